"""The gateway's HTTP: OpenAI's API, image classification, health and metrics."""

import asyncio
import hashlib
import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import structlog
from aiohttp import web

from services.gateway import classify, responses
from services.gateway.answers import Answers
from services.gateway.api_error import ApiError, invalid, of_error
from services.gateway.asked import Asked, chat, completion
from services.gateway.bodies import decoded
from services.gateway.browsers import browsers
from services.gateway.catalog import Catalog
from services.gateway.choices import choices_of
from services.gateway.connections import Connections
from services.gateway.event_ids import NumberedAnswers
from services.gateway.frontend import NO_BUS, Frontend
from services.gateway.generation import Generation
from services.gateway.grammars import GrammarChecker
from services.gateway.idempotency import Key, key_of, marks_of
from services.gateway.images import ImageDecoder
from services.gateway.keyed_answers import KeyedAnswers
from services.gateway.metrics import CONTENT_TYPE, Metrics
from services.gateway.prompts import PromptReader
from services.gateway.text import TextCodec
from services.gateway.tokenizing import DetokenizeBody, TokenizeBody, detokenized, tokenized
from shared.config import GatewayConfig
from shared.errors import BadInput, BusError, LambdaScaleError, ModelError, NotFound
from shared.ids import ModelName, new_id
from shared.messages.pool import ModelRecord

OPEN = ("/live", "/ready", "/health", "/metrics")
"""What may be asked without a key."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_ID = web.RequestKey("request_id", str)
_FOR_PAGE = web.RequestKey("for_page", dict[str, str])
"""Headers with which a page of another origin may read the answer."""
Found = TypeVar("Found")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    def __init__(
        self,
        config: GatewayConfig,
        connections: Connections,
        catalog: Catalog,
        prompts: PromptReader,
        grammars: GrammarChecker,
        frontend: Frontend,
        metrics: Metrics,
        keyed: KeyedAnswers,
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
        self._connections = connections
        self._browsers = browsers(config)
        self._decoder = ImageDecoder()
        self._catalog = catalog
        self._prompts = prompts
        self._grammars = grammars
        self._frontend = frontend
        self._metrics = metrics
        self._keyed = keyed
        self._log = log
        self._connected = connected

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self._max_body, middlewares=[self._outer])
        app.on_response_prepare.append(_set_headers)
        app.router.add_get("/live", self._live)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/classify", self._classify)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        self._decoder.close()

    # --- around every request ------------------------------------------------

    @web.middleware
    async def _outer(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        given = request.headers.get("X-Request-ID", "")
        request[_ID] = given if _REQUEST_ID.fullmatch(given) else new_id("req")
        with self._connections.serving(request.transport):
            return await self._answer(request, handler)

    async def _answer(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            self._browsers.check(request.headers)
            request[_FOR_PAGE] = self._browsers.answer(request.headers)
            if _is_preflight(request):
                return web.Response(status=204, headers=self._browsers.preflight(request.headers))
            if request.path not in OPEN:
                self._authorize(request)
            response = await handler(request)
        except ApiError as error:
            response = _error_response(error)
        except web.HTTPException as error:
            response = _error_response(_of_http(request, error))
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except web.RequestPayloadError as error:
            response = _error_response(ApiError(400, f"the body cannot be read: {error}"))
        except LambdaScaleError as error:
            response = _error_response(of_error(error))
        except Exception:  # the supervised boundary of all handlers
            self._log.exception("request failed", path=request.path, request=request[_ID])
            response = _error_response(ApiError(500, responses.FAILED))
        resource = request.match_info.route.resource
        route = resource.canonical if resource else "none"
        self._metrics.responses.labels(route, str(response.status)).inc()
        return response

    @asynccontextmanager
    async def _arriving(self) -> AsyncIterator[None]:
        """While a body is awaited. ApiError 408 if it takes too long."""
        try:
            async with asyncio.timeout(self._connections.timeout_s):
                yield
        except TimeoutError:
            raise ApiError(408, "the body of the request did not arrive in time") from None

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

    async def _live(self, _: web.Request) -> web.Response:
        """Whoever gets this answer need not start the process again."""
        return web.json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        """Whether new requests should come here."""
        self._check_ready()
        return web.json_response({"status": "ok"})

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
        async with self._arriving():
            body = await request.read()
        return await self._complete(request, completion(body))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        async with self._arriving():
            body = await request.read()
        return await self._complete(request, chat(body))

    async def _complete(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        record = self._record(asked.model)
        lingo = await self._loaded(record, self._catalog.lingo)
        prompts = await self._prompts.read(asked, record, lingo)
        key = key_of(request.headers, request.path, await request.read())
        seed = None if key is None else key.seed
        choices = choices_of(asked, record, lingo, prompts, request[_ID], seed)
        await self._check_grammar(asked)
        prompt_tokens = sum(len(prompt) for prompt in prompts)
        trace = request.headers.get("traceparent", "")
        generation = Generation(
            self._frontend, self._metrics, record, choices, prompt_tokens, trace
        )
        if key is not None:
            return await self._complete_keyed(request, asked, key, generation, lingo.codec)
        answers = Answers(asked, generation, request[_ID], lingo.codec)
        async with generation:
            if asked.stream:
                return await responses.stream(request, generation, answers, self._log, request[_ID])
            return await responses.whole(generation, answers)

    async def _complete_keyed(
        self, request: web.Request, asked: Asked, key: Key, generation: Generation, codec: TextCodec
    ) -> web.StreamResponse:
        """Answers a request that may have been answered in part, by any gateway."""
        count = len(generation.choices)
        marks = marks_of(request.headers, count)
        async with self._keyed.reader(key, generation) as reader:
            answers = Answers(asked, reader.generation, reader.answer_id, codec, reader.created)
            if not asked.stream:
                return await responses.whole(reader, answers)
            numbered = NumberedAnswers(answers, marks, count)
            return await responses.stream(request, reader, numbered, self._log, request[_ID])

    async def _check_grammar(self, asked: Asked) -> None:
        if not asked.rules.grammar:
            return
        try:
            await self._grammars.check(asked.rules.grammar)
        except BadInput as error:
            invalid(asked.grammar_field, str(error))

    # --- classification ------------------------------------------------------

    async def _classify(self, request: web.Request) -> web.Response:
        async with self._arriving():
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

    # --- tokens --------------------------------------------------------------

    async def _tokenize(self, request: web.Request) -> web.Response:
        async with self._arriving():
            body = decoded(await request.read(), TokenizeBody)
        record = self._record(body.model)
        lingo = await self._loaded(record, self._catalog.lingo)
        return web.json_response(await tokenized(body, record, lingo, self._prompts))

    async def _detokenize(self, request: web.Request) -> web.Response:
        async with self._arriving():
            body = decoded(await request.read(), DetokenizeBody)
        record = self._record(body.model)
        lingo = await self._loaded(record, self._catalog.lingo)
        return web.json_response(detokenized(body, record, lingo))

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


def _is_preflight(request: web.Request) -> bool:
    return request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers


async def _set_headers(request: web.Request, response: web.StreamResponse) -> None:
    if _ID in request:
        response.headers["X-Request-ID"] = request[_ID]
    response.headers.update(request.get(_FOR_PAGE, {}))
