"""Clients that stream completions, in a process of their own.

Run: python -m benchmarks.gateway.clients URL STREAMS TOKENS. All streams are open at once. It
prints what came as JSON.
"""

import asyncio
import sys
import time
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop

from benchmarks.gateway.model import BENCH, PROMPT

TIMEOUT_S = 300.0
CONNECTING = 200
"""How many connect at a time, fewer than may wait at a server."""
_END = b"[DONE]"
_ERROR = b'{"error":'
"""How the event begins with which a stream fails. The stream's end follows it, too."""


class Came(msgspec.Struct):
    events: int = 0
    ended: int = 0
    """Streams that came to their end."""
    failed: int = 0
    first_failure: str = ""
    seconds: float = 0.0
    open: int = 0
    """Streams that have begun and not ended."""
    most_open: int = 0


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes, came: Came) -> None:
        self._request = request
        self._came = came
        self._first = b""
        self._tail = b""
        self._error = b""
        self.done = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        came = self._came
        if not self._first:
            self._first = data
            came.open += 1
            came.most_open = max(came.most_open, came.open)
        came.events += data.count(b'"text":')
        if (at := data.find(_ERROR)) >= 0:
            self._error = data[at:].partition(b"\n")[0]
        self._tail = (self._tail + data)[-32:]
        if _END in self._tail:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        came = self._came
        if _END in self._tail and not self._error:
            came.ended += 1
        else:
            came.failed += 1
            said = (self._error or self._first)[-300:].decode(errors="replace") or repr(exc)
            came.first_failure = came.first_failure or said
        came.open -= bool(self._first)
        self.done.set()


async def _run(url: str, streams: int, tokens: int) -> Came:
    at = urlsplit(url)
    body = msgspec.json.encode(
        {
            "model": BENCH,
            "prompt": PROMPT,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "logit_bias": {"40": 100},  # a token that has a text: one event each
        }
    )
    path = "/v1/completions" + (f"?{at.query}" if at.query else "")
    request = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    came = Came()
    connecting = asyncio.Semaphore(CONNECTING)
    loop = asyncio.get_running_loop()

    async def one() -> None:
        async with connecting:
            _, protocol = await loop.create_connection(
                lambda: _Stream(request, came), str(at.hostname), at.port or 80
            )
        await protocol.done.wait()

    started = time.perf_counter()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*(one() for _ in range(streams)))
    came.seconds = time.perf_counter() - started
    return came


if __name__ == "__main__":
    found = uvloop.run(_run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    print(msgspec.json.encode(found).decode())
