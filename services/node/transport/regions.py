"""Registered buffers and how far each may be read: the server side of every transport."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from shared.errors import Conflict, NotFound, RegionUnknown

EVICT_S = 2.0
"""Seconds that reads in progress may take to end once their region has to go."""


class Mirror(Protocol):
    """A second watermark of a region, outside of Python."""

    def show(self, ready: int) -> None: ...

    def close(self) -> None:
        """Nothing touches the region any more."""


class Region:
    """A buffer whose first `ready` bytes may be sent, with the users that touch it now."""

    def __init__(
        self, name: str, buffer: memoryview, ready: int, flow: str, *, first: int = 0
    ) -> None:
        """`first`: where the buffer begins in the region, if it is only a part of it."""
        self.name = name
        self.first = first
        self.flow = flow
        self.buffer = buffer
        self.ready = ready
        self.closed = False
        self.mirror: Mirror | None = None
        self._users: list[Callable[[], None]] = []
        self._leaving: list[Callable[[], None]] = []
        self._changed: set[asyncio.Future[None]] = set()

    async def beyond(self, position: int) -> int:
        """Waits until more than `position` bytes are ready, and returns how many are. RegionUnknown
        if the region goes first."""
        while self.ready <= position or self.closed:
            if self.closed:
                raise RegionUnknown(f"region {self.name} was unregistered")
            await self._change()
        return self.ready

    @contextmanager
    def use(
        self, evict: Callable[[], None] = lambda: None, leave: Callable[[], None] = lambda: None
    ) -> Iterator[memoryview]:
        """The buffer, which stays valid until the `with` block ends. `leave` asks the user to end
        when it can, since the region has to go. Calling `evict` makes it end soon."""
        if self.closed:
            raise RegionUnknown(f"region {self.name} was unregistered")
        self._users.append(evict)
        self._leaving.append(leave)
        try:
            yield self.buffer
        finally:
            self._users.remove(evict)
            self._leaving.remove(leave)
            self._wake()

    def advance(self, ready: int) -> None:
        if not self.ready <= ready <= len(self.buffer):
            raise Conflict(
                f"region {self.name}: ready goes from {self.ready} to {ready} "
                f"of {len(self.buffer)} bytes; it may only grow, within the buffer"
            )
        self.ready = ready
        if self.mirror is not None:
            self.mirror.show(ready)
        self._wake()

    async def close(self) -> None:
        """Returns once nothing touches the buffer."""
        self.closed = True
        for leave in list(self._leaving):
            leave()
        self._wake()
        eviction = asyncio.get_running_loop().call_later(EVICT_S, self._evict)
        try:
            while self._users:
                await self._change()
        finally:
            eviction.cancel()
        if self.mirror is not None:
            self.mirror.close()
            self.mirror = None

    def _evict(self) -> None:
        for evict in list(self._users):
            evict()

    async def _change(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._changed.add(future)
        try:
            await future
        finally:
            self._changed.discard(future)

    def _wake(self) -> None:
        for future in self._changed:
            if not future.done():
                future.set_result(None)


class Regions:
    def __init__(self) -> None:
        self._regions: dict[str, Region] = {}

    def register(self, name: str, buffer: memoryview, ready: int, flow: str) -> None:
        if name in self._regions:
            raise Conflict(f"region {name} is registered already: unregister it first")
        flat = buffer.cast("B")
        if not 0 <= ready <= len(flat):
            raise Conflict(f"region {name}: {ready} bytes ready of {len(flat)}")
        self._regions[name] = Region(name, flat, ready, flow)

    def advance(self, name: str, ready: int) -> None:
        self._own(name).advance(ready)

    async def unregister(self, name: str) -> None:
        """Closes the region. Its name is free only once this returns: a buffer in use still owns
        it."""
        region = self._own(name)
        try:
            await region.close()
        finally:
            if self._regions.get(name) is region:
                del self._regions[name]

    def has(self, name: str) -> bool:
        region = self._regions.get(name)
        return region is not None and not region.closed

    def find(self, name: str, offset: int, nbytes: int) -> Region:
        """The region that a peer asks for. RegionUnknown if it does not exist or the range lies
        outside of it."""
        region = self._regions.get(name)
        if region is None or region.closed:
            raise RegionUnknown(f"no region {name} here")
        if offset + nbytes > len(region.buffer):
            raise RegionUnknown(
                f"region {name} has {len(region.buffer)} bytes; "
                f"[{offset}, {offset + nbytes}) lies outside"
            )
        return region

    def get(self, name: str) -> Region | None:
        return self._regions.get(name)

    def _own(self, name: str) -> Region:
        region = self._regions.get(name)
        if region is None:
            raise NotFound(f"no region {name} is registered")
        return region
