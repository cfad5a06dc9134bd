"""Copies of KV pages that peers read, and that are read from peers.

Everything runs on the transport's loop; pages are copied on threads. A copy is a region with a name
that nobody can guess, and lives until its reader has it, or for LENT_S.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from blake3 import blake3

from services.node.core.kv import KvPages
from services.node.transport.base import Transport
from shared import telemetry

KV_REGION = "kv/"
"""With what the names of these regions begin. The rest of the name is the permission to read."""
LENT_S = 10.0
"""Seconds after which a copy goes that nobody has fetched."""
MOST_BYTES = 1 << 30
"""The most memory that copies take at a time, those that are lent and those that come."""
PRIORITY = 0
"""Of reads. Streams wait for them, so they go before blocks of weights of their flow."""


class KvImages:
    def __init__(
        self, transport: Transport, spawn: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        """`spawn` owns the tasks."""
        self._transport = transport
        self._spawn = spawn
        self._lent: dict[str, tuple[int, asyncio.TimerHandle]] = {}
        """By region: its bytes, and when it goes."""
        self._bytes = 0
        """What all copies take."""
        self._log = telemetry.logger("kv")

    def lend(self, pages: KvPages, lent: Callable[[str, bytes], None]) -> None:
        self._spawn(self._lend(pages, lent))

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
            nbytes, timer = self._lent.pop(region)
            timer.cancel()
            self._spawn(self._unregister(region, nbytes))

    async def _lend(self, pages: KvPages, lent: Callable[[str, bytes], None]) -> None:
        nbytes = pages.nbytes
        if self._bytes + nbytes > MOST_BYTES:
            lent("", b"")
            return
        self._bytes += nbytes
        try:
            image = bytearray(nbytes)
            digest = await asyncio.to_thread(_copied, pages, image)
        except Exception as error:  # the requester's problem only: it computes the KV
            self._bytes -= nbytes
            self._log.warning("KV is not lent", error=str(error))
            lent("", b"")
            return
        region = KV_REGION + secrets.token_hex(16)
        self._transport.register(region, memoryview(image), ready=nbytes, flow=KV_REGION)
        timer = asyncio.get_running_loop().call_later(LENT_S, self.end, region)
        self._lent[region] = nbytes, timer
        lent(region, digest)

    async def _unregister(self, region: str, nbytes: int) -> None:
        await self._transport.unregister(region)
        self._bytes -= nbytes

    async def _bring(
        self,
        address: str,
        region: str,
        digest: bytes,
        pages: KvPages,
        brought: Callable[[bool], None],
    ) -> None:
        nbytes = pages.nbytes
        if self._bytes + nbytes > MOST_BYTES:
            brought(False)
            return
        self._bytes += nbytes
        try:
            image = bytearray(nbytes)
            await self._transport.read(address, region, 0, memoryview(image), priority=PRIORITY)
            right = await asyncio.to_thread(_filled, pages, image, digest)
        except Exception as error:  # the KV is computed then
            self._log.warning("KV did not come", peer=address, error=str(error))
            right = False
        finally:
            self._bytes -= nbytes
        brought(right)


def _copied(pages: KvPages, image: bytearray) -> bytes:
    """Copies the pages, and returns their digest."""
    pages.read(memoryview(image))
    return blake3(image).digest()


def _filled(pages: KvPages, image: bytearray, digest: bytes) -> bool:
    """Fills the pages if the digest is right."""
    if blake3(image).digest() != digest:
        return False
    pages.fill(memoryview(image))
    return True
