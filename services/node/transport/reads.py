"""Region reads over one connection: the dialler's end, which asks. The listener's is serving.py.

The bytes travel on the connection, or by the direct way that its handshake found (see direct.py).
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from services.node.transport.base import OnReceived, Permit, ReadResult
from services.node.transport.connection import Connection
from services.node.transport.direct import DirectReader, DirectSource, Place
from services.node.transport.pacing import Port, Turn
from services.node.transport.wire import (
    Kind,
    Prefix,
    ReadRequest,
    encode_permit,
    encode_prefix,
    encode_read,
    parse_fault,
    parse_grant,
)
from shared.clock import wall_ns
from shared.errors import (
    PeerLost,
    ProtocolViolation,
    ReadRefused,
    RegionUnknown,
    TransportError,
)

Work = Callable[[], Coroutine[Any, Any, None]]
Spawn = Callable[[Work], asyncio.Task[None]]
"""Runs work that ends with its connection."""
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
        *,
        asks: bool,
    ) -> None:
        """`asks`: whether the peer asks for permits."""
        self.connection = connection
        self._asks = asks
        self._shown: dict[str, bytes] = {}
        """The last permit that was shown, by subject."""
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
        permit: Permit | None,
    ) -> ReadResult:
        self.connection.check()
        identity = next(self._ids) % _IDS
        ended: asyncio.Future[ReadResult | TransportError]
        ended = asyncio.get_running_loop().create_future()
        direct = self._way is not None and self._way.end.reaches(into)
        request = ReadRequest(priority, offset, len(into), region, direct)
        pending = Pending(request, self._ingress.arrive(priority), into, received, ended)
        self._expect(identity, pending)
        if permit is not None and self._asks and self._shown.get(permit.subject) != permit.data:
            self._shown[permit.subject] = permit.data
            self.connection.post(encode_permit(permit.data))
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
                if isinstance(fault, ReadRefused):
                    self._shown.clear()  # whatever was wrong, the next read shows its permit anew
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
    for known in (RegionUnknown, ReadRefused):
        if code == known.code:
            return known(message)
    return TransportError(f"the peer refused the read: {message} ({code})")
