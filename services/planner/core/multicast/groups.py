"""Several sources: the destinations are split into groups, one for each source, that load side by
side.

λScale, section 4.2, Algorithm 1: each group starts at another chunk of the model and goes round, so
that the groups hold all blocks between them after b / (number of groups) steps. Here the groups are
balanced (the paper's sizes do not sum to N). And every second chunk is sent backwards, so that a
chunk's last blocks and the next chunk's first ones meet: paths then need fewer stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.planner.core.multicast.binomial import pipeline
from services.planner.core.multicast.schedule import Move, Schedule, by_step, check_inputs


@dataclass(frozen=True)
class Group:
    """A source, the destinations that it feeds, and the order in which it sends the blocks."""

    source: int
    destinations: tuple[int, ...]
    order: tuple[int, ...]


def make_groups(nodes: int, blocks: int, sources: Sequence[int]) -> tuple[Group, ...]:
    """The groups of a cluster of equal nodes. BadInput as in `check_inputs`."""
    check_inputs(nodes, blocks, sources)
    taken = set(sources)
    return split(sources, [node for node in range(nodes) if node not in taken], blocks)


def split(sources: Sequence[int], destinations: Sequence[int], blocks: int) -> tuple[Group, ...]:
    """min(k, D) groups for k sources and D destinations. Each group has floor or ceil of D/k
    destinations.

    With more sources than destinations, each destination has a source of its own and some sources
    rest.
    """
    count = min(len(sources), len(destinations))
    parts = balanced(destinations, count)
    return tuple(
        Group(source, tuple(part), order)
        for source, part, order in zip(sources, parts, orders(blocks, count), strict=False)
    )


def balanced(items: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Consecutive runs whose lengths differ by at most one."""
    ends = [len(items) * i // parts for i in range(parts + 1)] if parts else []
    return [items[start:stop] for start, stop in pairwise(ends)]


def orders(blocks: int, count: int) -> list[tuple[int, ...]]:
    """An order of all blocks for each group: it starts with the group's own chunk and goes round;
    odd chunks run backwards.

    After ceil(b / count) steps the sources together have sent every block.
    """
    chunks = balanced(range(blocks), count)
    turned = [chunk[::-1] if i % 2 else chunk for i, chunk in enumerate(chunks)]
    return [
        tuple(block for chunk in turned[first:] + turned[:first] for block in chunk)
        for first in range(count)
    ]


def binomial(nodes: int, blocks: int, sources: Sequence[int]) -> Schedule:
    """A schedule with the fewest steps on equal links, b + ceil(log2(N/k)) - 1, and no redundant
    move."""
    moves = binomial_moves(make_groups(nodes, blocks, sources))
    return Schedule(nodes, blocks, tuple(sources), tuple(moves))


def binomial_moves(groups: Sequence[Group]) -> list[Move]:
    """One binomial pipeline for each group, in order of steps."""
    moves: list[Move] = []
    for group in groups:
        moves += pipeline([group.source], group.destinations, group.order).moves
    return by_step(moves) if len(groups) > 1 else moves


def head_moves(groups: Sequence[Group]) -> list[Move]:
    """Each source feeds only the head of its group, and the head feeds the group, a step behind.

    The heads together hold every block at step ceil(b / groups); no set of one node from each group
    can be earlier. All nodes are complete at b + ceil(log2(L - 1)) for L nodes in a group, the
    source included. That is at most a step after the optimum, and the optimum itself if L is 2^m +
    1.
    """
    moves: list[Move] = []
    for group in groups:
        head, *others = group.destinations
        moves += pipeline([group.source], [head], group.order).moves
        moves += pipeline([head], others, group.order, start=1).moves
    return by_step(moves)


def fixed_pipelines(nodes: int, blocks: int, sources: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """λScale's execution pipelines (Algorithm 2), which have one destination of every group each.

    If the groups' sizes differ, the nodes left over join the last pipelines, since a short pipeline
    could run no sooner than it is complete. For comparison only: requests are routed over
    `paths.plan_paths`.
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
