"""Region reads over one connection: the dialler's end asks, the listener's end serves.

The bytes travel on the connection, or by the direct way that its handshake found (see direct.py).
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from services.node.transport.base import Buffer, OnReceived, ReadResult
from services.node.transport.connection import Connection
from services.node.transport.direct import DirectReader, DirectSource, Place
from services.node.transport.loans import Loans
from services.node.transport.pacing import PATIENCE_S, Port, Turn
from services.node.transport.regions import Region, Regions
from services.node.transport.wire import (
    CANCELLED,
    Kind,
    Prefix,
    ReadRequest,
    encode_fault,
    encode_grant,
    encode_prefix,
    encode_read,
    parse_fault,
    parse_grant,
    parse_read,
)
from shared.clock import wall_ns
from shared.errors import (
    PeerLost,
    ProtocolViolation,
    RegionUnknown,
    TransportError,
    TransportTimeout,
)

Work = Callable[[], Coroutine[Any, Any, None]]
Spawn = Callable[[Work], asyncio.Task[None]]
"""Runs work that ends with its connection."""
OnSent = Callable[[float, float, int], None]
"""(began, ended, bytes) of a read that was served; seconds on the loop's clock."""
SCRATCH = 64 * 1024
MAX_READS = 4096
"""The most reads that one connection may have waiting. More are a ProtocolViolation."""
_IDS = 1 << 32


_scratch = memoryview(bytearray(SCRATCH))
"""Receives bytes that nobody wants any more."""

End = TypeVar("End", DirectReader, DirectSource)


@dataclass(frozen=True, slots=True)
class Way(Generic[End]):
    """One end of a connection's direct way, and the port that it shares with other connections."""

    name: str
    end: End
    port: Port


@dataclass(slots=True, eq=False)
class Pending:
    request: ReadRequest
    turn: Turn
    into: memoryview | None
    """None once the reader has gone. What still arrives is then received into scratch and
    dropped."""
    received: OnReceived | None
    ended: asyncio.Future[ReadResult | TransportError]
    position: int = 0
    first_byte_ns: int = 0
    taking: asyncio.Task[None] | None = None
    """Takes granted bytes into `into`."""

    def room(self, nbytes: int) -> memoryview:
        if self.into is None:
            return _scratch[:nbytes]
        return self.into[self.position : self.position + nbytes]

    def came(self, nbytes: int) -> None:
        if self.into is not None and self.received is not None:
            self.received(self.into[self.position : self.position + nbytes])
        self.position += nbytes


