"""Bytes that reach the device first: from a peer's device, or from the network by its adapter.

Each part of the arena is then copied down to its place on the host, and only then counts as read.
It is checked there, like every other part; peers that use other ways take it from there, and a
model that is put aside stays there. So every byte crosses the device's bus once, as it does when
blocks land on the host and go up. But a block can run as soon as its last part is checked, because
the copies down are done while other parts arrive.

Memories beside the arena may have a *twin* on the device. What comes there stays there, since only
the device needs it: KV that goes from device to device (`services.node.moving.kv_images`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

from services.node.memory.cuda import EXPORTED_BYTES, CudaError, DmaBuf, Driver, Opened
from services.node.memory.ranges import Ranges
from services.node.memory.views import Memory, address, find
from shared import telemetry
from shared.errors import BadInput, TransportError
from shared.threads import to_its_end


def starts_of(memories: Sequence[Memory]) -> list[int]:
    """Where the twin of each begins on the device, and where the last one ends."""
    return list(accumulate((len(memory.view) for memory in memories), initial=0))


class Landing:
    """The device's arena, for ways that reach it. Its methods may be called on any loop."""

    def __init__(
        self,
        host: Memory,
        pointer: int,
        there: Ranges,
        make_driver: Callable[[], Driver],
        beside: Sequence[Memory] = (),
    ) -> None:
        """`pointer`: where the device's arena begins. It is laid out like the host's, which is
        page-locked. `there`: the ranges that are the same in both. `beside`: memories whose twins
        follow the device's arena. CudaError if there is no driver."""
        self.nbytes = len(host.view)
        self.ways: list[str] = []
        """Names of the ways that bring bytes directly to the device; each way adds its own."""
        self._memories = [host, *beside]
        self._starts = starts_of(self._memories)
        self._base = address(host.view)
        self._pointer = pointer
        self._there = there
        self._log = telemetry.logger("landing")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="landing")
        """Runs every call of the driver, in order. It is separate from the thread for uploads, so
        as not to wait behind them."""
        try:
            self._driver = self._thread.submit(make_driver).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def close(self) -> None:
        self._thread.shutdown()

    def exported(self) -> bytes:
        """EXPORTED_BYTES bytes for a process on this machine to `open`; b"" if CUDA cannot share
        the arena."""
        try:
            return self._thread.submit(self._driver.export, self._pointer).result()
        except CudaError as error:
            self._log.warning("the device's memory is not shared", why=str(error))
            return b""

    def dma_buf(self) -> DmaBuf | None:
        try:
            return self._thread.submit(self._driver.dma_buf, self._pointer, self.nbytes).result()
        except CudaError as error:
            self._log.warning("adapters do not reach the device's memory", why=str(error))
            return None

    def start(self, memory: Memory) -> int | None:
        """Where the memory's twin begins on the device, counted from the device's arena; None: it
        has none."""
        for ours, start in zip(self._memories, self._starts, strict=False):
            if ours is memory:
                return start
        return None

    def reaches(self, buffer: memoryview) -> bool:
        """Whether the device has a place for these bytes of the host."""
        return find(self._memories, buffer) is not None

    def holds(self, buffer: memoryview) -> bool:
        """Whether peers find these bytes of the host on the device: those of the arena if they are
        there, too; those beside it if they are shown."""
        if not self.reaches(buffer):
            return False
        start = self.place(buffer)
        return self._there.cover(start, start + len(buffer))

    def place(self, buffer: memoryview) -> int:
        """Where the device has its place for these bytes of the host, counted from the device's
        arena. BadInput: it has none."""
        found = find(self._memories, buffer)
        if found is None:
            raise BadInput(f"{len(buffer)} bytes that have no place on the node's device")
        index, offset = found
        return self._starts[index] + offset

    def show(self, buffer: memoryview) -> None:
        """From now on peers find the bytes beside the arena on the device."""
        start = self.place(buffer)
        self._there.add(start, start + len(buffer))

    def hide(self, buffer: memoryview) -> None:
        start = self.place(buffer)
        self._there.discard(start, start + len(buffer))

    async def open(self, exported: bytes) -> Opened:
        """Opens a peer's device memory. TransportError if this device does not reach it."""
        if len(exported) != EXPORTED_BYTES:
            raise TransportError("the peer shares no device memory")
        opened: list[Opened] = []
        try:
            await self._do(lambda: opened.append(self._driver.open(exported)))
        except BaseException:
            for each in opened:
                self.give_back(each)
            raise
        return opened[0]

    def give_back(self, opened: Opened) -> None:
        """Closes a peer's memory, once the copies that were begun are done."""
        self._thread.submit(self._close, opened)

    async def pull(self, source: int, into: memoryview) -> None:
        """Fills a part of both arenas, or of a twin beside them, from device memory of a peer.
        TransportError if that fails."""
        start, nbytes = self.place(into), len(into)

        def copy() -> None:
            self._driver.to_device(self._pointer + start, source, nbytes)
            if start < self.nbytes:
                self._copy_down(start, nbytes)
            else:
                self._driver.finish()

        await self._do(copy)

    async def land(self, into: memoryview) -> None:
        """Fills a part of the host's arena with what an adapter has written to the device's.
        TransportError if that fails. BadInput: it is no part of the arena."""
        start, nbytes = self.place(into), len(into)
        if start >= self.nbytes:
            raise BadInput(f"{nbytes} bytes that lie beside the node's arena")

        def copy() -> None:
            self._driver.flush()
            self._copy_down(start, nbytes)

        await self._do(copy)

    def _close(self, opened: Opened) -> None:
        try:
            self._driver.close(opened)
        except CudaError as error:
            self._log.warning("a peer's device memory was not given back", why=str(error))

    def _copy_down(self, start: int, nbytes: int) -> None:
        self._driver.to_host(self._base + start, self._pointer + start, nbytes)
        self._driver.finish()
        self._there.add(start, start + nbytes)

    async def _do(self, work: Callable[[], None]) -> None:
        try:
            await to_its_end(work, self._thread)
        except CudaError as error:
            raise TransportError(f"device memory: {error}") from error
