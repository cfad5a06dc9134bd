"""Two events that take from one source at the same time, on virtual time: each gets its share of
the source's port, whatever the steps of the other's plan."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from services.node.core.residency import PlanId
from services.node.memory.arena import Arena, ModelSpace
from services.node.moving.mover import Mover
from services.node.transport.base import NoListener
from services.node.transport.memory import MemoryNetwork, MemoryTransport
from shared.clock import now
from shared.ids import EventId, ModelId, NodeId
from shared.messages.scaling import Pull
from simulation.loop import run
from tests.unit.node.moving.test_mover_multicast import BLOCK, CONTENT, RATE, manifest

BLOCKS = 16
SHAPE = manifest(BLOCKS)
STEP_S = BLOCK / RATE
SOURCE = NodeId("source")


class Node:
    def __init__(self, network: MemoryNetwork, name: NodeId) -> None:
        self.address = f"memory://{name}"
        self.arrived: asyncio.Queue[int] = asyncio.Queue()
        self.transport = MemoryTransport(
            network,
            self.address,
            link_bytes_per_s=RATE,
            listener=NoListener(),
        )
        self.mover = Mover(
            self.transport,
            on_arrived=lambda arrival: self.arrived.put_nowait(arrival.block),
            on_failed=lambda failure: pytest.fail(str(failure)),
        )

    def host(self, model: ModelId, *, whole: bool) -> None:
        space = ModelSpace(SHAPE, Arena(ModelSpace.size(SHAPE)).allocate(SHAPE.nbytes))
        for block in range(BLOCKS if whole else 0):
            space.block(block)[:] = CONTENT
        self.mover.host(model, SHAPE, space, range(BLOCKS) if whole else [])

    def pull(self, model: ModelId, source: "Node", first_step: int) -> None:
        self.host(model, whole=False)
        pulls = [Pull(first_step + block, block, SOURCE) for block in range(BLOCKS)]
        self.mover.apply(model, PlanId(EventId(model), 1), pulls, {SOURCE: source.address})

    async def until_arrived(self, blocks: int) -> float:
        """When so many more have come, s."""
        for _ in range(blocks):
            await self.arrived.get()
        return now()


async def two_events(lead: int, first_steps: tuple[int, int]) -> tuple[float, float]:
    """Steps after which each event is complete; the second begins when the first has got `lead`
    blocks."""
    models = ModelId("m-1"), ModelId("m-2")
    async with AsyncExitStack() as stack:
        network = MemoryNetwork()
        source, one, two = (Node(network, NodeId(name)) for name in (SOURCE, "one", "two"))
        for node in (source, one, two):
            await stack.enter_async_context(node.transport)
            stack.push_async_callback(node.mover.close)
        for model in models:
            source.host(model, whole=True)
        began = now()
        one.pull(models[0], source, first_steps[0])
        await one.until_arrived(lead)
        two.pull(models[1], source, first_steps[1])
        ended = await asyncio.gather(one.until_arrived(BLOCKS - lead), two.until_arrived(BLOCKS))
        return (ended[0] - began) / STEP_S, (ended[1] - began) / STEP_S


@pytest.mark.parametrize("first_steps", [(1, 1), (1, 100), (100, 1)])
@pytest.mark.parametrize("lead", [0, 8])
def test_neither_of_two_events_starves(lead: int, first_steps: tuple[int, int]) -> None:
    one, two = run(two_events(lead, first_steps))
    shared = 2 * (BLOCKS - lead)  # until the first is complete, each has half of the port
    assert one == pytest.approx(lead + shared, rel=0.05)
    assert two == pytest.approx(2 * BLOCKS, rel=0.05)
