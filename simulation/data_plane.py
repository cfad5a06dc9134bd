"""A node's data plane without a thread: the real mover over a modelled transport, on one loop.

It is the twin of `services/node/moving/data_plane.py` and has its methods, none of which takes
virtual time by itself.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

from services.node.core.kv import KvMover
from services.node.core.residency import PlanId
from services.node.memory.arena import ModelSpace
from services.node.moving.data_plane import fetch
from services.node.moving.events import PlaneListener
from services.node.moving.mover import Mover
from services.node.moving.outboxes import Outboxes
from services.node.transport.base import Buffer, Permit
from shared.errors import Conflict
from shared.ids import ModelId, NodeId
from shared.layout import Manifest
from shared.messages.scaling import Pull
from simulation.kv_moves import ModelledKvMover
from simulation.transport import ONE_CHUNK, Ends, ModelledTransport

T = TypeVar("T")


class ModelledDataPlane:
    """Use as an async context manager; Conflict once it is closed."""

    def __init__(
        self,
        ends: Ends,
        node: str,
        listener: PlaneListener,
        mover_type: type[Mover] = Mover,
    ) -> None:
        """`node`: its name in the network."""
        self._transport = ModelledTransport(ends, node, listener=listener)
        self._mover = mover_type(
            self._transport,
            on_arrived=listener.on_arrived,
            on_failed=listener.on_failed,
            read_bytes=ONE_CHUNK,
        )
        self._ended = asyncio.Event()
        self._open = False
        self._outboxes = Outboxes(self._transport, self._spawn, listener)
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.address = self._transport.address
        self.kv: KvMover | None = ModelledKvMover(self._transport, ends.unit, self._spawn)

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        self._open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open = False
        await self._mover.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._transport.__aexit__(None, None, None)
        self._ended.set()

    async def wait(self) -> None:
        """Waits until the data plane is closed."""
        await self._ended.wait()

    async def host(
        self, model: ModelId, manifest: Manifest, space: ModelSpace, held: Iterable[int] = ()
    ) -> None:
        self._check_open()
        self._mover.host(model, manifest, space, held)

    async def take_over(
        self, model: ModelId, blocks: Sequence[int]
    ) -> Mapping[int, frozenset[int]]:
        return await self._do(self._mover.take_over_all(model, blocks))

    async def mark_held(
        self, model: ModelId, block: int, chunks: Sequence[int] | None = None
    ) -> None:
        self._check_open()
        self._mover.mark_held(model, block, chunks)

    async def apply(
        self,
        model: ModelId,
        plan: PlanId,
        pulls: Sequence[Pull],
        addresses: Mapping[NodeId, str],
        space: ModelSpace | None = None,
        *,
        capability: bytes = b"",
    ) -> None:
        self._check_open()
        if space is not None:
            self._mover.host(model, space.manifest, space, ())
        self._mover.apply(model, plan, pulls, addresses, capability)

    async def drop(self, model: ModelId) -> None:
        await self._do(self._mover.drop(model))

    async def fetch(
        self,
        address: str,
        region: str,
        offset: int,
        into: memoryview,
        *,
        permit: Permit | None = None,
        within: float,
    ) -> None:
        await self._do(fetch(self._transport, address, region, offset, into, permit, within))

    async def connect(self, address: str) -> None:
        await self._do(self._transport.connect(address))

    def send(self, address: str, header: bytes, payload: Sequence[Buffer]) -> None:
        """Queues a message. Messages to one peer keep their order."""
        if self._open:
            self._outboxes.put(address, header, payload)

    async def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work, which goes on if this call is cancelled."""
        if not self._open:
            work.close()
            raise _closed()
        begun = self._spawn(work)
        await asyncio.wait([begun])
        if begun.cancelled():
            raise _closed()
        return begun.result()

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not task.cancelled():
            task.exception()  # whoever asked has it already, or has gone

    def _check_open(self) -> None:
        if not self._open:
            raise _closed()


def _closed() -> Conflict:
    return Conflict("this node's data plane is closed")
