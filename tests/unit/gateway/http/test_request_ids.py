"""A request's id: in its answer, its error, its span and the log, whatever API it came by."""

from typing import Any

import aiohttp
import pytest
import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.gateway.frontend import Frontend
from tests.support import spans as support_spans
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
    return support_spans.exported(monkeypatch)


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


TRACE = "0af7651916cd43dd8448eb211c80319c"


async def test_the_span_says_what_was_asked_and_what_came_of_it(
    cluster: Cluster, http: aiohttp.ClientSession, spans: InMemorySpanExporter
) -> None:
    def found() -> list[ReadableSpan]:
        return [span for span in spans.get_finished_spans() if span.name == "request"]

    parent = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-00"}  # which says: do not record
    async with http.post("/v1/completions", json=ASK, headers=parent) as response:
        assert response.status == 200
    await cluster.until(lambda: len(found()) == 1)
    async with http.post("/v1/completions", json={**ASK, "n": "x"}) as response:
        assert response.status == 400
    async with http.post("/v1/completions", json={**ASK, "model": "other"}) as response:
        assert response.status == 404
    await cluster.until(lambda: len(found()) == 3)
    good, bad, unknown = found()
    context = good.get_span_context()
    assert context is not None
    assert f"{context.trace_id:032x}" == TRACE
    attributes = dict(good.attributes or {})
    assert attributes["http.request.method"] == "POST"
    assert attributes["http.route"] == "/v1/completions"
    assert attributes["http.response.status_code"] == 200
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.request.model"] == NAME
    assert attributes["gen_ai.response.finish_reasons"] == "stop"
    assert "error.type" not in attributes
    assert dict(bad.attributes or {})["error.type"] == "400"
    assert dict(unknown.attributes or {})["error.type"] == "model_not_found"
    assert all(span.status.is_unset or span.status.is_ok for span in found())


async def test_what_fails_here_is_an_error_of_the_span(
    cluster: Cluster,
    http: aiohttp.ClientSession,
    spans: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Frontend, "begin", fail)
    with structlog.testing.capture_logs():
        async with http.post("/v1/completions", json=ASK) as response:
            assert response.status == 500
    await cluster.until(lambda: bool(spans.get_finished_spans()))
    (span,) = spans.get_finished_spans()
    assert not span.status.is_ok
    assert dict(span.attributes or {})["http.response.status_code"] == 500
