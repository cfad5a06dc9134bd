"""The figure of one event: which block reached which node when, and what was served meanwhile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from services.cli.demo.burst import Outcome
from services.cli.demo.report import throughput
from services.local.watch import Role, Watch
from shared.ids import NodeId
from shared.messages.scaling import BlockArrived, EventRecord

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.patches import Patch

BLOCKS = plt.get_cmap("viridis")
ROLES = {Role.PATH: "#fde3c1", Role.REPLICA: "#d3ecd0"}
ROLE_NAMES = {
    Role.PATH: "serves in paths, with what it has",
    Role.REPLICA: "serves alone, with all blocks",
}
ROW = 0.86
"""Height of a node's row. Rows are 1 apart."""
LEGEND = {"loc": "lower left", "frameon": False, "fontsize": 9, "borderaxespad": 0.0}


@dataclass(frozen=True, slots=True)
class Mark:
    at: float
    label: str
    colour: str
    line: str = "--"


def draw(
    path: Path,
    watch: Watch,
    nodes: Sequence[NodeId],
    outcomes: Sequence[Outcome],
    start: float,
    title: str,
) -> None:
    """Writes a PNG. Times are seconds after the burst began (`start`, monotonic).

    The event alone is above. Below, on a time axis of their own, are throughput and load of the
    whole run.
    """
    figure = plt.figure(figsize=(12, 10), constrained_layout=True)
    grid = figure.add_gridspec(3, 1, height_ratios=(5, 2.2, 2.6))
    blocks = figure.add_subplot(grid[0])
    rates = figure.add_subplot(grid[1])
    load = figure.add_subplot(grid[2], sharex=rates)
    event = watch.scale_out()
    marks = _marks(watch, event, start)
    _blocks(blocks, watch, nodes, event, start)
    _rates(rates, outcomes, start)
    instances = _load(load, watch, start)
    for axis in (blocks, rates, load):
        for mark in marks:
            axis.axvline(mark.at, color=mark.colour, linewidth=1.3, linestyle=mark.line, zorder=2)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", alpha=0.25)
    _legends(blocks, rates, load, instances, marks)
    ends = [sample.at - start for sample in watch.samples]
    rates.set_xlim(-0.5, max(ends, default=10.0))
    rates.tick_params(labelbottom=False)
    load.set_xlabel("seconds after the burst began")
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _marks(watch: Watch, event: EventRecord | None, start: float) -> list[Mark]:
    if event is None:
        return []
    decided = watch.monotonic(event.decided_ns) - start
    found = [Mark(decided, "decided", "tab:red")]
    for value, label, colour, line in (
        (event.actual.first_partial_token_s, "first token over a loading node", "tab:orange", "--"),
        (event.physical_limit_s, "physical limit", "black", ":"),
        (event.actual.all_complete_s, "all complete: switch to local", "tab:green", "--"),
    ):
        if value is not None:
            found.append(Mark(decided + value, f"{label} (+{value:.2f} s)", colour, line))
    return found


def _blocks(
    axis: plt.Axes,
    watch: Watch,
    nodes: Sequence[NodeId],
    event: EventRecord | None,
    start: float,
) -> None:
    """One row for each node, with a bar for each block, from its first byte to its last."""
    for row, node in enumerate(nodes):
        _roles(axis, row, watch, node, start)
        arrivals = [a for a in watch.arrivals if a.node == node and event and a.event == event.id]
        _arrivals(axis, row, watch, arrivals, start)
        if event is not None and node in event.sources:
            at = watch.monotonic(event.decided_ns) - start
            axis.text(at + 0.1, row, "source: has held the whole model all along", va="center",
                      fontsize=9, zorder=5,
                      bbox={"facecolor": ROLES[Role.REPLICA], "edgecolor": "none"})  # fmt: skip
    axis.set_yticks(range(len(nodes)), nodes)
    axis.set_ylim(len(nodes) - 0.45, -0.55)
    axis.tick_params(axis="y", length=0)
    if event is not None:
        decided = watch.monotonic(event.decided_ns) - start
        took = event.actual.all_complete_s or 10.0
        axis.set_xlim(decided - 0.04 * took, decided + 1.12 * took)
    axis.set_xlabel("seconds after the burst began (this event alone)")


