"""`lambdascale events` and `trace`: lines of events, trees of spans."""

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from services.cli import events
from services.cli.events import decision_line, event_line, read_spans, tree_lines
from services.planner.core import events as planner_events
from shared import telemetry
from shared.config import TelemetryConfig
from shared.errors import BadInput, NotFound
from shared.ids import EventId, NodeId
from shared.messages.decisions import Decided, Verdict
from shared.messages.ledger import Phase, Spent
from shared.messages.scaling import EventState, Growth
from tests.unit.cli.records import record

ROOT, PLAN, BLOCK, LOST = "1" * 16, "2" * 16, "3" * 16, "4" * 16


def span(
    name: str, span_id: str, parent: str | None, *, at_ms: float, took_ms: float = 1, **more: Any
) -> dict[str, Any]:
    start = 10**18 + int(at_ms * 1e6)
    return {
        "trace_id": more.pop("trace_id", "t1"),
        "span_id": span_id,
        "parent_id": parent,
        "name": name,
        "service": more.pop("service", "planner"),
        "start_ns": start,
        "end_ns": start + int(took_ms * 1e6),
        "attributes": more.pop("attributes", {}),
        "links": [],
        "error": more.pop("error", None),
    }


SPANS = [
    span("scale_event", ROOT, None, at_ms=0, took_ms=90, attributes={"event": "ev-1"}),
    span("plan", PLAN, ROOT, at_ms=1, attributes={"cause": "two words", "rate": 1.23456}),
    span("apply_plan", "5" * 16, PLAN, at_ms=2, service="node-1"),
    span("block_arrival", BLOCK, ROOT, at_ms=3, service="node-1", error="digest"),
]


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    events.add_parser(parser.add_subparsers())
    args = parser.parse_args(words)
    return int(args.run(args))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The traces of two finished events, in two processes' files."""
    traces = tmp_path / "traces"
    traces.mkdir()
    later = span(
        "scale_event", "9" * 16, None, at_ms=500, trace_id="t2", attributes={"event": "ev-2"}
    )
    planner = [json.dumps(each) for each in (SPANS[1], later, SPANS[0])]
    (traces / "planner.jsonl").write_text("\n".join(planner) + "\n")
    node = [json.dumps(each) for each in (SPANS[2], SPANS[3])]
    (traces / "node-1.jsonl").write_text("\n".join(node) + '\n{"trace_id": "t1", "na')
    return tmp_path


def test_a_tree_of_spans_by_time() -> None:
    assert list(tree_lines(SPANS)) == [
        "scale_event +0.0 ms, 90.0 ms [planner] event=ev-1",
        '├─ plan +1.0 ms, 1.0 ms [planner] cause="two words" rate=1.235',
        "│  └─ apply_plan +2.0 ms, 1.0 ms [node-1]",
        "└─ block_arrival +3.0 ms, 1.0 ms [node-1] ERROR digest",
    ]


def test_long_lines_are_broken_below_their_span() -> None:
    long = dict.fromkeys(("considered", "empty"), "") | {"a": "1", "b": "two words", "c": "3"}
    root = {**SPANS[0], "attributes": {**SPANS[0]["attributes"], **long}}
    assert list(tree_lines([root, *SPANS[1:]], 50)) == [
        "scale_event +0.0 ms, 90.0 ms [planner] event=ev-1",
        '│  a=1 b="two words" c=3',
        "├─ plan +1.0 ms, 1.0 ms [planner]",
        '│  │  cause="two words" rate=1.235',
        "│  └─ apply_plan +2.0 ms, 1.0 ms [node-1]",
        "└─ block_arrival +3.0 ms, 1.0 ms [node-1]",
        "      ERROR digest",
    ]


def test_a_span_whose_parent_is_missing_is_a_root() -> None:
    lines = list(tree_lines([*SPANS, span("drain", LOST, "7" * 16, at_ms=8)]))
    assert lines[-1] == "drain +8.0 ms, 1.0 ms [planner]"


def test_spans_of_all_processes_but_not_half_a_line(data: Path) -> None:
    spans = [s for s in read_spans(data / "traces", "t1") if s["trace_id"] == "t1"]
    assert spans == SPANS
    assert read_spans(data / "nowhere", "t1") == []


