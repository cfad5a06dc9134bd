"""One TCP connection of the data plane: whole frames out, exact bytes in.

Works on the raw non-blocking socket, so that bytes go from the kernel straight to where they
belong and from a region's memory straight to the kernel. Where received bytes go is asked for at
each receive: an owner that gives its buffer up is obeyed at once, in the middle of a frame too.
"""

import asyncio
import fcntl
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from services.node.transport.base import Buffer
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
"""linux/tcp.h; the socket module has no name for it."""
_SIOCOUTQNSD = 0x894B
"""linux/sockios.h: bytes that the kernel has and did not send yet."""
_MAX_BUFFERS = 64
"""Buffers handed to one sendmsg."""
AT_ONCE = 1024 * 1024
"""Bytes that are waited for together, if so many are to come: waking costs more than copying."""
DEEP = 4 << 20
"""The largest buffer of a socket that is asked for."""
MANY = 64 * 1024
"""So many are not there yet when the first of them are: more than one packet."""
USED_S = 5.0
"""A connection over which nothing but heartbeats went for so long is idle."""
IDLE_SLOWER = 8
"""Its heartbeats come so many times less often, and its silence may be so many times as long: a
node has connections to many peers, and bytes on their way with few of them."""
_TURN = 16
"""System calls in a row that did not have to wait, after which others get the loop."""


def _limit(name: str) -> int:
    """The kernel's; 0 where it does not say."""
    try:
        return int(Path("/proc/sys/net/core", name).read_text())
    except OSError:
        return 0


_most = {socket.SO_RCVBUF: _limit("rmem_max"), socket.SO_SNDBUF: _limit("wmem_max")}


class Sink(Protocol):
    """Where received bytes go."""

    def room(self, nbytes: int) -> memoryview:
        """For the next bytes, at most so many; asked for when they are there."""

    def came(self, nbytes: int) -> None:
        """So many are in the room that was given last."""


class _Buffer:
    """A sink that is a buffer."""

    __slots__ = ("_rest",)

    def __init__(self, buffer: bytearray) -> None:
        self._rest = memoryview(buffer)

    def room(self, nbytes: int) -> memoryview:
        return self._rest

    def came(self, nbytes: int) -> None:
        self._rest = self._rest[nbytes:]


