"""The transport between nodes: TCP, and direct ways for the bytes where both ends have them.

Each end dials its own connections: one for the reads that it makes of a peer (with shallow socket
buffers, so that the next frame is chosen as late as possible) and one for the messages that it
sends, so that an activation never queues behind a block. The handshake of the connection for reads
finds the best direct way between the two nodes, if there is one. Every connection has one task that
receives, sends heartbeats when it is idle, and is closed when the peer has been silent for
`silence_s`.
"""

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

from services.node.transport import native
from services.node.transport.base import Buffer, Gate, Listener, OnReceived, Permit, ReadResult
from services.node.transport.connection import Connection
from services.node.transport.direct import Direct, DirectReader, DirectSource, Offer
from services.node.transport.handshake import HANDSHAKE_S, Handshake
from services.node.transport.loans import Loans
from services.node.transport.native.hub import Hub
from services.node.transport.native.reads import NativeChannel, NativeServer
from services.node.transport.pacing import MAX_GRANT, MIN_GRANT, Port
from services.node.transport.pool import Pool
from services.node.transport.reads import ReadChannel, Spawn, Way, Work
from services.node.transport.regions import Regions
from services.node.transport.secret import Secret
from services.node.transport.serving import ReadServer
from services.node.transport.sockets import readable
from services.node.transport.strangers import MOST, Strangers
from services.node.transport.tls import Tls, certified
from services.node.transport.wire import (
    MAX_BODY,
    Hello,
    Kind,
    Purpose,
    encode_prefix,
)
from shared import telemetry
from shared.errors import BadInput, PeerLost, ProtocolViolation, TransportError

SILENCE_S = 0.75
"""Seconds after which a silent peer is lost."""
BEATS_PER_SILENCE = 5
DIRECT_WIDTH = 2
"""Grants that may be out at a time on a direct way, so that one is taken while the next is on its
way."""
ACCEPT_PAUSE_S = 0.05
"""Seconds to wait after a failed accept (for example because no file descriptors are left)."""
PeerKey = tuple[str, int]
"""(address, instance)."""


class _Ports:
    """Both directions of a link."""

    def __init__(self, bytes_per_s: int, width: int, min_grant: int) -> None:
        self.out = Port(bytes_per_s, width=width, min_grant=min_grant)
        self.into = Port(bytes_per_s)


