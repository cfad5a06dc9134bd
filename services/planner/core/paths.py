"""Paths over pools of holders: how nodes that hold parts of a model serve it together.

λScale (Algorithm 2) and FaaScale make fixed groups of destinations. Here any node may run any block
that it holds, also complete nodes and busy sources. So the capacity reaches its upper bound, min
over sets S of blocks of b |holders of S| / |S|, more often and sooner. A request keeps its path for
life. Stages are contiguous and few, because each stage costs latency.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from services.planner.core.classes import LEAST, Classes
from services.planner.core.packing import Packing
from services.planner.core.pricing import Pricer, Stages, loads
from shared.errors import BadInput

_PASSES = 24
"""The most rounds of column generation. Small clusters need fewer than 10. At 64 nodes the limit
costs a few per cent of capacity at worst, which the next call, beginning from `previous`, wins
back."""
_TOLERANCE = 0.01
"""Columns that gain less than this are not worth a change."""
_EFFORT = 5_000_000
"""The most numbers that packing changes, which takes about half a second. The solution is then
close to the best."""
HOP_COST = 0.15
"""The price of one more stage of a path, as a share of the path's throughput. A token takes about a
pass on each node of the path. So requests there have fewer tokens when loading ends, where most of
them are run anew, and the nodes' passes carry fewer rows (docs/planning.md)."""
REPLICA_FLOOR = 0.05
"""The share of itself that a complete node keeps for requests that it serves alone, so that its
running requests are not cut off."""


@dataclass(frozen=True)
class WeightedPath:
    stages: Stages
    """In order, covering every block once."""
    weight: float
    """The throughput given to the path, in units of one complete node of speed 1."""


def plan_paths(
    held: Sequence[AbstractSet[int]],
    blocks: int,
    *,
    max_stages: int,
    speeds: Sequence[float] | None = None,
    hop_cost: float = HOP_COST,
    previous: Iterable[WeightedPath] = (),
    keep_gain: float = 0.05,
    replica_floor: float = REPLICA_FLOOR,
) -> tuple[WeightedPath, ...]:
    """The paths of the largest total weight for which no node's load exceeds its speed.

    A node's load is the sum over paths of weight x (its blocks) / blocks. `held[n]` is what node n
    holds (nothing for a node that is gone), `speeds[n]` its throughput when it runs all blocks
    alone, in units of an ordinary node (1 for all unless given). `hop_cost` is the capacity, for
    each unit of a path, that may be given up to save a hop. A path of `previous` that can still
    run, on some node that is not complete, is dropped only if that gains more than `keep_gain`.
    Every complete node keeps a path of its own, with at least the share `replica_floor` of its
    speed. No node stands in a path twice. The result is deterministic and ordered by stages. It is
    empty if no path of at most `max_stages` stages exists.
    """
    if blocks < 1 or max_stages < 1:
        raise BadInput(f"{blocks} blocks and {max_stages} stages: both must be at least 1")
    speeds = [1.0] * len(held) if speeds is None else speeds
    classes = Classes(held, blocks, speeds)
    old = {
        path.stages: path.weight
        for path in previous
        if _runs(path.stages, held, blocks, max_stages)
    }
    known = [
        stages
        for stages in dict.fromkeys(map(classes.path_of, old))
        if _runs(stages, classes.held, blocks, max_stages)
    ]
    complete = [len(have) == blocks for have in classes.held]
    alone = [((i, 0, blocks),) for i, whole in enumerate(complete) if whole]
    kept = {stages for stages in known if not all(complete[i] for i, _, _ in stages)}
    counts = [len(members) for members in classes.members]

    def value(stages: Stages) -> float:
        return 1 - hop_cost * (len(stages) - 1) + (keep_gain if stages in kept else 0.0)

    packed = _pack(
        Pricer(classes.held, blocks, counts=counts, max_stages=max_stages, hop_cost=hop_cost),
        [
            n * speed * (1 - replica_floor * whole)
            for n, speed, whole in zip(counts, classes.speeds, complete, strict=True)
        ],
        tuple(dict.fromkeys([*known, *alone])),
        value,
    )
    floors = {
        node: replica_floor * speeds[node] for node, have in enumerate(held) if len(have) == blocks
    }
    free = [speed - floors.get(node, 0.0) for node, speed in enumerate(speeds)]
    weights = classes.deal(packed, old, free)
    for node, floor in floors.items():
        lone = ((node, 0, blocks),)
        weights[lone] = weights.get(lone, 0.0) + floor
    return _feasible(weights, blocks, speeds)


def run_end(have: AbstractSet[int], start: int) -> int:
    """The first block from `start` on that is not held."""
    stop = start
    while stop in have:
        stop += 1
    return stop


def _pack(
    pricer: Pricer,
    capacities: Sequence[float],
    kept: Sequence[Stages],
    value: Callable[[Stages], float],
) -> dict[Stages, float]:
    """Column generation: cheap paths at the packing's prices enter it until none gains enough."""
    packing: Packing[Stages] = Packing(capacities)

    def enter(stages: Stages) -> bool:
        load = loads(stages, pricer.blocks)
        gains = packing.gain(load, value(stages)) > _TOLERANCE
        if gains:
            packing.enter(stages, load, value(stages))
        return gains

    limit = 1 - _TOLERANCE
    for _ in range(_PASSES):
        if packing.work > _EFFORT:
            break
        if not sum(map(enter, (*kept, *pricer.cheap_paths(packing.prices, limit)))):
            cheapest = pricer.cheapest_path(limit)
            if cheapest is None or not enter(cheapest):
                break
    return dict(packing.solution())


def _feasible(
    weights: Mapping[Stages, float], blocks: int, speeds: Sequence[float]
) -> tuple[WeightedPath, ...]:
    """The paths without tiny weights, scaled so that rounding overloads no node."""
    totals: dict[int, float] = {}
    for stages, weight in weights.items():
        for node, load in loads(stages, blocks).items():
            totals[node] = totals.get(node, 0.0) + load * weight
    scale = 1 / max([1.0, *(total / speeds[node] for node, total in totals.items())])
    return tuple(
        WeightedPath(stages, weight * scale)
        for stages, weight in sorted(weights.items())
        if weight >= LEAST
    )


def _runs(stages: Stages, held: Sequence[AbstractSet[int]], blocks: int, max_stages: int) -> bool:
    """Whether the path can run on these holdings."""
    ends = [0, *(stop for _, _, stop in stages)]
    return (
        len(stages) <= max_stages
        and ends[-1] == blocks
        and all(start == end for (_, start, _), end in zip(stages, ends, strict=False))
        and all(
            node < len(held) and held[node] >= set(range(start, stop))
            for node, start, stop in stages
        )
    )
