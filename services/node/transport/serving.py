"""Region reads over one connection: the listener's end, which serves. The dialler's is reads.py."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from services.node.transport.base import Buffer, Visitor
from services.node.transport.connection import Connection
from services.node.transport.direct import DirectSource, Place
from services.node.transport.loans import Loans
from services.node.transport.pacing import PATIENCE_S, Port, Turn
from services.node.transport.reads import MAX_READS, Spawn, Way
from services.node.transport.regions import Region, Regions
from services.node.transport.wire import (
    CANCELLED,
    Kind,
    ReadRequest,
    encode_fault,
    encode_grant,
    encode_prefix,
    parse_read,
)
from shared.errors import ProtocolViolation, ReadRefused, RegionUnknown, TransportTimeout

OnSent = Callable[[float, float, int], None]
"""(began, ended, bytes) of a read that was served; seconds on the loop's clock."""


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
        visitor: Visitor | None,
        on_sent: OnSent,
    ) -> None:
        """`visitor`: says what the peer may read; None: everything."""
        self._visitor = visitor
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
                elif prefix.kind is Kind.PERMIT and self._visitor is not None:
                    self._visitor.show(bytes(body))
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
        try:
            if self._visitor is not None:
                self._visitor.check(request.region)
        except ReadRefused as error:
            self._refuse(identity, error)
            return
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

    def _refuse(self, identity: int, error: RegionUnknown | ReadRefused) -> None:
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
                async with asyncio.timeout(PATIENCE_S):
                    await unsent()
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
