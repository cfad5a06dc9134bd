"""The calls of the API: what runs each, and what the OpenAPI document says of it."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from services.gateway.answer_bodies import ErrorAnswer

SESSION = "X-Session-ID"
"""The header that names the conversation which a request belongs to."""
SHOW_PATH = "X-Show-Path"
"""The header with which an administrator asks to be told over which nodes the tokens of a stream
come."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    path: str
    """As aiohttp has it."""
    handler: Handler
    name: str
    """For clients that are generated from the document."""
    summary: str
    answer: Any
    """The type of its JSON; `str` if it is plain text, `dict` if it is any JSON."""
    body: type | None = None
    form: type | None = None
    """The body, if it may also be a form."""
    events: Any = None
    """The type of the JSON of each event, if it can be a stream."""
    error: Any = ErrorAnswer
    """The type of its JSON with other statuses."""
    errors: Mapping[int, Any] = field(default_factory=dict)
    """By status, where it is not `error`."""
    names_model: bool = False
    """Whether it is about a model that the client names."""
    generates: bool = False
    """Whether a model runs, on nodes."""
    keyed: bool = False
    """Whether `Idempotency-Key` is honoured."""

    @property
    def route(self) -> web.RouteDef:
        return web.route(self.method, self.path, self.handler, expect_handler=_continue)


async def _continue(request: web.Request) -> None:
    """A client that waits for a word before it sends its body gets it. Anything else that it may
    expect is ignored, as RFC 9110 allows (10.1.1): a refusal here would be none of ours."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun
