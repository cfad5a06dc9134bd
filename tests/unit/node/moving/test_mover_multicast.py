"""Plans of the planner, carried out by movers over paced ports, on virtual time: the ports must
follow the schedule, or the multicast falls behind the steps that it was planned in."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from services.node.checkpoints.packing import digest
from services.node.core.residency import PlanId
from services.node.memory.arena import Arena, ModelSpace
from services.node.moving.mover import Mover
from services.node.transport.base import NoListener
from services.node.transport.memory import MemoryNetwork, MemoryTransport
from services.planner.core.multicast.fabric import step_task
from services.planner.core.multicast.schedule import Schedule
from services.planner.core.multicast.strategies import STRATEGIES, lower_bound
from shared.clock import now
from shared.ids import EventId, ModelId, NodeId
from shared.layout import BlockSpec, Manifest
from shared.messages.scaling import Pull
from simulation.loop import run

MODEL = ModelId("m")
RATE = 100_000_000
CHUNK = 256 * 1024
BLOCK = 4 * CHUNK
CONTENT = bytes(range(256)) * (BLOCK // 256)
DIGESTS = tuple(digest(CONTENT[at : at + CHUNK]) for at in range(0, BLOCK, CHUNK))


def manifest(blocks: int) -> Manifest:
    return Manifest(
        architecture="x",
        config={},
        chunk_bytes=CHUNK,
        blocks=tuple(BlockSpec(i, i, i, BLOCK, (), DIGESTS) for i in range(blocks)),
    )


async def carry_out(schedule: Schedule) -> float:
    """Seconds until every node holds every block."""
    shape = manifest(schedule.blocks)
    every = range(schedule.blocks)
    complete = asyncio.Semaphore(0)
    addresses = {NodeId(f"{node}"): f"memory://{node}" for node in range(schedule.nodes)}
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        movers: list[Mover] = []
        for node, address in enumerate(addresses.values()):
            transport = MemoryTransport(
                network,
                address,
                link_bytes_per_s=RATE,
                listener=NoListener(),
            )
            await stack.enter_async_context(transport)
            mover = Mover(
                transport,
                on_arrived=lambda _: complete.release(),
                on_failed=lambda failure: pytest.fail(str(failure)),
            )
            stack.push_async_callback(mover.close)
            space = ModelSpace(shape, Arena(ModelSpace.size(shape)).allocate(shape.nbytes))
            if node in schedule.sources:
                for block in every:
                    space.block(block)[:] = CONTENT
            mover.host(MODEL, shape, space, every if node in schedule.sources else [])
            movers.append(mover)
        started = now()
        for node in schedule.destinations:
            moves = [move for move in schedule.moves if move.dst == node]
            pulls = [Pull(move.step, move.block, NodeId(f"{move.src}")) for move in moves]
            movers[node].apply(MODEL, PlanId(EventId("e"), 1), pulls, addresses)
        for _ in range(schedule.blocks * len(schedule.destinations)):
            await complete.acquire()
        return now() - started


@pytest.mark.parametrize(("nodes", "sources"), [(2, 1), (5, 1), (8, 1), (12, 1), (9, 3)])
def test_the_binomial_pipeline_takes_its_steps(nodes: int, sources: int) -> None:
    schedule = STRATEGIES["binomial"](step_task(nodes, 16, range(sources)))
    step = BLOCK / RATE
    took = run(carry_out(schedule))
    assert took <= 1.05 * lower_bound(nodes, 16, sources) * step


def test_a_chain_relays_by_chunks_not_by_blocks() -> None:
    """A relay forwards while it receives: seven hops cost less than one step of a block."""
    schedule = STRATEGIES["chain"](step_task(8, 4, [0]))
    took = run(carry_out(schedule))
    assert took <= (4 + 6 * CHUNK / BLOCK + 0.5) * BLOCK / RATE
