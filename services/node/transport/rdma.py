"""One-sided reads over RDMA: each connection is a queue pair, and each memory is registered once.

The listener's adapter answers without the listener's process. The dialler waits for one file
descriptor, so that a connection at rest costs no time. Its takes share the queue of READs in turn.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from services.node.memory.landing import Landing
from services.node.memory.views import Memory
from services.node.transport.direct import Place
from services.node.transport.rdma_endpoint import decode, encode
from shared.errors import BadInput, ConfigError, PeerLost, TransportError

if TYPE_CHECKING:  # it needs pyverbs, which most machines do not have
    from services.node.transport import verbs

READ_BYTES = 1 << 20
"""The most bytes that one READ moves."""
DRAIN_S = 2.0
"""Seconds that a cancelled take waits for its READs. Then the connection is given up."""
_ADDRESSES = 1 << 64


class RdmaDirect:
    name = "rdma"

    def __init__(
        self,
        memories: Sequence[Memory],
        device: str,
        gid_index: int,
        *,
        landing: Landing | None = None,
        bytes_per_s: int = 0,
    ) -> None:
        """`gid_index` chooses among the device's addresses (RoCE v2 over IPv4: often 1 or 3).
        `landing`: the device memory that bytes are read to first, if the adapter reaches it
        (GPUDirect)."""
        self.bytes_per_s = bytes_per_s
        self._memories = memories
        self._name = device
        self._gid_index = gid_index
        self._landing = landing
        self._ends: set[_Closable] = set()

    async def __aenter__(self) -> Self:
        try:
            from services.node.transport import verbs
        except ImportError as error:
            raise ConfigError(
                f"RDMA device {self._name} cannot be used: {error}; install the system's "
                "pyverbs (Debian, Ubuntu: apt install python3-pyverbs ibverbs-providers) and run "
                "on the system's version of Python"
            ) from error
        self._verbs = verbs
        self._device = verbs.Device(self._name, self._gid_index, self._memories, self._landing)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for end in list(self._ends):
            end.close()
        self._device.close()

    def offer(self) -> "RdmaOffer":
        return RdmaOffer(self._ends, self._device, self._verbs.ReaderEnd(self._device))

    def accept(self, offer: bytes) -> "tuple[bytes, RdmaSource] | None":
        peer = decode(offer)
        try:
            end = self._verbs.SourceEnd(self._device, peer)
        except TransportError:
            return None
        return encode(end.endpoint), RdmaSource(self._ends, self._device, end)


class _Closable:
    """A member of its RdmaDirect's open ends until it is closed."""

    def __init__(self, ends: "set[_Closable]") -> None:
        self._ends = ends
        ends.add(self)

    def close(self) -> None:
        if self in self._ends:
            self._ends.discard(self)
            self._close()

    def _close(self) -> None:
        raise NotImplementedError


class RdmaOffer(_Closable):
    def __init__(
        self, ends: set[_Closable], device: "verbs.Device", end: "verbs.ReaderEnd"
    ) -> None:
        super().__init__(ends)
        self.data = encode(end.endpoint)
        self._device = device
        self._end = end

    async def complete(self, answer: bytes) -> "RdmaReader":
        try:
            peer = decode(answer)
            depth = self._end.connect(peer)
        except BaseException:
            self.close()
            raise
        self._ends.discard(self)
        return RdmaReader(self._ends, self._device, self._end, str(peer), depth)

    def withdraw(self) -> None:
        self.close()

    def _close(self) -> None:
        self._end.close()


class RdmaSource(_Closable):
    def __init__(
        self, ends: set[_Closable], device: "verbs.Device", end: "verbs.SourceEnd"
    ) -> None:
        super().__init__(ends)
        self._device = device
        self._end = end

    def place(self, buffer: memoryview) -> Place | None:
        found = self._device.locate(buffer)
        return None if found is None else Place(found[0].rkey, found[1])

    def _close(self) -> None:
        self._end.close()


class _Take:
    """What one call of `take` still has to do."""

    def __init__(self, place: Place, address: int, lkey: int, nbytes: int) -> None:
        self.place = place
        self.address = address
        self.lkey = lkey
        self.nbytes = nbytes
        self.asked = 0
        """Bytes for which READs were begun."""
        self.reading = 0
        """Number of READs under way."""
        self.error: TransportError | None = None
        self.ended = asyncio.Event()