def _roles(axis: plt.Axes, row: int, watch: Watch, node: NodeId, start: float) -> None:
    history = watch.roles.get(node, [])
    end = max([at for at, _ in history] + [sample.at for sample in watch.samples[-1:]], default=0.0)
    ends = [at for at, _ in history[1:]] + [end]
    for (began, role), ended in zip(history, ends[: len(history)], strict=True):
        if role in ROLES:
            axis.barh(
                row, ended - began, left=began - start, height=ROW, color=ROLES[role], zorder=1
            )


def _arrivals(
    axis: plt.Axes, row: int, watch: Watch, arrivals: Sequence[BlockArrived], start: float
) -> None:
    placed = lanes([(a.first_byte_ns, a.finished_ns) for a in arrivals])
    height = ROW / max([2, *(lane + 1 for lane in placed)])
    for arrival, lane in zip(arrivals, placed, strict=True):
        began = watch.monotonic(arrival.first_byte_ns) - start
        ended = watch.monotonic(arrival.finished_ns) - start
        share = arrival.block / max(watch.n_blocks - 1, 1)
        middle = row - ROW / 2 + (lane + 0.5) * height
        axis.barh(middle, ended - began, left=began, height=height * 0.9, color=BLOCKS(share),
                  edgecolor="white", linewidth=0.5, zorder=3)  # fmt: skip
        axis.text((began + ended) / 2, middle, str(arrival.block), ha="center", va="center",
                  fontsize=9, color="white" if share < 0.65 else "black", zorder=5)  # fmt: skip


def lanes(spans: Sequence[tuple[int, int]]) -> list[int]:
    """A lane for each (begin, end), so that no two in a lane overlap, with as few lanes as
    possible."""
    placed = [0] * len(spans)
    free_from: list[int] = []
    for index in sorted(range(len(spans)), key=lambda i: spans[i]):
        begin, end = spans[index]
        lane = next((n for n, free in enumerate(free_from) if free <= begin), len(free_from))
        free_from[lane:lane + 1] = [end]  # fmt: skip
        placed[index] = lane
    return placed


def _rates(axis: plt.Axes, outcomes: Sequence[Outcome], start: float) -> None:
    series = throughput(outcomes, start)
    at, rates = [at for at, _ in series], [rate for _, rate in series]
    axis.fill_between(at, rates, step="mid", alpha=0.25, linewidth=0)
    axis.step(at, rates, where="mid", linewidth=1.5)
    axis.set_ylim(0, max(rates, default=1.0) * 1.05)
    axis.set_ylabel("tokens a second")


def _load(axis: plt.Axes, watch: Watch, start: float) -> plt.Axes:
    """Draws the load. Returns the axis of the instances, which shares the time."""
    at = [sample.at - start for sample in watch.samples]
    axis.plot(at, [sample.queued for sample in watch.samples], label="requests waiting")
    axis.plot(at, [sample.running for sample in watch.samples],
              label="requests running", color="tab:purple")  # fmt: skip
    axis.set_ylabel("requests")
    axis.set_ylim(bottom=0)
    instances = axis.twinx()
    instances.step(at, [sample.replicas for sample in watch.samples], where="post",
                   color="tab:green", label="replicas (right)")  # fmt: skip
    instances.step(at, [sample.paths for sample in watch.samples], where="post",
                   color="tab:orange", label="paths over loading nodes (right)")  # fmt: skip
    instances.set_ylabel("instances")
    instances.set_ylim(bottom=0)
    instances.yaxis.get_major_locator().set_params(integer=True)
    instances.spines[["top"]].set_visible(False)
    return instances


def _legends(
    blocks: plt.Axes,
    rates: plt.Axes,
    load: plt.Axes,
    instances: plt.Axes,
    marks: Sequence[Mark],
) -> None:
    """Puts legends above each panel, where they hide nothing."""
    above: Mapping[str, Any] = LEGEND | {"bbox_to_anchor": (0, 1.01)}
    patches = [Patch(color=ROLES[role], label=ROLE_NAMES[role]) for role in ROLES]
    patches.append(Patch(color=BLOCKS(0.4), label="a block arriving, from its first byte"))
    blocks.legend(handles=patches, ncols=3, **above)
    lines = [
        plt.Line2D([], [], color=mark.colour, linestyle=mark.line, label=mark.label)
        for mark in marks
    ]
    if lines:
        rates.legend(handles=lines, ncols=len(lines), **above)
    handles, labels = load.get_legend_handles_labels()
    more_handles, more_labels = instances.get_legend_handles_labels()
    load.legend(handles + more_handles, labels + more_labels, ncols=4, **above)
