"""The live picture in the terminal: blocks by node, instances, queue, tokens per second."""

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.cli.demo.burst import Outcome
from services.cli.demo.report import BUCKET_S, percentiles, throughput
from services.local.watch import Role, Watch
from shared.ids import NodeId
from shared.messages.instances import InstanceState

STYLES = {Role.REPLICA: "green", Role.PATH: "yellow", Role.IDLE: "cyan"}
SPARKS = " ▁▂▃▄▅▆▇█"
HISTORY = 40
"""Number of buckets of the throughput that are shown."""


def render(
    watch: Watch,
    nodes: Sequence[NodeId],
    outcomes: Sequence[Outcome],
    phase: str,
    start: float | None,
) -> RenderableType:
    """The picture, which always has the same height. `start`: when the burst began (monotonic)."""
    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(no_wrap=True, overflow="ellipsis")
    for name, text in (
        ("event", _event(watch)),
        ("instances", _instances(watch)),
        ("requests", _requests(watch, outcomes)),
        ("latency", _latency(outcomes)),
        ("tokens/s", _rates(outcomes, start)),
    ):
        table.add_row(name, text)
    clock = f"  {time.monotonic() - start:.1f} s" if start is not None else ""
    return Group(Text.assemble((phase, "bold"), clock), "", _nodes(watch, nodes), "", table)


def _nodes(watch: Watch, nodes: Sequence[NodeId]) -> Table:
    table = Table.grid(padding=(0, 2), pad_edge=False)
    for _ in range(4):
        table.add_column(no_wrap=True)
    for node in nodes:
        held = watch.held.get(node, frozenset())
        role = watch.role(node)
        cells = Text.assemble(
            *(("██", STYLES[role]) if block in held else ("░░", "dim")
              for block in range(watch.n_blocks))
        )  # fmt: skip
        state = Text(_state(role, len(held), watch.n_blocks), style=STYLES[role] if held else "dim")
        table.add_row(node, cells, f"{len(held):>2}/{watch.n_blocks}", state)
    return table


def _state(role: Role, held: int, n_blocks: int) -> str:
    if role is Role.REPLICA:
        return "serves alone"
    if role is Role.PATH:
        return "serves in paths, loading"
    if held:
        return "loads" if held < n_blocks else "complete"
    return "empty"


def _event(watch: Watch) -> str:
    record = watch.scale_out()
    if record is None:
        return "none"
    predicted, actual = record.predicted.all_complete_s, record.actual.all_complete_s
    told = f"{record.id} {record.state.value}"
    if predicted is not None:
        told += f", {predicted:.2f} s predicted"
    if actual is not None:
        told += f", {actual:.2f} s taken"
    return told


def _instances(watch: Watch) -> str:
    counts = Counter(
        "replica" if instance.is_replica else
        "path over loading nodes" if instance.state is InstanceState.SERVING else "path that ends"
        for instance in watch.instances
    )  # fmt: skip
    names = ("replica", "path over loading nodes", "path that ends")
    return ", ".join(f"{counts[name]} x {name}" for name in names if counts[name]) or "none"


def _requests(watch: Watch, outcomes: Sequence[Outcome]) -> str:
    queued = watch.load.queued_requests if watch.load else 0
    running = watch.load.running_requests if watch.load else 0
    done = sum(outcome.done for outcome in outcomes)
    return f"{queued} waiting, {running} running, {done} of {len(outcomes)} done"


def _latency(outcomes: Sequence[Outcome]) -> str:
    ttft = percentiles([o.ttft_s for o in outcomes if o.ttft_s is not None])["p50"]
    tpot = percentiles([o.tpot_s for o in outcomes if o.tpot_s is not None])["p50"]
    shown = [f"{name} p50 {value:.0f} ms"
             for name, value in (("TTFT", ttft), ("TPOT", tpot)) if value is not None]  # fmt: skip
    return ", ".join(shown) or "-"


def _rates(outcomes: Sequence[Outcome], start: float | None) -> str:
    """A sparkline of the last full buckets, then the value of the last one."""
    if start is None:
        return "-"
    now = int((time.monotonic() - start) / BUCKET_S)
    rates = [rate for _, rate in throughput(outcomes, start)][:now]
    rates = (rates + [0.0] * (now - len(rates)))[-HISTORY:]
    top = max(rates, default=0.0)
    if not top:
        return "-"
    line = "".join(SPARKS[round(rate / top * (len(SPARKS) - 1))] for rate in rates)
    return f"{line} {rates[-1]:.0f}"
