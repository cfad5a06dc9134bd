"""What planning costs, and what plans are worth: time, steps, capacity while loading.

Run: .venv/bin/python -m benchmarks.planning. Steps are held against the lower bound, capacity
against the two ways of serving that the papers have: once a node is complete, and over fixed
pipelines of destinations (λScale, Algorithm 2).
"""

import time

from services.planner.core.multicast.fabric import step_task
from services.planner.core.multicast.groups import fixed_pipelines
from services.planner.core.multicast.schedule import Schedule
from services.planner.core.multicast.strategies import STRATEGIES, lower_bound
from services.planner.core.paths import Path, plan_paths

CASES = ((1, 8, 16), (1, 5, 16), (2, 16, 16))
MAX_STAGES = 4


def capacities(schedule: Schedule) -> tuple[float, float, float]:
    """Mean capacity over the loading window as a share of the final one, (paths over pools, fixed
    pipelines, complete nodes only)."""
    nodes, blocks = schedule.nodes, schedule.blocks
    pipelines = fixed_pipelines(nodes, blocks, schedule.sources)
    pools, fixed, complete = 0.0, 0.0, 0.0
    previous: tuple[Path, ...] = ()
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


def main() -> None:
    print("time to make a schedule, 64 blocks (limit: 100 ms at 1,024 nodes)")
    for nodes in (64, 256, 1000, 1024):
        started = time.perf_counter()
        schedule = STRATEGIES["binomial"](step_task(nodes, 64, (0,)))
        took = (time.perf_counter() - started) * 1e3
        bound = lower_bound(nodes, 64, 1)
        print(f"  N = {nodes:5}: {took:6.1f} ms; {schedule.steps} steps, lower bound {bound}")
    print("steps by strategy, 16 blocks")
    for nodes in (5, 8, 16, 64):
        counts = {name: make(step_task(nodes, 16, (0,))).steps for name, make in STRATEGIES.items()}
        bound = lower_bound(nodes, 16, 1)
        ratios = ", ".join(f"{n} {c} ({c / bound:.2f} x)" for n, c in counts.items())
        print(f"  N = {nodes:3}: lower bound {bound}; {ratios}")
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
    main()