class ReadChannel:
    """The asking end. A cancelled read is drained, so that the connection and its other reads go
    on; the server is told to stop after the part that it has begun."""

    def __init__(
        self,
        connection: Connection,
        ingress: Port,
        spawn: Spawn,
        way: Way[DirectReader] | None = None,
    ) -> None:
        self.connection = connection
        self._ingress = ingress
        self._spawn = spawn
        self._way = way
        self._pending: dict[int, Pending] = {}
        connection.busy = lambda: bool(self._pending)
        self._ids = itertools.count()

    async def read(
        self,
        region: str,
        offset: int,
        into: memoryview,
        *,
        priority: int,
        received: OnReceived | None,
    ) -> ReadResult:
        self.connection.check()
        identity = next(self._ids) % _IDS
        ended: asyncio.Future[ReadResult | TransportError]
        ended = asyncio.get_running_loop().create_future()
        direct = self._way is not None and self._way.end.reaches(into)
        request = ReadRequest(priority, offset, len(into), region, direct)
        pending = Pending(request, self._ingress.arrive(priority), into, received, ended)
        self._expect(identity, pending)
        self.connection.post(encode_read(identity, request))
        try:
            outcome = await ended
        except asyncio.CancelledError:
            self._abandon(identity, pending)
            if pending.taking is not None:
                await _stopped(pending.taking)
            if identity in self._pending and self.connection.error is None:
                self.connection.post(encode_prefix(Kind.CANCEL, id=identity))
            raise
        finally:
            pending.into = None
        if isinstance(outcome, TransportError):
            raise outcome
        return outcome

    async def run(self) -> None:
        """Receives until the connection ends, with a TransportError."""
        while True:
            prefix = await self._next()
            pending = self._pending.get(prefix.id)
            if pending is None or prefix.kind not in (Kind.DATA, Kind.GRANT, Kind.FAULT):
                raise ProtocolViolation(f"{prefix.kind.name} for read {prefix.id}, not asked for")
            if pending.taking is not None:
                raise ProtocolViolation(f"{prefix.kind.name} for read {prefix.id} before TAKEN")
            if prefix.kind is Kind.FAULT:
                body = await self.connection.receive_exactly(prefix.body)
                fault = _fault(*parse_fault(body))
                self._forget(prefix.id)
                end(pending, fault)
            elif prefix.kind is Kind.GRANT:
                body = await self.connection.receive_exactly(prefix.body)
                self._granted(prefix.id, pending, *parse_grant(body))
            else:
                self._check_length(pending, prefix.payload)
                pending.first_byte_ns = pending.first_byte_ns or wall_ns()
                if self._ingress.unlimited:
                    await self.connection.receive(pending, prefix.payload)
                else:
                    async with self._ingress.grant(self, pending.turn, prefix.payload):
                        await self.connection.receive(pending, prefix.payload)
                self._moved(prefix.id, pending, self.connection.name)

    def _expect(self, identity: int, pending: Pending) -> None:
        self._pending[identity] = pending

    def _abandon(self, identity: int, pending: Pending) -> None:
        """Nobody wants the read's bytes any more."""
        pending.into = None

    def _forget(self, identity: int) -> None:
        """The read has ended. It may be unknown, if the connection broke meanwhile."""
        self._pending.pop(identity, None)

    async def _next(self) -> Prefix:
        """The prefix of the next frame that is for us."""
        return await self.connection.receive_prefix()

    def fail(self, error: TransportError) -> None:
        """Ends all reads because the connection is closed, each once nothing writes to its
        buffer."""
        if self._way is not None:
            self._way.end.close()
        for pending in self._pending.values():
            lost = type(error)(str(error))
            if pending.taking is None:
                end(pending, lost)
            else:
                # The take may still write to the buffer, so the read ends only after it.
                pending.taking.add_done_callback(partial(_end_after, pending, lost))
                pending.taking.cancel()
        self._pending.clear()

    def _check_length(self, pending: Pending, nbytes: int) -> None:
        if nbytes > pending.request.nbytes - pending.position:
            raise ProtocolViolation(f"{nbytes} bytes for a read, more than was asked for")

    def _moved(self, identity: int, pending: Pending, way: str) -> None:
        if pending.position == pending.request.nbytes:
            self._forget(identity)
            end(pending, ReadResult(pending.position, pending.first_byte_ns, way))

    # --- by the direct way ---

    def _granted(self, identity: int, pending: Pending, place: Place, nbytes: int) -> None:
        self._check_length(pending, nbytes)
        if self.connection.posted >= MAX_READS:  # each finished take has posted a frame
            raise ProtocolViolation(f"{MAX_READS} grants were taken, and nobody reads of it")
        if self._way is None or not pending.request.direct:
            raise ProtocolViolation(f"GRANT for read {identity}, which is not direct")
        pending.taking = self._spawn(partial(self._take, pending, place, nbytes, self._way))
        pending.taking.add_done_callback(lambda _: self._took(identity, pending, nbytes))

    async def _take(
        self, pending: Pending, place: Place, nbytes: int, way: Way[DirectReader]
    ) -> None:
        if pending.into is None:
            return
        async with way.port.grant(pending, pending.turn, nbytes):
            into = pending.into[pending.position : pending.position + nbytes]
            try:
                await way.end.take(place, into)
            except (PeerLost, ProtocolViolation):
                raise
            # This read gets its own error; the way is broken for the others.
            except TransportError as error:
                end(pending, error)
                raise PeerLost(f"{self.connection.address}: {error}") from error
            pending.first_byte_ns = pending.first_byte_ns or wall_ns()
        if pending.into is not None and pending.received is not None:
            await asyncio.get_running_loop().run_in_executor(None, pending.received, into)

    def _took(self, identity: int, pending: Pending, nbytes: int) -> None:
        """Handles granted bytes that have arrived, or, if the read was cancelled, that are no
        longer wanted."""
        pending.taking = None
        if self.connection.error is not None or self._way is None:
            return
        pending.position += nbytes
        self._moved(identity, pending, self._way.name)
        self.connection.post(encode_prefix(Kind.TAKEN, id=identity))