def test_a_trace_is_shown_when_the_cluster_is_gone(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("trace", "ev-1", "--data", str(data)) == 0
    assert capsys.readouterr().out.splitlines() == list(tree_lines(SPANS))
    assert run("trace", "ev-1", "--data", str(data), "--json") == 0
    assert json.loads(capsys.readouterr().out) == SPANS
    assert run("trace", "last", "--data", str(data)) == 0
    assert "event=ev-2" in capsys.readouterr().out


def test_spans_that_just_ended_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry.configure("planner", TelemetryConfig(trace_dir=str(tmp_path / "traces")))
    try:
        telemetry.record("scale_event", start_ns=1, end_ns=2, attributes={"event": "ev-1"})
        assert run("trace", "ev-1", "--data", str(tmp_path)) == 0
    finally:
        telemetry.shutdown()
        structlog.reset_defaults()
    assert "event=ev-1" in capsys.readouterr().out


def test_an_unknown_event_of_no_cluster_is_not_found(data: Path) -> None:
    with pytest.raises(NotFound):
        run("trace", "ev-9", "--data", str(data))


def test_a_trace_shows_where_the_time_went_beside_what_was_predicted(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = (
        Spent(Phase.EVIDENCE, 0.25, 0.005),
        Spent(Phase.FORM, 0.0, 0.0),
        Spent(Phase.LAST_BLOCK, 0.75, None),
    )
    over = msgspec.structs.replace(record(), id=EventId("ev-3"), ledger=ledger)
    root = span("scale_event", "9" * 16, None, at_ms=0, trace_id="t3")
    root["attributes"] = planner_events.summary(over)
    (data / "traces" / "later.jsonl").write_text(json.dumps(root) + "\n")
    assert run("trace", over.id, "--data", str(data)) == 0
    tree, table = capsys.readouterr().out.split("\n\n")
    assert "ledger." not in tree
    assert table.splitlines() == [
        "phase          predicted      actual   share",
        "evidence          5.0 ms    250.0 ms   25.0%",
        "last block             -    750.0 ms   75.0%",
        "in all            5.0 ms   1000.0 ms  100.0%",
    ]


async def trace_of_an_event(args: object) -> str:
    return "t-elsewhere"


def test_where_spans_go_instead_is_said(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_unfinished", trace_of_an_event)
    monkeypatch.setenv("LAMBDASCALE_TELEMETRY_OTLP_ENDPOINT", "http://jaeger:4318")
    with pytest.raises(NotFound, match="they are sent to http://jaeger:4318"):
        run("trace", "ev-9", "--data", str(data))


def test_the_line_of_an_event_says_when_where_and_why() -> None:
    line = event_line(record())
    assert line.startswith("ev-1  20")
    assert line.endswith("m  complete        2.00 s  node-0 -> node-1  9 requests queued")
    failed = event_line(record(EventState.FAILED, error="no route"))
    assert failed.endswith(
        "m  failed               -  node-0 -> node-1  9 requests queued; no route"
    )


def test_the_line_of_an_event_that_grew_says_when_by_whom_and_why() -> None:
    begun = record()
    growth = Growth(begun.decided_ns + 500_000_000, "7 more queued", (NodeId("node-2"),))
    line = event_line(msgspec.structs.replace(begun, growths=(growth,)))
    assert line.endswith("9 requests queued; after 0.50 s grown by node-2: 7 more queued")


def test_a_limit_below_one_is_bad_input() -> None:
    with pytest.raises(BadInput, match="--limit 0"):
        run("events", "--limit", "0")


def test_a_story_is_of_something() -> None:
    with pytest.raises(BadInput, match="of what"):
        run("events", "--story")


def test_the_line_of_a_decision_says_when_what_where_and_why() -> None:
    decided = Decided(
        at_ns=10**18,
        verdict=Verdict.FEWER,
        replicas=3,
        wanted=2,
        why="3 replicas serve, 2 are enough for 2.0 s",
        nodes=(NodeId("node-1"),),
    )
    line = decision_line(decided)
    assert line.startswith("2001-")
    assert line.endswith("fewer      3 -> 2    node-1  3 replicas serve, 2 are enough for 2.0 s")
    more = msgspec.structs.replace(
        decided, verdict=Verdict.MORE, wanted=4, nodes=(), event=EventId("ev-1")
    )
    assert "more       3 -> 4    ev-1  " in decision_line(more)


@pytest.mark.parametrize("more", [("ev-1",), ("--story",)])
def test_decisions_are_of_a_model_alone(more: tuple[str, ...]) -> None:
    with pytest.raises(BadInput, match="leave ID and --story out"):
        run("events", "--model", "llama", *more)
