"""The page at `/`, and what it asks for: the cluster, as it is and as it was.

The page itself has no data, and needs no key. What it asks for is for administrators.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

import msgspec
from aiohttp import web

from services.gateway.api_error import ApiError
from services.gateway.http.outer import CALLER
from services.gateway.lookout import Lookout
from shared.clock import now, wall_ns
from shared.ids import EventId

LOOK_S = 0.25
"""Seconds between looks at what has changed."""
ALIVE_S = 5.0
"""Seconds after which a silent stream says that it goes on."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_GUARDED: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FILES = resources.files("services.gateway") / "page"
FIRST = "index.html"


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    kind: str


class Live:
    def __init__(self, lookout: Lookout) -> None:
        self._lookout = lookout
        self._files = {
            entry.name: _File(entry.read_bytes(), _KINDS[entry.name.rpartition(".")[2]])
            for entry in FILES.iterdir()
            if entry.is_file()
        }
        self._closing = False

    def routes(self) -> list[web.RouteDef]:
        """They are no part of the API: the page of the same release asks for them."""
        return [
            web.get("/", self._first),
            web.get("/page/{name}", self._file),
            web.get("/cluster", self._changes),
            web.get("/cluster/events/{event}", self._event),
        ]

    def close(self) -> None:
        """Ends all streams; pages then try another gateway, or this one again."""
        self._closing = True

    async def _first(self, _: web.Request) -> web.Response:
        return self._answer(FIRST)

    async def _file(self, request: web.Request) -> web.Response:
        return self._answer(request.match_info["name"])

    def _answer(self, name: str) -> web.Response:
        found = self._files.get(name)
        if found is None:
            raise web.HTTPNotFound
        return web.Response(
            body=found.body, content_type=found.kind, charset="utf-8", headers=_GUARDED
        )

    async def _event(self, request: web.Request) -> web.Response:
        _check_admin(request)
        past = await self._lookout.event(EventId(request.match_info["event"]))
        return web.Response(
            body=msgspec.json.encode(past),
            content_type="application/json",
            headers={"Cache-Control": "no-store"},
        )

    async def _changes(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: first all that is known, then what changes."""
        _check_admin(request)
        async with self._lookout.page() as scene:
            response = web.StreamResponse(
                headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            )
            response.content_type = "text/event-stream"
            response.charset = "utf-8"
            await response.prepare(request)
            serial, spoken_at = 0, now()
            while not self._closing:
                if change := scene.since(serial):
                    serial, spoken_at, change.at_ns = change.serial, now(), wall_ns()
                    await response.write(b"data: " + msgspec.json.encode(change) + b"\n\n")
                elif now() - spoken_at >= ALIVE_S:
                    spoken_at = now()
                    await response.write(b": nothing new\n\n")
                await asyncio.sleep(LOOK_S)
            await response.write_eof()
        return response


def _check_admin(request: web.Request) -> None:
    if not request[CALLER].admin:
        raise ApiError(
            403,
            "the cluster is shown to administrators: make a key with `lambdascale key add --admin`",
            code="not_an_administrator",
        )
