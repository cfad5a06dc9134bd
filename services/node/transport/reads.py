"""Region reads over one TCP connection: the dialler's end asks, the listener's end serves."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.node.transport.base import ReadResult
from services.node.transport.connection import Connection
from services.node.transport.pacing import Port, Turn
from services.node.transport.regions import Region, Regions
from services.node.transport.wire import (
    CANCELLED,
    Kind,
    ReadRequest,
    encode_fault,
    encode_prefix,
    encode_read,
    parse_fault,
    parse_read,
)
from shared.clock import wall_ns
from shared.errors import ProtocolViolation, RegionUnknown, TransportError

Work = Callable[[], Coroutine[Any, Any, None]]
Spawn = Callable[[Work], asyncio.Task[None]]
"""Runs work that ends with its connection."""
SCRATCH = 64 * 1024
MAX_READS = 4096
"""Reads that one connection may have waiting; more are a ProtocolViolation."""
_IDS = 1 << 32


@dataclass(slots=True, eq=False)
class _Pending:
    turn: Turn
    nbytes: int
    into: memoryview | None
    """None once the reader has gone: what still comes is received into scratch and dropped."""
    ended: asyncio.Future[ReadResult | TransportError]
    position: int = 0
    first_byte_ns: int = 0


class ReadChannel:
    """The asking end. A cancelled read is drained, so that the connection and the other reads on
    it go on; the server is told to stop after the frame it is in."""

    def __init__(self, connection: Connection, ingress: Port, spawn: Spawn) -> None:
        self.connection = connection
        self._ingress = ingress
        self._spawn = spawn
        self._pending: dict[int, _Pending] = {}
        self._ids = itertools.count()
        self._scratch = memoryview(bytearray(SCRATCH))

    async def read(
        self, region: str, offset: int, into: memoryview, *, priority: int
    ) -> ReadResult:
        identity = next(self._ids) % _IDS
        ended: asyncio.Future[ReadResult | TransportError]
        ended = asyncio.get_running_loop().create_future()
        pending = _Pending(self._ingress.arrive(priority), len(into), into, ended)
        self._pending[identity] = pending
        try:
            request = ReadRequest(priority, offset, len(into), region)
            await self.connection.send([encode_read(identity, request)])
            outcome = await ended
        except asyncio.CancelledError:
            if identity in self._pending and self.connection.error is None:
                self._spawn(partial(self._cancel, identity))
            raise
        finally:
            pending.into = None
        if isinstance(outcome, TransportError):
            raise outcome
        return outcome

    async def run(self) -> None:
        """Receives until the connection ends, with a TransportError."""
        while True:
            prefix = await self.connection.receive_prefix()
            pending = self._pending.get(prefix.id)
            if pending is None or prefix.kind not in (Kind.DATA, Kind.FAULT):
                raise ProtocolViolation(f"{prefix.kind.name} for read {prefix.id}, not asked for")
            if prefix.kind is Kind.FAULT:
                body = await self.connection.receive_exactly(prefix.body)
                fault = _fault(*parse_fault(body))
                del self._pending[prefix.id]
                _end(pending, fault)
                continue
            if prefix.payload > pending.nbytes - pending.position:
                raise ProtocolViolation(f"{prefix.payload} bytes of DATA, more than was asked for")
            async with self._ingress.grant(self, pending.turn, prefix.payload):
                await self._receive(pending, prefix.payload)
            if pending.position == pending.nbytes:
                del self._pending[prefix.id]
                _end(pending, ReadResult(pending.nbytes, pending.first_byte_ns))

    def fail(self, error: TransportError) -> None:
        for pending in self._pending.values():
            _end(pending, type(error)(str(error)))
        self._pending.clear()

    async def _receive(self, pending: _Pending, nbytes: int) -> None:
        end = pending.position + nbytes

        def destination() -> memoryview:
            if pending.into is None:
                return self._scratch[: end - pending.position]
            return pending.into[pending.position : end]

        while pending.position < end:
            received = await self.connection.receive_some(destination)
            pending.first_byte_ns = pending.first_byte_ns or wall_ns()
            pending.position += received

    async def _cancel(self, identity: int) -> None:
        await self.connection.send([encode_prefix(Kind.CANCEL, id=identity)])


def _end(pending: _Pending, outcome: ReadResult | TransportError) -> None:
    if not pending.ended.done():
        pending.ended.set_result(outcome)


def _fault(code: str, message: str) -> TransportError:
    if code == RegionUnknown.code:
        return RegionUnknown(message)
    return TransportError(f"the peer refused the read: {message} ({code})")


@dataclass(slots=True, eq=False)
class _Serving:
    request: ReadRequest
    turn: Turn
    task: asyncio.Task[None] | None = None
    sent: int = 0
    in_frame: bool = False
    stop: bool = False
    refused: bool = False

    @property
    def answered(self) -> bool:
        return self.refused or self.sent == self.request.nbytes


class ReadServer:
    """The serving end: waits for each read's bytes and sends them frame by frame, as the egress
    port grants it. A frame that was begun is finished, whatever happens to its read."""

    def __init__(
        self, connection: Connection, regions: Regions, egress: Port, spawn: Spawn
    ) -> None:
        self._connection = connection
        self._regions = regions
        self._egress = egress
        self._spawn = spawn
        self._serving: dict[int, _Serving] = {}

    async def run(self) -> None:
        """Serves until the connection ends, with a TransportError."""
        try:
            while True:
                prefix = await self._connection.receive_prefix()
                body = await self._connection.receive_exactly(prefix.body)
                if prefix.kind is Kind.READ:
                    self._begin(prefix.id, parse_read(body))
                elif prefix.kind is Kind.CANCEL:
                    await self._stop(prefix.id)
                else:
                    raise ProtocolViolation(f"{prefix.kind.name} on a connection for reads")
        finally:
            for serving in self._serving.values():
                if serving.task is not None:
                    serving.task.cancel()

    def _begin(self, identity: int, request: ReadRequest) -> None:
        if identity in self._serving:
            raise ProtocolViolation(f"read {identity} was asked for twice")
        if len(self._serving) >= MAX_READS:
            raise ProtocolViolation(f"more than {MAX_READS} reads on one connection")
        serving = self._serving[identity] = _Serving(request, self._egress.arrive(request.priority))
        serving.task = self._spawn(partial(self._serve, identity, serving))

    async def _stop(self, identity: int) -> None:
        serving = self._serving.get(identity)
        if serving is None or serving.task is None:
            return
        if serving.in_frame:
            serving.stop = True
        else:
            serving.task.cancel()
        await asyncio.wait([serving.task])
        if not serving.answered:
            await self._connection.send([encode_fault(identity, CANCELLED, "")])

    async def _serve(self, identity: int, serving: _Serving) -> None:
        request = serving.request
        try:
            region = self._regions.find(request.region, request.offset, request.nbytes)
            while not serving.answered and not serving.stop:
                await self._send_frame(identity, serving, region)
        except RegionUnknown as error:
            serving.refused = serving.in_frame = True
            await self._connection.send([encode_fault(identity, error.code, str(error))])
        finally:
            del self._serving[identity]

    async def _send_frame(self, identity: int, serving: _Serving, region: Region) -> None:
        request = serving.request
        position, end = request.offset + serving.sent, request.offset + request.nbytes
        ready = min(await region.beyond(position), end)
        nbytes = min(self._egress.grant_bytes, ready - position)
        async with self._egress.grant(self, serving.turn, nbytes):
            with region.use() as buffer:
                serving.in_frame = True
                prefix = encode_prefix(Kind.DATA, id=identity, payload=nbytes)
                await self._connection.send([prefix, buffer[position : position + nbytes]])
                serving.in_frame = False
            serving.sent += nbytes