class TcpTransport:
    def __init__(
        self,
        host: str,
        port: int,
        *,
        link_bytes_per_s: int,
        listener: Listener,
        ways: Sequence[Direct] = (),
        tls: Tls | None = None,
        secret: Secret | None = None,
        gate: Gate | None = None,
        silence_s: float = SILENCE_S,
        handshake_s: float = HANDSHAKE_S,
        max_payload: int = 64 << 20,
        most_strangers: int = MOST,
    ) -> None:
        """`link_bytes_per_s` paces each direction; 0: as fast as it goes. `ways`: the direct ways,
        best first. `gate`: what peers may read; None: everything. `most_strangers`: see
        strangers.py."""
        self._hears = listener
        self._gate = gate
        self._tls = tls
        self._ways = {way.name: way for way in ways}
        self._ports = {way.name: _Ports(way.bytes_per_s, DIRECT_WIDTH, MAX_GRANT) for way in ways}
        self._silence_s = silence_s
        self._handshake_s = handshake_s
        self._max_payload = max_payload
        self._regions = Regions()
        self._loans = Loans(listener)
        self._link = _Ports(link_bytes_per_s, 1, MIN_GRANT)
        self._link_bytes_per_s = link_bytes_per_s
        self._hub: Hub | None = None
        self._handshake = Handshake(
            host,
            port,
            tls,
            secret,
            paced=link_bytes_per_s > 0,
            silence_s=silence_s,
            handshake_s=handshake_s,
            max_payload=max_payload,
            asks=gate is not None,
        )
        self._strangers = Strangers(most_strangers)
        self._log = telemetry.logger("transport")
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._readers = Pool(self._dial_reads, self._spawn)
        self._senders = Pool(self._dial_messages, self._spawn)
        self._standing: dict[Connection, PeerKey | None] = {}
        """Connections past their handshake, with the peers that this end dialled. None: accepted,
        from a peer whose word is all that says who it is."""
        self._ways_to: dict[str, str] = {}
        """What carries reads from the peers to which connections for reads stand."""
        self._told: set[PeerKey] = set()
        """Peers whose loss was reported while some of their connections still stand."""
        self._closing = False

    # --- life ------------------------------------------------------------------

    @property
    def address(self) -> str:
        return self._handshake.address

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            listener = opened.enter_context(self._handshake.listen())
            for way in self._ways.values():
                await opened.enter_async_context(way)
            if not self._tls and (library := await asyncio.to_thread(native.load)) is not None:
                hub = Hub(library, self._link_bytes_per_s)
                self._hub = await opened.enter_async_context(hub)
            await self._group.__aenter__()
            self._resources = opened.pop_all()
        self._spawn(self._accept(listener))
        self._spawn(self._watch_silence())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing = True
        self._readers.close()
        self._senders.close()
        for task in list(self._tasks):
            task.cancel()
        for connection in list(self._standing):
            connection.close(PeerLost("this transport was closed"))
        try:
            await self._group.__aexit__(exc_type, exc, traceback)
        finally:
            await self._resources.aclose()

    # --- the contract ----------------------------------------------------------

    def register(self, region: str, buffer: memoryview, *, ready: int = 0, flow: str = "") -> None:
        self._regions.register(region, buffer, ready, flow)

    def advance(self, region: str, ready: int) -> None:
        self._regions.advance(region, ready)

    async def unregister(self, region: str) -> None:
        await self._regions.unregister(region)

    async def connect(self, address: str) -> None:
        await asyncio.gather(self._readers.get(address), self._senders.get(address))

    def way_to(self, address: str) -> str:
        """What carries reads from the peer; "" if no connection for them stands. Any thread may
        ask."""
        return self._ways_to.get(address, "")

    async def read(
        self,
        address: str,
        region: str,
        offset: int,
        into: memoryview,
        *,
        priority: int,
        received: OnReceived | None = None,
        permit: Permit | None = None,
    ) -> ReadResult:
        flat = into.cast("B")
        if not len(flat) or offset < 0:
            raise BadInput(f"read of {len(flat)} bytes at {offset} of region {region}")
        channel = await self._readers.get(address)
        return await channel.read(
            region, offset, flat, priority=priority, received=received, permit=permit
        )

    async def send(self, address: str, header: Buffer, payload: Sequence[Buffer] = ()) -> None:
        body, rest = _nbytes([header]), _nbytes(payload)
        if body > MAX_BODY or rest > self._max_payload:
            raise BadInput(
                f"a message of {body} + {rest} bytes: "
                f"at most {MAX_BODY} + {self._max_payload} can be sent"
            )
        connection = await self._senders.get(address)
        # A message does not wait for the port; reads after it pay for its bytes.
        self._charge(body + rest, out=True)
        prefix = encode_prefix(Kind.MESSAGE, body=body, payload=rest)
        await connection.send([prefix, header, *payload])

    def _charge(self, nbytes: int, *, out: bool) -> None:
        (self._link.out if out else self._link.into).charge(nbytes)
        if self._hub is not None:
            self._hub.charge(nbytes, out=out)

    # --- dialling --------------------------------------------------------------

    async def _dial_reads(self, address: str) -> ReadChannel:
        offers: dict[str, Offer] = {}
        try:
            for name, each in self._ways.items():
                try:
                    offers[name] = each.offer()
                except TransportError as error:
                    self._log.warning("no direct way", peer=address, way=name, error=str(error))
            connection, peer = await self._handshake.dial(
                address, Purpose.READS, {name: offer.data for name, offer in offers.items()}
            )
            try:
                way = await self._complete(connection, offers, peer)
                channel = self._channel(connection, way, peer.asks)
            except BaseException:
                connection.close(PeerLost(f"{address}: not connected"))
                raise
        finally:
            # `_complete` has taken out the offer that is in use.
            for offer in offers.values():
                offer.withdraw()

        name = way.name if way else connection.name

        def closed(error: TransportError) -> None:
            self._readers.drop(address)
            self._ways_to.pop(address, None)
            channel.fail(error)

        self._ways_to[address] = name
        self._stand(connection, (address, peer.instance), closed)
        self._hears.on_connected(address, name)
        self._spawn(self._guard(connection, channel.run))
        return channel

    def _channel(
        self, connection: Connection, way: Way[DirectReader] | None, asks: bool
    ) -> ReadChannel:
        spawn = self._spawner(connection)
        if self._hub is None or way is not None:
            return ReadChannel(connection, self._link.into, spawn, way, asks=asks)
        return NativeChannel(
            connection,
            self._link.into,
            spawn,
            self._hub,
            self._regions,
            asks=asks,
            max_payload=self._max_payload,
        )

    async def _complete(
        self, connection: Connection, offers: dict[str, Offer], peer: Hello
    ) -> Way[DirectReader] | None:
        """The direct way that the peer chose. It is taken out of the offers."""
        for name, answer in peer.ways.items():
            if name not in offers:
                raise ProtocolViolation(f"{connection.address} answers with {name}, not offered")
            try:
                async with asyncio.timeout(self._handshake_s):
                    reader = await offers.pop(name).complete(answer)
            except (TransportError, TimeoutError) as error:
                self._log.warning(
                    "no direct way", peer=connection.address, way=name, error=str(error)
                )
            else:
                return Way(reader.name, reader, self._ports[name].into)
        return None

    async def _dial_messages(self, address: str) -> Connection:
        connection, peer = await self._handshake.dial(address, Purpose.MESSAGES, {})
        self._stand(connection, (address, peer.instance), lambda _: self._senders.drop(address))
        self._spawn(self._guard(connection, lambda: _receive_nothing(connection)))
        return connection

    # --- accepting -------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        """Accepts connections. `loop.sock_accept` is not used, because it loses the socket if it is
        cancelled at the wrong moment."""
        while True:
            await readable(listener)
            try:
                sock, source = listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                self._log.warning("a connection was not accepted", error=error.strerror)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            sock.setblocking(False)
            name = f"{source[0]}:{source[1]}"
            connection = Connection(sock, name, max_payload=self._max_payload)
            if expelled := self._strangers.enter(source[0], connection):
                why = f"{expelled.address} said nothing, and others came"
                expelled.close(PeerLost(why))
            work = partial(self._welcome, connection, source[0])
            welcome = self._spawn(self._guard(connection, work))
            # A task that is cancelled before it has begun closes nothing by itself.
            welcome.add_done_callback(partial(_close_with_task, connection))

    async def _welcome(self, connection: Connection, host: str) -> None:
        try:
            peer = await self._handshake.welcome(connection)
        except ProtocolViolation as error:
            self._accepted_ended(connection, error)
            raise
        finally:
            self._strangers.leave(host, connection)
        answer, way = self._accept_way(peer)
        try:
            await self._handshake.answer(connection, peer, answer)
            self._stand(connection, None, partial(self._accepted_ended, connection))
            self._hears.on_dialled(peer.address)
            if peer.purpose is Purpose.READS:
                spawn = self._spawner(connection)
                await self._serve(connection, spawn, way)
            else:
                await self._receive_messages(connection)
        finally:
            if way is not None:
                way.end.close()

    async def _serve(
        self, connection: Connection, spawn: Spawn, way: Way[DirectSource] | None
    ) -> None:
        parts = (connection, self._regions, self._loans, self._link.out, spawn)
        on_sent = self._hears.on_sent
        visitor = None
        if self._gate is not None:
            visitor = self._gate.visitor(certified(connection.sock))
        if self._hub is None:
            await ReadServer(*parts, way, visitor=visitor, on_sent=on_sent).run()
        elif way is None:
            await NativeServer(*parts, self._hub, visitor=visitor, on_sent=on_sent).run()
        else:
            self._hub.serve_directly(+1)
            try:
                await ReadServer(*parts, way, visitor=visitor, on_sent=on_sent).run()
            finally:
                self._hub.serve_directly(-1)

    def _accept_way(self, peer: Hello) -> tuple[dict[str, bytes], Way[DirectSource] | None]:
        """The first of our ways that the peer offers and that works between the two nodes."""
        for name, way in self._ways.items():
            if name in peer.ways and (accepted := way.accept(peer.ways[name])) is not None:
                answer, source = accepted
                return {name: answer}, Way(name, source, self._ports[name].out)
        return {}, None

    async def _receive_messages(self, connection: Connection) -> None:
        while True:
            prefix = await connection.receive_prefix()
            if prefix.kind is not Kind.MESSAGE:
                raise ProtocolViolation(f"{prefix.kind.name} on a connection for messages")
            header = await connection.receive_exactly(prefix.body)
            payload = await connection.receive_exactly(prefix.payload)
            self._charge(prefix.body + prefix.payload, out=False)
            self._hears.on_message(connection.address, memoryview(header), memoryview(payload))

    # --- standing connections --------------------------------------------------

    def _stand(
        self, connection: Connection, peer: PeerKey | None, closed: Callable[[TransportError], None]
    ) -> None:
        """`peer`: None if the connection was accepted. Its end is then no peer's loss: whoever says
        that it is some node would end that node's requests by hanging up."""
        self._standing[connection] = peer
        if peer is not None:
            self._told.discard(peer)

        def on_closed(error: TransportError) -> None:
            del self._standing[connection]
            closed(error)
            if peer is not None:
                self._tell_lost(peer, error)

        connection.on_closed = on_closed
        connection.rest()
        self._spawn(self._guard(connection, connection.send_posted))

    def _accepted_ended(self, connection: Connection, error: TransportError) -> None:
        if not self._closing:
            tell = self._log.warning if isinstance(error, ProtocolViolation) else self._log.debug
            says = connection.address
            tell("an accepted connection ended", says_it_is=says, code=error.code, error=str(error))

    def _tell_lost(self, peer: PeerKey, error: TransportError) -> None:
        """Reports the loss once, though the death of a process breaks several connections."""
        if peer not in self._told and not self._closing:
            self._told.add(peer)
            self._hears.on_peer_lost(peer[0], error)
        if peer not in self._standing.values():
            self._told.discard(peer)

    async def _watch_silence(self) -> None:
        loop = asyncio.get_running_loop()
        interval = self._silence_s / BEATS_PER_SILENCE
        now = loop.time()
        while True:
            before = now
            await asyncio.sleep(interval)
            now = loop.time()
            for connection in list(self._standing):
                if now - before > 2 * interval:
                    connection.forgive_silence(now)
                connection.watch(now, self._silence_s, interval)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _spawner(self, connection: Connection) -> Spawn:
        return lambda work: self._spawn(self._guard(connection, work))

    async def _guard(self, connection: Connection, work: Work) -> None:
        """Runs a connection's work. If it fails, it closes this connection and nothing else."""
        try:
            await work()
        except TransportError as error:
            connection.close(error)
        except Exception as error:  # a connection's boundary
            self._log.exception("a connection ended with a bug", peer=connection.address)
            connection.close(PeerLost(f"{connection.address}: bug: {error!r}"))


def _close_with_task(connection: Connection, _: asyncio.Task[None]) -> None:
    connection.close(PeerLost(f"{connection.address}: this transport was closed"))


async def _receive_nothing(connection: Connection) -> None:
    prefix = await connection.receive_prefix()
    raise ProtocolViolation(f"{prefix.kind.name} from the receiver of messages")


def _nbytes(buffers: Sequence[Buffer]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)
