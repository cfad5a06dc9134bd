"""Copies of KV pages that peers read, and that are read from peers.

Everything runs on the transport's loop; pages are copied on threads. A copy is a region with a name
that nobody can guess, and lives until its reader has it, or for LENT_S. It lies in memory that the
direct ways reach, so KV goes by the best way between two nodes, as weights do.

A copy has a digest, by which its reader knows that it is whole. Where the reader reads the device
memory of the lender (CUDA IPC), the copy stays there: the memory for copies has a twin on each
device, and the bytes go from twin to twin, with a checksum that devices compute. Otherwise a copy
lies in the host's memory, and has its BLAKE3.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

from blake3 import blake3

from services.node.core.kv import Image, KvPages
from services.node.memory.arena import Span
from services.node.memory.checksum import checksum
from services.node.moving.kv_room import KvRoom, Twins
from services.node.transport import cuda_ipc
from services.node.transport.base import Transport
from services.node.transport.pacing import SERVING_FLOW
from shared import telemetry
from shared.errors import TransportError

KV_REGION = "kv/"
"""With what the names of these regions begin. The rest of the name is the permission to read."""
DEVICE_REGION = KV_REGION + "device/"
"""With what those begin of which only the device has the bytes."""
LENT_S = 10.0
"""Seconds after which a copy goes that nobody has fetched."""
PRIORITY = 0
"""The priority of reads of KV. Requests wait for them, so they come in before blocks of weights."""


class KvImages:
    def __init__(
        self,
        transport: Transport,
        room: KvRoom,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        copied: Callable[[int, float], None] = lambda nbytes, seconds: None,
        twins: Twins | None = None,
    ) -> None:
        """`spawn` owns the tasks. `copied` is told what it took to copy KV out of pages or into
        pages, with its digest. `twins`: for copies on a device that the transport reaches."""
        self._transport = transport
        self._room = room
        self._twins = twins
        self._spawn = spawn
        self._copied = copied
        self._lent: dict[str, tuple[Span, asyncio.TimerHandle]] = {}
        """By region: where it lies, and when it goes."""
        self._log = telemetry.logger("kv")

    def lend(
        self, pages: KvPages, lent: Callable[[str, bytes], None], *, on_device: bool = False
    ) -> None:
        self._spawn(self._lend(pages, lent, self._twins if on_device else None))

    def bring(
        self,
        address: str,
        region: str,
        digest: bytes,
        pages: KvPages,
        brought: Callable[[bool], None],
    ) -> None:
        self._spawn(self._bring(address, region, digest, pages, brought))

    def end(self, region: str) -> None:
        if region in self._lent:
            span, timer = self._lent.pop(region)
            timer.cancel()
            self._spawn(self._unregister(region, span))

    async def _lend(
        self, pages: KvPages, lent: Callable[[str, bytes], None], twins: Twins | None
    ) -> None:
        going, span = (twins.room if twins else self._room).going, None
        try:
            span = await going.take(pages.nbytes)
            image: Image = twins.device.twin(span.memory) if twins else span.memory
            digest, seconds = await asyncio.to_thread(_copied, pages, image)
            self._copied(pages.nbytes, seconds)
        except Exception as error:  # the requester's problem only: it computes the KV
            if span is not None:
                going.give(span)
            self._log.warning("KV is not lent", error=str(error))
            lent("", b"")
            return
        region = (DEVICE_REGION if twins else KV_REGION) + secrets.token_hex(16)
        if twins:
            twins.device.show(span.memory)
        self._transport.register(region, span.memory, ready=span.nbytes, flow=SERVING_FLOW)
        timer = asyncio.get_running_loop().call_later(LENT_S, self.end, region)
        self._lent[region] = span, timer
        lent(region, digest)

    async def _unregister(self, region: str, span: Span) -> None:
        await self._transport.unregister(region)
        if self._twins and region.startswith(DEVICE_REGION):
            self._twins.device.hide(span.memory)
            self._twins.room.going.give(span)
        else:
            self._room.going.give(span)

    async def _bring(
        self,
        address: str,
        region: str,
        digest: bytes,
        pages: KvPages,
        brought: Callable[[bool], None],
    ) -> None:
        twins = self._twins if region.startswith(DEVICE_REGION) else None
        coming, span = (twins.room if twins else self._room).coming, None
        try:
            span = await coming.take(pages.nbytes)
            image: Image = twins.device.twin(span.memory) if twins else span.memory
            came = await self._transport.read(address, region, 0, span.memory, priority=PRIORITY)
            if region.startswith(DEVICE_REGION) and came.way != cuda_ipc.NAME:
                raise TransportError(f"it lies on the peer's device: {came.way} does not read it")
            right, seconds = await asyncio.to_thread(_filled, pages, image, digest)
            if right:
                self._copied(pages.nbytes, seconds)
            else:
                self._log.warning("KV came damaged", peer=address)
        except Exception as error:  # the KV is computed then
            self._log.warning("KV did not come", peer=address, error=str(error))
            right = False
        finally:
            if span is not None:
                coming.give(span)
        brought(right)


def _copied(pages: KvPages, image: Image) -> tuple[bytes, float]:
    """Copies the pages, and returns their digest, and how long that took."""
    began = time.perf_counter()
    pages.read(image)
    digest = _digest(image)
    return digest, time.perf_counter() - began


def _filled(pages: KvPages, image: Image, digest: bytes) -> tuple[bool, float]:
    """Fills the pages if the digest is right. Returns whether it is, and how long that took."""
    began = time.perf_counter()
    if _digest(image) != digest:
        return False, 0.0
    pages.fill(image)
    return True, time.perf_counter() - began


def _digest(image: Image) -> bytes:
    return blake3(image).digest() if isinstance(image, memoryview) else checksum(image)
