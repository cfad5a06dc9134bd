"""`lambdascale events [ID] [--story]` and `trace EVENT`."""

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from services.cli import ledger_text, story
from services.cli.client import (
    add_cluster_options,
    add_json_option,
    connect,
    print_json,
    say,
    state_of,
)
from services.local.asking import ask
from services.planner.core.events import LEDGER
from shared import subjects
from shared.config import load
from shared.errors import BadInput, NotFound
from shared.ids import ModelName
from shared.messages.decisions import Decided, Decisions, DecisionsQuery
from shared.messages.scaling import EventRecord, Growth, PlannerQuery, PlannerState
from shared.span_file import WRITE_EVERY_S

ROOT_SPAN = "scale_event"
ALL = 1000
PIPED_WIDTH = 120

Span = dict[str, Any]
"""One line of a trace file; see shared.span_file."""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    events = commands.add_parser(
        "events",
        help="list scaling events, the decisions about a model, or what services did about an ID",
        description="Lists the scaling events, newest first. With --model it lists every decision "
        "about a model instead: more replicas, fewer, copies that give way to other models, waits "
        "for memory, failures. Each decision says how many replicas there were, how many were "
        "wanted, and why. The planner remembers the last hundred since it started. With --story "
        "it asks the planner, the registry, the nodes and the gateways what they did lately about "
        "ID, and prints their steps in order of time: who took the step, its cause, what it "
        "concerns, and what changed. "
        "Exits with 1 if a service does not answer; it then shows what the others say.",
    )
    events.add_argument(
        "id",
        nargs="?",
        metavar="ID",
        help="only this event (or `last`); with --story also a node, a model, an instance, or a "
        "request by its X-Request-ID",
    )
    events.add_argument(
        "--story",
        action="store_true",
        help="what every service did lately about ID, and why",
    )
    events.add_argument(
        "--model", metavar="NAME", help="every decision about this model, and why, newest first"
    )
    events.add_argument(
        "--limit", type=int, default=20, metavar="N", help="how many events (default: %(default)s)"
    )
    events.set_defaults(run=_events)
    trace = commands.add_parser(
        "trace",
        help="print where a scaling event's time went, and its spans as a tree",
        description="Prints where the time of a scaling event went, from its first waiting request "
        "to its last complete node: what each phase took, beside its prediction, and its share of "
        "the whole (docs/planning.md says what the phases are). Above it come the event's spans, "
        "over all processes, as a tree: milliseconds after the event was detected, duration, "
        "process, attributes. Spans are read from DIR/traces, so the cluster need not run. An "
        "event that still runs has spans only.",
    )
    trace.add_argument(
        "event", metavar="EVENT", help="the event's id, from `lambdascale events`, or `last`"
    )
    trace.set_defaults(run=_trace)
    for parser in (events, trace):
        add_cluster_options(parser)
        add_json_option(parser)


async def _records(args: argparse.Namespace, limit: int) -> tuple[EventRecord, ...]:
    async with connect(args) as bus:
        query = PlannerQuery(events=limit)
        return (await ask(bus, subjects.PLANNER_STATE, query, PlannerState)).events


def _events(args: argparse.Namespace) -> int:
    if args.limit < 1:
        raise BadInput(f"--limit {args.limit}: use 1 or more")
    if args.model is not None and (args.story or args.id is not None):
        raise BadInput("--model lists all decisions of a model: leave ID and --story out")
    if args.story:
        return _story(args)
    if args.model is not None:
        return _decided(args)
    records = asyncio.run(_records(args, args.limit if args.id is None else ALL))
    if args.id is not None:
        records = tuple(r for r in records if r.id == args.id or args.id == story.LAST)[:1]
        if not records:
            raise NotFound(
                f"no event {args.id!r}; see `lambdascale events`, or `lambdascale events --model "
                "NAME` for the decisions about a model"
            )
    if args.json:
        print_json(records)
        return 0
    if not records:
        say("no events yet")
    for record in records:
        sys.stdout.write(event_line(record) + "\n")
    return 0


def _decided(args: argparse.Namespace) -> int:
    found = asyncio.run(_decisions(args))
    if args.json:
        print_json(found)
        return 0
    if not found:
        say(f"the planner has decided nothing about {args.model} since it was started")
    sys.stdout.writelines(f"{decision_line(each)}\n" for each in found)
    return 0


async def _decisions(args: argparse.Namespace) -> tuple[Decided, ...]:
    async with connect(args) as bus:
        query = DecisionsQuery(name=ModelName(args.model), limit=args.limit)
        return (await ask(bus, subjects.PLANNER_DECISIONS, query, Decisions)).decisions


def decision_line(decided: Decided) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(decided.at_ns / 1e9))
    whom = " ".join((*decided.nodes, *([decided.event] if decided.event else [])))
    numbers = f"{decided.replicas} -> {decided.wanted}"
    return f"{at}  {decided.verdict.value:<9}  {numbers:<8}  {whom or '-'}  {decided.why}"


def _story(args: argparse.Namespace) -> int:
    if args.id is None:
        raise BadInput("--story: of what? Name an event, a node, a model, an instance or a request")
    told = asyncio.run(_gathered(args))
    for error in told.errors:
        say(f"lambdascale: {error}")
    if not told.steps:
        raise NotFound(
            f"nobody remembers anything of {args.id!r}: name an event, a node, a model or a "
            "request; what a service did before it was last started is forgotten"
        )
    if args.json:
        print_json(told.steps)
    else:
        sys.stdout.writelines(f"{line}\n" for line in story.lines(told.steps, told.names))
    return 1 if told.errors else 0


async def _gathered(args: argparse.Namespace) -> story.Merged:
    async with connect(args) as bus:
        return await story.gather(bus, args.id)


