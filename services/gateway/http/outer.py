"""What surrounds every call: its id, who may call, errors, and headers."""

import asyncio
import re
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from services.gateway import picker
from services.gateway.api_error import ApiError, of_error
from services.gateway.books import Books
from services.gateway.browsers import browsers
from services.gateway.connections import Connections
from services.gateway.core.callers import Caller
from services.gateway.credential import credential
from services.gateway.http import openapi, sending
from services.gateway.keyring import Keyring
from services.gateway.messages.errors import error_body
from services.gateway.metrics import Metrics
from services.gateway.request_span import CLIENT_LEFT, RequestSpan
from shared.clock import wall_ns
from shared.config import GatewayConfig
from shared.errors import LambdaScaleError
from shared.ids import new_id

OPEN = ("/", "/live", "/ready", "/health", "/metrics", picker.PATH, openapi.PATH)
"""What may be asked without a key."""
OPEN_BELOW = "/page/"
"""So may all paths that begin with this."""
ID = web.RequestKey("request_id", str)
CALLER = web.RequestKey("caller", Caller)
"""Who sent it. Set for every call but those of OPEN."""
SPAN = web.RequestKey("span", RequestSpan)
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_FOR_PAGE = web.RequestKey("for_page", dict[str, str])
"""Headers with which a page of another origin may read the answer."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Outer:
    def __init__(
        self,
        config: GatewayConfig,
        connections: Connections,
        keyring: Keyring,
        books: Books,
        metrics: Metrics,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._keyring = keyring
        self._books = books
        self._browsers = browsers(config)
        self._connections = connections
        self._metrics = metrics
        self._log = log

    @web.middleware
    async def middleware(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        given = request.headers.get("X-Request-ID", "")
        request[ID] = given if _REQUEST_ID.fullmatch(given) else new_id("req")
        span = request[SPAN] = RequestSpan(request.headers.get("traceparent", ""), request[ID])
        status = CLIENT_LEFT
        try:
            with self._connections.serving(request.transport):
                response = await self._answer(request, handler)
            status = response.status
            return response
        finally:
            if request.method == "POST":  # the others ask no model for anything
                # In the loop's next turn: the answer goes to the client first.
                loop = asyncio.get_running_loop()
                loop.call_soon(span.end, request.method, _route(request), status)

    async def _answer(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            self._browsers.check(request.headers)
            request[_FOR_PAGE] = self._browsers.answer(request.headers)
            if _is_preflight(request):
                return web.Response(status=204, headers=self._browsers.preflight(request.headers))
            if request.path not in OPEN and not request.path.startswith(OPEN_BELOW):
                given = credential(request.headers)
                request[CALLER] = self._keyring.caller(given, wall_ns())
            response = await handler(request)
        except ApiError as error:
            request[SPAN].error = request[SPAN].error or error.code or ""
            response = _error_response(request, error)
        except web.HTTPException as error:
            response = _error_response(request, _of_http(request, error))
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except web.RequestPayloadError as error:
            response = _error_response(request, ApiError(400, f"the body cannot be read: {error}"))
        except LambdaScaleError as error:
            response = _error_response(request, of_error(error))
        except Exception:  # the supervised boundary of all handlers
            self._log.exception("request failed", path=request.path, request=request[ID])
            response = _error_response(request, ApiError(500, sending.FAILED))
        self._metrics.responses.labels(_route(request), str(response.status)).inc()
        return response

    async def set_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        if ID in request:
            response.headers["X-Request-ID"] = request[ID]
            if _is_message(request):
                response.headers["request-id"] = request[ID]
        if CALLER in request:
            response.headers.update(self._books.headers(request[CALLER]))
        response.headers.update(request.get(_FOR_PAGE, {}))


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource else "none"


def _of_http(request: web.Request, error: web.HTTPException) -> ApiError:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, "the body is too large", code="body_too_large")
    if error.status in (404, 405):
        return ApiError(error.status, f"{request.method} {request.path}: there is no such call")
    return ApiError(error.status, error.reason)


def _error_response(request: web.Request, error: ApiError) -> web.Response:
    body = error_body(error, request[ID]) if _is_message(request) else error.body
    response = web.Response(status=error.status, body=body, content_type="application/json")
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _is_message(request: web.Request) -> bool:
    """Whether it is of Anthropic's API."""
    return request.path == "/v1/messages" or request.path.startswith("/v1/messages/")


def _is_preflight(request: web.Request) -> bool:
    return request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
