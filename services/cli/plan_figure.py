"""The picture of a schedule: what every node receives in every step, and what can serve by then."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import MaxNLocator

from services.cli.plan_text import Plan
from services.planner.core.costs import schedule_arrivals
from services.planner.core.multicast.schedule import Schedule
from services.planner.core.outlook import capacity_bound
from shared.errors import BadInput

COLOURS = colormaps["viridis"]
Colour = str | tuple[float, float, float, float]
INK, FAINT, EMPTY = "#22262b", "#8a929c", "#f1f3f5"
SOURCE = "#d9dde2"
LARGEST = 128
"""The most rows and columns of a picture that somebody can read."""


def draw(plan: Plan, path: Path) -> None:
    """Writes the picture in the format of the file's name. BadInput if it would be unreadable or
    cannot be written."""
    schedule = plan.schedule
    rows, columns = schedule.nodes, schedule.steps
    if max(rows, columns) > LARGEST:
        raise BadInput(
            f"{rows} nodes and {columns} steps make no picture that can be read: "
            f"{LARGEST} of each at most"
        )
    cell = max(0.2, min(0.52, 9.0 / max(rows, columns, 1)))
    width, height = columns * cell * 1.12 + 2.6, rows * cell + 2.9
    figure = Figure(figsize=(max(width, 7.0), height), layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=(max(rows * cell, 1.0), 1.15))
    cells = figure.add_subplot(grid[0])
    _cells(cells, plan, cell)
    capacity = figure.add_subplot(grid[1], sharex=cells)
    _capacity(capacity, schedule)
    _key(figure, cells, schedule.blocks, plan.choice.unit)
    figure.suptitle(
        _title(plan), x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK, linespacing=1.5
    )
    try:
        figure.savefig(path, dpi=150, facecolor="white")
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: {error}") from error


def _title(plan: Plan) -> str:
    schedule, outlook = plan.schedule, plan.choice.outlook
    sources = len(schedule.sources)
    first = (
        f"{plan.choice.strategy}: {plan.task.blocks} blocks from {sources} "
        f"{'node' if sources == 1 else 'nodes'} to {schedule.nodes} in {schedule.steps} steps"
    )
    if not plan.timed:
        return first
    return f"{first}, {plan.clock(outlook.all_complete_s)} (limit {plan.clock(plan.limit)})"


def _cells(axis: Axes, plan: Plan, cell: float) -> None:
    """Draws the cells: rows are nodes, columns steps."""
    schedule = plan.schedule
    boxes: list[FancyBboxPatch] = []
    shades: list[Colour] = []
    for node in range(schedule.nodes):
        held = node in schedule.sources
        boxes.append(_box(1, node, span=max(schedule.steps, 1)))
        shades.append(SOURCE if held else EMPTY)
    for step, _, dst, block in schedule.moves:
        boxes.append(_box(step, dst))
        shades.append(COLOURS(_share(block, schedule.blocks)))
    axis.add_collection(PatchCollection(boxes, facecolors=shades, edgecolors="none"))
    size = cell * 72
    for step, src, dst, block in schedule.moves:
        light = _share(block, schedule.blocks) < 0.62
        ink = "white" if light else INK
        axis.text(step, dst - 0.1, str(block), ha="center", va="center", fontsize=0.36 * size,
                  fontweight="bold", color=ink)  # fmt: skip
        axis.text(step, dst + 0.27, f"\N{LEFTWARDS ARROW}{src}", ha="center", va="center",
                  fontsize=0.23 * size, color=ink, alpha=0.85)  # fmt: skip
    for source in schedule.sources:
        axis.text(0.7, source, "holds every block from the start", va="center", ha="left",
                  fontsize=min(9.0, 0.36 * size), color=INK)  # fmt: skip
    _frame(axis, plan, min(9.0, 0.42 * size))


def _box(step: int, node: int, span: int = 1) -> FancyBboxPatch:
    gap = 0.05
    return FancyBboxPatch(
        (step - 0.5 + gap, node - 0.5 + gap),
        span - 2 * gap,
        1 - 2 * gap,
        boxstyle="round,pad=0,rounding_size=0.12",
    )


def _share(block: int, blocks: int) -> float:
    return 0.04 + 0.92 * block / max(blocks - 1, 1)


def _frame(axis: Axes, plan: Plan, size: float) -> None:
    """Writes the nodes' names on the left, with their racks, and on the right when each is
    complete."""
    schedule = plan.schedule
    axis.set_xlim(0.4, max(schedule.steps, 1) + 0.6)
    axis.set_ylim(schedule.nodes - 0.4, -0.6)
    axis.set_yticks(range(schedule.nodes), _names(plan), fontsize=size, color=INK)
    every = 1 if schedule.steps <= 40 else 5
    axis.set_xticks([s for s in range(1, schedule.steps + 1) if s == 1 or s % every == 0])
    axis.tick_params(length=0, labelsize=size, labelcolor=FAINT, top=True, labeltop=True,
                     bottom=False, labelbottom=False)  # fmt: skip
    axis.tick_params(axis="y", labelcolor=INK)
    axis.spines[:].set_visible(False)
    for start in _rack_starts(plan)[1:]:
        axis.axhline(start - 0.5, color=INK, linewidth=1.2)
    right = axis.secondary_yaxis("right")
    right.set_yticks(range(schedule.nodes), _complete(plan), fontsize=size, color=FAINT)
    right.tick_params(length=0)
    right.spines[:].set_visible(False)
    axis.text(1.012, 1.0, "complete", transform=axis.transAxes, va="bottom", fontsize=size,
              color=FAINT)  # fmt: skip


def _names(plan: Plan) -> list[str]:
    ports = plan.task.fabric.ports
    names = [str(node) for node in range(len(ports))]
    for node, port in enumerate(ports):
        if port.out == 0:
            names[node] = f"receives only  {node}"
    for start in _rack_starts(plan):
        if ports[start].rack:
            names[start] = f"{ports[start].rack}   {names[start]}"
    return names


def _rack_starts(plan: Plan) -> list[int]:
    """The first node of every run of nodes of one rack."""
    starts, node = [], 0
    for _, ports in groupby(plan.task.fabric.ports, key=lambda port: port.rack):
        starts.append(node)
        node += len(list(ports))
    return starts


def _complete(plan: Plan) -> list[str]:
    last: dict[int, float] = {}
    for (node, _), at in schedule_arrivals(plan.schedule, plan.unit_task, {}).items():
        last[node] = max(last.get(node, 0.0), at)
    labels = {node: f"{at:.2f} s" if plan.timed else f"step {at:g}" for node, at in last.items()}
    return [labels.get(node, "") for node in range(plan.schedule.nodes)]


def _capacity(axis: Axes, schedule: Schedule) -> None:
    """Draws the capacity after every step, in complete nodes: over paths of any holders, and of
    complete nodes only."""
    pools, alone = [], []
    for step in range(schedule.steps + 1):
        held = schedule.held(step)
        masks = [sum(1 << block for block in have) for have in held]
        pools.append(capacity_bound(masks, schedule.blocks))
        alone.append(float(sum(len(have) == schedule.blocks for have in held)))
    at = [step + 0.5 for step in range(schedule.steps + 1)]
    _area(axis, at, pools, COLOURS(0.55), "nodes serve together what they hold (at most)")
    _area(axis, at, alone, COLOURS(0.15), "complete nodes alone")
    axis.set_ylim(0, schedule.nodes * 1.05)
    axis.set_ylabel("capacity,\ncomplete nodes", fontsize=9, color=INK)
    axis.set_xlabel("step", fontsize=9, color=INK)
    axis.tick_params(length=0, labelsize=8, labelcolor=FAINT, labelbottom=False)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(SOURCE)
    axis.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axis.legend(loc="upper left", frameon=False, fontsize=8.5, labelcolor=INK)


def _area(
    axis: Axes, at: Sequence[float], values: Sequence[float], colour: Colour, label: str
) -> None:
    axis.fill_between(at, values, step="post", color=colour, alpha=0.25, linewidth=0)
    axis.step(at, values, where="post", color=colour, linewidth=1.8, label=label)


def _key(figure: Figure, axis: Axes, blocks: int, unit: int) -> None:
    """The key of which colour is which block."""
    name = "block received, and its sender" if unit == 1 else f"{unit} blocks, and their sender"
    bar = figure.colorbar(
        ScalarMappable(Normalize(0, max(blocks - 1, 1)), COLOURS),
        ax=axis,
        location="top",
        aspect=60,
        shrink=0.45,
        anchor=(0.0, 0.0),
        pad=0.02,
    )
    bar.outline.set_visible(False)
    bar.set_ticks([0, blocks - 1] if blocks > 1 else [0])
    bar.ax.tick_params(length=0, labelsize=8, labelcolor=FAINT)
    bar.set_label(name, fontsize=9, color=INK, loc="left")
