"""A plan as text: who sends what to whom in which step, what can serve after it; or as JSON."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.planner.core.choose import Choice
from services.planner.core.costs import is_uniform, physical_limit
from services.planner.core.multicast.fabric import Task
from services.planner.core.multicast.groups import fixed_pipelines
from services.planner.core.multicast.schedule import Schedule
from services.planner.core.multicast.strategies import lower_bound
from services.planner.core.paths import WeightedPath, plan_paths
from shared.config import PlannerConfig
from shared.runs import runs
from shared.wording import counted

_PATHS_UP_TO = 2048
"""Up to this many nodes x blocks, the paths of every step are computed and shown."""


@dataclass(frozen=True)
class Plan:
    task: Task
    unit_task: Task
    """The task in the chosen units of blocks, which the schedule is for."""
    choice: Choice
    timed: bool
    """Whether rates are known. Otherwise a block takes one step."""
    ports: tuple[str, ...] = ()
    """What KV does to the nodes' ports, in words."""

    @property
    def schedule(self) -> Schedule:
        return self.choice.schedule

    @property
    def limit(self) -> float:
        return physical_limit(self.task)

    def clock(self, seconds: float | None) -> str:
        if seconds is None:
            return "never"
        if self.timed:
            return f"{seconds:.3f} s"
        return "1 step" if seconds == 1 else f"{seconds:.4g} steps"


def document(schedule: Schedule, unit: int) -> dict[str, object]:
    """The document that a checker of schedules reads. With `blocks_per_move` > 1, its blocks are
    units of that many blocks."""
    steps: list[list[dict[str, int]]] = [[] for _ in range(schedule.steps)]
    for step, src, dst, block in schedule.moves:
        steps[step - 1].append({"src": src, "dst": dst, "block": block})
    return {
        "n": schedule.nodes,
        "blocks": schedule.blocks,
        "blocks_per_move": unit,
        "sources": list(schedule.sources),
        "own": list(schedule.own),
        "steps": steps,
        "pipelines": [list(pipeline) for pipeline in _pipelines(schedule)],
    }


def _pipelines(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    return fixed_pipelines(schedule.nodes, schedule.blocks, schedule.sources)


def title(plan: Plan) -> str:
    task, unit = plan.task, plan.choice.unit
    moved = f", moved {unit} at a time" if unit > 1 else ""
    return (
        f"{plan.choice.strategy}: {task.blocks} blocks{moved} from {len(task.sources)} to "
        f"{counted(task.nodes, 'node')} (sources: {runs(task.sources)})"
    )


def report(plan: Plan) -> Iterator[str]:
    yield title(plan)
    schedule = plan.schedule
    if schedule.own:
        yield f"nodes {runs(schedule.own)} load from their own host memory or disk"
    if not schedule.moves:
        if not schedule.own:
            yield "every node is a source: nothing moves"
        return
    yield ""
    table = _table(schedule)
    fits = max(map(len, table)) <= shutil.get_terminal_size((120, 24)).columns
    yield from table if fits else _list(schedule)
    yield ""
    yield from _totals(plan)
    yield ""
    yield from _serving(schedule)


def _table(schedule: Schedule) -> list[str]:
    """Rows are nodes, columns steps. A cell is the block received and its sender."""
    cells = {(m.dst, m.step): f"{m.block}<{m.src}" for m in schedule.moves}
    steps = range(1, schedule.steps + 1)
    width = max([3, *map(len, cells.values())])
    lines = ["step".ljust(6) + "".join(f" {step:>{width}}" for step in steps)]
    for node in range(schedule.nodes):
        row = "".join(f" {cells.get((node, step), '.'):>{width}}" for step in steps)
        lines.append(f"{node:>5}{'*' if node in schedule.sources else ' '}" + row)
    return [*lines, "(block<sender; * holds everything from the start)"]


def _list(schedule: Schedule) -> Iterator[str]:
    """One line for each step, for schedules too wide for a table."""
    by_step: dict[int, list[str]] = {}
    for step, src, dst, block in schedule.moves:
        by_step.setdefault(step, []).append(f"{src}>{dst}:{block}")
    yield "(sender>receiver:block)"
    for step, moves in by_step.items():
        yield f"step {step}: " + " ".join(moves)


def _totals(plan: Plan) -> Iterator[str]:
    schedule = plan.schedule
    bound = lower_bound(schedule.nodes, schedule.blocks, len(schedule.sources))
    beside = "the lower bound" if schedule.steps == bound else f"lower bound {bound}"
    if plan.task.chunk_bytes and schedule.steps > bound:
        beside += ", where relays forward whole blocks only; here by chunks"
    if not is_uniform(plan.task.fabric):
        beside = "links are unequal: steps are an order, not times"
    yield f"steps:              {schedule.steps} ({beside}), {len(schedule.moves)} transfers"
    first = _union_step(schedule, schedule.destinations)
    yield f"first complete set: step {first} (the destinations hold every block between them)"
    if plan.timed:
        outlook = plan.choice.outlook
        yield (
            f"predicted:          first path {plan.clock(outlook.first_path_s)}, "
            f"first node complete {plan.clock(outlook.first_complete_s)}, "
            f"all {plan.clock(outlook.all_complete_s)} "
            f"(physical limit {plan.clock(plan.limit)})"
        )


def _union_step(schedule: Schedule, nodes: Sequence[int]) -> int:
    """The step at whose end the nodes together hold every block."""
    first: dict[int, int] = {}
    for step, _, dst, block in schedule.moves:
        if dst in nodes:
            first.setdefault(block, step)
    return max(first.values())


def _serving(schedule: Schedule) -> Iterator[str]:
    if schedule.nodes * schedule.blocks <= _PATHS_UP_TO:
        yield "what can serve (capacity in complete nodes; paths over all holders):"
        yield from _paths_by_step(schedule)
        yield ""
    yield "fixed pipelines (λScale, Algorithm 2) by the step that completes them, for comparison:"
    by_step: dict[int, list[str]] = {}
    for pipeline in _pipelines(schedule):
        by_step.setdefault(_union_step(schedule, pipeline), []).append(runs(pipeline))
    for step, pipelines in sorted(by_step.items()):
        yield f"  step {step:>3}: nodes " + " | ".join(pipelines)


def _paths_by_step(schedule: Schedule) -> Iterator[str]:
    previous: tuple[WeightedPath, ...] = ()
    for step in range(schedule.steps + 1):
        paths = plan_paths(
            schedule.held(step),
            schedule.blocks,
            max_stages=PlannerConfig().max_stages,
            previous=previous,
        )
        new = [path for path in paths if path.stages not in {old.stages for old in previous}]
        shown = ", ".join(_path(path) for path in new[:3])
        more = f", and {len(new) - 3} more" if len(new) > 3 else ""
        capacity = sum(path.weight for path in paths)
        yield (
            f"  step {step:>3}: {capacity:6.2f} on {len(paths):>3} paths"
            + (f"; new: {shown}{more}" if new else "")
        )
        previous = paths


def _path(path: WeightedPath) -> str:
    return "|".join(f"{node}[{runs(range(start, stop))}]" for node, start, stop in path.stages)
