"""Memory for copies of KV on their way, which the direct ways know like any arena.

Copies that go and copies that come have a memory each, so that two nodes that bring KV from each
other cannot wait for each other. A copy for which there is no room waits behind those before it.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from services.node.memory.arena import Arena, Span
from services.node.memory.device import DeviceArena
from services.node.memory.views import Memory
from shared.errors import CapacityExceeded

MOST_BYTES = 256 << 20
"""The most that each of the two memories has. An RDMA device locks both."""
LEAST_BYTES = 64 << 20
"""The least that each has, and what their twins have: room for four pieces of KV
(`services.node.core.lending`)."""


class Side:
    """One of the two. Used on the transport's loop only."""

    def __init__(self, nbytes: int) -> None:
        self._arena = Arena(nbytes, lazy=True)
        self._waiting: deque[tuple[int, asyncio.Future[Span]]] = deque()

    @property
    def memory(self) -> Memory:
        return self._arena.memory

    async def take(self, nbytes: int) -> Span:
        """Room for a copy, once there is some. CapacityExceeded: there never is."""
        if nbytes > self._arena.nbytes:
            raise CapacityExceeded(f"a copy of {nbytes} bytes: at most {self._arena.nbytes} move")
        turn: asyncio.Future[Span] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        self._serve()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(turn.result())
            raise

    def give(self, span: Span) -> None:
        """Nothing touches the copy any more."""
        self._arena.free(span)
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            nbytes, turn = self._waiting[0]
            if not turn.cancelled():
                try:
                    turn.set_result(self._arena.allocate(nbytes))
                except CapacityExceeded:
                    return
            self._waiting.popleft()

    def close(self) -> None:
        self._arena.close()


class KvRoom:
    def __init__(self, nbytes: int = MOST_BYTES) -> None:
        """`nbytes`: of either side. Pages are taken when they are first used."""
        self.going, self.coming = Side(nbytes), Side(nbytes)

    @property
    def memories(self) -> list[Memory]:
        return [self.going.memory, self.coming.memory]

    def close(self) -> None:
        self.going.close()
        self.coming.close()


@dataclass(frozen=True, slots=True)
class Twins:
    """Memory for copies on a device. That of the host with the same places is never written to: who
    reads it by another way than the device's finds zeros there."""

    room: KvRoom
    device: DeviceArena


def room_beside(arena_bytes: int) -> KvRoom:
    """The room of a node whose weights have an arena of this size: not more than the arena itself,
    if some pieces fit, because a device that locks it would lock more for KV than for weights."""
    return KvRoom(min(MOST_BYTES, max(LEAST_BYTES, arena_bytes)))
