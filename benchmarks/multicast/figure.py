"""The figure of a run: makespan over the limit, by number of nodes, one line for each strategy."""

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.multicast.bench import OURS, Results
from services.planner.core.choose import AUTO
from shared.errors import BadInput

INK, FAINT, GRID = "#22262b", "#8a929c", "#e6e9ec"
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = {
    AUTO: "#D55E00",
    "binomial": "#E69F00",
    "head": "#CC79A7",
    "chain": "#0072B2",
    "taps": "#56B4E9",
    "tree": "#009E73",
}
DASHES = ((0, (5, 1.5)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)))
"""Line styles of the peers, which are grey."""


def draw(results: Results, path: Path) -> None:
    """Writes the figure in the format that the file's name says. BadInput if it cannot be
    written."""
    figure = Figure(figsize=(8.5, 5.0), layout="constrained")
    axis = figure.add_subplot()
    flat = [row for row in results.rows if not row.racks]
    names = dict.fromkeys(row.strategy for row in flat)
    peers = [name for name in names if name not in OURS]
    for name in names:
        rows = [row for row in flat if row.strategy == name]
        middle = [row.ratio for row in rows]
        low = [row.ratio - min(row.makespans_s) / row.limit_s for row in rows]
        high = [max(row.makespans_s) / row.limit_s - row.ratio for row in rows]
        line = DASHES[peers.index(name) % len(DASHES)] if name in peers else "-"
        axis.errorbar(
            [row.n for row in rows], middle, yerr=[low, high], label=name,
            color=COLOURS.get(name, FAINT), linestyle=line, marker="o", markersize=4, capsize=2,
            linewidth=2.6 if name == AUTO else 1.4, zorder=5 if name == AUTO else 3,
        )  # fmt: skip
    axis.axhline(1.0, color=INK, linewidth=1.0)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g} x")
    axis.set_xticks(sorted({row.n for row in flat}))
    axis.set_xlabel("nodes, the source included", color=INK)
    axis.set_ylabel("time until all are complete, over the limit of a link", color=INK)
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(FAINT)
    axis.tick_params(colors=FAINT, labelcolor=INK)
    axis.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    settings = results.settings
    figure.suptitle(
        f"{results.nbytes / (1 << 20):.0f} MiB to all nodes over links of "
        f"{settings.link_mbit:g} Mbit/s (medians of {settings.runs}, least and most)",
        x=0.012, ha="left", fontsize=12, fontweight="bold", color=INK,
    )  # fmt: skip
    try:
        figure.savefig(path, dpi=150, facecolor="white")
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: {error}") from error