class Connection:
    name = "tcp"
    """What carries the bytes, in traces."""

    def __init__(self, sock: socket.socket, address: str, *, max_payload: int) -> None:
        self.address = address
        """Where the peer listens; before the handshake: what it is called in errors."""
        self.error: TransportError | None = None
        """Why it was closed."""
        self.on_closed: Callable[[TransportError], None] | None = None
        self.busy: Callable[[], bool] = lambda: False
        """Something is asked for over it, and not all answered."""
        self.sock = sock
        self._used_at = self._in_use_since = asyncio.get_running_loop().time()
        self._max_payload = max_payload
        self._writing = asyncio.Lock()
        self._posted: list[bytes] = []
        self._posting: asyncio.Future[None] | None = None
        """Done when something is posted."""
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._silent_since: float | None = None
        self._in_frame = False
        self._sent_at = 0.0
        self._room = 0
        """Asked of the kernel for what is sent."""
        self._unsent_limit = 0
        self._unyielded = 0
        self._watched = False
        """The loop calls us when bytes come."""
        self._enough = 1
        """Bytes for which the kernel wakes us."""

    # --- receiving -------------------------------------------------------------

    async def receive(self, sink: Sink, nbytes: int) -> None:
        """So many bytes, as they come."""
        if nbytes > MANY:
            await self._wait_readable(nbytes)
        while nbytes:
            self.check()
            try:
                received = self.sock.recv_into(sink.room(nbytes))
            except BlockingIOError:
                await self._wait_readable(nbytes)
                continue
            except ssl.SSLWantReadError:  # of a record that may be there in part
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
        """The next frame's prefix; heartbeats are taken in silently."""
        while True:
            self._in_frame = False
            data = await self.receive_exactly(PREFIX_BYTES)
            prefix = parse_prefix(data, max_payload=self._max_payload)
            if prefix.kind is not Kind.HEARTBEAT:
                self._in_frame = True
                self._use()
                return prefix

    async def secure(self, context: ssl.SSLContext) -> None:
        """The TLS handshake, before anything else is sent."""
        server = context.protocol is ssl.PROTOCOL_TLS_SERVER
        while True:
            self.check()
            try:
                if not isinstance(self.sock, ssl.SSLSocket):
                    self.sock.getpeername()  # or there is nobody left to shake hands with
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
        return len(self._posted)

    def post(self, frame: bytes) -> None:
        """Has `send_posted` send a small frame, after those posted before."""
        self._use()
        self._post(frame)

    def _post(self, frame: bytes) -> None:
        self._posted.append(frame)
        _wake(self._posting)

    async def send_posted(self) -> None:
        """Sends what is posted, all that has come together, until the connection ends."""
        while True:
            self.check()
            if self._posted:
                frames, self._posted = self._posted, []
                await self._send([b"".join(frames)])
            else:
                self._posting = asyncio.get_running_loop().create_future()
                await self._posting

    async def send(self, buffers: Sequence[Buffer]) -> None:
        """One frame, after those begun earlier; returns once the kernel has all of it.

        Cancelled in the middle of the frame it closes the connection: the rest can't be left out.
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
                    begun = isinstance(self.sock, ssl.SSLSocket)  # a record may lie half sent
                    views = _without(views, await self._send_some(views))
                    if self._had_its_turn():
                        await asyncio.sleep(0)
            except asyncio.CancelledError:
                if views and (begun or len(views) < whole or views[0].nbytes < first):
                    self.close(PeerLost(f"{self.address}: a send was cancelled half-way"))
                raise
            self._sent_at = asyncio.get_running_loop().time()

    async def sent_but(self, nbytes: int) -> None:
        """Until no more than so many bytes wait in the kernel, or the connection has ended."""
        while self.error is None and self._unsent() > nbytes:
            self._limit_unsent(2 * nbytes)  # which wakes us when half of that is left
            await self._wait_writable()

    def _unsent(self) -> int:
        buffer = bytearray(4)
        fcntl.ioctl(self.sock, _SIOCOUTQNSD, buffer)
        return int.from_bytes(buffer, sys.byteorder)

    def _make_room(self, nbytes: int) -> None:
        """For a frame that the kernel is to take at once, as far as its limits let it."""
        if nbytes > self._room:
            self._room = nbytes
            if 2 * nbytes > self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF):
                set_buffer(self.sock, socket.SO_SNDBUF, nbytes)
        self._limit_unsent(2 * self._room)

    def _limit_unsent(self, nbytes: int) -> None:
        """How many bytes may wait in the kernel, where nothing can overtake them."""
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
        """Ends the connection; whoever waits on it gets the error. Later calls do nothing."""
        if self.error is not None:
            return
        self.error = error
        loop = asyncio.get_running_loop()
        if self.sock.fileno() >= 0:  # TLS may have closed it
            loop.remove_reader(self.sock.fileno())
            loop.remove_writer(self.sock.fileno())
            self.sock.close()
        for waiter in (self._readable, self._writable, self._posting):
            _wake(waiter)
        on_closed, self.on_closed = self.on_closed, None
        if on_closed is not None:
            on_closed(error)

    def _use(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._used_at > USED_S:
            self._in_use_since = now
            self._post(encode_prefix(Kind.HEARTBEAT))  # the peer waits for it from now on
        self._used_at = now

    def _is_idle(self, now: float, after_s: float) -> bool:
        if self.busy():
            self._used_at = now
        return now - self._used_at > after_s

    def check_silence(self, now: float, limit_s: float) -> None:
        """Closes the connection if we have been waiting for bytes for longer than `limit_s`, or
        IDLE_SLOWER times that if it is idle.

        To be called several times in that time: any byte counts, however many are waited for.
        """
        idle = self._is_idle(now, USED_S)
        if self._silent_since is None:
            return
        silent_s = now - max(self._silent_since, self._in_use_since)
        if silent_s < limit_s / 2:
            return
        self._wake_at(1)
        if idle:
            limit_s *= IDLE_SLOWER
        if silent_s < limit_s:
            return
        if self._in_frame:
            self.close(TransportTimeout(f"{self.address}: stopped within a frame for {limit_s} s"))
        else:
            self.close(PeerLost(f"{self.address}: silent for {limit_s} s"))

    def forgive_silence(self, now: float) -> None:
        """This process itself was not running: what the peer sent meanwhile is still unread."""
        if self._silent_since is not None:
            self._silent_since = now

    def beat_after(self, now: float, interval_s: float) -> None:
        """A heartbeat, if nothing was sent for that long."""
        if self._is_idle(now, 2 * USED_S):  # the peer may be late to notice
            interval_s *= IDLE_SLOWER
        if now - self._sent_at >= interval_s and not self._writing.locked() and not self._posted:
            self._post(encode_prefix(Kind.HEARTBEAT))

    def _had_its_turn(self) -> bool:
        self._unyielded = (self._unyielded + 1) % _TURN
        return not self._unyielded

    def check(self) -> None:
        """Raises what it was closed with, if it was."""
        if self.error is not None:
            raise type(self.error)(str(self.error))

    async def _wait_readable(self, wanted: int) -> None:
        """Until so many bytes are there, or some of very many, or of a slow link."""
        self.check()
        loop = asyncio.get_running_loop()
        self._wake_at(min(wanted, AT_ONCE))
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
        """Mostly somebody waits for it; only else is it worth while not to be called again."""
        if self._readable is None:
            self._watched = False
            asyncio.get_running_loop().remove_reader(self.sock.fileno())
        else:
            _wake(self._readable)

    def _wake_at(self, nbytes: int) -> None:
        if nbytes != self._enough:
            self._enough = nbytes
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    async def _wait_writable(self) -> None:
        """Several may wait at a time."""
        self.check()
        if self._writable is None or self._writable.done():
            loop = asyncio.get_running_loop()
            self._writable = loop.create_future()
            loop.add_writer(self.sock.fileno(), self._on_writable)
        await asyncio.shield(self._writable)

    def _on_writable(self) -> None:
        asyncio.get_running_loop().remove_writer(self.sock.fileno())
        _wake(self._writable)


def set_buffer(sock: socket.socket, option: int, nbytes: int) -> None:
    """SO_RCVBUF or SO_SNDBUF, where the kernel allows DEEP ones: else it would end its own sizing,
    which goes further."""
    if _most[option] >= DEEP:
        sock.setsockopt(socket.SOL_SOCKET, option, nbytes)


async def readable(sock: socket.socket) -> None:
    """Until there are bytes, a connection or an end."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _without(views: list[memoryview], sent: int) -> list[memoryview]:
    """What is left of the buffers after their first `sent` bytes."""
    for index, view in enumerate(views):
        if sent < view.nbytes:
            return [view[sent:], *views[index + 1 :]]
        sent -= view.nbytes
    return []
