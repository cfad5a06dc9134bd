"""Logs and traces: one tree over processes that know each other by traceparent strings only."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
import structlog
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.trace import Status, StatusCode

from shared import telemetry
from shared.config import TelemetryConfig
from shared.errors import ConfigError
from shared.span_file import SpanFile
from tests.support.spans import exported

MORE_THAN_A_PIPE_HOLDS = 1000
"""Spans of 200 bytes or more; a pipe holds 64 KiB."""


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    telemetry.shutdown()
    structlog.reset_defaults()


def read(directory: Path, service: str) -> list[dict[str, Any]]:
    """What a service's file has when it has stopped."""
    telemetry.shutdown()
    return [json.loads(line) for line in (directory / f"{service}.jsonl").read_text().splitlines()]


def as_service(name: str, directory: Path) -> None:
    """From here on this process plays the named one."""
    telemetry.configure(name, TelemetryConfig(trace_dir=str(directory)))


def test_a_trace_goes_on_in_another_process(tmp_path: Path) -> None:
    as_service("planner", tmp_path)
    root = telemetry.start("scale_event", attributes={"event": "ev-1", "targets": 3})
    sent = telemetry.traceparent(root)
    planned = telemetry.record("plan", start_ns=10, end_ns=20, parent=sent)
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[13]", sent)

    other = tmp_path / "there"
    root.end(end_time=99)
    as_service("node-1", other)
    telemetry.record(
        "block_arrival", start_ns=20, end_ns=30, parent=sent, attributes={"block": 7},
        links=[planned, "", "junk"],
    )  # fmt: skip
    with telemetry.span("first_token", parent=planned) as span:
        inner = telemetry.traceparent(span)
    telemetry.shutdown()

    plan, event = read(tmp_path, "planner")
    arrival, token = read(other, "node-1")
    assert {span["trace_id"] for span in (event, plan, arrival, token)} == {sent.split("-")[1]}
    assert event["parent_id"] is None
    assert plan["parent_id"] == arrival["parent_id"] == event["span_id"]
    assert token["parent_id"] == plan["span_id"]
    assert token["span_id"] == inner.split("-")[2]
    assert [span["service"] for span in (event, arrival)] == ["planner", "node-1"]
    assert event["attributes"] == {"event": "ev-1", "targets": 3}
    assert (arrival["start_ns"], arrival["end_ns"]) == (20, 30)
    assert arrival["links"] == ["-".join(planned.split("-")[1:3])]
    assert event["end_ns"] == 99


def test_a_span_that_is_recorded_goes_out_as_one_that_was_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exporter = exported(monkeypatch)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    what: dict[str, Any] = {
        "parent": parent, "start_ns": 10, "attributes": {"block": 7}, "links": [parent, "junk"],
    }  # fmt: skip
    begun = telemetry.start("pull", **what)
    begun.set_status(Status(StatusCode.ERROR, "lost"))
    begun.end(end_time=20)
    telemetry.record("pull", end_ns=20, own=telemetry.traceparent(begun), error="lost", **what)
    one, other = exporter.get_finished_spans()
    assert encode_spans([one]) == encode_spans([other])


def test_without_a_parent_a_trace_begins(tmp_path: Path) -> None:
    as_service("planner", tmp_path)
    one = telemetry.record("one", start_ns=1, end_ns=2)
    with telemetry.span("outer"):
        two = telemetry.record("two", start_ns=1, end_ns=2, parent="not a traceparent")
    assert telemetry.context_of(one) is not None
    assert one.split("-")[1] != two.split("-")[1]
    assert all(span["parent_id"] is None for span in read(tmp_path, "planner"))


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[TextIO]:
    """A pipe in the place of the planner's file: its reader decides when a write ends."""
    os.mkfifo(tmp_path / "planner.jsonl")
    reading = os.open(tmp_path / "planner.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    as_service("planner", tmp_path)
    os.set_blocking(reading, True)
    with os.fdopen(reading) as lines:
        yield lines


def test_spans_can_be_read_while_the_process_runs(pipe: TextIO) -> None:
    for name in ("one", "two"):
        telemetry.record(name, start_ns=1, end_ns=2)
        assert json.loads(pipe.readline())["name"] == name


def test_a_disk_that_hangs_holds_up_nobody_and_loses_nothing(pipe: TextIO) -> None:
    names = [f"span {number}" for number in range(MORE_THAN_A_PIPE_HOLDS)]
    for name in names:
        telemetry.record(name, start_ns=1, end_ns=2)
    assert [json.loads(pipe.readline())["name"] for _ in names] == names


def test_a_disk_that_is_full_is_logged_and_spans_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "planner.jsonl").symlink_to("/dev/full")
    as_service("planner", tmp_path)
    telemetry.record("one", start_ns=1, end_ns=2)
    telemetry.shutdown()
    assert "spans could not be written" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError"])
def test_a_process_that_ends_by_itself_writes_what_it_has(tmp_path: Path, end: str) -> None:
    work = f"""if True:
        import sys
        from shared import telemetry
        from shared.config import TelemetryConfig
        telemetry.configure("planner", TelemetryConfig(trace_dir={str(tmp_path)!r}))
        telemetry.record("one", start_ns=1, end_ns=2)
        {end}"""
    subprocess.run([sys.executable, "-c", work], stderr=subprocess.DEVNULL, check=False)
    assert [span["name"] for span in read(tmp_path, "planner")] == ["one"]


