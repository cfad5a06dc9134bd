"""The picture of one event: which block reached which node when, and what was served meanwhile."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

from services.cli.demo.burst import Outcome
from services.cli.demo.report import throughput
from services.cli.demo.watch import Watch
from shared.ids import NodeId

matplotlib.use("Agg")

from matplotlib import pyplot as plt

COLOURS = plt.get_cmap("viridis")


def draw(
    path: Path, watch: Watch, nodes: Sequence[NodeId], outcomes: Sequence[Outcome], start: float
) -> None:
    """Writes a PNG; times are seconds after the burst began (`start`, monotonic)."""
    figure, (blocks, rates, load) = plt.subplots(
        3, 1, figsize=(11, 8.5), sharex=True, height_ratios=(3, 2, 2), constrained_layout=True
    )
    event = watch.scale_out()
    marks: list[tuple[float, str, str]] = []
    if event is not None:
        decided = watch.monotonic(event.decided_ns) - start
        marks.append((decided, "decided", "tab:red"))
        for value, label, colour in (
            (event.actual.first_partial_token_s, "first token over a loading node", "tab:orange"),
            (event.actual.all_complete_s, "all complete: switch to local", "tab:green"),
        ):
            if value is not None:
                marks.append((decided + value, label, colour))
    _blocks(blocks, watch, nodes, start)
    series = throughput(outcomes, start)
    rates.step([at for at, _ in series], [rate for _, rate in series], where="mid")
    rates.fill_between(
        [at for at, _ in series], [rate for _, rate in series], step="mid", alpha=0.2
    )
    rates.set_ylabel("tokens/s")
    _load(load, watch, start)
    for axis in (blocks, rates, load):
        for at, label, colour in marks:
            axis.axvline(at, color=colour, linewidth=1.2, linestyle="--", label=label)
        axis.grid(alpha=0.3)
    blocks.legend(loc="lower right", fontsize=8)
    load.set_xlabel("seconds after the burst began")
    end = max((sample.at - start for sample in watch.samples), default=10.0)
    load.set_xlim(-0.5, end)
    figure.suptitle(
        f"One scaling event: {event.n_blocks if event else 0} blocks to "
        f"{len(event.targets) if event else 0} nodes, serving while they move"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _blocks(axis: plt.Axes, watch: Watch, nodes: Sequence[NodeId], start: float) -> None:
    """One bar a block and node, over the time it took to arrive; then the time it was held."""
    event = watch.scale_out()
    for row, node in enumerate(nodes):
        arrivals = [a for a in watch.arrivals if a.node == node and event and a.event == event.id]
        for arrival in arrivals:
            began = watch.monotonic(arrival.first_byte_ns) - start
            ended = watch.monotonic(arrival.finished_ns) - start
            share = arrival.block / max(watch.n_blocks - 1, 1)
            axis.barh(row, ended - began, left=began, height=0.7, color=COLOURS(share))
            axis.text((began + ended) / 2, row, str(arrival.block), ha="center", va="center",
                      fontsize=6, color="white" if share < 0.6 else "black")  # fmt: skip
        if event is not None and node in event.sources:
            axis.text(0.1, row, "holds the model", va="center", fontsize=9)
    axis.set_yticks(range(len(nodes)), nodes)
    axis.set_ylim(len(nodes) - 0.4, -0.6)
    axis.set_ylabel("blocks arriving")


def _load(axis: plt.Axes, watch: Watch, start: float) -> None:
    at = [sample.at - start for sample in watch.samples]
    axis.plot(at, [sample.queued for sample in watch.samples], label="requests waiting")
    axis.plot(
        at,
        [sample.running for sample in watch.samples],
        label="requests running",
        color="tab:purple",
    )
    axis.set_ylabel("requests")
    instances = axis.twinx()
    instances.step(at, [sample.replicas for sample in watch.samples], where="post",
                   color="tab:green", label="replicas")  # fmt: skip
    instances.step(at, [sample.paths for sample in watch.samples], where="post",
                   color="tab:orange", label="paths over loading nodes")  # fmt: skip
    instances.set_ylabel("instances")
    lines, labels = axis.get_legend_handles_labels()
    more_lines, more_labels = instances.get_legend_handles_labels()
    instances.legend(lines + more_lines, labels + more_labels, loc="upper right", fontsize=8)
