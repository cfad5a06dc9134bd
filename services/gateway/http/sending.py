"""The HTTP responses of what is generated: whole ones and streams, of any API, from whatever gives
their deltas."""

import asyncio
from collections.abc import AsyncIterator, Iterable

import msgspec
import structlog
from aiohttp import web

from services.gateway.api_error import ApiError
from services.gateway.aside import aside
from services.gateway.connections import Connection
from services.gateway.encoder import Encoder, StreamEncoder
from services.gateway.generation import Delta, Generation
from services.gateway.keyed_answers import Reader
from services.gateway.replies.parts import Reply
from shared.clock import now

FAILED = "the gateway failed; its log says why"
PROGRESS_S = 1.0
"""Seconds between looks at what a stream waits for."""
KEEPALIVE_S = 3.0
"""Seconds after which a silent stream sends a sign of life."""
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class _Events(web.StreamResponse):
    """A stream of server-sent events."""

    _send_headers_immediately = False
    """So aiohttp sends the headers with the first event: a second system call would take as long as
    all that is computed for a token."""


def as_json(answer: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


async def whole(source: Generation | Reader, encoder: Encoder) -> web.Response:
    generation = source.generation
    replies = [Reply() for _ in generation.choices]
    async for deltas in source.deltas(None):
        for choice, parts, *_ in deltas:
            replies[choice.index].add(parts)
    if encoder.long:  # 10,000 tokens take 0.2 s: streams go on meanwhile
        pieces = await aside(encoder.whole, replies)
        length = {"Content-Length": str(sum(map(len, pieces)))}
        body = _one_by_one(pieces)
        return web.Response(body=body, headers=length, content_type="application/json")
    return web.Response(body=b"".join(encoder.whole(replies)), content_type="application/json")


async def _one_by_one(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Each in a turn of the loop of its own."""
    for piece in pieces:
        yield piece
        await asyncio.sleep(0)


async def stream(
    request: web.Request,
    source: Generation | Reader,
    encoder: StreamEncoder,
    connection: Connection | None,
    log: structlog.stdlib.BoundLogger,
    call: str,
) -> web.StreamResponse:
    """Streams an answer. Headers go out with the first piece, so that an early failure has its own
    status. `connection`: the request's, if deltas of `source` are written there as they come.
    `call`: the request's id, for the log."""
    signs = _Signs(source.generation, encoder)
    response = _Events(headers=_HEADERS)
    last = b""
    try:
        try:
            async for deltas in source.deltas(min(PROGRESS_S, KEEPALIVE_S)):
                if not deltas:
                    data = signs.next()
                elif source.generation.scored:  # a line for every token of the prompt
                    data = await aside(encoder.events, deltas)
                else:
                    data = encoder.events(deltas)
                data = _overs(deltas) + data
                if not data:
                    continue  # half a character, or the possible beginning of a stop string
                if not source.generation.open:
                    last += data  # a system call less than if it went before what ends the stream
                    continue
                if not response.prepared:
                    await response.prepare(request)
                await response.write(data)
                signs.spoken()
                if connection is not None and source.generation.outlet is None:
                    source.generation.outlet = _Direct(connection, response, encoder, signs)
            if not response.prepared:
                await response.prepare(request)
            last += encoder.last()
        except (ConnectionResetError, asyncio.CancelledError):
            raise
        except Exception as error:  # headers are out, so the stream itself has to say it
            if not response.prepared:
                raise
            if not isinstance(error, ApiError):
                log.exception("stream failed", request=call)
                error = ApiError(500, FAILED)
            last += encoder.failed(error)
        await response.write_eof(last)
    except ConnectionResetError:
        pass  # the client left, and with it its interest in the answer
    return response


def _overs(deltas: Iterable[Delta]) -> bytes:
    """Where tokens come from, if the client is to see it: SSE comments."""
    return "".join(f": over {delta.over}\n\n" for delta in deltas if delta.over).encode()


class _Direct:
    """Writes events as they come. A stream writes one for every token: waking its task for each
    would take as long as all the rest."""

    def __init__(
        self,
        connection: Connection,
        response: web.StreamResponse,
        encoder: StreamEncoder,
        signs: "_Signs",
    ) -> None:
        """`response`: one that has begun."""
        self._connection = connection
        self._chunked = response.headers.get("Transfer-Encoding") == "chunked"
        self._encoder = encoder
        self._signs = signs

    @property
    def ready(self) -> bool:
        return self._connection.takes

    def put(self, delta: Delta) -> None:
        data = self._encoder.events((delta,))
        if delta.over:
            data = _overs((delta,)) + data
        if data:
            self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
            self._signs.spoken()


class _Signs:
    """What a stream says while there is nothing to tell: SSE comments, which clients ignore."""

    def __init__(self, generation: Generation, encoder: StreamEncoder) -> None:
        self._generation = generation
        self._encoder = encoder
        self._progress = ""
        self._spoke = False
        """Since `next` looked."""
        self._quiet_since = now()

    def spoken(self) -> None:
        self._spoke = True  # for every token, so nobody looks at the clock

    def next(self) -> bytes:
        if self._spoke:
            self._spoke, self._quiet_since = False, now()
        progress = self._generation.progress
        if progress and progress != self._progress:
            self._progress = progress
            return f": {progress}\n\n".encode()
        # Each part of a prompt that was scored is a sign of life.
        if self._generation.scored or now() - self._quiet_since >= KEEPALIVE_S:
            return self._encoder.waiting()
        return b""
