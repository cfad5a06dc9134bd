"""Many sources: the destinations are split into groups, one source each, that load side by side.

λScale, section 4.2, Algorithm 1: each group starts at another chunk of the model and goes round,
so that the groups hold all blocks between them after b / (number of groups) steps. Here the groups
are balanced (the paper's sizes do not sum to N), and every second chunk runs backwards, so that a
chunk's last blocks and the next chunk's first ones meet: paths then need fewer stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.planner.core.multicast.binomial import binomial_moves
from services.planner.core.multicast.schedule import Move, Schedule, check_inputs


@dataclass(frozen=True)
class Group:
    """A source, the destinations that it feeds, and the order in which it sends the blocks."""

    source: int
    destinations: tuple[int, ...]
    order: tuple[int, ...]


def make_groups(nodes: int, blocks: int, sources: Sequence[int]) -> tuple[Group, ...]:
    """min(k, D) groups for k sources and D destinations, of floor or ceil of D/k destinations.

    With more sources than destinations some sources rest, and each destination has its own.
    """
    check_inputs(nodes, blocks, sources)
    taken = set(sources)
    destinations = [node for node in range(nodes) if node not in taken]
    count = min(len(sources), len(destinations))
    return tuple(
        Group(source, tuple(part), tuple(_shifted(blocks, count, i)))
        for i, (source, part) in enumerate(
            zip(sources, balanced(destinations, count), strict=False)
        )
    )


def balanced(items: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Consecutive runs whose lengths differ by at most one."""
    ends = [len(items) * i // parts for i in range(parts + 1)] if parts else []
    return [items[start:stop] for start, stop in pairwise(ends)]


def _shifted(blocks: int, count: int, first: int) -> list[int]:
    """All blocks, from chunk `first` on and round; odd chunks backwards."""
    chunks = balanced(range(blocks), count)
    turned = [chunk[::-1] if i % 2 else chunk for i, chunk in enumerate(chunks)]
    return [block for chunk in turned[first:] + turned[:first] for block in chunk]


def binomial(nodes: int, blocks: int, sources: Sequence[int]) -> Schedule:
    """The least number of steps: b + ceil(log2(N/k)) - 1, without a redundant move."""
    moves: list[Move] = []
    for group in make_groups(nodes, blocks, sources):
        moves += binomial_moves((group.source, *group.destinations), group.order)
    if len(sources) > 1:
        moves.sort()
    return Schedule(nodes, blocks, tuple(sources), tuple(moves))


def fixed_pipelines(nodes: int, blocks: int, sources: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """λScale's execution pipelines (Algorithm 2): one destination of every group each.

    Nodes left over where the groups' sizes differ join the last pipelines instead of making a
    short one, which could run no sooner than it is complete. For comparison only:
    requests are routed over `paths.plan_paths`.
    """
    groups = make_groups(nodes, blocks, sources)
    if not groups:
        return ()
    count = min(len(group.destinations) for group in groups)
    pipelines: list[list[int]] = [[] for _ in range(count)]
    for group in groups:
        for i, node in enumerate(group.destinations):
            pipelines[min(i, count - 1)].append(node)
    return tuple(tuple(pipeline) for pipeline in pipelines)
