"""CUDA IPC: nodes whose devices share a machine copy blocks from device to device.

This extends shared memory. The reader also opens its peer's device arena, which has the layout of
the host's, and copies from there what is there already. What is not there (because the peer still
loads it from disk, or has put the model aside) it copies from the host's arena. The handle that
opens the device memory comes over the same socket as the host's descriptors, so it reaches only
processes of the same user.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from services.node.memory.cuda import Opened
from services.node.memory.landing import Landing
from services.node.memory.views import Memory
from services.node.transport.direct import Place
from services.node.transport.shm import Bytes, ShmDirect, ShmOffer, ShmReader, ShmSource
from shared import telemetry
from shared.errors import TransportError

ON_DEVICE = 1 << 31
"""A bit of a place's key: the bytes are on the device as well, at the same offset."""
NAME = "cuda-ipc"


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
        """`memories`: the host's arena, and what has no place on the device. `exported`: the handle
        that `landing` exported."""
        super().__init__(memories, machine=machine, bytes_per_s=bytes_per_s)
        self._landing = landing
        self._beside = exported

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
        exported, theirs = await self._dial(answer)
        opened = None
        try:
            opened = await self._landing.open(exported)
        except TransportError as error:
            telemetry.logger(NAME).warning(
                "a peer's device is not reached from this one: host memory is shared instead",
                error=str(error),
            )
        return CudaIpcReader(theirs, self._memories, self._copiers, self._landing, opened)


class CudaIpcReader(ShmReader):
    def __init__(
        self,
        theirs: Sequence[Bytes],
        memories: Sequence[Memory],
        copiers: ThreadPoolExecutor,
        landing: Landing,
        opened: Opened | None,
    ) -> None:
        super().__init__(theirs, memories, copiers)
        self._landing = landing
        self._opened = opened
        if opened is not None:
            self.name = NAME

    async def take(self, place: Place, into: memoryview) -> None:
        on_host = Place(place.key & ~ON_DEVICE, place.address)
        if self._opened is None or on_host == place:
            await super().take(on_host, into)
            return
        self._check()
        self._source(on_host, len(into))  # the device's arena is as large as the host's
        await self._landing.pull(self._opened.pointer + place.address, into)
        self._check()

    def close(self) -> None:
        super().close()
        opened, self._opened = self._opened, None
        if opened is not None:
            self._landing.give_back(opened)
