"""What planning costs and what plans are worth: time, steps, capacity while loading.

Run: .venv/bin/python -m benchmarks.planning. Steps are compared with the lower bound. Capacity is
compared with the two ways of serving in the papers: once a node is complete, and over fixed
pipelines of destinations (λScale, Algorithm 2).
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from benchmarks.no_options import describe
from services.planner.core.append import append
from services.planner.core.choose import choose
from services.planner.core.costs import physical_limit
from services.planner.core.multicast.fabric import Fabric, Port, Task, step_task, uniform
from services.planner.core.multicast.groups import fixed_pipelines
from services.planner.core.multicast.schedule import Schedule
from services.planner.core.multicast.strategies import STRATEGIES, lower_bound
from services.planner.core.outlook import Serving
from services.planner.core.paths import WeightedPath, plan_paths

CASES = ((1, 8, 16), (1, 5, 16), (2, 16, 16))
MAX_STAGES = 4
RATE = 1.25e9
OVERHEAD_S = 0.001
SIZES = (100_000_000,) * 64
CHUNK = 4 << 20
"""The chunk size that importing a model of this size gives."""


def capacities(schedule: Schedule) -> tuple[float, float, float]:
    """Mean capacity over the loading window as a share of the final capacity: (paths over pools,
    fixed pipelines, complete nodes only)."""
    nodes, blocks = schedule.nodes, schedule.blocks
    pipelines = fixed_pipelines(nodes, blocks, schedule.sources)
    pools, fixed, complete = 0.0, 0.0, 0.0
    previous: tuple[WeightedPath, ...] = ()
    for step in range(schedule.steps):
        held = schedule.held(step)
        previous = plan_paths(held, blocks, max_stages=MAX_STAGES, previous=previous)
        pools += sum(path.weight for path in previous)
        done = [len(have) == blocks for have in held]
        complete += sum(done)
        fixed += sum(done[source] for source in schedule.sources)
        for members in pipelines:
            union = set().union(*(held[node] for node in members))
            fixed += len(members) if len(union) == blocks else sum(done[n] for n in members)
    final = nodes * schedule.steps
    return pools / final, fixed / final, complete / final


def milliseconds(work: Callable[[], object]) -> tuple[float, float]:
    """(CPU, wall clock), each the least of five runs."""
    cpu, wall = [], []
    for _ in range(5):
        began = time.process_time(), time.perf_counter()
        work()
        cpu.append((time.process_time() - began[0]) * 1e3)
        wall.append((time.perf_counter() - began[1]) * 1e3)
    return min(cpu), min(wall)


def times() -> None:
    print("time to choose and make a schedule, 64 blocks (limit: 100 ms at 1,024 nodes)")
    for nodes in (64, 256, 1000, 1024):
        task = Task(uniform(nodes, RATE, OVERHEAD_S), SIZES, (0,), CHUNK)
        alone = milliseconds(partial(STRATEGIES["binomial"], task))
        both = milliseconds(partial(choose, task, Serving(MAX_STAGES)))
        print(
            f"  N = {nodes:5}: {both[0]:6.1f} ms of CPU, {both[1]:6.1f} ms; "
            f"the schedule alone {alone[0]:6.1f} ms, {alone[1]:6.1f} ms"
        )


def growths() -> None:
    print("time to append newcomers to a multicast of 64 blocks that is half over")
    for old, new in ((60, 4), (200, 50), (900, 100), (500, 500)):
        task = Task(uniform(old + new, RATE, OVERHEAD_S), SIZES, (0,), CHUNK)
        begun = replace(task, fabric=replace(task.fabric, ports=task.fabric.ports[:old]))
        for name in ("binomial", "chain"):
            schedule = STRATEGIES[name](begun)
            half = schedule.steps // 2
            held = [*schedule.held(half), *(frozenset[int]() for _ in range(new))]
            running = [move for move in schedule.moves if move.step > half]
            wanted = dict.fromkeys(range(old, old + new), frozenset(range(task.blocks)))
            cpu, wall = milliseconds(partial(append, held, running, wanted, task))
            print(f"  {old} + {new}, {name:8}: {cpu:6.0f} ms of CPU, {wall:6.0f} ms")


def racks(count: int, size: int) -> Fabric:
    """Racks whose trunks are as wide as one node's port."""
    ports = tuple(Port(RATE, RATE, rack=str(node // size)) for node in range(count * size))
    return Fabric(ports, OVERHEAD_S, {str(rack): RATE for rack in range(count)})


def choices() -> None:
    print("what is chosen on unequal links, and what the others would take; 64 blocks")
    fast, slow = Port(RATE, RATE), Port(RATE / 4, RATE / 4)
    for name, fabric in (
        ("2 racks of 8", racks(2, 8)),
        ("4 racks of 16", racks(4, 16)),
        ("4 racks of 256", racks(4, 256)),
        ("12 nodes and 4 of a quarter of the rate", Fabric((fast,) * 12 + (slow,) * 4, OVERHEAD_S)),
    ):
        task = Task(fabric, SIZES, (0,), CHUNK)
        choice = choose(task, Serving(MAX_STAGES))
        took, _ = milliseconds(partial(choose, task, Serving(MAX_STAGES)))
        over = {
            each.strategy: each.outlook.all_complete_s or 0.0
            for each in reversed(choice.considered)
        }
        others = ", ".join(f"{other} {seconds:.2f} s" for other, seconds in over.items())
        print(
            f"  {name}: {choice.strategy}; limit {physical_limit(task):.2f} s; {others} "
            f"({took:.0f} ms of CPU)"
        )


def steps() -> None:
    print("steps by strategy, 16 blocks")
    for nodes in (5, 8, 16, 64):
        counts = {name: make(step_task(nodes, 16, (0,))).steps for name, make in STRATEGIES.items()}
        bound = lower_bound(nodes, 16, 1)
        ratios = ", ".join(f"{n} {c} ({c / bound:.2f} x)" for n, c in counts.items() if c)
        print(f"  N = {nodes:3}: lower bound {bound}; {ratios}")


def serving() -> None:
    print(f"mean capacity while loading, share of the final; at most {MAX_STAGES} stages")
    for sources, nodes, blocks in CASES:
        schedule = STRATEGIES["binomial"](step_task(nodes, blocks, range(sources)))
        pools, fixed, complete = capacities(schedule)
        print(
            f"  (k, N, b) = ({sources}, {nodes}, {blocks}): pools {pools:.3f}, fixed pipelines "
            f"{fixed:.3f} ({pools / fixed:.1f} x), complete nodes {complete:.3f} "
            f"({pools / complete:.1f} x)"
        )


if __name__ == "__main__":
    describe("planning", __doc__)
    times()
    growths()
    choices()
    steps()
    serving()
