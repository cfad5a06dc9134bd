"""Region reads whose bytes move in relay.c. What is asked, refused and judged is the same code as
without it: `reads.py` and `serving.py`."""

import asyncio
import os
from collections import deque

from services.node.memory.views import address
from services.node.transport.base import Chunks, ReadResult, Visitor
from services.node.transport.connection import Connection
from services.node.transport.loans import Loans
from services.node.transport.native import CHUNKS, FRAME, LOST, READ, SERVED, Event
from services.node.transport.native.hub import Half, Hub
from services.node.transport.pacing import Port
from services.node.transport.reads import Pending, ReadChannel, Spawn, end
from services.node.transport.regions import Region, Regions
from services.node.transport.serving import OnSent, ReadServer, Serving
from services.node.transport.wire import PREFIX_BYTES, Prefix, ReadRequest, parse_prefix
from shared.errors import PeerLost, RegionUnknown, TransportError


class NativeChannel(ReadChannel):
    """The asking end. C receives; frames that are not good DATA come here."""

    def __init__(
        self,
        connection: Connection,
        ingress: Port,
        spawn: Spawn,
        hub: Hub,
        regions: Regions,
        *,
        asks: bool,
        max_payload: int,
    ) -> None:
        super().__init__(connection, ingress, spawn, asks=asks)
        self._hub = hub
        self._regions = regions
        self._max_payload = max_payload
        self._frames: deque[Event] = deque()
        self._lost: TransportError | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._paused = False
        self._half = Half(hub, connection, self._on_event, receives=True, max_payload=max_payload)
        connection.inward = self._half

    def _expect(self, identity: int, pending: Pending) -> None:
        super()._expect(identity, pending)
        into, received = pending.into, pending.received
        assert into is not None  # it was asked for just now
        chunk_bytes, digests, shows = 0, b"", None
        if isinstance(received, Chunks):
            chunk_bytes, digests = received.chunk_bytes, received.digests
            region = self._regions.get(received.region)
            if region is not None and not region.closed:
                shows = self._hub.region(region)
        if not self._half.call(
            "read_begin",
            identity,
            address(into),
            len(into),
            pending.request.priority,
            chunk_bytes,
            digests,
            shows,
            pending.request.offset,
        ):
            super()._forget(identity)
            raise TransportError("a read was not begun: out of memory")

    def _abandon(self, identity: int, pending: Pending) -> None:
        self._half.call("read_drop", identity)
        self._hub.hear()  # the chunks that were shown before
        super()._abandon(identity, pending)

    def _forget(self, identity: int) -> None:
        super()._forget(identity)
        self._half.call("read_end", identity)

    async def _next(self) -> Prefix:
        if self._paused:
            self._paused = False
            self._half.call("conn_resume")
        while not self._frames:
            self.connection.check()
            if self._lost is not None:
                raise self._lost
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        event = self._frames.popleft()
        self._paused = True
        prefix = parse_prefix(bytes(event.head[:PREFIX_BYTES]), max_payload=self._max_payload)
        if pending := self._pending.get(prefix.id):
            pending.position = event.a
        return prefix

    def fail(self, error: TransportError) -> None:
        self._hub.hear()
        self._half.close()
        super().fail(error)
        self._wake()

    def _on_event(self, event: Event) -> None:
        if event.kind == FRAME:
            self._frames.append(event)
            self._wake()
        elif event.kind == LOST:
            self._lost = _lost(self.connection, event.a)
            self._wake()
        elif pending := self._pending.get(event.id):
            if event.kind == CHUNKS and isinstance(pending.received, Chunks):
                pending.received.found(event.a, right=bool(event.b))
            elif event.kind == READ:
                self._arrived(event, pending)

    def _arrived(self, event: Event, pending: Pending) -> None:
        del self._pending[event.id]
        if pending.into is None:
            return
        if pending.received is not None and not isinstance(pending.received, Chunks):
            pending.received(pending.into)
        end(pending, ReadResult(event.a, event.b, self.connection.name))

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class NativeServer(ReadServer):
    """The serving end. C sends; the requests come here."""

    def __init__(
        self,
        connection: Connection,
        regions: Regions,
        loans: Loans,
        egress: Port,
        spawn: Spawn,
        hub: Hub,
        *,
        visitor: Visitor | None,
        on_sent: OnSent,
    ) -> None:
        super().__init__(
            connection, regions, loans, egress, spawn, visitor=visitor, on_sent=on_sent
        )
        self._hub = hub
        self._ends: dict[int, asyncio.Future[Event]] = {}
        self._half = Half(hub, connection, self._on_event, receives=False, max_payload=0)
        connection.outward = self._half

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self._half.close()

    def _way_of(self, request: ReadRequest, region: Region) -> tuple[Port, None]:
        return self._egress, None

    async def _answer(self, identity: int, serving: Serving) -> None:
        request, region = serving.request, serving.region
        ended: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        with region.use(self._evict, lambda: self._halt(identity, serving)):
            if self._half.closed or serving.cancelled:
                return
            self._ends[identity] = ended
            serving.in_part = True
            try:
                if not self._half.call(
                    "serve_begin",
                    identity,
                    self._hub.region(region),
                    request.offset - region.first,
                    request.nbytes,
                    request.priority,
                    self._hub.flow(region.flow),
                ):
                    raise TransportError("a read was not served: out of memory")
                event = await ended
            except asyncio.CancelledError:
                self._half.close()  # the connection has ended, and C may be sending
                raise
            finally:
                del self._ends[identity]
        serving.sent, serving.began = event.a, event.began
        if not serving.answered and region.closed:
            raise RegionUnknown(f"region {region.name} was unregistered")

    def _halt(self, identity: int, serving: Serving) -> None:
        if serving.in_part:
            self._half.call("serve_stop", identity)
        else:
            super()._halt(identity, serving)

    def _on_event(self, event: Event) -> None:
        if event.kind == LOST:
            self._connection.close(_lost(self._connection, event.a))
        elif event.kind == SERVED and (ended := self._ends.get(event.id)) and not ended.done():
            ended.set_result(event)


def _lost(connection: Connection, why: int) -> PeerLost:
    if not why:
        return PeerLost(f"{connection.address}: the peer closed the connection")
    return PeerLost(f"{connection.address}: connection broke: {os.strerror(why)}")
