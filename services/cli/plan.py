"""`lambdascale plan`: a multicast schedule on paper, for people or for a checker."""

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence

from services.planner.core.costs import arrival_times, physical_limit, predict
from services.planner.core.multicast.fabric import step_task
from services.planner.core.multicast.groups import fixed_pipelines
from services.planner.core.multicast.schedule import Schedule
from services.planner.core.multicast.strategies import DEFAULT, STRATEGIES, lower_bound, strategy
from services.planner.core.paths import Path, plan_paths
from shared.config import PlannerConfig
from shared.errors import BadInput

_PATHS_UP_TO = 2048
"""Nodes x blocks for which the paths of every step are worked out and shown."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "plan",
        help="show the multicast schedule for a cluster of this size",
        description="The schedule that takes a model's blocks from the first K nodes to all N, "
        "checked against the lower bound, and what can serve after each step.",
    )
    parser.add_argument("--nodes", type=_positive, required=True, help="N, sources included")
    parser.add_argument("--blocks", type=_positive, required=True, help="blocks of the model")
    parser.add_argument("--sources", type=_positive, default=1, help="nodes that hold it (1)")
    parser.add_argument("--algorithm", choices=list(STRATEGIES), default=DEFAULT)
    parser.add_argument("--link-mbit", type=float, help="rate of a link, 10^6 bits a second")
    parser.add_argument("--size-mb", type=float, help="size of the model, 10^6 bytes")
    parser.add_argument("--json", action="store_true", help="the bare schedule, as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """BadInput for arguments that do not fit together."""
    speed = _speed(args)
    if args.sources > args.nodes:
        raise BadInput(f"--sources {args.sources} is more than --nodes {args.nodes}")
    schedule = strategy(args.algorithm)(step_task(args.nodes, args.blocks, range(args.sources)))
    if args.json:
        print(json.dumps(_document(schedule)))
    else:
        for line in _report(schedule, args.algorithm, speed):
            print(line)
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _speed(args: argparse.Namespace) -> tuple[float, float] | None:
    """(model size in bytes, link rate in bytes a second), if both were given."""
    if args.link_mbit is None and args.size_mb is None:
        return None
    if args.link_mbit is None or args.size_mb is None:
        raise BadInput("--link-mbit and --size-mb predict times together: give both or neither")
    if not (0 < args.link_mbit < float("inf") and 0 < args.size_mb < float("inf")):
        raise BadInput("--link-mbit and --size-mb must be more than 0")
    return args.size_mb * 1e6, args.link_mbit * 1e6 / 8


def _document(schedule: Schedule) -> dict[str, object]:
    steps: list[list[dict[str, int]]] = [[] for _ in range(schedule.steps)]
    for step, src, dst, block in schedule.moves:
        steps[step - 1].append({"src": src, "dst": dst, "block": block})
    return {
        "n": schedule.nodes,
        "blocks": schedule.blocks,
        "sources": list(schedule.sources),
        "steps": steps,
        "pipelines": [list(pipeline) for pipeline in _pipelines(schedule)],
    }


def _pipelines(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    return fixed_pipelines(schedule.nodes, schedule.blocks, schedule.sources)


def _report(schedule: Schedule, algorithm: str, speed: tuple[float, float] | None) -> Iterator[str]:
    yield (
        f"{algorithm}: {schedule.blocks} blocks from {len(schedule.sources)} to "
        f"{schedule.nodes} nodes (sources: {_runs(schedule.sources)})"
    )
    if not schedule.moves:
        yield "every node is a source: nothing moves"
        return
    yield ""
    table = _table(schedule)
    fits = max(map(len, table)) <= shutil.get_terminal_size((120, 24)).columns
    yield from table if fits else _list(schedule)
    yield ""
    yield from _totals(schedule)
    if speed is not None:
        yield from _seconds(schedule, *speed)
    yield ""
    yield from _serving(schedule)


def _table(schedule: Schedule) -> list[str]:
    """Rows are nodes, columns steps; a cell is the block received and its sender."""
    cells = {(m.dst, m.step): f"{m.block}<{m.src}" for m in schedule.moves}
    steps = range(1, schedule.steps + 1)
    width = max([3, *map(len, cells.values())])
    lines = ["step".ljust(6) + "".join(f" {step:>{width}}" for step in steps)]
    for node in range(schedule.nodes):
        row = "".join(f" {cells.get((node, step), '.'):>{width}}" for step in steps)
        lines.append(f"{node:>5}{'*' if node in schedule.sources else ' '}" + row)
    return [*lines, "(block<sender; * holds everything from the start)"]


def _list(schedule: Schedule) -> Iterator[str]:
    """One line a step, for schedules too wide for a table."""
    by_step: dict[int, list[str]] = {}
    for step, src, dst, block in schedule.moves:
        by_step.setdefault(step, []).append(f"{src}>{dst}:{block}")
    yield "(sender>receiver:block)"
    for step, moves in by_step.items():
        yield f"step {step}: " + " ".join(moves)


def _totals(schedule: Schedule) -> Iterator[str]:
    bound = lower_bound(schedule.nodes, schedule.blocks, len(schedule.sources))
    beside = "the lower bound" if schedule.steps == bound else f"lower bound {bound}"
    yield f"steps:              {schedule.steps} ({beside}), {len(schedule.moves)} transfers"
    first = _union_step(schedule, schedule.destinations)
    yield f"first complete set: step {first} (the destinations hold every block between them)"


def _union_step(schedule: Schedule, nodes: Sequence[int]) -> int:
    """The step at whose end the nodes hold every block between them."""
    first: dict[int, int] = {}
    for step, _, dst, block in schedule.moves:
        if dst in nodes:
            first.setdefault(block, step)
    return max(first.values())


def _seconds(schedule: Schedule, nbytes: float, rate: float) -> Iterator[str]:
    config = PlannerConfig()
    nodes, blocks = schedule.nodes, schedule.blocks
    size = [round(nbytes / blocks)] * blocks
    arrivals = arrival_times(schedule.moves, size, [rate] * nodes, config.step_overhead_s)
    times = predict(schedule.held(0), blocks, arrivals, max_stages=config.max_stages)
    limit = physical_limit(nbytes, blocks, nodes, rate, len(schedule.sources))
    yield (
        f"predicted:          first path {_clock(times.first_path_s)}, first node complete "
        f"{_clock(times.first_complete_s)}, all {_clock(times.all_complete_s)} "
        f"(physical limit {_clock(limit)})"
    )


def _clock(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.3f} s"


def _serving(schedule: Schedule) -> Iterator[str]:
    if schedule.nodes * schedule.blocks <= _PATHS_UP_TO:
        yield "what can serve (capacity in complete nodes; paths over all holders):"
        yield from _paths_by_step(schedule)
        yield ""
    yield "fixed pipelines (λScale, Algorithm 2) by the step that completes them, for comparison:"
    by_step: dict[int, list[str]] = {}
    for pipeline in _pipelines(schedule):
        by_step.setdefault(_union_step(schedule, pipeline), []).append(_runs(pipeline))
    for step, pipelines in sorted(by_step.items()):
        yield f"  step {step:>3}: nodes " + " | ".join(pipelines)


def _paths_by_step(schedule: Schedule) -> Iterator[str]:
    previous: tuple[Path, ...] = ()
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


def _path(path: Path) -> str:
    return "|".join(f"{node}[{_runs(range(start, stop))}]" for node, start, stop in path.stages)


def _runs(numbers: Sequence[int]) -> str:
    """`0-3,7`"""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
