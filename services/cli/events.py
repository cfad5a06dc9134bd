"""`lambdascale events` and `trace EVENT`."""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from services.cli.client import add_cluster_options, add_json_option, connect, print_json
from shared import subjects
from shared.errors import NotFound
from shared.messages.scaling import EventRecord, PlannerQuery, PlannerState

TIMEOUT_S = 5.0


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    events = commands.add_parser("events", help="list the scaling events, newest first")
    events.add_argument("--limit", type=int, default=20, help="default: %(default)s")
    events.set_defaults(run=lambda args: asyncio.run(_events(args)))
    trace = commands.add_parser(
        "trace",
        help="print a scaling event's spans as a tree",
        description="Prints the spans of one scaling event, over all processes, as a tree: "
        "milliseconds after the event was detected, duration, process, attributes.",
    )
    trace.add_argument("event", metavar="EVENT", help="its id, from `lambdascale events`; or last")
    trace.set_defaults(run=lambda args: asyncio.run(_trace(args)))
    for parser in (events, trace):
        add_cluster_options(parser)
        add_json_option(parser)


async def _records(args: argparse.Namespace, limit: int) -> tuple[EventRecord, ...]:
    async with connect(args) as bus:
        state = await bus.request(
            subjects.PLANNER_STATE, PlannerQuery(events=limit), PlannerState, timeout=TIMEOUT_S
        )
    return state.events


async def _events(args: argparse.Namespace) -> int:
    records = await _records(args, args.limit)
    if args.json:
        print_json(records)
        return 0
    for record in records:
        took = record.actual.all_complete_s
        sys.stdout.write(
            f"{record.id}  {record.name}  {record.state.value:<12} "
            f"{f'{took:.2f} s' if took is not None else '-':>9}  "
            f"{','.join(record.sources)} -> {','.join(record.targets)}  {record.cause}\n"
        )
    return 0


async def _trace(args: argparse.Namespace) -> int:
    records = await _records(args, 1000)
    found = [r for r in records if args.event in (r.id, "last")]
    if not found:
        raise NotFound(f"no event {args.event!r}; see `lambdascale events`")
    trace_id = found[0].trace.split("-")[1]
    spans = read_spans(args.data / "traces", trace_id)
    if not spans:
        raise NotFound(f"no spans of {found[0].id} in {args.data / 'traces'}")
    if args.json:
        print_json(spans)
    else:
        sys.stdout.write("\n".join(tree_lines(spans)) + "\n")
    return 0


def read_spans(directory: Path, trace_id: str) -> list[dict[str, Any]]:
    """The spans of one trace from every process's file, in order of their starts."""
    spans = []
    for path in sorted(directory.glob("*.jsonl")):
        with path.open() as lines:
            for line in lines:
                if trace_id in line:
                    try:
                        span = json.loads(line)
                    except json.JSONDecodeError:
                        continue  # a line that is still being written
                    if span["trace_id"] == trace_id:
                        spans.append(span)
    return sorted(spans, key=lambda span: (span["start_ns"], span["name"]))


def tree_lines(spans: list[dict[str, Any]]) -> Iterable[str]:
    ids = {span["span_id"] for span in spans}
    children: dict[str | None, list[dict[str, Any]]] = {}
    for span in spans:
        parent = span["parent_id"] if span["parent_id"] in ids else None
        children.setdefault(parent, []).append(span)
    start = spans[0]["start_ns"]

    def walk(parent: str | None, indent: str) -> Iterable[str]:
        siblings = children.get(parent, [])
        for span in siblings:
            last = span is siblings[-1]
            branch = "" if parent is None else ("└─ " if last else "├─ ")
            yield f"{indent}{branch}{_line(span, start)}"
            deeper = "" if parent is None else ("   " if last else "│  ")
            yield from walk(span["span_id"], indent + deeper)

    return walk(None, "")


def _line(span: dict[str, Any], start: int) -> str:
    at = (span["start_ns"] - start) / 1e6
    took = (span["end_ns"] - span["start_ns"]) / 1e6
    attributes = " ".join(f"{key}={_value(value)}" for key, value in span["attributes"].items())
    error = f" ERROR {span['error']}" if span["error"] else ""
    return f"{span['name']} +{at:.1f} ms, {took:.1f} ms [{span['service']}] {attributes}{error}"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return msgspec.json.encode(value).decode() if " " in str(value) else str(value)
