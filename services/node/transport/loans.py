"""Bytes that lie in no region, brought for one read each: a disk feeds peers through these.

A read of a region that is not registered may still be answered: whoever listens brings the bytes it
asks for into a buffer, from which they are sent as from any region. The buffer goes with the read.
So a node sends what its disk holds at the disk's pace, without room for it in an arena: at most
LOANS such reads have a buffer at a time, those of the earliest steps first.
"""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.node.transport.base import Listener
from services.node.transport.regions import Region

LOANS = 16
"""Enough to keep a disk busy (`checkpoints.reading.DEPTH`) while as many buffers are sent."""


class Loans:
    """The reads of one transport whose bytes are brought."""

    def __init__(self, listener: Listener) -> None:
        self._bring = listener.bring
        self._free = LOANS
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        """(priority, order of arrival, its turn)"""
        self._arrivals = itertools.count()

    @asynccontextmanager
    async def region(
        self, name: str, offset: int, nbytes: int, priority: int
    ) -> AsyncIterator[Region]:
        """A region of the bytes [offset, offset + nbytes) of the region `name`, all of them ready,
        as long as the block lasts. RegionUnknown if they cannot be brought."""
        await self._enter(priority)
        try:
            brought = await self._bring(name, offset, nbytes)
            region = Region(name, brought.buffer, nbytes, brought.flow, first=offset)
            try:
                yield region
            finally:
                await region.close()
        finally:
            self._leave()

    async def _enter(self, priority: int) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._arrivals), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()
            raise

    def _leave(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
