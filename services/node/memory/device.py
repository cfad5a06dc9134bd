"""Memory for weights on a device that has its own, and how blocks get there.

Two things are taken when the node starts, before any plan: the device's arena, and a page lock on
the host's arena. The device's arena is as large as the host's and laid out like it (what may follow
it are twins, see `landing`): a block lies at
the offset at which it landed. So whatever has room on the host has room on the device, and nobody
has to account for free space twice.

A block goes to the device from where the disk or the network put it, in one copy by the device's
own engine at the rate of its bus. Through page-locked buffers, a core would first have to copy
every byte, and host memory would be passed over three times instead of once. That is done only
where the arena cannot be locked.

Where the arena is locked, bytes from peers may also reach the device first: see `landing`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, Self

import torch

from services.node.memory.cuda import CudaDriver, CudaError, Driver
from services.node.memory.landing import Landing, starts_of
from services.node.memory.page_lock import page_lock, page_unlock
from services.node.memory.ranges import Ranges
from services.node.memory.views import Memory, address, find
from shared import telemetry
from shared.errors import BadInput, CapacityExceeded, Conflict

BUFFER = 32 << 20
"""Bytes that go to the device at a time if the arena is not page-locked."""


class Event(Protocol):
    def synchronize(self) -> None:
        """Waits until everything begun before is done."""


class Link(Protocol):
    """Copies from page-locked host memory to a device. Made and used on one thread, except for its
    events, which are waited for on another."""

    def lock(self, memory: memoryview) -> None:
        """Page-locks memory. CapacityExceeded if the system does not allow it."""

    def unlock(self, memory: memoryview) -> None: ...

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory, as uint8."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        """Begins a copy. Its event comes after this copy and all copies before."""


class CudaLink:
    """Copies on a stream of its own, so that the engine's kernels run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def lock(self, memory: memoryview) -> None:
        page_lock(self._device, address(memory), len(memory))  # this thread runs no kernel

    def unlock(self, memory: memoryview) -> None:
        page_unlock(self._device, address(memory))

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return done


