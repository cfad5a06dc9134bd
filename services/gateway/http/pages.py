"""Health and metrics, which need no key."""

from collections.abc import Callable

import msgspec
from aiohttp import web

from services.gateway import picker
from services.gateway.answer_bodies import HealthPage, Status
from services.gateway.health import Health
from services.gateway.http.call import Call
from services.gateway.http.models import ServedModels
from shared.metrics import Metrics as Families


class Pages:
    def __init__(
        self,
        models: ServedModels,
        health: Callable[[], Health],
        metrics: Families,
        for_pickers: Families,
    ) -> None:
        self._models = models
        self._healthy = health
        self._metrics = metrics
        self._for_pickers = for_pickers

    def calls(self) -> list[Call]:
        return [
            Call("GET", "/live", self._live, "live", "200 as long as the process answers", Status),
            Call("GET", "/ready", self._ready, "ready", "Whether to send requests here", Status),
            Call(
                "GET",
                "/health",
                self._health,
                "health",
                "Whether the gateway serves, and what it lacks",
                HealthPage,
                errors={503: HealthPage},
            ),
            Call("GET", "/metrics", self._show_metrics, "metrics", "For Prometheus", str),
            Call("GET", picker.PATH, self._show_picker, "picker", "For pickers of endpoints", str),
        ]

    async def _live(self, _: web.Request) -> web.Response:
        """Whoever gets this answer need not start the process again."""
        return web.json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        """Whether new requests should come here."""
        self._models.check_ready()
        return web.json_response({"status": "ok"})

    async def _health(self, _: web.Request) -> web.Response:
        health = self._healthy()
        return web.json_response(
            msgspec.to_builtins(health.page), status=200 if health.serves else 503
        )

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return _rendered(self._metrics, request)

    async def _show_picker(self, request: web.Request) -> web.Response:
        return _rendered(self._for_pickers, request)


def _rendered(families: Families, request: web.Request) -> web.Response:
    body, content_type = families.render(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})
