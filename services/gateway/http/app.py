"""The gateway's HTTP: OpenAI's API, image classification, health and metrics."""

from collections.abc import Callable

import structlog
from aiohttp import web

from services.gateway.books import Books
from services.gateway.catalog import Catalog
from services.gateway.connections import Connections
from services.gateway.frontend import Frontend
from services.gateway.grammars import GrammarChecker
from services.gateway.health import Health
from services.gateway.http.classification import Classification
from services.gateway.http.completions import Completions
from services.gateway.http.embeddings import Embeddings
from services.gateway.http.generating import Generating
from services.gateway.http.live import Live
from services.gateway.http.messages import Messages
from services.gateway.http.models import ServedModels
from services.gateway.http.openapi import Described
from services.gateway.http.outer import OPEN, Outer
from services.gateway.http.pages import Pages
from services.gateway.http.responses import Responses
from services.gateway.http.tokens import Tokens
from services.gateway.keyed_answers import KeyedAnswers
from services.gateway.keyring import Keyring
from services.gateway.lookout import Lookout
from services.gateway.metrics import Metrics
from services.gateway.prompts import PromptReader
from shared.config import GatewayConfig
from shared.metrics import Metrics as Families


class Api:
    def __init__(
        self,
        config: GatewayConfig,
        connections: Connections,
        keyring: Keyring,
        books: Books,
        catalog: Catalog,
        prompts: PromptReader,
        grammars: GrammarChecker,
        frontend: Frontend,
        metrics: Metrics,
        for_pickers: Families,
        keyed: KeyedAnswers,
        lookout: Lookout,
        log: structlog.stdlib.BoundLogger,
        *,
        connected: Callable[[], bool],
        health: Callable[[], Health],
    ) -> None:
        """`connected`: whether the control bus is there, or was a moment ago."""
        self._max_body = config.max_body_bytes
        self._outer = Outer(config, connections, keyring, books, metrics, log)
        self._models = models = ServedModels(catalog, keyring, connected, log)
        self._pages = Pages(models, health, metrics.families, for_pickers)
        generating = Generating(
            connections, books, models, prompts, grammars, frontend, metrics, keyed, log
        )
        self._completions = Completions(generating)
        self._messages = Messages(generating)
        self._responses = Responses(generating)
        self._classification = Classification(
            config.max_image_bytes, connections, books, models, frontend, metrics
        )
        self._embeddings = Embeddings(connections, books, models, prompts, frontend, metrics)
        self._tokens = Tokens(connections, models, prompts)
        self._live = Live(lookout)

    def drain(self) -> None:
        """From now on nothing new is accepted."""
        self._models.draining = True
        self._live.close()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self._max_body, middlewares=[self._outer.middleware])
        app.on_response_prepare.append(self._outer.set_headers)
        rooms = (
            self._pages,
            self._models,
            self._completions,
            self._messages,
            self._responses,
            self._classification,
            self._embeddings,
            self._tokens,
        )
        described = Described((call for room in rooms for call in room.calls()), OPEN)
        app.add_routes(call.route for call in described.calls)
        app.add_routes(self._live.routes())
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        self._classification.close()
