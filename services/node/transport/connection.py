"""One TCP connection of the data plane: sends whole frames, and receives exactly the bytes asked
for.

It works on the raw non-blocking socket, so that the kernel copies bytes straight to where they
belong, and straight out of a region's memory. Each receive asks anew where its bytes go, so that an
owner can take its buffer back at any time, also in the middle of a frame.
"""

import asyncio
import fcntl
import math
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from services.node.transport.base import Buffer
from services.node.transport.sockets import set_buffer
from services.node.transport.wire import (
    PREFIX_BYTES,
    Hello,
    Kind,
    Prefix,
    encode_prefix,
    parse_hello,
    parse_prefix,
)
from shared.errors import PeerLost, ProtocolViolation, TransportError, TransportTimeout

_TCP_NOTSENT_LOWAT = 25
"""From linux/tcp.h; the socket module has no name for it."""
_SIOCOUTQNSD = 0x894B
"""From linux/sockios.h: the number of bytes that the kernel has not sent yet."""
_MAX_BUFFERS = 64
"""The most buffers that one sendmsg gets."""
AT_ONCE = 1024 * 1024
"""A receive waits for up to this many bytes at once, because waking up costs more than copying."""
MANY = 64 * 1024
"""A receive of more bytes than this waits before it first asks the kernel: they exceed one packet,
so some have not arrived yet."""
USED_S = 5.0
"""A connection is idle once only heartbeats went over it for this many seconds."""
_HEARTBEAT = encode_prefix(Kind.HEARTBEAT)
IDLE_SLOWER = 8
"""An idle connection sends heartbeats less often, and may be silent for longer, by this factor. A
node has connections to many peers, but exchanges bytes with few of them at a time."""
_TURN = 16
"""After this many system calls in a row without waiting, other tasks get the loop."""


class Sink(Protocol):
    """The receiver of a connection's bytes."""

    def room(self, nbytes: int) -> memoryview:
        """The buffer for the next bytes, at most `nbytes`. Asked for when they have arrived."""

    def came(self, nbytes: int) -> None:
        """`nbytes` bytes were written to the buffer that `room` gave last."""


class _Buffer:
    """A sink that fills one buffer."""

    __slots__ = ("_rest",)

    def __init__(self, buffer: bytearray) -> None:
        self._rest = memoryview(buffer)

    def room(self, nbytes: int) -> memoryview:
        return self._rest

    def came(self, nbytes: int) -> None:
        self._rest = self._rest[nbytes:]


class Inward(Protocol):
    """Receives in the connection's place."""

    def silent_since(self, *, any_byte: bool) -> tuple[float | None, bool]:
        """Since when it has waited for bytes, if it does, and whether it is within a frame. From
        now on `any_byte` wakes it."""

    def forgive_silence(self, now: float) -> None: ...


class Outward(Protocol):
    """Sends in the connection's place."""

    def post(self, frame: bytes) -> int:
        """Sends a frame when it can. Returns how many posted frames wait."""

    def sent_at(self) -> float: ...