def event_line(record: EventRecord) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.decided_ns / 1e9))
    took = record.actual.all_complete_s
    seconds = "-" if took is None else f"{took:.2f} s"
    grown = [_growth(record, growth) for growth in record.growths]
    why = "; ".join(filter(None, (record.cause, record.way, *record.ports, *grown, record.error)))
    return (
        f"{record.id}  {at}  {record.name}  {record.state.value:<12} {seconds:>9}  "
        f"{','.join(record.sources) or '-'} -> {_targets(record) or '-'}  {why}"
    )


def _targets(record: EventRecord) -> str:
    parts = ((node, record.parts.get(node)) for node in record.targets)
    return ",".join(f"{node} ({part})" if part else node for node, part in parts)


def _growth(record: EventRecord, growth: Growth) -> str:
    after_s = (growth.at_ns - record.decided_ns) / 1e9
    return f"after {after_s:.2f} s grown by {','.join(growth.nodes)}: {growth.cause}"


def _trace(args: argparse.Namespace) -> int:
    directory = _trace_directory(args)
    time.sleep(2 * WRITE_EVERY_S)  # by then, all spans that ended before the command are written
    trace_id = _finished(directory, args.event) or asyncio.run(_unfinished(args))
    spans = [span for span in read_spans(directory, trace_id) if span["trace_id"] == trace_id]
    if not spans:
        raise NotFound(f"no spans of {args.event} in {directory}{_elsewhere(args)}")
    if args.json:
        print_json(spans)
    else:
        width = shutil.get_terminal_size((PIPED_WIDTH, 0)).columns
        sys.stdout.writelines(f"{line}\n" for line in (*tree_lines(spans, width), *_ledger(spans)))
    return 0


def _ledger(spans: Iterable[Span]) -> Iterator[str]:
    for span in spans:
        if span["name"] == ROOT_SPAN and (ledger := ledger_text.of_attributes(span["attributes"])):
            yield ""
            yield from ledger_text.lines(ledger)


def _trace_directory(args: argparse.Namespace) -> Path:
    """The trace directory of the local cluster, or the one that the configuration names."""
    configured = load(args.config).telemetry.trace_dir if args.config else ""
    return Path(configured) if configured else args.data / "traces"


def _elsewhere(args: argparse.Namespace) -> str:
    """Where spans go instead, if the configuration says so."""
    endpoint = load(args.config).telemetry.otlp_endpoint
    return f"; they are sent to {endpoint}: look for them there (Jaeger, ...)" if endpoint else ""


def _finished(directory: Path, event: str) -> str | None:
    """The trace of a finished event. Its root span is written when it ends."""
    roots = [span for span in read_spans(directory, ROOT_SPAN) if span["name"] == ROOT_SPAN]
    found = [span for span in roots if event in (span["attributes"].get("event"), story.LAST)]
    return str(found[-1]["trace_id"]) if found else None


async def _unfinished(args: argparse.Namespace) -> str:
    state_of(args)
    for record in await _records(args, ALL):
        if args.event in (record.id, story.LAST):
            return record.trace.split("-")[1]
    raise NotFound(f"no event {args.event!r}; see `lambdascale events`")


def read_spans(directory: Path, text: str) -> list[Span]:
    """The spans that mention `text` (such as a trace id), from every process's file, by start."""
    spans = []
    for path in sorted(directory.glob("*.jsonl")):
        with path.open() as lines:
            for line in lines:
                if text in line:
                    try:
                        spans.append(json.loads(line))
                    except json.JSONDecodeError:
                        continue  # it is still being written
    return sorted(spans, key=lambda span: (span["start_ns"], span["name"]))


def tree_lines(spans: Iterable[Span], width: int = PIPED_WIDTH) -> Iterator[str]:
    """Spans below their parents, one a line of at most `width` columns, or a few where its
    attributes do not fit; a span whose parent is missing is a root."""
    spans = list(spans)
    ids = {span["span_id"] for span in spans}
    children: dict[str | None, list[Span]] = {}
    for span in spans:
        parent = span["parent_id"] if span["parent_id"] in ids else None
        children.setdefault(parent, []).append(span)
    start = spans[0]["start_ns"]

    def walk(parent: str | None, indent: str) -> Iterator[str]:
        siblings = children.get(parent, [])
        for span in siblings:
            last = span is siblings[-1]
            branch = "" if parent is None else ("└─ " if last else "├─ ")
            deeper = indent + ("" if parent is None else ("   " if last else "│  "))
            below = "│  " if span["span_id"] in children else "   "
            yield from _wrapped(_parts(span, start), indent + branch, deeper + below, width)
            yield from walk(span["span_id"], deeper)

    return walk(None, "")


def _wrapped(parts: Iterable[str], first: str, below: str, width: int) -> Iterator[str]:
    """Parts on as few lines as may be; `first` and `below` are what the lines begin with."""
    line, empty = first, True
    for part in parts:
        if not empty and len(line) + 1 + len(part) > width:
            yield line
            line, empty = below, True
        line += part if empty else f" {part}"
        empty = False
    yield line


def _parts(span: Mapping[str, Any], start: int) -> Iterator[str]:
    at = (span["start_ns"] - start) / 1e6
    took = (span["end_ns"] - span["start_ns"]) / 1e6
    yield f"{span['name']} +{at:.1f} ms, {took:.1f} ms [{span['service']}]"
    for key, value in span["attributes"].items():
        if value not in ("", None) and not key.startswith(LEDGER):
            yield f"{key}={_value(value)}"
    if span["error"]:
        yield f"ERROR {span['error']}"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return msgspec.json.encode(value).decode() if " " in str(value) else str(value)