async def _stopped(task: asyncio.Task[None]) -> None:
    """Cancels the task and waits for its end, even if the waiter is cancelled again."""
    task.cancel()
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task])


def end(pending: Pending, outcome: ReadResult | TransportError) -> None:
    if not pending.ended.done():
        pending.ended.set_result(outcome)


def _end_after(pending: Pending, outcome: TransportError, _: asyncio.Task[None]) -> None:
    end(pending, outcome)


def _fault(code: str, message: str) -> TransportError:
    if code == RegionUnknown.code:
        return RegionUnknown(message)
    return TransportError(f"the peer refused the read: {message} ({code})")


@dataclass(slots=True, eq=False)
class Serving:
    request: ReadRequest
    port: Port
    source: DirectSource | None
    """Tells where the peer takes the bytes from; None if they are sent as DATA."""
    region: Region = field(init=False)
    """Set as soon as the bytes are in a region."""
    turn: Turn = field(init=False)
    task: asyncio.Task[None] | None = None
    sent: int = 0
    began: float = 0.0
    """When the read got its first grant."""
    in_part: bool = False
    """Whether a DATA frame, or a GRANT without its TAKEN, is under way."""
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False
    refused: bool = False

    def admit(self, region: Region) -> None:
        self.region = region
        self.turn = self.port.arrive(self.request.priority, region.flow)

    @property
    def answered(self) -> bool:
        return self.refused or self.sent == self.request.nbytes