class Connection:
    name = "tcp"
    """The name in traces of what carries the bytes."""

    def __init__(self, sock: socket.socket, address: str, *, max_payload: int) -> None:
        self.address = address
        """The address at which the peer listens. Before the handshake, a name for errors."""
        self.error: TransportError | None = None
        """The reason why the connection was closed."""
        self.on_closed: Callable[[TransportError], None] | None = None
        self.busy: Callable[[], bool] = lambda: False
        """Whether requests were made over the connection that are not all answered."""
        self.sock = sock
        self._used_at = self._in_use_since = asyncio.get_running_loop().time()
        self._max_payload = max_payload
        self._writing = asyncio.Lock()
        self._posted: list[bytes] = []
        self._posting: asyncio.Future[None] | None = None
        """Done when a frame is posted."""
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self.inward: Inward | None = None
        self.outward: Outward | None = None
        self._silent_since: float | None = None
        self._in_frame = False
        self._skips = False
        """Whether the bytes waited for are a prefix, which may be a heartbeat's."""
        self._sent_at = 0.0
        self._watched_until = 0.0
        """Until then nothing has to be done about silence, since the connection is idle."""
        self._room = 0
        """The size of the send buffer that the kernel was asked for."""
        self._unsent_limit = 0
        self._unyielded = 0
        self._watched = False
        """Whether the loop calls us when bytes arrive."""
        self._enough = 1
        """The number of bytes at which the kernel wakes us."""

    # --- receiving -------------------------------------------------------------

    async def receive(self, sink: Sink, nbytes: int) -> None:
        """Receives exactly `nbytes` bytes, as they arrive."""
        if nbytes > MANY:
            await self._wait_readable(nbytes)
        while nbytes:
            self.check()
            try:
                received = self.sock.recv_into(sink.room(nbytes))
            except BlockingIOError:
                await self._wait_readable(nbytes)
                continue
            except ssl.SSLWantReadError:  # part of a TLS record may have arrived
                await self._wait_readable(1)
                continue
            except OSError as error:
                raise PeerLost(f"{self.address}: connection broke: {error.strerror}") from error
            if not received:
                raise PeerLost(f"{self.address}: the peer closed the connection")
            sink.came(received)
            nbytes -= received
            if self._had_its_turn():
                await asyncio.sleep(0)

    async def receive_exactly(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        await self.receive(_Buffer(data), nbytes)
        return data

    async def receive_prefix(self) -> Prefix:
        """The prefix of the next frame. Skips heartbeats."""
        while True:
            self._in_frame = False
            data = await self.receive_exactly(PREFIX_BYTES)
            prefix = parse_prefix(data, max_payload=self._max_payload)
            if prefix.kind is not Kind.HEARTBEAT:
                self._in_frame = True
                self._use()
                return prefix

    async def secure(self, context: ssl.SSLContext) -> None:
        """Does the TLS handshake, before anything else is sent."""
        server = context.protocol is ssl.PROTOCOL_TLS_SERVER
        while True:
            self.check()
            try:
                if not isinstance(self.sock, ssl.SSLSocket):
                    self.sock.getpeername()  # raises if the peer has gone already
                    self.sock = context.wrap_socket(
                        self.sock, server_side=server, do_handshake_on_connect=False
                    )
                self.sock.do_handshake()
            except ssl.SSLWantReadError:
                await self._wait_readable(1)
            except ssl.SSLWantWriteError:
                await self._wait_writable()
            except OSError as error:
                raise PeerLost(
                    f"{self.address}: no TLS: {error}; all nodes need certificates of one authority"
                ) from error
            else:
                return

    async def receive_hello(self) -> Hello:
        prefix = await self.receive_prefix()
        if prefix.kind is not Kind.HELLO:
            raise ProtocolViolation(f"{self.address}: {prefix.kind.name} before HELLO")
        return parse_hello(await self.receive_exactly(prefix.body))

    # --- sending ---------------------------------------------------------------

    @property
    def posted(self) -> int:
        """How many frames are posted and not yet being sent."""
        return self.outward.post(b"") if self.outward else len(self._posted)

    def post(self, frame: bytes) -> None:
        """Queues a small frame for `send_posted`, after the frames posted before."""
        self._use()
        self._post(frame)

    def _post(self, frame: bytes) -> None:
        if self.outward:
            self.outward.post(frame)
            return
        self._posted.append(frame)
        _wake(self._posting)

    async def send_posted(self) -> None:
        """Sends posted frames, joining those that wait, until the connection ends."""
        while True:
            self.check()
            if self._posted:
                frames, self._posted = self._posted, []
                await self._send([b"".join(frames)])
            else:
                self._posting = asyncio.get_running_loop().create_future()
                await self._posting

    async def send(self, buffers: Sequence[Buffer]) -> None:
        """Sends one frame, after the frames begun earlier. Returns once the kernel has all of it.

        If it is cancelled in the middle of the frame, it closes the connection: the peer would take
        whatever comes next for the rest of this frame.
        """
        self._use()
        await self._send(buffers)

    async def _send(self, buffers: Sequence[Buffer]) -> None:
        async with self._writing:
            self.check()
            views = [memoryview(b).cast("B") for b in buffers if memoryview(b).nbytes]
            whole = len(views)
            first = views[0].nbytes
            begun = False
            self._make_room(sum(view.nbytes for view in views))
            try:
                while views:
                    begun = isinstance(self.sock, ssl.SSLSocket)  # a TLS record may be half sent
                    views = _without(views, await self._send_some(views))
                    if self._had_its_turn():
                        await asyncio.sleep(0)
            except asyncio.CancelledError:
                if views and (begun or len(views) < whole or views[0].nbytes < first):
                    self.close(PeerLost(f"{self.address}: a send was cancelled half-way"))
                raise
            self._sent_at = asyncio.get_running_loop().time()

    async def sent_but(self, nbytes: int) -> None:
        """Waits until at most `nbytes` bytes are unsent in the kernel, or the connection has
        ended."""
        while self.error is None and self._unsent() > nbytes:
            self._limit_unsent(2 * nbytes)  # the kernel wakes us when half of this is left
            await self._wait_writable()

    def _unsent(self) -> int:
        buffer = bytearray(4)
        fcntl.ioctl(self.sock, _SIOCOUTQNSD, buffer)
        return int.from_bytes(buffer, sys.byteorder)

    def _make_room(self, nbytes: int) -> None:
        """Grows the send buffer so that the kernel takes a frame of `nbytes` at once, as far as its
        limits allow."""
        if nbytes > self._room:
            self._room = nbytes
            if 2 * nbytes > self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF):
                set_buffer(self.sock, socket.SO_SNDBUF, nbytes)
        self._limit_unsent(2 * self._room)

    def _limit_unsent(self, nbytes: int) -> None:
        """Limits how many bytes wait unsent in the kernel, where no other frame can overtake
        them."""
        if nbytes != self._unsent_limit:
            self._unsent_limit = nbytes
            self.sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, nbytes)

    async def _send_some(self, views: Sequence[memoryview]) -> int:
        while True:
            self.check()
            try:
                if isinstance(self.sock, ssl.SSLSocket):
                    return self.sock.send(views[0])
                return self.sock.sendmsg(views[:_MAX_BUFFERS])
            except (BlockingIOError, ssl.SSLWantWriteError):
                await self._wait_writable()
            except OSError as error:
                lost = PeerLost(f"{self.address}: connection broke: {error.strerror}")
                self.close(lost)
                raise lost from error

    # --- life ------------------------------------------------------------------

    def close(self, error: TransportError) -> None:
        """Ends the connection. Whoever waits on it gets the error. Later calls do nothing."""
        if self.error is not None:
            return
        self.error = error
        loop = asyncio.get_running_loop()
        if self.sock.fileno() >= 0:  # TLS may have closed it already
            loop.remove_reader(self.sock.fileno())
            loop.remove_writer(self.sock.fileno())
            self.sock.close()
        for waiter in (self._readable, self._writable, self._posting):
            _wake(waiter)
        on_closed, self.on_closed = self.on_closed, None
        if on_closed is not None:
            on_closed(error)

    def watch(self, now: float, limit_s: float, interval_s: float) -> None:
        """Checks that the peer is not silent, and shows it that we are there. To be called every
        `interval_s`."""
        if now < self._watched_until:
            return
        self.check_silence(now, limit_s)
        self.beat_after(now, interval_s)
        if self._is_idle(now, 2 * USED_S):
            self._watched_until = now + IDLE_SLOWER / 2 * interval_s

    def rest(self) -> None:
        """Idle until it is used: what came before, the handshake, does not count."""
        self._used_at = -math.inf

    def _use(self) -> None:
        self._watched_until = 0.0
        now = asyncio.get_running_loop().time()
        if now - self._used_at > USED_S:
            self._in_use_since = now
            self._post(_HEARTBEAT)  # from now on the peer expects heartbeats
        self._used_at = now

    def _is_idle(self, now: float, after_s: float) -> bool:
        if self.busy():
            self._used_at = now
        return now - self._used_at > after_s

    def check_silence(self, now: float, limit_s: float) -> None:
        """Closes the connection if it has waited for bytes for longer than `limit_s`, or
        IDLE_SLOWER times that if it is idle.

        To be called several times within `limit_s`. Any byte counts as a sign of life, however many
        are waited for.
        """
        idle = self._is_idle(now, USED_S)
        since, in_frame = self._silence(any_byte=False)
        if since is None:
            return
        silent_s = now - max(since, self._in_use_since)
        if silent_s < limit_s / 2:
            return
        # From now on any byte wakes us: a slow link must not look like a silent peer.
        self._silence(any_byte=True)
        if idle:
            limit_s *= IDLE_SLOWER
        if silent_s < limit_s:
            return
        if in_frame:
            self.close(TransportTimeout(f"{self.address}: stopped within a frame for {limit_s} s"))
        else:
            self.close(PeerLost(f"{self.address}: silent for {limit_s} s"))

    def _silence(self, *, any_byte: bool) -> tuple[float | None, bool]:
        """As Inward.silent_since says."""
        if self.inward:
            return self.inward.silent_since(any_byte=any_byte)
        if any_byte:
            self._wake_at(1)
        return self._silent_since, self._in_frame

    def forgive_silence(self, now: float) -> None:
        """Starts the wait anew, because this process itself was not running: what the peer sent
        meanwhile is still unread."""
        if self.inward:
            self.inward.forgive_silence(now)
        if self._silent_since is not None:
            self._silent_since = now

    def beat_after(self, now: float, interval_s: float) -> None:
        """Posts a heartbeat if nothing was sent for `interval_s`."""
        # Twice as long, because the peer may notice later that we are idle.
        if self._is_idle(now, 2 * USED_S):
            interval_s *= IDLE_SLOWER
        sent_at = self.outward.sent_at() if self.outward else self._sent_at
        if now - sent_at >= interval_s and not self._writing.locked() and not self._posted:
            self._beat(now)

    def _beat(self, now: float) -> None:
        """Sends a heartbeat at once, if the kernel has room for it."""
        if self.outward or isinstance(self.sock, ssl.SSLSocket):
            self._post(_HEARTBEAT)
            return
        try:
            sent = self.sock.send(_HEARTBEAT)
        except OSError:  # it is full, or broken: the sending task meets that
            sent = 0
        if sent < len(_HEARTBEAT):
            self._post(_HEARTBEAT[sent:])
        self._sent_at = now

    def _had_its_turn(self) -> bool:
        self._unyielded = (self._unyielded + 1) % _TURN
        return not self._unyielded

    def check(self) -> None:
        """Raises the error that closed the connection, if it is closed."""
        if self.error is not None:
            raise type(self.error)(str(self.error))

    async def _wait_readable(self, wanted: int) -> None:
        """Waits until `wanted` bytes have arrived, or AT_ONCE if that is less. On a slow link it
        also returns for fewer: see `check_silence`."""
        self.check()
        loop = asyncio.get_running_loop()
        self._wake_at(min(wanted, AT_ONCE))
        tls = isinstance(self.sock, ssl.SSLSocket)
        self._skips = wanted == PREFIX_BYTES and not self._in_frame and not tls
        self._readable = loop.create_future()
        self._silent_since = loop.time()
        if not self._watched:
            self._watched = True
            loop.add_reader(self.sock.fileno(), self._on_readable)
        try:
            await self._readable
        finally:
            self._readable = self._silent_since = None

    def _on_readable(self) -> None:
        """Usually somebody waits for these bytes. Only if nobody does, it pays to stop watching the
        socket."""
        if self._readable is None:
            self._watched = False
            asyncio.get_running_loop().remove_reader(self.sock.fileno())
        elif not self._skips or not self._skip_heartbeat():
            _wake(self._readable)

    def _skip_heartbeat(self) -> bool:
        """Takes in a heartbeat, if one has come, without waking who waits for a frame: most of what
        comes over most connections is heartbeats."""
        try:
            if self.sock.recv(PREFIX_BYTES, socket.MSG_PEEK) != _HEARTBEAT:
                return False
            self.sock.recv(PREFIX_BYTES)
        except OSError:  # whoever waits meets it
            return False
        self._silent_since = asyncio.get_running_loop().time()
        return True

    def _wake_at(self, nbytes: int) -> None:
        if nbytes != self._enough:
            self._enough = nbytes
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    async def _wait_writable(self) -> None:
        """Waits until the socket takes more bytes. Several tasks may wait at a time."""
        self.check()
        if self._writable is None or self._writable.done():
            loop = asyncio.get_running_loop()
            self._writable = loop.create_future()
            loop.add_writer(self.sock.fileno(), self._on_writable)
        await asyncio.shield(self._writable)

    def _on_writable(self) -> None:
        asyncio.get_running_loop().remove_writer(self.sock.fileno())
        _wake(self._writable)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _without(views: list[memoryview], sent: int) -> list[memoryview]:
    """The buffers without their first `sent` bytes."""
    for index, view in enumerate(views):
        if sent < view.nbytes:
            return [view[sent:], *views[index + 1 :]]
        sent -= view.nbytes
    return []
