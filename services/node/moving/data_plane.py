"""The transport's thread: its loop, the transport and mover on it, and the doors in and out.

Everything inside runs on the data loop; every public method is called from the control loop or
the engine thread and only hands work over.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar

import uvloop

from services.node.core.kv import KvMover, KvPages
from services.node.core.residency import PlanId
from services.node.memory.arena import ModelSpace
from services.node.moving.events import PlaneListener
from services.node.moving.kv_images import KvImages
from services.node.moving.kv_room import KvRoom, Twins
from services.node.moving.mover import Mover
from services.node.moving.outboxes import Outboxes
from services.node.transport import cuda_ipc
from services.node.transport.base import Buffer, Gate, Permit, Transport
from services.node.transport.direct import Direct
from services.node.transport.secret import Secret
from services.node.transport.tcp import TcpTransport
from services.node.transport.tls import Tls
from shared import telemetry
from shared.errors import Conflict, TransportTimeout
from shared.ids import ModelId, NodeId
from shared.layout import Manifest
from shared.messages.scaling import Pull

T = TypeVar("T")

LAST = (1 << 31) - 1
"""The priority of reads that go behind all others of their flow."""


class DataPlane:
    """Use as an async context manager on the control loop; Conflict once it is closed."""

    def __init__(
        self,
        host: str,
        port: int,
        link_bytes_per_s: int,
        ways: Sequence[Direct] = (),
        tls: Tls | None = None,
        secret: Secret | None = None,
        gate: Gate | None = None,
        *,
        listener: PlaneListener,
        overwrites: Callable[[memoryview], None] = lambda buffer: None,
        kv_room: KvRoom | None = None,
        kv_twins: Twins | None = None,
    ) -> None:
        """`ways` to move bytes by besides TCP, best first. `gate`: what peers may read. `kv_room`:
        the memory for KV on its way that the `ways` know, to be closed here; None: they know none.
        `kv_twins`: the same on a device.
        `overwrites` is told of each part of the arena before anything is written there. The
        callbacks are called on the data loop and must not block."""
        self._make = partial(
            TcpTransport,
            host,
            port,
            link_bytes_per_s=link_bytes_per_s,
            ways=ways,
            tls=tls,
            secret=secret,
            gate=gate,
            listener=listener,
        )
        self._hears = listener
        self._overwrites = overwrites
        self._kv_room = kv_room or KvRoom()
        self._kv_twins = kv_twins
        self._thread = threading.Thread(target=self._run, name="data", daemon=True)
        self._started = _milestone()
        self._ended = _milestone()
        self._stop = asyncio.Event()
        self._closing = False
        self._sending: set[asyncio.Task[None]] = set()
        self.address = ""
        self.kv = KvDoor(self._do, self._reads_device)
        """Moves KV. For the engine's thread."""

    async def __aenter__(self) -> Self:
        self._loop = uvloop.new_event_loop()
        self._over = asyncio.wrap_future(self._ended)
        self._over.add_done_callback(lambda over: over.cancelled() or over.exception())
        self._thread.start()
        try:
            await asyncio.wrap_future(self._started)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def wait(self) -> None:
        """Waits until the thread has ended, and raises what it failed with."""
        await asyncio.shield(self._over)

    async def _close(self) -> None:
        self._closing = True
        with suppress(RuntimeError):  # the loop is closed: the thread ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join)
        self._kv_room.close()
        if self._kv_twins is not None:
            self._kv_twins.room.close()

    # --- from the control loop ---

    async def host(
        self, model: ModelId, manifest: Manifest, space: ModelSpace, held: Iterable[int] = ()
    ) -> None:
        await self._call(lambda: self._mover.host(model, manifest, space, held))

    async def take_over(
        self, model: ModelId, blocks: Sequence[int]
    ) -> Mapping[int, frozenset[int]]:
        return await self._await(self._mover.take_over_all(model, blocks))

    async def mark_held(
        self, model: ModelId, block: int, chunks: Sequence[int] | None = None
    ) -> None:
        await self._call(lambda: self._mover.mark_held(model, block, chunks))

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
        """`space`: the model is hosted in it first. The data loop is asked once, because each turn
        of the two loops takes milliseconds where many wait for a processor."""
        if space is None:
            await self._call(lambda: self._mover.apply(model, plan, pulls, addresses, capability))
            return

        def begin() -> None:
            self._mover.host(model, space.manifest, space, ())
            self._mover.apply(model, plan, pulls, addresses, capability)

        with telemetry.span("register_regions", parent=telemetry.here()):
            await self._call(begin)

    async def drop(self, model: ModelId) -> None:
        await self._await(self._mover.drop(model))

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
        """Reads a part of a peer's region, behind everything that plans ask for. TransportTimeout
        after `within` seconds; TransportError."""
        await self._await(fetch(self._transport, address, region, offset, into, permit, within))

    async def connect(self, address: str) -> None:
        await self._await(self._transport.connect(address))

    # --- from the engine thread ---

    def send(self, address: str, header: bytes, payload: Sequence[Buffer]) -> None:
        """Queues a message; messages to one peer keep their order."""
        with suppress(RuntimeError):  # the loop is closed, and the node with it
            self._loop.call_soon_threadsafe(self._outboxes.put, address, header, payload)

    def _reads_device(self, address: str) -> bool:
        return self._kv_twins is not None and self._transport.way_to(address) == cuda_ipc.NAME

    def _do(self, act: Callable[[KvImages], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and the node with it
            self._loop.call_soon_threadsafe(lambda: act(self._images))

    # --- between the loops ---

    async def _call(self, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        return await self._await(call())

    async def _await(self, work: Coroutine[Any, Any, T]) -> T:
        """Has work done on the data loop. If the caller is cancelled, the work goes on."""
        if self._closing:
            work.close()
            raise _closed()
        try:
            begun = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:  # the loop is closed
            work.close()
            raise _closed() from error
        done = asyncio.wrap_future(begun)
        done.add_done_callback(lambda done: done.cancelled() or done.exception())
        waited: tuple[asyncio.Future[Any], ...] = done, self._over
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not done.done() or done.cancelled():
            raise _closed()
        return done.result()

    # --- the data thread ---

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._main())
        except BaseException as error:  # the thread's boundary: `wait` raises it
            failure = error
        for milestone in (self._started, self._ended):
            if failure is not None and not milestone.done():
                milestone.set_exception(failure)
            elif not milestone.done():
                milestone.set_result(None)

    async def _main(self) -> None:
        async with self._make() as transport, asyncio.TaskGroup() as group:
            self._transport = transport
            self._group = group
            self._outboxes = Outboxes(transport, self._spawn, self._hears)
            self._mover = Mover(
                transport,
                on_arrived=self._hears.on_arrived,
                on_failed=self._hears.on_failed,
                overwrites=self._overwrites,
            )
            self._images = KvImages(
                transport,
                self._kv_room,
                self._spawn,
                self._hears.on_kv_copied,
                self._kv_twins,
            )
            self.address = transport.address
            self._started.set_result(None)
            await self._stop.wait()
            await self._mover.close()
            for task in self._sending:
                task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)


class KvDoor(KvMover):
    """The door to `KvImages` for other threads."""

    def __init__(
        self,
        do: Callable[[Callable[[KvImages], None]], None],
        reads_device: Callable[[str], bool],
    ) -> None:
        self._do = do
        self._reads_device = reads_device

    def reads_device(self, address: str) -> bool:
        return self._reads_device(address)

    def lend(
        self, pages: KvPages, lent: Callable[[str, bytes], None], *, on_device: bool = False
    ) -> None:
        self._do(lambda images: images.lend(pages, lent, on_device=on_device))

    def bring(
        self,
        address: str,
        region: str,
        digest: bytes,
        pages: KvPages,
        brought: Callable[[bool], None],
    ) -> None:
        self._do(lambda images: images.bring(address, region, digest, pages, brought))

    def end(self, region: str) -> None:
        self._do(lambda images: images.end(region))


async def fetch(
    transport: Transport,
    address: str,
    region: str,
    offset: int,
    into: memoryview,
    permit: Permit | None,
    within: float,
) -> None:
    try:
        async with asyncio.timeout(within):
            await transport.read(address, region, offset, into, priority=LAST, permit=permit)
    except TimeoutError:
        raise TransportTimeout(f"{address}: no bytes of {region} for {within} s") from None


def _milestone() -> "concurrent.futures.Future[None]":
    """A future that its waiters cannot cancel."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()
    return future


def _closed() -> Conflict:
    return Conflict("this node's data plane is closed")