class RdmaReader(_Closable):
    def __init__(
        self,
        ends: set[_Closable],
        device: "verbs.Device",
        end: "verbs.ReaderEnd",
        peer: str,
        depth: int,
    ) -> None:
        super().__init__(ends)
        self.name = RdmaDirect.name
        self._device = device
        self._end = end
        self._peer = peer
        self._depth = depth
        self._read_bytes = min(READ_BYTES, device.max_message)
        self._waiting: deque[_Take] = deque()
        """Takes that still have bytes to ask for, the next one first."""
        self._reading: dict[int, _Take] = {}
        """The take of each READ under way, by the READ's name."""
        self._names = itertools.count()
        self._broken = ""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end.descriptor, self._on_completed)

    def reaches(self, into: memoryview) -> bool:
        return not self._broken and self._device.target(into) is not None

    async def take(self, place: Place, into: memoryview) -> None:
        target = self._device.target(into)
        if target is None:
            raise BadInput(
                f"{into.nbytes} bytes of memory that RDMA does not know: check `reaches`"
            )
        if self._broken:
            raise PeerLost(self._broken)
        if place.address + into.nbytes > _ADDRESSES:
            raise TransportError(f"{self._peer}: no memory lies at {place.address:#x}")
        take = _Take(place, target.address, target.lkey, into.nbytes)
        self._waiting.append(take)
        try:
            self._begin_reads()
        except TransportError as error:
            self._break(f"{self._peer}: {error}")
        try:
            await take.ended.wait()
        except asyncio.CancelledError:
            await self._drain(take)
            raise
        if take.error is not None:
            raise take.error
        if target.landing is not None:
            await target.landing.land(into)

    def _close(self) -> None:
        self._break(f"{self._peer}: this end was closed")

    def _begin_reads(self) -> None:
        """Begins as many READs as may be under way, one for each waiting take in turn."""
        while self._waiting and len(self._reading) < self._depth:
            take = self._waiting.popleft()
            nbytes = min(self._read_bytes, take.nbytes - take.asked)
            name = next(self._names)
            self._reading[name] = take
            self._end.read(
                name,
                take.address + take.asked,
                take.lkey,
                nbytes,
                take.place.address + take.asked,
                take.place.key,
            )
            take.reading += 1
            take.asked += nbytes
            if take.asked < take.nbytes:
                self._waiting.append(take)

    def _on_completed(self) -> None:
        try:
            for name, outcome in self._end.completed():
                take = self._reading[name]
                if outcome != "done":
                    self._fail(take, outcome)
                    return
                del self._reading[name]
                take.reading -= 1
                if not take.reading and take.asked == take.nbytes:
                    take.ended.set()
            self._begin_reads()
        except TransportError as error:
            self._break(f"{self._peer}: {error}")

    def _fail(self, take: _Take, outcome: "verbs.Outcome") -> None:
        """Ends the connection after the failure of a READ of `take`: a queue pair carries nothing
        after an error."""
        if outcome == "refused":
            take.error = TransportError(f"{self._peer}: has no such memory for us")
            self._break(f"{self._peer}: the connection broke when the peer refused a READ")
        elif outcome == "unanswered":
            self._break(f"{self._peer}: the peer does not answer")
        else:
            self._break(f"{self._peer}: the connection broke")

    async def _drain(self, take: _Take) -> None:
        """Waits for the READs of a cancelled take. Further cancellations do not cut this short."""
        if take in self._waiting:
            self._waiting.remove(take)
            take.nbytes = take.asked
            if not take.reading:
                return
        overdue = self._loop.call_later(
            DRAIN_S, self._break, f"{self._peer}: READs did not end within {DRAIN_S} s"
        )
        while not take.ended.is_set():
            with suppress(asyncio.CancelledError):
                await take.ended.wait()
        overdue.cancel()

    def _break(self, why: str) -> None:
        """Ends all takes, after which none of them writes any more. Runs once."""
        if self._broken:
            return
        self._broken = why
        self._loop.remove_reader(self._end.descriptor)
        self._end.close()
        for take in {*self._waiting, *self._reading.values()}:
            take.error = take.error or PeerLost(why)
            take.ended.set()
        self._waiting.clear()
        self._reading.clear()
        self.close()
