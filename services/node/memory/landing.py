"""Bytes that reach the device first: from a peer's device, or from the network by its adapter.

Each part is then copied down to its place in the host's arena, and only then counts as read. It is
checked there, like every other part; peers that use other ways take it from there, and a model that
is put aside stays there. So every byte crosses the device's bus once, as it does when blocks land
on the host and go up. But a block can run as soon as its last part is checked, because the copies
down are done while other parts arrive.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from services.node.memory.cuda import EXPORTED_BYTES, CudaError, DmaBuf, Driver, Opened
from services.node.memory.ranges import Ranges
from services.node.memory.views import Memory, address, find
from shared import telemetry
from shared.errors import BadInput, TransportError
from shared.threads import to_its_end


class Landing:
    """The device's arena, for ways that reach it. Its methods may be called on any loop."""

    def __init__(
        self, host: Memory, pointer: int, there: Ranges, make_driver: Callable[[], Driver]
    ) -> None:
        """`pointer`: where the device's arena begins. It is laid out like the host's, which is
        page-locked. `there`: the ranges that are the same in both. CudaError if there is no
        driver."""
        self.nbytes = len(host.view)
        self.ways: list[str] = []
        """Names of the ways that bring bytes directly to the device; each way adds its own."""
        self._host = host
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

    def holds(self, buffer: memoryview) -> bool:
        """Whether these bytes of the host are a part of its arena, and are on the device, too."""
        place = find([self._host], buffer)
        return place is not None and self._there.cover(place[1], place[1] + len(buffer))

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
        """Fills a part of both arenas from device memory of a peer. TransportError if that
        fails."""
        offset, nbytes = self._offset(into), len(into)

        def copy() -> None:
            self._driver.to_device(self._pointer + offset, source, nbytes)
            self._copy_down(offset, nbytes)

        await self._do(copy)

    async def land(self, into: memoryview) -> None:
        """Fills a part of the host's arena with what an adapter has written to the device's.
        TransportError if that fails."""
        offset, nbytes = self._offset(into), len(into)

        def copy() -> None:
            self._driver.flush()
            self._copy_down(offset, nbytes)

        await self._do(copy)

    def _close(self, opened: Opened) -> None:
        try:
            self._driver.close(opened)
        except CudaError as error:
            self._log.warning("a peer's device memory was not given back", why=str(error))

    def _copy_down(self, offset: int, nbytes: int) -> None:
        self._driver.to_host(self._base + offset, self._pointer + offset, nbytes)
        self._driver.finish()
        self._there.add(offset, offset + nbytes)

    async def _do(self, work: Callable[[], None]) -> None:
        try:
            await to_its_end(work, self._thread)
        except CudaError as error:
            raise TransportError(f"device memory: {error}") from error

    def _offset(self, buffer: memoryview) -> int:
        place = find([self._host], buffer)
        if place is None:
            raise BadInput(f"{len(buffer)} bytes that do not lie in the node's arena")
        return place[1]
