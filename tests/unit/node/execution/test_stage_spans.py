"""A later stage of a path records one span for each sequence, in the span of its attempt."""

import msgspec
import pytest
import torch
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.node.core.microbatches import (
    Admit,
    Forward,
    Free,
    Path,
    StageMessage,
)
from services.node.core.rows import Draw, Row
from services.node.execution import activations, stage_spans
from services.node.execution.stage_spans import StageSpans
from shared.errors import CapacityExceeded, PeerLost
from shared.ids import NodeId
from shared.messages.serving import Sampling
from tests.support import spans as support_spans
from tests.support.submits import BLOCKS, MODEL, stages, submit
from tests.unit.node.execution.test_steps import Rig, hidden_states

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LAST = Path(MODEL, stages(("c", 0, 2), ("a", 2, BLOCKS)))
MIDDLE = Path(MODEL, stages(("c", 0, 2), ("a", 2, 4), ("f", 4, BLOCKS)))
PROMPT = Row("x#1", 0, 2, 9, draw=Draw(0, Sampling()))
TOKEN = Row("x#1", 2, 1, 9, draw=Draw(1, Sampling()))


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    return support_spans.exported(monkeypatch)


def say(rig: Rig, message: StageMessage, hidden: torch.Tensor | None = None) -> None:
    header, payload = activations.encode(message, hidden)
    body = memoryview(bytearray(b"".join(payload)))
    rig.steps.received("mem://c", memoryview(header), body)


def admit(rig: Rig, path: Path, trace: str = TRACE) -> None:
    say(rig, Admit(path, 1, "x#1", 2, 9, trace=trace))


def run(rig: Rig, path: Path, row: Row) -> None:
    say(rig, Forward(path, 1, 1, (row,)), hidden_states(*range(row.count)))
    rig.run()


def the_only(exported: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exported.get_finished_spans()
    return span


@pytest.mark.parametrize("path", [LAST, MIDDLE])
def test_one_span_for_a_sequence(exported: InMemorySpanExporter, path: Path) -> None:
    rig = Rig()
    admit(rig, path)
    run(rig, path, PROMPT)
    run(rig, path, TOKEN)
    assert not exported.get_finished_spans()
    say(rig, Free(("x#1",)))
    span = the_only(exported)
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" in TRACE
    found = dict(span.attributes or {})
    assert span.name == "stage"
    assert (found["node"], found["request"], found["stage"]) == ("a", "x", 1)
    assert found["blocks"] == f"2:{path.stages[1].stop}"
    assert (found["micro_batches"], found["positions"]) == (2, 3)
    assert {"busy_s", "waited_s", "prefill_s"} <= set(found)
    assert span.status.is_unset


def test_the_time_that_micro_batches_are_here(
    exported: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(stage_spans, "wall_ns", lambda: int(now * 1e9))
    spans = StageSpans(NodeId("a"), lambda: now)
    spans.asked(Admit(LAST, 1, "x#1", 2, 9, trace=TRACE))
    spans.went(["x#1"])  # nothing of it was here
    for waits, runs, row in (
        (5.0, 1.0, Row("x#1", 0, 1, 9)),
        (1.0, 0.5, Row("x#1", 1, 1, 9, draw=Draw(0, Sampling()))),
        (2.0, 0.25, TOKEN),
    ):
        now += waits
        spans.came(Forward(LAST, 1, 1, (row,)))
        now += runs
        spans.went(["x#1"])
        now += 1.0
        spans.went(["x#1"])  # nor now
        spans.asked(Admit(LAST, 1, "x#1", 2, 9, trace=TRACE))  # as if a message came twice
    spans.over(["x#1", "unknown"])
    span = the_only(exported)
    assert (span.start_time, span.end_time) == (100_000_000_000, int(now * 1e9))
    found = dict(span.attributes or {})
    assert (found["waited_s"], found["prefill_s"], found["busy_s"]) == (5.0, 3.5, 1.75)


def test_what_fails_here_is_an_error(exported: InMemorySpanExporter) -> None:
    rig = Rig()
    admit(rig, MIDDLE)
    rig.steps.peer_lost(MIDDLE.stages[2].address, PeerLost("gone"))
    assert the_only(exported).status.description == PeerLost.code


def test_no_room_is_an_error(exported: InMemorySpanExporter) -> None:
    rig = Rig()
    say(rig, Admit(LAST, 1, "x#1", 200, 300, trace=TRACE))
    assert the_only(exported).status.description == CapacityExceeded.code


def test_a_sequence_that_was_never_run(exported: InMemorySpanExporter) -> None:
    rig = Rig()
    admit(rig, LAST)
    say(rig, Free(("x#1",)))
    found = dict(the_only(exported).attributes or {})
    assert found["micro_batches"] == 0
    assert not {"waited_s", "prefill_s"} & set(found)


def test_without_a_trace_nothing_is_recorded(exported: InMemorySpanExporter) -> None:
    rig = Rig()
    admit(rig, LAST, trace="")
    run(rig, LAST, PROMPT)
    say(rig, Free(("x#1",)))
    assert not exported.get_finished_spans()


def test_a_leader_passes_the_attempt_on() -> None:
    rig = Rig()
    plain = submit("r", stages(("a", 0, 2), ("b", 2, BLOCKS)))
    rig.steps.submit(msgspec.structs.replace(plain, trace=TRACE))
    ((_, header, _),) = rig.sent
    message, _, _ = activations.decode(memoryview(header), memoryview(b""))
    assert isinstance(message, Admit)
    assert message.trace == TRACE