class ReadServer:
    """The serving end: waits for each read's bytes, and sends them frame by frame or grants them
    part by part, as the port allows. A part that was begun is finished, whatever happens to its
    read."""

    def __init__(
        self,
        connection: Connection,
        regions: Regions,
        loans: Loans,
        egress: Port,
        spawn: Spawn,
        way: Way[DirectSource] | None = None,
        *,
        on_sent: OnSent,
    ) -> None:
        self._connection = connection
        self._regions = regions
        self._loans = loans
        self._egress = egress
        self._spawn = spawn
        self._way = way
        self._on_sent = on_sent
        self._serving: dict[int, Serving] = {}
        connection.busy = lambda: bool(self._serving)

    async def run(self) -> None:
        """Serves until the connection ends, with a TransportError."""
        try:
            while True:
                prefix = await self._connection.receive_prefix()
                body = await self._connection.receive_exactly(prefix.body)
                if prefix.kind is Kind.READ:
                    self._begin(prefix.id, parse_read(body))
                elif prefix.kind is Kind.TAKEN:
                    self._taken(prefix.id)
                elif prefix.kind is Kind.CANCEL:
                    self._spawn(partial(self._stop, prefix.id))
                else:
                    raise ProtocolViolation(f"{prefix.kind.name} on a connection for reads")
        finally:
            for serving in self._serving.values():
                if serving.task is not None:
                    serving.task.cancel()
            if self._way is not None:
                self._way.end.close()

    def _begin(self, identity: int, request: ReadRequest) -> None:
        if identity in self._serving:
            raise ProtocolViolation(f"read {identity} was asked for twice")
        if len(self._serving) + self._connection.posted >= MAX_READS:  # refusals are posted frames
            raise ProtocolViolation(f"more than {MAX_READS} reads on one connection")
        if not self._regions.has(request.region):
            serving = self._serving[identity] = Serving(request, self._egress, None)
            serving.task = self._spawn(partial(self._serve_loan, identity, serving))
            return
        try:
            region = self._regions.find(request.region, request.offset, request.nbytes)
        except RegionUnknown as error:
            self._refuse(identity, error)
            return
        serving = self._serving[identity] = Serving(request, *self._way_of(request, region))
        serving.admit(region)
        serving.task = self._spawn(partial(self._serve, identity, serving))

    def _way_of(self, request: ReadRequest, region: Region) -> tuple[Port, DirectSource | None]:
        if request.direct and self._way is not None:
            asked = region.buffer[request.offset : request.offset + request.nbytes]
            if self._way.end.place(asked) is not None:
                return self._way.port, self._way.end
        return self._egress, None

    def _refuse(self, identity: int, error: RegionUnknown) -> None:
        self._connection.post(encode_fault(identity, error.code, str(error)))

    def _taken(self, identity: int) -> None:
        serving = self._serving.get(identity)
        if serving is None or not serving.in_part or serving.source is None:
            raise ProtocolViolation(f"TAKEN for read {identity}, of which nothing is granted")
        serving.taken.set()

    async def _stop(self, identity: int) -> None:
        serving = self._serving.get(identity)
        if serving is None or serving.task is None or serving.cancelled:
            return
        serving.cancelled = True
        self._halt(identity, serving)
        await asyncio.wait([serving.task])
        if not serving.answered:
            self._connection.post(encode_fault(identity, CANCELLED, ""))

    def _halt(self, identity: int, serving: Serving) -> None:
        """Ends the read, but for a part that was begun: the reader could not tell where half a
        frame ends."""
        if serving.task is not None and not serving.in_part:
            serving.task.cancel()

    async def _serve_loan(self, identity: int, serving: Serving) -> None:
        asked = serving.request
        try:
            async with self._loans.region(
                asked.region, asked.offset, asked.nbytes, asked.priority
            ) as region:
                serving.admit(region)
                await self._serve(identity, serving)
        except RegionUnknown as error:
            self._refuse(identity, error)
        finally:
            self._serving.pop(identity, None)

    async def _serve(self, identity: int, serving: Serving) -> None:
        try:
            await self._answer(identity, serving)
        except RegionUnknown as error:
            serving.refused = serving.in_part = True
            self._refuse(identity, error)
        finally:
            del self._serving[identity]
        if not serving.refused:
            self._on_sent(serving.began, asyncio.get_running_loop().time(), serving.sent)

    async def _answer(self, identity: int, serving: Serving) -> None:
        while not serving.answered and not serving.cancelled:
            await self._serve_part(identity, serving)

    async def _serve_part(self, identity: int, serving: Serving) -> None:
        request, region, port = serving.request, serving.region, serving.port
        begin = request.offset - region.first
        position, end = begin + serving.sent, begin + request.nbytes
        ready = min(await region.beyond(position), end)
        nbytes = min(port.grant_bytes, ready - position)
        lane = serving if serving.source else self
        async with port.grant(lane, serving.turn, nbytes):
            serving.began = serving.began or asyncio.get_running_loop().time()
            with region.use(self._evict) as buffer:
                serving.in_part = True
                data = buffer[position : position + nbytes]
                if serving.source is None:
                    prefix = encode_prefix(Kind.DATA, id=identity, payload=nbytes)
                    await self._send(port, [prefix, data], region.ready > position + nbytes)
                else:
                    place = serving.source.place(data)
                    assert place is not None  # the whole range has a place, so its parts have one
                    await self._grant(identity, serving, place, nbytes)
                serving.in_part = False
            serving.sent += nbytes

    async def _send(self, port: Port, frame: Sequence[Buffer], more: bool) -> None:
        """Sends a frame once the frame before it is nearly out. If there is `more`, or if others
        want the port, it waits until its own frame is nearly out too. So whoever is there then
        decides who comes next."""
        if port.unsent is not None:
            unsent, port.unsent = port.unsent, None
            with suppress(TimeoutError):
                await asyncio.wait_for(unsent(), PATIENCE_S)
        await self._connection.send(frame)
        unsent = partial(self._connection.sent_but, port.ahead_bytes)
        if more or port.wanted:
            await unsent()
        else:
            port.unsent = unsent

    def _evict(self) -> None:
        why = f"{self._connection.address} does not take what it asked for, and it has to go"
        self._connection.close(TransportTimeout(why))

    async def _grant(self, identity: int, serving: Serving, place: Place, nbytes: int) -> None:
        serving.taken.clear()
        self._connection.post(encode_grant(identity, place, nbytes))
        await serving.taken.wait()
