"""The bytes of one connection of the data plane, over a raw non-blocking socket.

The kernel copies bytes straight to where they belong, and straight out of a region's memory. Each
receive asks anew where its bytes go, so that an owner can take its buffer back at any time, also in
the middle of a frame.
"""

import asyncio
import fcntl
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from services.node.transport.sockets import set_buffer
from shared.errors import PeerLost, TransportError

_TCP_NOTSENT_LOWAT = 25
"""From linux/tcp.h; the socket module has no name for it."""
_SIOCOUTQNSD = 0x894B
"""From linux/sockios.h: the number of bytes that the kernel has not sent yet."""
_MAX_BUFFERS = 64
"""The most buffers that one sendmsg gets."""
AT_ONCE = 1024 * 1024
"""A receive waits for up to this many bytes at once, because waking up costs more than copying."""
FEW = 64
"""A receive of at most this many bytes is woken by the first of them, so that it is known when the
rest does not come. Usually they come together."""
MANY = 64 * 1024
"""A receive of more bytes than this waits before it first asks the kernel: they exceed one packet,
so some have not arrived yet."""
_TURN = 16
"""After this many system calls in a row without waiting, other tasks get the loop."""


class Sink(Protocol):
    """The receiver of a connection's bytes."""

    def room(self, nbytes: int) -> memoryview:
        """The buffer for the next bytes, at most `nbytes`. Asked for when they have arrived."""

    def came(self, nbytes: int) -> None:
        """`nbytes` bytes were written to the buffer that `room` gave last."""


class _Buffer:
    """A sink that fills one buffer. The buffer grows as bytes come, at most to twice what has come:
    a peer that announces much gets no memory for it."""

    __slots__ = ("_rest", "data")

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(min(nbytes, AT_ONCE))
        self._rest = memoryview(self.data)

    def room(self, nbytes: int) -> memoryview:
        if not self._rest:
            self._rest.release()
            came = len(self.data)
            self.data += bytes(min(nbytes, came))
            self._rest = memoryview(self.data)[came:]
        return self._rest

    def came(self, nbytes: int) -> None:
        self._rest = self._rest[nbytes:]


class Stream:
    def __init__(self, sock: socket.socket, address: str) -> None:
        self.address = address
        """The address at which the peer listens. Before the handshake, a name for errors."""
        self.error: TransportError | None = None
        """The reason why the connection was closed."""
        self.on_closed: Callable[[TransportError], None] | None = None
        self.sock = sock
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._silent_since: float | None = None
        """Since when bytes have been waited for, if they are."""
        self._wanted = 0
        """How many bytes are waited for."""
        self._begun = False
        """Whether a part of them has come."""
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
            self._begun = nbytes > 0
            if self._had_its_turn():
                await asyncio.sleep(0)

    async def receive_exactly(self, nbytes: int) -> bytearray:
        buffer = _Buffer(nbytes)
        await self.receive(buffer, nbytes)
        return buffer.data

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

    # --- sending ---------------------------------------------------------------

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
        wake(self._readable)
        wake(self._writable)
        on_closed, self.on_closed = self.on_closed, None
        if on_closed is not None:
            on_closed(error)

    def _had_its_turn(self) -> bool:
        self._unyielded = (self._unyielded + 1) % _TURN
        return not self._unyielded

    def check(self) -> None:
        """Raises the error that closed the connection, if it is closed."""
        if self.error is not None:
            raise type(self.error)(str(self.error))

    # --- waiting ---------------------------------------------------------------

    async def _wait_readable(self, wanted: int) -> None:
        """Waits until `wanted` bytes have arrived, or AT_ONCE if that is less. After `_wake_at` it
        also returns for fewer."""
        self.check()
        loop = asyncio.get_running_loop()
        self._wake_at(1 if wanted <= FEW else min(wanted, AT_ONCE))
        self._wanted = wanted
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
        elif not self._skip():
            wake(self._readable)

    def _skip(self) -> bool:
        """Takes in what has come, if nobody needs to be woken for it."""
        return False

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
        wake(self._writable)


def wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
