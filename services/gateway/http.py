"""The gateway's HTTP: OpenAI's API, image classification, health and metrics."""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
from aiohttp import web

from services.gateway import classify
from services.gateway.answers import WAITING, Answers
from services.gateway.api_error import ApiError, invalid, of_error
from services.gateway.asked import Asked, chat, completion
from services.gateway.catalog import Catalog
from services.gateway.choices import choices_of, prompts_of
from services.gateway.frontend import NO_BUS, Frontend
from services.gateway.generation import Generation
from services.gateway.grammars import GrammarChecker
from services.gateway.images import ImageDecoder
from services.gateway.metrics import CONTENT_TYPE, Metrics
from shared.config import GatewayConfig
from shared.errors import BadInput, BusError, LambdaScaleError, ModelError, NotFound
from shared.ids import ModelName, new_id
from shared.messages.pool import ModelRecord

FAILED = "the gateway failed; its log says why"
KEEPALIVE_S = 3.0
"""Seconds after which a silent stream sends a sign of life."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_ID = web.RequestKey("request_id", str)
_NO_STORE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
Found = TypeVar("Found")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    def __init__(
        self,
        config: GatewayConfig,
        catalog: Catalog,
        grammars: GrammarChecker,
        frontend: Frontend,
        metrics: Metrics,
        log: structlog.stdlib.BoundLogger,
        *,
        connected: Callable[[], bool],
    ) -> None:
        """`connected`: whether the control bus is there, or was a moment ago."""
        self.draining = False
        """Whether nothing new is accepted any more."""
        self._keys = [bytes.fromhex(key) for key in config.api_keys]
        self._max_body = config.max_body_bytes
        self._max_image = config.max_image_bytes
        self._decoder = ImageDecoder()
        self._catalog = catalog
        self._grammars = grammars
        self._frontend = frontend
        self._metrics = metrics
        self._log = log
        self._connected = connected

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self._max_body, middlewares=[self._outer])
        app.on_response_prepare.append(_set_request_id)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/classify", self._classify)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        self._decoder.close()

    # --- around every request ------------------------------------------------

    @web.middleware
    async def _outer(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        given = request.headers.get("X-Request-ID", "")
        request[_ID] = given if _REQUEST_ID.fullmatch(given) else new_id("req")
        try:
            if request.path.startswith("/v1/"):
                self._authorize(request)
            response = await handler(request)
        except ApiError as error:
            response = _error_response(error)
        except web.HTTPException as error:
            response = _error_response(_of_http(request, error))
        except LambdaScaleError as error:
            response = _error_response(of_error(error))
        except Exception:  # the supervised boundary of all handlers
            self._log.exception("request failed", path=request.path, request=request[_ID])
            response = _error_response(ApiError(500, FAILED))
        resource = request.match_info.route.resource
        route = resource.canonical if resource else "none"
        self._metrics.responses.labels(route, str(response.status)).inc()
        return response

    def _authorize(self, request: web.Request) -> None:
        if not self._keys:
            return
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode(errors="surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            message = "send a valid API key: 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key")

    # --- pages ---------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        if not self._connected():
            return web.json_response({"status": "disconnected", "error": NO_BUS}, status=503)
        return web.json_response({"status": "draining" if self.draining else "ok"})

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _models(self, request: web.Request) -> web.Response:
        self._check_ready()
        records = [self._catalog.records[name] for name in sorted(self._catalog.records)]
        return web.json_response({"object": "list", "data": [_card(r) for r in records]})

    async def _model(self, request: web.Request) -> web.Response:
        return web.json_response(_card(self._record(request.match_info["name"])))

    # --- completions ---------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, completion(await request.read()))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat(await request.read()))

    async def _complete(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        record = self._record(asked.model)
        lingo = await self._loaded(record, self._catalog.lingo)
        prompts = await prompts_of(asked, lingo)
        choices = choices_of(asked, record, lingo, prompts, request[_ID])
        await self._check_grammar(asked)
        prompt_tokens = sum(len(prompt) for prompt in prompts)
        trace = request.headers.get("traceparent", "")
        generation = Generation(
            self._frontend, self._metrics, record, choices, prompt_tokens, trace
        )
        answers = Answers(asked, generation, request[_ID], lingo.codec)
        async with generation:
            if asked.stream:
                return await self._stream(request, generation, answers)
            texts: list[list[str]] = [[] for _ in choices]
            async for deltas in generation.deltas(None):
                for choice, text, *_ in deltas:
                    texts[choice.index].append(text)
            data = await _written(generation, answers.whole, texts)
            return web.Response(body=data, content_type="application/json")

    async def _stream(
        self, request: web.Request, generation: Generation, answers: Answers
    ) -> web.StreamResponse:
        """Streams an answer. Headers go out with the first piece, so that an early failure has its
        own status."""
        response = web.StreamResponse(headers=_NO_STORE)
        response.content_type = "text/event-stream"
        response.charset = "utf-8"
        try:
            try:
                async for deltas in generation.deltas(KEEPALIVE_S):
                    data = await _written(generation, answers.events, deltas) if deltas else WAITING
                    if not data:
                        continue  # half a character, or the possible beginning of a stop string
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(data)
                await response.write(answers.last())
            except (ConnectionResetError, asyncio.CancelledError):
                raise
            except Exception as error:  # headers are out, so the stream itself has to say it
                if not response.prepared:
                    raise
                if not isinstance(error, ApiError):
                    self._log.exception("stream failed", request=request[_ID])
                    error = ApiError(500, FAILED)
                await response.write(answers.failed(error))
            await response.write_eof()
        except ConnectionResetError:
            pass  # the client left; the generation's context cancels its requests
        return response

    async def _check_grammar(self, asked: Asked) -> None:
        if not asked.rules.grammar:
            return
        try:
            await self._grammars.check(asked.rules.grammar)
        except BadInput as error:
            invalid(asked.grammar_field, str(error))

    # --- classification ------------------------------------------------------

    async def _classify(self, request: web.Request) -> web.Response:
        body = await classify.read(request.clone(client_max_size=self._max_image))
        record = self._record(body.model)
        sight = await self._loaded(record, self._catalog.sight)
        pixels = await self._decoder.pixels(body.image, sight.input)
        choice = classify.choice_of(body, pixels, sight, record, request[_ID])
        trace = request.headers.get("traceparent", "")
        generation = Generation(
            self._frontend, self._metrics, record, [choice], record.context_length, trace
        )
        async with generation:
            async for _ in generation.deltas(None):
                pass
        return web.json_response(classify.answer(request[_ID], generation, choice, sight))

    # --- models --------------------------------------------------------------

    def _record(self, name: str) -> ModelRecord:
        self._check_ready()
        record = self._catalog.records.get(ModelName(name))
        if record is None:
            raise of_error(NotFound(f"there is no model {name!r}; GET /v1/models lists them"))
        return record

    def _check_ready(self) -> None:
        if self.draining:
            raise ApiError(503, "the gateway is stopping", retry_after=1)
        if not self._connected():
            raise of_error(BusError(NO_BUS))
        if not self._catalog.known:
            message = "the gateway is starting: the registry has not answered yet"
            raise ApiError(503, message, retry_after=1)

    async def _loaded(
        self, record: ModelRecord, load: Callable[[ModelRecord], Awaitable[Found]]
    ) -> Found:
        try:
            return await load(record)
        except (ModelError, NotFound, BusError) as error:
            self._log.warning("model's files not loaded", model=record.name, error=str(error))
            message = f"model {record.name!r} can't be served now: {error}"
            raise ApiError(503, message, code=error.code, retry_after=1) from error


async def _written(
    generation: Generation, write: Callable[[list[Found]], bytes], what: list[Found]
) -> bytes:
    """Encodes an answer. With scores it has a line for every token of the prompt, and 10,000 of
    them take 0.2 s. So it is encoded on a thread, while streams go on."""
    return await asyncio.to_thread(write, what) if generation.scored else write(what)


def _card(record: ModelRecord) -> dict[str, object]:
    return {
        "id": record.name,
        "object": "model",
        "created": record.created_ns // 1_000_000_000,
        "owned_by": "lambdascale",
        "root": record.model_id,
        "max_model_len": record.context_length,
        "task": record.task.value,
    }


def _of_http(request: web.Request, error: web.HTTPException) -> ApiError:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, "the body is too large", code="body_too_large")
    if error.status in (404, 405):
        return ApiError(error.status, f"{request.method} {request.path}: there is no such call")
    return ApiError(error.status, error.reason)


def _error_response(error: ApiError) -> web.Response:
    response = web.Response(status=error.status, body=error.body, content_type="application/json")
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def _set_request_id(request: web.Request, response: web.StreamResponse) -> None:
    if _ID in request:
        response.headers["X-Request-ID"] = request[_ID]