class DeviceArena:
    """Use as a context manager around all uploads. Entering blocks while memory is taken."""

    def __init__(
        self,
        host: Memory,
        device: torch.device,
        make_link: Callable[[torch.device], Link] = CudaLink,
        make_driver: Callable[[int], Driver] = CudaDriver,
        *,
        beside: Sequence[Memory] = (),
    ) -> None:
        """`beside`: memories of the host that get twins on the device, see `landing`."""
        self.landing: Landing | None = None
        """For ways that bring bytes directly to the device, once entered; None if no way can."""
        self._host = host
        self._beside = beside
        self._device = device
        self._make_link = make_link
        self._make_driver = make_driver
        self._there = Ranges()
        """Ranges that are the same in both arenas."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")
        """Runs every call of the link, in order."""
        self._ends = ThreadPoolExecutor(1, thread_name_prefix="uploaded")
        """Waits for the copies' ends, in the order in which they were begun. The next copy is begun
        meanwhile, so that the device's bus is never idle while blocks wait."""
        self._buffers: list[torch.Tensor] = []
        self._log = telemetry.logger("device", device=str(device))

    def __enter__(self) -> Self:
        """CapacityExceeded if the device has no room for the arena."""
        try:
            self._thread.submit(self._open).result()
        except BaseException:
            self._thread.shutdown()
            self._ends.shutdown()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.submit(self._close).result()
        self._thread.shutdown()

    @property
    def staging(self) -> str:
        """How blocks get to the device, in words."""
        by_host = "pinned host buffers" if self._buffers else "pinned host arena"
        direct = self.landing.ways if self.landing else []
        return ", ".join([*direct, f"else {by_host}"]) if direct else by_host

    def overwrites(self, buffer: memoryview) -> None:
        """To be called before anything is written to a part of the host's arena, since the device's
        copy is then outdated."""
        start = self._offset(buffer)
        self._there.discard(start, start + len(buffer))

    def landed(self, block: memoryview) -> torch.Tensor | None:
        """The block's bytes on the device, if they are all there already; else None."""
        start = self._offset(block)
        stop = start + len(block)
        return self._bytes[start:stop] if self._there.cover(start, stop) else None

    async def upload(self, block: memoryview) -> torch.Tensor:
        """Returns the bytes, once they are all on the device, of a block in the host's arena.

        Blocks go up in the order of the calls. A copy that was begun goes on if this is cancelled:
        see `settle`. Conflict: the arena was left.
        """
        offset = self._offset(block)
        source = torch.frombuffer(block, dtype=torch.uint8)
        target = self._bytes[offset : offset + len(block)]
        await self._ended(lambda: self._copy(source, target).synchronize)
        self._there.add(offset, offset + len(block))
        return target

    @property
    def has_twins(self) -> bool:
        """Whether the memories beside the arena have twins that ways reach."""
        return bool(self._beside) and self.landing is not None

    def twin(self, buffer: memoryview) -> torch.Tensor:
        """The device's bytes, uint8 [len(buffer)], in place of these of a memory beside the arena.
        This and the next two are for a device that `has_twins`."""
        assert self.landing is not None
        start = self.landing.place(buffer)
        return self._whole[start : start + len(buffer)]

    def show(self, buffer: memoryview) -> None:
        """Lets peers take these bytes beside the arena from their twin."""
        assert self.landing is not None
        self.landing.show(buffer)

    def hide(self, buffer: memoryview) -> None:
        assert self.landing is not None
        self.landing.hide(buffer)

    async def settle(self) -> None:
        """Returns once nothing reads the memory of earlier calls of `upload` any more."""
        await self._ended(lambda: lambda: None)

    def _offset(self, block: memoryview) -> int:
        place = find([self._host], block)
        if place is None:
            raise BadInput(f"a block of {len(block)} bytes that does not lie in the node's arena")
        return place[1]

    async def _ended(self, begin: Callable[[], Callable[[], None]]) -> None:
        """Has the thread call `begin`, and returns when what that returned, called after those of
        earlier calls, has returned."""
        done: Future[None] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    self._ends.submit(_settle, done, begin())
                except BaseException as error:  # handed on to the caller
                    done.set_exception(error)

        try:
            self._thread.submit(run)
        except RuntimeError as error:
            raise Conflict(f"the arena on {self._device} is given back") from error
        await asyncio.wrap_future(done)

    # --- on the thread ------------------------------------------------------

    def _open(self) -> None:
        nbytes = len(self._host.view)
        started = time.monotonic()
        try:
            self._link = self._make_link(self._device)
            self._whole = self._allocated()
            self._bytes = self._whole[:nbytes]
        except RuntimeError as error:
            raise CapacityExceeded(
                f"{self._device} has no room for an arena of {nbytes} bytes: "
                f"{str(error).splitlines()[0]}; lower node.arena_bytes"
            ) from error
        allocated = time.monotonic()
        try:
            self._link.lock(self._host.view)
        except CapacityExceeded as error:
            self._log.warning(
                "blocks go to the device through buffers, slower: a core copies them there",
                why=str(error),
            )
            self._buffers = [self._link.buffer(min(BUFFER, nbytes)) for _ in range(2)]
        else:
            self._open_landing()
        self._log.info(
            "device arena taken",
            nbytes=nbytes,
            staging=self.staging,
            allocate_s=round(allocated - started, 3),
            lock_s=round(time.monotonic() - allocated, 3),
        )

    def _allocated(self) -> torch.Tensor:
        """The arena, and the twins behind it if there is room for them. RuntimeError."""
        *_, end = starts_of([self._host, *self._beside])
        try:
            return torch.empty(end, dtype=torch.uint8, device=self._device)
        except RuntimeError:
            if not self._beside:
                raise
            self._log.warning(
                "the device has no room for more than its arena: KV goes by the host's memory",
                lacks_bytes=end - len(self._host.view),
            )
            self._beside = ()
            return torch.empty(len(self._host.view), dtype=torch.uint8, device=self._device)

    def _open_landing(self) -> None:
        try:
            self.landing = Landing(
                self._host,
                self._bytes.data_ptr(),
                self._there,
                lambda: self._make_driver(self._device.index or 0),
                self._beside,
            )
        except CudaError as error:
            self._log.info("nothing comes to the device but by the host", why=str(error))

    def _close(self) -> None:
        self._ends.shutdown()  # once the last copy has ended
        if self.landing is not None:
            self.landing.close()
        if not self._buffers:
            self._link.unlock(self._host.view)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        """Begins a copy; through buffers, waits for its end."""
        if not self._buffers:
            return self._link.copy(source, target)
        begun: deque[Event] = deque()
        for index, (piece, place) in enumerate(
            zip(torch.split(source, BUFFER), torch.split(target, BUFFER), strict=True)
        ):
            if len(begun) == len(self._buffers):
                begun.popleft().synchronize()
            buffer = self._buffers[index % len(self._buffers)][: len(piece)]
            buffer.copy_(piece)
            begun.append(self._link.copy(buffer, place))
        begun[-1].synchronize()
        return begun[-1]


def _settle(done: Future[None], wait: Callable[[], None]) -> None:
    try:
        wait()
    except BaseException as error:  # handed on to the caller
        done.set_exception(error)
    else:
        done.set_result(None)
