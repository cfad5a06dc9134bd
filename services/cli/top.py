"""`lambdascale top`: models and nodes as they are, every second."""

import argparse
import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table

from services.cli.arguments import amount
from services.cli.client import add_cluster_options, connect, ended_by_signals
from services.cli.status_text import console
from services.local.asking import ask
from shared import subjects
from shared.bus.base import Bus, On
from shared.clock import now
from shared.ids import GatewayId, ModelName
from shared.messages.instances import InstanceState
from shared.messages.load import WHOLE_S, GatewayLoad, ModelLoad
from shared.messages.pool import PoolState
from shared.messages.scaling import EventState, PlannerQuery, PlannerState
from shared.pool_pages import read_pool

EVENTS = 20
SILENT_S = 2.0
"""A gateway that has said nothing for so long is gone."""
_OVER = (EventState.COMPLETE, EventState.CANCELLED, EventState.FAILED)


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "top",
        help="watch models, nodes and scaling events as they are",
        description="Shows requests that wait and run, replicas, nodes and scaling events, until "
        "Ctrl-C. Where standard output is no terminal, once.",
    )
    parser.add_argument(
        "--every", type=amount, default=1.0, metavar="S",
        help="seconds between looks (default: %(default)s)",
    )  # fmt: skip
    add_cluster_options(parser)
    parser.set_defaults(run=lambda args: asyncio.run(_run(args)))


class Loads:
    """What gateways say of their load: of each model, the last that each has said."""

    def __init__(self) -> None:
        self._said: dict[GatewayId, tuple[float, dict[ModelName, ModelLoad]]] = {}

    async def hear(self, load: GatewayLoad) -> None:
        _, before = self._said.get(load.gateway, (0.0, {}))
        models = {} if load.whole else dict(before)
        models |= {model.model: model for model in load.models}
        self._said[load.gateway] = now(), models

    def of(self, model: ModelName) -> tuple[int, int]:
        """Requests that wait, and that run, at all gateways."""
        fresh = (models for at, models in self._said.values() if now() - at < SILENT_S)
        found = [models[model] for models in fresh if model in models]
        return sum(m.queued_requests for m in found), sum(m.running_requests for m in found)


async def _run(args: argparse.Namespace) -> int:
    out, loads = console(), Loads()
    async with connect(args) as bus:
        await bus.subscribe(subjects.LOAD_GATEWAY, On(GatewayLoad, loads.hear))
        await asyncio.sleep(WHOLE_S + 0.1)  # each gateway has said everything once by then
        if not out.is_terminal:
            out.print(await _frame(bus, loads))
            return 0
        with ended_by_signals(), Live(console=out, screen=True, auto_refresh=False) as live:
            while True:
                live.update(await _frame(bus, loads), refresh=True)
                await asyncio.sleep(args.every)


async def _frame(bus: Bus, loads: Loads) -> Group:
    pool = await read_pool(partial(ask, bus))
    planner = await ask(bus, subjects.PLANNER_STATE, PlannerQuery(events=EVENTS), PlannerState)
    return Group(models_table(planner, loads), "", nodes_table(pool), "", events_table(planner))


def models_table(planner: PlannerState, loads: Loads) -> Table:
    rows = []
    for each in sorted(planner.sets, key=lambda found: found.name):
        serving = [i for i in each.instances if i.state is InstanceState.SERVING]
        replicas = sum(instance.lasts for instance in serving)
        queued, running = loads.of(each.name)
        share = f"{each.coming.share:.0%} of {each.coming.replicas}" if each.coming else ""
        rows.append((each.name, queued, running, replicas, len(serving) - replicas, share))
    return _table("models", ("model", "wait", "run", "replicas", "paths", "loading"), rows)


def nodes_table(pool: PoolState) -> Table:
    rows = []
    for view in pool.nodes:
        kv = f"{view.kv_used / view.kv_capacity:.0%}" if view.kv_capacity else ""
        cached = f"{view.cached_tokens / view.prompt_tokens:.0%}" if view.prompt_tokens else ""
        free = f"{view.arena_free / 1e9:.1f} of {view.info.arena_bytes / 1e9:.1f}"
        state = "unfit" if view.unfit else view.info.duty.value
        rows.append((view.info.node, state, view.running, kv, cached, view.preemptions, free))
    columns = ("node", "duty", "run", "KV used", "cached", "preempted", "free GB")
    return _table("nodes", columns, rows)


def events_table(planner: PlannerState) -> Table:
    rows = []
    for event in planner.events:
        done = event.actual.all_complete_s
        seconds = f"{done:.2f}" if done is not None else ""
        state = event.state.value if event.state in _OVER else f"[bold]{event.state.value}[/]"
        rows.append((event.id, event.name, state, len(event.targets), seconds, event.cause))
    return _table("events", ("event", "model", "state", "nodes", "seconds", "why"), rows[:8])


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="ellipsis", no_wrap=True)
    for row in rows:
        table.add_row(*map(str, row))
    return table
