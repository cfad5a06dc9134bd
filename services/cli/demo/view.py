"""The live picture in the terminal: blocks by node, instances, queue, time to first token."""

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.cli.demo.burst import Outcome
from services.cli.demo.report import percentiles
from services.cli.demo.watch import Watch
from shared.ids import NodeId

RECENT_S = 1.0


def render(
    watch: Watch, nodes: Sequence[NodeId], outcomes: Sequence[Outcome], phase: str
) -> RenderableType:
    return Group(
        Text(phase, style="bold"), _nodes(watch, nodes), _instances(watch), _load(watch, outcomes)
    )


def _nodes(watch: Watch, nodes: Sequence[NodeId]) -> Table:
    table = Table.grid(padding=(0, 1))
    serving = {i.leader for i in watch.replicas}
    in_path = {stage.node for path in watch.paths for stage in path.stages}
    for node in nodes:
        held = watch.held.get(node, 0)
        if node in serving:
            state = Text("serves alone", style="green")
        elif node in in_path:
            state = Text("serves in paths while loading", style="yellow")
        elif held:
            state = Text("loading" if held < watch.n_blocks else "leaving", style="cyan")
        else:
            state = Text("empty", style="dim")
        bar = ProgressBar(total=max(watch.n_blocks, 1), completed=held, width=40)
        table.add_row(node, bar, f"{held:>2}/{watch.n_blocks} blocks", state)
    return table


def _instances(watch: Watch) -> Text:
    counts: dict[str, int] = {}
    for instance in watch.instances:
        kind = "replica" if instance.is_replica else "path"
        key = f"{kind} {instance.state.value}"
        counts[key] = counts.get(key, 0) + 1
    text = ", ".join(f"{count} x {key}" for key, count in sorted(counts.items()))
    return Text(f"instances  {text or 'none'}")


def _load(watch: Watch, outcomes: Sequence[Outcome]) -> Text:
    at = time.monotonic()
    recent = sum(1 for o in outcomes for t in reversed(o.token_at) if at - t < RECENT_S)
    done = sum(outcome.done for outcome in outcomes)
    ttft = percentiles([o.ttft_s for o in outcomes if o.ttft_s is not None])["p50"]
    queued = watch.load.queued_requests if watch.load else 0
    running = watch.load.running_requests if watch.load else 0
    return Text(
        f"requests   {queued} waiting, {running} running, {done} of {len(outcomes)} done   "
        f"TTFT p50 {f'{ttft:.0f} ms' if ttft is not None else '-'}   {recent} tokens/s"
    )
