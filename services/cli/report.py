"""`lambdascale report`: what happened, as one file that can be kept and sent."""

import argparse
import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from services.cli.access import duration
from services.cli.client import add_cluster_options, connect, print_json, say
from services.cli.page_file import page_file
from services.gateway.core.scene import Change, Scene
from services.local.asking import ask
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BadInput, NotFound
from shared.event_pages import read_event
from shared.messages.chronicle import Chronicle, ChronicleQuery, ModelPast
from shared.messages.scaling import EventRecord

LAST = "last"
AROUND_NS = 60_000_000_000
"""What is shown before an event and after it."""
MOST = 10_000_000
DESCRIPTION = """\
Writes what happened: one scaling event, block by block, with the load around it, or everything in a
range of time: the events, and how many replicas each model had, wanted and was granted, with the
reasons. The file shows what the gateway's page shows, and needs neither a cluster nor a network.

The planner remembers the blocks of the last hundred events, and the numbers of some hours; both
since it was started.
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "report",
        help="write a scaling event, or a range of time, as a page in one file",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what",
        metavar="EVENT|RANGE",
        help="an event's id, `last`, or how far back the range begins, such as 30m or 12h",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page to this file")
    parser.add_argument(
        "--json", action="store_true", help="print what the page shows as one JSON document"
    )
    add_cluster_options(parser)
    parser.set_defaults(run=lambda args: asyncio.run(_run(args)))


async def _run(args: argparse.Namespace) -> int:
    if args.html is None and not args.json:
        raise BadInput("say where the report goes: --html FILE, --json, or both")
    async with connect(args) as bus:
        if args.what[-1:].isalpha() and args.what[:-1].replace(".", "").isdigit():
            title, change = await of_range(bus, duration(args.what))
        else:
            title, change = await of_event(bus, args.what)
    if args.html is not None:
        write(args.html, title, change)
        say(f"written to {args.html}")
    if args.json:
        print_json(change)
    return 0


def write(path: Path, title: str, change: Change) -> None:
    """BadInput if the file cannot be written."""
    try:
        path.write_text(page_file(title, change))
    except OSError as error:
        raise BadInput(f"--html {path}: {error.strerror}") from error


async def of_event(bus: Bus, what: str) -> tuple[str, Change]:
    """One event, by its id, or the newest. NotFound."""
    chronicle = await ask(bus, subjects.PLANNER_CHRONICLE, ChronicleQuery(), Chronicle)
    found = [event for event in chronicle.events if what in (event.id, LAST)]
    if not found:
        raise NotFound(f"no event {what!r}; see `lambdascale events`")
    record = found[0]
    from_ns = record.detected_ns - AROUND_NS
    to_ns = min(record.history[-1][1] + AROUND_NS, chronicle.at_ns)
    models = [model for model in chronicle.models if model.name == record.name]
    report = _Report(from_ns, to_ns)
    report.add(chronicle, models)
    await report.add_event(bus, record)
    return f"{record.id}, {record.name}", report.change


async def of_range(bus: Bus, seconds: float) -> tuple[str, Change]:
    """Everything in the last so many seconds."""
    query = ChronicleQuery(last_s=seconds)
    chronicle = await ask(bus, subjects.PLANNER_CHRONICLE, query, Chronicle)
    report = _Report(chronicle.at_ns - int(seconds * 1e9), chronicle.at_ns)
    report.add(chronicle, chronicle.models)
    for record in chronicle.events:
        await report.add_event(bus, record)
    return f"the last {seconds:g} s", report.change


class _Report:
    """What the page is given. `Lookout` of the gateway gives it the same."""

    def __init__(self, from_ns: int, to_ns: int) -> None:
        self._from_ns, self._to_ns = from_ns, to_ns
        self._scene = Scene()
        self._scene.put("about", {"from_ns": from_ns, "to_ns": to_ns})

    @property
    def change(self) -> Change:
        change = self._scene.since(0)
        assert change is not None
        change.at_ns = self._to_ns
        return change

    def add(self, chronicle: Chronicle, models: Sequence[ModelPast]) -> None:
        for model in models:
            self._add("counts", model.name, model.counts)
            self._add("decisions", model.name, model.decisions[::-1])
        self._add("rates", "all", chronicle.rates)

    def _add(self, section: str, key: str, rows: Sequence[Any]) -> None:
        within = [row for row in rows if self._from_ns <= row.at_ns <= self._to_ns]
        self._scene.add(section, key, within, MOST)

    async def add_event(self, bus: Bus, record: EventRecord) -> None:
        past = await read_event(partial(ask, bus), record.id)
        shown = msgspec.structs.replace(past.record, trace="")
        self._scene.put("events", {record.id: shown}, all_there_are=False)
        trail = {"forgotten": past.forgotten, "served": past.served}
        self._scene.put("trails", {record.id: trail}, all_there_are=False)
        self._scene.add("arrivals", record.id, past.arrivals, MOST)
