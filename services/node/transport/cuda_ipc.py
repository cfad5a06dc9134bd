"""CUDA IPC: nodes whose devices share a machine copy blocks from device to device.

This extends shared memory. The reader also opens its peer's device arena, which has the layout of
the host's, and copies from there what is there already. What is not there (because the peer still
loads it from disk, or has put the model aside) it copies from the host's arena. Other memories of
the peer may have twins behind its arena (`services.node.memory.landing`), from which KV is copied
that never was on the host. The handle that opens the device memory comes over the same socket as
the host's descriptors, so it reaches only processes of the same user.
"""

import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

from services.node.memory.cuda import EXPORTED_BYTES, Opened
from services.node.memory.landing import Landing
from services.node.memory.views import Memory
from services.node.transport.direct import Place
from services.node.transport.shm import Bytes, ShmDirect, ShmOffer, ShmReader, ShmSource
from shared import telemetry
from shared.errors import ProtocolViolation, TransportError

ON_DEVICE = 1 << 31
"""A bit of a place's key: the bytes are on the device, in the memory's twin, at the same offset.
Those of the arena are on the host as well."""
NAME = "cuda-ipc"
_START = struct.Struct("!q")
"""Where a memory's twin begins on the device; less than 0: it has none."""


class CudaIpcDirect(ShmDirect):
    name = NAME

    def __init__(
        self,
        memories: Sequence[Memory],
        landing: Landing,
        exported: bytes,
        *,
        machine: str,
        bytes_per_s: int = 0,
    ) -> None:
        """`memories`: the host's arena, and others. `exported`: the handle that `landing`
        exported."""
        super().__init__(memories, machine=machine, bytes_per_s=bytes_per_s)
        self._landing = landing
        starts = (landing.start(memory) for memory in memories)
        told = (_START.pack(-1 if start is None else start) for start in starts)
        self._beside = b"".join([exported, *told])

    async def __aenter__(self) -> Self:
        self._landing.ways.append("CUDA IPC")
        return await super().__aenter__()

    def offer(self) -> "CudaIpcOffer":
        return CudaIpcOffer(self._here, self._memories, self._copiers, self._landing)

    def accept(self, offer: bytes) -> "tuple[bytes, CudaIpcSource] | None":
        if offer != self._here:
            return None
        return self._socket.encode(), CudaIpcSource(self._memories, self._landing)


class CudaIpcSource(ShmSource):
    def __init__(self, memories: Sequence[Memory], landing: Landing) -> None:
        super().__init__(memories)
        self._landing = landing

    def place(self, buffer: memoryview) -> Place | None:
        place = super().place(buffer)
        if place is None or not self._landing.holds(buffer):
            return place
        return Place(place.key | ON_DEVICE, place.address)


class CudaIpcOffer(ShmOffer):
    def __init__(
        self,
        here: bytes,
        memories: Sequence[Memory],
        copiers: ThreadPoolExecutor,
        landing: Landing,
    ) -> None:
        super().__init__(here, memories, copiers)
        self._landing = landing

    async def complete(self, answer: bytes) -> "CudaIpcReader":
        told, theirs = await self._dial(answer)
        exported, starts = told[:EXPORTED_BYTES], told[EXPORTED_BYTES:]
        opened = None
        try:
            opened = await self._landing.open(exported)
        except TransportError as error:
            telemetry.logger(NAME).warning(
                "a peer's device is not reached from this one: host memory is shared instead",
                error=str(error),
            )
        device = None
        if opened is not None:
            device = Theirs(opened, _starts(starts, len(theirs)))
        return CudaIpcReader(theirs, self._memories, self._copiers, self._landing, device)


def _starts(told: bytes, count: int) -> tuple[int, ...]:
    """Where the twins of so many memories begin. A peer of an earlier version does not say: it has
    one of its arena only, which is the first memory."""
    if len(told) != _START.size * count:
        return (0, *[-1] * (count - 1))
    return tuple(start for (start,) in _START.iter_unpack(told))


@dataclass(frozen=True, slots=True)
class Theirs:
    """A peer's device memory."""

    opened: Opened
    starts: tuple[int, ...]
    """Where the twin of each of its memories begins there."""

    def pointer(self, index: int) -> int:
        """The address here of the twin of this memory. ProtocolViolation: it has none."""
        if self.starts[index] < 0:
            raise ProtocolViolation(f"memory {index} of a peer, which is not on its device")
        return self.opened.pointer + self.starts[index]


class CudaIpcReader(ShmReader):
    def __init__(
        self,
        theirs: Sequence[Bytes],
        memories: Sequence[Memory],
        copiers: ThreadPoolExecutor,
        landing: Landing,
        device: Theirs | None,
    ) -> None:
        """`device`: None: the peer's is not reached from here."""
        super().__init__(theirs, memories, copiers)
        self._landing = landing
        self._device = device
        if device is not None:
            self.name = NAME

    async def take(self, place: Place, into: memoryview) -> None:
        on_host = Place(place.key & ~ON_DEVICE, place.address)
        if self._device is None or on_host == place or not self._landing.reaches(into):
            await super().take(on_host, into)
            return
        self._check()
        self._source(on_host, len(into))  # a twin is as large as its memory
        pointer = self._device.pointer(on_host.key) + place.address
        await self._landing.pull(pointer, into)
        self._check()

    def close(self) -> None:
        super().close()
        device, self._device = self._device, None
        if device is not None:
            self._landing.give_back(device.opened)
