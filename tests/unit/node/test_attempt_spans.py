"""The spans of attempts belong to the trace of their request."""

import json
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.node.attempt_spans import AttemptSpans
from shared import telemetry
from shared.config import TelemetryConfig
from shared.errors import CapacityExceeded
from shared.ids import GatewayId, InstanceId, ModelId, NodeId, RequestId
from shared.messages.instances import Stage
from shared.messages.serving import AttemptFailed, Cancel, Sampling, Submit, Token, Tokens
from tests.support import spans as support_spans

NODE, REQUEST = NodeId("a"), RequestId("r")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    return support_spans.exported(monkeypatch)


def submit(attempt: int = 1, trace: str = TRACE) -> Submit:
    return Submit(
        request=REQUEST,
        attempt=attempt,
        gateway=GatewayId("g"),
        model_id=ModelId("m"),
        instance=InstanceId("i"),
        stages=(Stage(NODE, "tcp://a", 0, 2), Stage(NodeId("b"), "tcp://b", 2, 4)),
        tokens=(1, 2, 3),
        prompt_tokens=3,
        max_tokens=4,
        stop_ids=(),
        sampling=Sampling(),
        trace=trace,
    )


def tokens(*found: Token, failed: tuple[AttemptFailed, ...] = ()) -> Tokens:
    return Tokens(node=NODE, tokens=found, failed=failed)


def by_name(exported: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exported.get_finished_spans()}


def test_an_attempt_has_a_prefill_and_a_decode(exported: InMemorySpanExporter) -> None:
    spans = AttemptSpans(NODE)
    spans.begun(submit())
    spans.told(tokens(Token(REQUEST, 1, 0, 7, cached=2)))
    spans.begun(submit())  # its gateway asks whether it goes on
    spans.told(tokens(Token(REQUEST, 1, 1, 8), Token(REQUEST, 1, 2, 9, finish="stop")))
    found = by_name(exported)
    attempt, prefill, decode = (found[name] for name in ("attempt", "prefill", "decode"))
    context = attempt.get_span_context()
    assert context is not None
    assert attempt.attributes is not None
    assert f"{context.trace_id:032x}" == TRACE.split("-")[1]
    assert attempt.attributes["stages"] == "a[0:2] b[2:4]"
    assert (attempt.attributes["tokens"], attempt.attributes["cached_tokens"]) == (3, 2)
    assert attempt.attributes["end"] == "stop"
    for part in (prefill, decode):
        assert part.parent is not None
        assert part.parent.span_id == context.span_id
    assert attempt.start_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    assert decode.end_time == attempt.end_time
    assert not spans._open


def test_every_end_ends_it(exported: InMemorySpanExporter) -> None:
    spans = AttemptSpans(NODE)
    for attempt in (1, 2, 3):
        spans.begun(submit(attempt))
    spans.cancelled(Cancel(request=REQUEST, attempt=1))
    spans.told(tokens(failed=(AttemptFailed(REQUEST, 2, "engine_failed", "why"),)))
    spans.refused(submit(3), CapacityExceeded("full"))
    found = [dict(span.attributes or {})["end"] for span in exported.get_finished_spans()]
    assert found == ["cancelled", "engine_failed", "refused"]
    assert [
        span.status.is_ok or span.status.is_unset for span in exported.get_finished_spans()
    ] == [
        True,
        False,
        False,
    ]
    assert not spans._open


def test_other_stages_record_in_the_attempt(tmp_path: Path) -> None:
    telemetry.configure("node-a", TelemetryConfig(trace_dir=str(tmp_path)))
    try:
        spans = AttemptSpans(NODE)
        traced = spans.begun(submit())
        assert spans.begun(submit()).trace == traced.trace  # the same attempt, asked for again
        telemetry.record("stage", start_ns=1, end_ns=2, parent=traced.trace)
        spans.cancelled(Cancel(request=REQUEST, attempt=1))
    finally:
        telemetry.shutdown()
    lines = (tmp_path / "node-a.jsonl").read_text().splitlines()
    found = {each["name"]: each for each in map(json.loads, lines)}
    assert found["stage"]["parent_id"] == found["attempt"]["span_id"]
    assert found["attempt"]["parent_id"] == TRACE.split("-")[2]


def test_without_a_trace_nothing_is_kept(exported: InMemorySpanExporter) -> None:
    spans = AttemptSpans(NODE)
    spans.begun(submit(trace=""))
    spans.told(tokens(Token(REQUEST, 1, 0, 7, finish="stop")))
    assert not exported.get_finished_spans()
