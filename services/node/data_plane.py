"""The transport's thread: its loop, the transport and mover on it, and the doors in and out.

Everything inside runs on the data loop; every public method is called from the control loop or
the engine thread and only hands work over.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import uvloop
from structlog.stdlib import BoundLogger

from services.node.memory.arena import ModelSpace
from services.node.mover import Arrival, Failure, Mover
from services.node.transport.base import Buffer, OnMessage, OnPeerLost
from services.node.transport.tcp import TcpTransport
from shared.errors import TransportError
from shared.ids import EventId, ModelId, NodeId
from shared.layout import Manifest
from shared.messages.scaling import Pull

T = TypeVar("T")
Outgoing = tuple[bytes, Sequence[Buffer]]


class DataPlane:
    """Use as an async context manager on the control loop."""

    def __init__(
        self,
        host: str,
        port: int,
        link_bytes_per_s: int,
        *,
        log: BoundLogger,
        on_message: OnMessage,
        on_peer_lost: OnPeerLost,
        on_arrived: Callable[[Arrival], None],
        on_failed: Callable[[Failure], None],
    ) -> None:
        """The four callbacks are called on the data loop and must not block."""
        self._make = partial(
            TcpTransport,
            host,
            port,
            link_bytes_per_s=link_bytes_per_s,
            on_message=on_message,
            on_peer_lost=on_peer_lost,
        )
        self._on_arrived = on_arrived
        self._on_failed = on_failed
        self._on_peer_lost = on_peer_lost
        self._log = log
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="data", daemon=True)
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._stop = asyncio.Event()
        self._outboxes: dict[str, asyncio.Queue[Outgoing]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def __aenter__(self) -> "DataPlane":
        self._thread.start()
        await asyncio.wrap_future(self._started)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._main())
            except BaseException as error:
                if self._started.done():
                    self._log.exception("data plane failed")
                else:
                    self._started.set_exception(error)

    async def _main(self) -> None:
        async with self._make() as transport, asyncio.TaskGroup() as group:
            self._transport = transport
            self._group = group
            self._mover = Mover(transport, on_arrived=self._on_arrived, on_failed=self._on_failed)
            self.address = transport.address
            self._started.set_result(None)
            await self._stop.wait()
            await self._mover.close()
            for task in self._tasks:
                task.cancel()

    # --- from the control loop ---

    async def host(
        self, model: ModelId, manifest: Manifest, space: ModelSpace, held: Iterable[int]
    ) -> None:
        await self._call(lambda: self._mover.host(model, manifest, space, held))

    async def mark_held(self, model: ModelId, block: int) -> None:
        await self._call(lambda: self._mover.mark_held(model, block))

    async def apply(
        self,
        model: ModelId,
        event: EventId,
        revision: int,
        pulls: Sequence[Pull],
        addresses: Mapping[NodeId, str],
    ) -> None:
        await self._call(lambda: self._mover.apply(model, event, revision, pulls, addresses))

    async def drop(self, model: ModelId) -> None:
        await self._await(self._mover.drop(model))

    async def connect(self, address: str) -> None:
        await self._await(self._transport.connect(address))

    # --- from the engine thread ---

    def send(self, address: str, header: bytes, payload: Sequence[Buffer]) -> None:
        """Queues a message; messages to one peer keep their order."""
        self._loop.call_soon_threadsafe(self._enqueue, address, (header, payload))

    def _enqueue(self, address: str, message: Outgoing) -> None:
        outbox = self._outboxes.get(address)
        if outbox is None:
            outbox = self._outboxes[address] = asyncio.Queue()
            task = self._group.create_task(self._drain(address, outbox))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        outbox.put_nowait(message)

    async def _drain(self, address: str, outbox: asyncio.Queue[Outgoing]) -> None:
        while True:
            header, payload = await outbox.get()
            try:
                await self._transport.send(address, header, payload)
            except TransportError as error:
                while not outbox.empty():
                    outbox.get_nowait()
                self._on_peer_lost(address, error)

    # --- between the loops ---

    async def _call(self, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        return await self._await(call())

    async def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