def test_without_a_directory_no_thread_starts() -> None:
    before = threading.enumerate()
    telemetry.configure("simulation", TelemetryConfig(log_level="off"))
    telemetry.record("one", start_ns=1, end_ns=2)
    assert threading.enumerate() == before


def test_a_restarted_process_appends(tmp_path: Path) -> None:
    for name in ("one", "two"):
        as_service("planner", tmp_path)
        telemetry.record(name, start_ns=1, end_ns=2)
        telemetry.shutdown()
    assert [span["name"] for span in read(tmp_path, "planner")] == ["one", "two"]


def test_an_exception_marks_its_span_and_goes_on(tmp_path: Path) -> None:
    def fail() -> None:
        with telemetry.span("plan"):
            raise ValueError("no targets")

    as_service("planner", tmp_path)
    with pytest.raises(ValueError, match="no targets"):
        fail()
    (span,) = read(tmp_path, "planner")
    assert "no targets" in span["error"]


@pytest.mark.parametrize("text", ["", "junk", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_malformed_traceparent_names_no_span(text: str) -> None:
    assert telemetry.context_of(text) is None


def test_without_traces_configured_spans_cost_and_write_nothing(tmp_path: Path) -> None:
    assert telemetry.record("one", start_ns=1, end_ns=2) == ""
    assert list(tmp_path.iterdir()) == []


def test_logs_are_json_lines_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    early = telemetry.logger("node", name="node-1")
    telemetry.configure("node-1", TelemetryConfig(log_json=True, log_level="warning"))
    early.info("not told")
    early.warning("told", block=7)
    out, err = capsys.readouterr()
    assert out == ""
    line = json.loads(err)
    assert (line["event"], line["level"], line["role"], line["name"], line["block"]) == (
        "told", "warning", "node", "node-1", 7,
    )  # fmt: skip


def test_who_logs_to_a_full_disk_goes_on() -> None:
    code = """
from shared import telemetry
from shared.config import TelemetryConfig
telemetry.configure("node-1", TelemetryConfig())
telemetry.logger("node").warning("told")
print("goes on")
"""
    with Path("/dev/full").open("w") as full:
        said = subprocess.check_output([sys.executable, "-c", code], stderr=full)
    assert said == b"goes on\n"


def test_logs_for_people_name_the_exception(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.configure("node-1", TelemetryConfig())
    try:
        raise ValueError("bad block")
    except ValueError:
        telemetry.logger("node").exception("block failed")
    err = capsys.readouterr().err
    assert "block failed" in err
    assert "ValueError: bad block" in err


def test_an_unknown_log_level_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.log_level 'loud': use debug, info"):
        telemetry.configure("node-1", TelemetryConfig(log_level="loud"))


async def test_code_knows_the_span_it_runs_in(tmp_path: Path) -> None:
    as_service("node-1", tmp_path)

    async def here() -> str:
        return telemetry.here()

    assert telemetry.here() == ""
    with telemetry.span("outer") as outer:
        task = asyncio.create_task(here())
        with telemetry.span("inner", parent=telemetry.here()) as inner:
            assert telemetry.here() == telemetry.traceparent(inner)
        assert telemetry.here() == telemetry.traceparent(outer)
    assert telemetry.here() == ""
    assert await task == telemetry.traceparent(outer)
    within, around = await asyncio.to_thread(read, tmp_path, "node-1")
    assert within["parent_id"] == around["span_id"]


def test_a_span_that_is_not_exported_stands_for_its_parent() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    telemetry.configure("node-1", TelemetryConfig())
    with telemetry.span("apply_plan", parent=parent):
        assert telemetry.here() == parent
    with telemetry.span("apply_plan"):
        assert telemetry.here() == ""


def test_two_processes_of_one_name_have_a_file_each(tmp_path: Path) -> None:
    files = [SpanFile(tmp_path / "planner.jsonl") for _ in range(2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["planner-2.jsonl", "planner.jsonl"]
    for file in files:
        file.shutdown()
    SpanFile(tmp_path / "planner.jsonl").shutdown()  # the next process goes on with the file
    assert len(list(tmp_path.iterdir())) == 2


def test_a_caller_cannot_keep_spans_from_being_recorded(tmp_path: Path) -> None:
    as_service("gateway", tmp_path)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    own = telemetry.new_trace(parent)
    telemetry.record("request", start_ns=1, end_ns=2, parent=parent, own=own)
    (request,) = read(tmp_path, "gateway")
    assert own == f"00-{request['trace_id']}-{request['span_id']}-01"
    assert f"00-{request['trace_id']}-{request['parent_id']}-00" == parent


def test_a_large_file_of_spans_is_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.span_file.LARGEST", 0)
    for number in range(3):
        as_service("node", tmp_path)
        telemetry.record(f"span-{number}", start_ns=1, end_ns=2)
        telemetry.shutdown()
    (aside,) = (tmp_path / "node.old.jsonl").read_text().splitlines()
    assert json.loads(aside)["name"] == "span-2"
    assert (tmp_path / "node.jsonl").read_text() == ""
    assert len(list(tmp_path.iterdir())) == 2
