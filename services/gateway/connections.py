"""The gateway's TCP connections: how many there may be, and how long they may keep it waiting.

aiohttp serves a connection for as long as it is open. Between the socket and aiohttp stands a
`Connection`, which closes it when

- a new one has not sent the headers of a request in time,
- no request has run on it for a while,
- its client has not read a byte of its answer for a while.

So nobody can hold the gateway's descriptors or memory by doing nothing.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import cast

from aiohttp import web

from services.gateway.api_error import ApiError

IDLE_S = 75.0
"""A connection on which no request has run for this long is closed."""
LARGE_BODY = 1 << 16
"""Bytes from which on a body takes a good part of a millisecond to be decoded."""
_FULL = ApiError(503, "the gateway has no room for another connection", retry_after=1)
_FULL_FOR_CLIENT = ApiError(429, "your address has too many connections", retry_after=1)
_LATE = ApiError(408, "the headers of the request did not arrive in time")


class Connections:
    def __init__(
        self, most: int, most_per_client: int, timeout_s: float, refused: Callable[[], None]
    ) -> None:
        """`most_per_client`: 0 for as many as `most`. `timeout_s`: for a request's headers, and for
        a client to read on. `refused` is called when there is no room for a connection."""
        self._most = most
        self._most_per_client = most_per_client or most
        self.timeout_s = timeout_s
        self._refused = refused
        self._large = asyncio.Lock()
        """Held by the large body that comes next: each is given out, and so decoded, in a turn of
        the loop of its own. Streams have their turns in between."""
        self._open: dict[asyncio.BaseTransport, Connection] = {}
        self._of_client: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def protocols(self, make: Callable[[], asyncio.Protocol]) -> "Callable[[], Connection]":
        """What asyncio's servers ask for. `make` gives each connection the protocol to which it
        delegates."""
        return lambda: Connection(self, make())

    def of(self, transport: asyncio.BaseTransport | None) -> "Connection | None":
        """The open connection with this transport."""
        return None if transport is None else self._open.get(transport)

    @contextmanager
    def serving(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """While a request runs on a connection."""
        connection = self.of(transport)
        if connection is None:  # it has ended meanwhile
            yield
            return
        connection.begin()
        try:
            yield
        finally:
            connection.end()

    async def body(self, request: web.BaseRequest) -> bytes:
        """A request's body. ApiError 408 if it does not arrive in time."""
        if request.content.is_eof():  # it came with the headers, as most do: nothing to wait for
            data = await request.read()
        else:
            async with self.arriving():
                data = await request.read()
        if len(data) >= LARGE_BODY:
            async with self._large:
                await asyncio.sleep(0)
        return data

    @asynccontextmanager
    async def arriving(self) -> AsyncIterator[None]:
        """While a body is awaited. ApiError 408 if it takes too long."""
        try:
            async with asyncio.timeout(self.timeout_s):
                yield
        except TimeoutError:
            raise ApiError(408, "the body of the request did not arrive in time") from None

    # --- for connections ---

    def add(self, connection: "Connection", transport: asyncio.Transport, client: str) -> None:
        """ApiError if there is no room for it."""
        error = None
        if len(self._open) >= self._most:
            error = _FULL
        elif self._of_client[client] >= self._most_per_client:
            error = _FULL_FOR_CLIENT
        if error is not None:
            self._refused()
            raise error
        self._open[transport] = connection
        self._of_client[client] += 1

    def remove(self, transport: asyncio.Transport, client: str) -> None:
        if self._open.pop(transport, None) is not None:
            self._of_client[client] -= 1
            if not self._of_client[client]:
                del self._of_client[client]


class Connection(asyncio.Protocol):
    def __init__(self, connections: Connections, inner: asyncio.Protocol) -> None:
        self._all = connections
        self._inner: asyncio.Protocol | None = inner
        """None: the connection was refused."""
        self._timer: asyncio.TimerHandle | None = None
        self._running = 0
        self._started = False
        """Whether a byte has come."""
        self._full = False
        """Whether the client reads more slowly than it is written to."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self._client = str(peer[0]) if isinstance(peer, tuple) else ""
        try:
            self._all.add(self, self._transport, self._client)
        except ApiError as error:
            self._inner = None
            self._refuse(error)
            return
        self._wait(self._all.timeout_s, self._late)
        assert self._inner is not None
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._started = True
        if self._inner is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._inner is None else self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        self._all.remove(self._transport, self._client)
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._full = True
        self._wait(self._all.timeout_s, self._transport.abort)
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._full = False
        self._rest()
        if self._inner is not None:
            self._inner.resume_writing()
        if not self._running:
            self._wait(IDLE_S, self._transport.abort)

    @property
    def takes(self) -> bool:
        """Whether something can be written now, without waiting for the client to read on."""
        return not (self._full or self._transport.is_closing())

    def write(self, data: bytes) -> None:
        """Writes a part of an answer past aiohttp, which takes a coroutine for it."""
        self._transport.write(data)

    def begin(self) -> None:
        """A request's headers have come."""
        self._running += 1
        self._rest()

    def end(self) -> None:
        """The request has been answered."""
        self._running -= 1
        if not self._running:
            self._wait(IDLE_S, self._transport.abort)

    def _wait(self, seconds: float, then: Callable[[], None]) -> None:
        self._rest()
        if not self._transport.is_closing():
            self._timer = asyncio.get_running_loop().call_later(seconds, then)

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if self._started:
            self._refuse(_LATE)
        else:
            self._transport.close()

    def _refuse(self, error: ApiError) -> None:
        lines = [f"HTTP/1.1 {error.status} {_REASONS[error.status]}"]
        if error.retry_after is not None:
            lines.append(f"Retry-After: {error.retry_after}")
        lines += [
            "Content-Type: application/json",
            f"Content-Length: {len(error.body)}",
            "Connection: close",
        ]
        self._transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + error.body)
        self._transport.close()


_REASONS = {408: "Request Timeout", 429: "Too Many Requests", 503: "Service Unavailable"}
