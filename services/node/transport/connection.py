"""One TCP connection of the data plane: its frames, and the heartbeats by which each end knows that
the other lives. `stream.py` moves its bytes.
"""

import asyncio
import math
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Protocol

from services.node.transport.base import Buffer
from services.node.transport.stream import Stream, wake
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

USED_S = 5.0
"""A connection is idle once only heartbeats went over it for this many seconds."""
_HEARTBEAT = encode_prefix(Kind.HEARTBEAT)


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


class Connection(Stream):
    name = "tcp"
    """The name in traces of what carries the bytes."""

    def __init__(self, sock: socket.socket, address: str, *, max_payload: int) -> None:
        super().__init__(sock, address)
        self.busy: Callable[[], bool] = lambda: False
        """Whether requests were made over the connection that are not all answered."""
        self._used_at = self._in_use_since = asyncio.get_running_loop().time()
        self._max_payload = max_payload
        self._writing = asyncio.Lock()
        self._posted: list[bytes] = []
        self._posting: asyncio.Future[None] | None = None
        """Done when a frame is posted."""
        self.challenge = b""
        """What the peer had to prove its knowledge of the cluster's secret with."""
        self.inward: Inward | None = None
        self.outward: Outward | None = None
        self._in_frame = False
        self._sent_at = 0.0

    # --- receiving -------------------------------------------------------------

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

    async def receive_hello(self) -> Hello:
        prefix = await self.receive_prefix()
        if prefix.kind is not Kind.HELLO:
            raise ProtocolViolation(f"{self.address}: {prefix.kind.name} before HELLO")
        return parse_hello(await self.receive_exactly(prefix.body))

    async def receive_challenge(self) -> bytes:
        prefix = await self.receive_prefix()
        if prefix.kind is not Kind.CHALLENGE:
            raise ProtocolViolation(f"{self.address}: {prefix.kind.name} before CHALLENGE")
        return bytes(await self.receive_exactly(prefix.body))

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
        wake(self._posting)

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

    # --- life ------------------------------------------------------------------

    def close(self, error: TransportError) -> None:
        super().close(error)
        wake(self._posting)

    def watch(self, now: float, limit_s: float, interval_s: float) -> None:
        """Checks that the peer is not silent, and shows it that we are there. To be called every
        `interval_s`. An idle connection is left to the kernel (`sockets.keep_alive`)."""
        # For twice as long, because the peer may notice later that we are idle.
        if not self._is_idle(now, 2 * USED_S):
            self.check_silence(now, limit_s)
            self.beat_after(now, interval_s)

    def rest(self) -> None:
        """Idle until it is used: what came before, the handshake, does not count."""
        self._used_at = -math.inf

    def _use(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._used_at > USED_S:
            self._in_use_since = now
            self._post(_HEARTBEAT)  # from now on the peer expects heartbeats
        self._used_at = now

    def _is_idle(self, now: float, after_s: float) -> bool:
        if self.busy() or self._begun:
            self._used_at = now
        return now - self._used_at > after_s

    def check_silence(self, now: float, limit_s: float) -> None:
        """Closes the connection if it is in use and has waited for bytes for longer than
        `limit_s`.

        To be called several times within `limit_s`. Any byte counts as a sign of life, however many
        are waited for.
        """
        if self._is_idle(now, USED_S):
            return
        since, in_frame = self._silence(any_byte=False)
        if since is None:
            return
        silent_s = now - max(since, self._in_use_since)
        if silent_s < limit_s / 2:
            return
        # From now on any byte wakes us: a slow link must not look like a silent peer.
        self._silence(any_byte=True)
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

    def _skip(self) -> bool:
        """Takes in a heartbeat, if one has come, without waking who waits for a frame: most of what
        comes over most connections is heartbeats."""
        if self._wanted != PREFIX_BYTES or self._in_frame or isinstance(self.sock, ssl.SSLSocket):
            return False
        try:
            if self.sock.recv(PREFIX_BYTES, socket.MSG_PEEK) != _HEARTBEAT:
                return False
            self.sock.recv(PREFIX_BYTES)
        except OSError:  # whoever waits meets it
            return False
        self._silent_since = asyncio.get_running_loop().time()
        return True


def _without(views: list[memoryview], sent: int) -> list[memoryview]:
    """The buffers without their first `sent` bytes."""
    for index, view in enumerate(views):
        if sent < view.nbytes:
            return [view[sent:], *views[index + 1 :]]
        sent -= view.nbytes
    return []
