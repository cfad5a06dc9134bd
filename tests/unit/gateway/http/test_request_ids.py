"""A request's id: in its answer, its error, its span and the log, whatever API it came by."""

from typing import Any

import aiohttp
import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.gateway.frontend import Frontend
from shared import telemetry
from tests.unit.gateway.http.builders import ASK, CHAT
from tests.unit.gateway.support import NAME, Cluster

SENT = {"X-Request-ID": "from-the-client"}
MESSAGE = {**CHAT, "max_tokens": 20}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("completions", ASK),
    ("chat/completions", CHAT),
    ("responses", {"model": NAME, "input": "hi"}),
    ("messages", MESSAGE),
]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "_tracer", provider.get_tracer("test"))
    return exporter


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "body"), CALLS)
async def test_it_is_in_the_answer_and_the_span(
    cluster: Cluster,
    http: aiohttp.ClientSession,
    spans: InMemorySpanExporter,
    route: str,
    body: dict[str, Any],
    stream: bool,
) -> None:
    ask = {**body, "stream": stream}
    async with http.post(f"/v1/{route}", json=ask, headers=SENT) as response:
        assert response.headers["X-Request-ID"] == "from-the-client"
        assert "from-the-client" in await response.text()

    def found() -> list[Any]:
        return [s.attributes for s in spans.get_finished_spans() if s.name == "request"]

    await cluster.until(lambda: bool(found()))
    (attributes,) = found()
    assert attributes["call"] == "from-the-client"


@pytest.mark.parametrize(("route", "body"), CALLS)
async def test_it_is_in_errors_and_the_log(
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    route: str,
    body: dict[str, Any],
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    wrong = {**body, "model": "other"}
    async with http.post(f"/v1/{route}", json=wrong, headers=SENT) as response:
        assert response.status == 404
        assert response.headers["X-Request-ID"] == "from-the-client"
        await response.read()
    monkeypatch.setattr(Frontend, "begin", fail)
    with structlog.testing.capture_logs() as logs:
        async with http.post(f"/v1/{route}", json=body, headers=SENT) as response:
            assert response.status == 500
            assert response.headers["X-Request-ID"] == "from-the-client"
            await response.read()
    (line,) = [line for line in logs if line["event"] == "request failed"]
    assert line["request"] == "from-the-client"
