"""Carries a schedule out with real movers on modelled links, in virtual time."""

import asyncio
from contextlib import AsyncExitStack

from services.node.checkpoints.packing import digest
from services.node.core.residency import PlanId
from services.node.memory.arena import Arena, ModelSpace
from services.node.moving.events import Arrival, PullFailure
from services.node.moving.mover import Mover
from services.node.transport.base import NoListener
from services.planner.core.multicast.fabric import Fabric, Task
from services.planner.core.multicast.schedule import Schedule
from shared.clock import now
from shared.ids import EventId, ModelId, NodeId
from shared.layout import BlockSpec, Manifest
from shared.messages.scaling import Pull
from simulation import loop
from simulation.network import Network
from simulation.transport import ONE_CHUNK, Ends, ModelledTransport, address_of

MODEL = ModelId("model")
EVENT = EventId("event")
UNIT = 64
"""Bytes of the task that one really moved byte stands for."""


def carry_out(schedule: Schedule, task: Task) -> dict[tuple[int, int], float]:
    """(node, block) -> seconds from the start until the block has arrived and is verified.

    Sizes are rounded up to multiples of UNIT. Every failure is raised.
    """
    return loop.run(_Multicast(schedule, task).run())


class _Multicast:
    def __init__(self, schedule: Schedule, task: Task) -> None:
        self._schedule = schedule
        self._task = task
        self._manifest = _manifest(task)
        self._began = 0.0
        self._arrived: dict[tuple[int, int], float] = {}
        self._news: asyncio.Queue[PullFailure | None] = asyncio.Queue()
        """None for an arrival, or the failure."""

    async def run(self) -> dict[tuple[int, int], float]:
        ends = Ends(_network(self._task.fabric), unit=UNIT)
        async with AsyncExitStack() as stack:
            movers = [await self._node(stack, ends, node) for node in range(self._task.nodes)]
            self._began = now()
            for node in self._schedule.destinations:
                movers[node].apply(
                    MODEL, PlanId(EVENT, 1), self._pulls(node), _addresses(self._task)
                )
            for _ in self._schedule.moves:
                failure = await self._news.get()
                if failure is not None:
                    raise failure.error
        return self._arrived

    async def _node(self, stack: AsyncExitStack, ends: Ends, node: int) -> Mover:
        transport = ModelledTransport(
            ends,
            str(node),
            listener=NoListener(),
        )
        await stack.enter_async_context(transport)

        def arrived(arrival: Arrival) -> None:
            self._arrived[node, arrival.block] = now() - self._began
            self._news.put_nowait(None)

        mover = Mover(
            transport, on_arrived=arrived, on_failed=self._news.put_nowait, read_bytes=ONE_CHUNK
        )
        stack.push_async_callback(mover.close)
        size = ModelSpace.size(self._manifest)
        held = range(self._task.blocks) if node in self._schedule.sources else ()
        mover.host(
            MODEL, self._manifest, ModelSpace(self._manifest, Arena(size).allocate(size)), held
        )
        return mover

    def _pulls(self, node: int) -> list[Pull]:
        moves = (move for move in self._schedule.moves if move.dst == node)
        return [Pull(move.step, move.block, NodeId(str(move.src))) for move in moves]


def _manifest(task: Task) -> Manifest:
    """A manifest of blocks of zeros, since arenas are filled with zeros."""
    chunk = -(-(task.chunk_bytes or max(task.block_bytes)) // UNIT)
    blocks = []
    for index, nbytes in enumerate(-(-size // UNIT) for size in task.block_bytes):
        pieces = (min(chunk, nbytes - start) for start in range(0, nbytes, chunk))
        digests = tuple(digest(memoryview(bytes(piece))) for piece in pieces)
        blocks.append(BlockSpec(index, index, index, nbytes, (), digests))
    return Manifest("zeros", {}, chunk, tuple(blocks))


def _network(fabric: Fabric) -> Network:
    network = Network(trunks=fabric.trunks, local_bytes_per_s=fabric.local_bytes_per_s)
    for node, port in enumerate(fabric.ports):
        network.add(str(node), out=port.out, into=port.into, rack=port.rack, host=port.host)
    return network


def _addresses(task: Task) -> dict[NodeId, str]:
    return {NodeId(str(node)): address_of(str(node)) for node in range(task.nodes)}
