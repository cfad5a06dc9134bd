"""λScale's execution pipelines (Algorithm 2): fixed groups of destinations, one path for each
group."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from services.planner.core.multicast.groups import fixed_pipelines
from services.planner.core.paths import WeightedPath, run_end
from services.planner.core.pricing import Stages
from services.planner.core.serving.loading import Loading, beside_replicas

_WIDTH = 256
"""The most sets of nodes with which the search for a pipeline's path goes on after each stage, the
furthest first. That is all of them for pipelines of up to ten nodes and four stages."""


def pipelines(loading: Loading) -> tuple[WeightedPath, ...]:
    """A pipeline serves as soon as its members together hold all blocks, each member a contiguous
    run, until it is complete. Complete nodes, also sources, serve alone.

    If no source is among the nodes (the sources are in host memory or on disk), the destinations
    form one pipeline.
    """
    found: list[WeightedPath] = []
    for members in _groups(loading):
        held = {node: loading.held[node] for node in members}
        if any(len(have) < loading.blocks for have in held.values()):
            stages = fastest(held, loading.blocks, loading.max_stages)
            if stages is not None and len(stages) > 1:
                weight = min(
                    loading.speeds[node] * loading.blocks / (stop - start)
                    for node, start, stop in stages
                )
                found.append(WeightedPath(stages, weight))
    return beside_replicas(loading, found)


def _groups(loading: Loading) -> Sequence[Sequence[int]]:
    nodes = len(loading.held)
    if loading.sources:
        return fixed_pipelines(nodes, loading.blocks, sorted(loading.sources))
    return [range(nodes)]


def fastest(held: Mapping[int, AbstractSet[int]], blocks: int, max_stages: int) -> Stages | None:
    """Of the paths over these nodes, the one whose longest stage is shortest, with the fewest
    stages among equals; None if there is no path."""
    for longest in range(-(-blocks // max(1, min(len(held), max_stages))), blocks + 1):
        # Among paths over the same nodes, the one that reaches furthest is at least as good as any.
        reach: dict[frozenset[int], Stages] = {frozenset(): ()}
        for _ in range(min(len(held), max_stages)):
            reach = _one_more(reach, held, longest)
            done = [stages for stages in reach.values() if stages[-1][2] == blocks]
            if done:
                return min(done)
    return None


def _one_more(
    reach: Mapping[frozenset[int], Stages], held: Mapping[int, AbstractSet[int]], longest: int
) -> dict[frozenset[int], Stages]:
    further: dict[frozenset[int], Stages] = {}
    for used, stages in reach.items():
        start = stages[-1][2] if stages else 0
        for node, have in held.items():
            stop = min(run_end(have, start), start + longest)
            known = further.get(used | {node})
            if node not in used and stop > start and (known is None or known[-1][2] < stop):
                further[used | {node}] = (*stages, (node, start, stop))
    furthest = sorted(further.items(), key=lambda item: -item[1][-1][2])
    return dict(furthest[:_WIDTH])
