"""Pools of holders: any node may run any block that it holds (see `paths`)."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from services.planner.core.paths import REPLICA_FLOOR, WeightedPath, plan_paths
from services.planner.core.serving.loading import Loading, beside_replicas
from services.planner.core.serving.zigzag import live_scaling

_WORTH = 0.25
"""Complete nodes serve over paths as much as they can only if paths add at least this share to
their capacity. It is about what a hop adds to the time of a decode step."""


def pools(loading: Loading) -> tuple[WeightedPath, ...]:
    """Complete nodes and busy sources are stages like any other node."""
    return beside_replicas(loading, _opened(loading, _chosen(loading)))


def _chosen(loading: Loading) -> tuple[WeightedPath, ...]:
    """Pairs as in live scaling, where each node that loads can have a complete one for itself, or
    where other paths would hardly serve more. (So it is if all that load hold the same first
    blocks, such as copies that wake.) No request has more than two stages then, and one that began
    there need not begin again when its nodes are complete.

    Not while requests run on other paths: these would end."""
    if not _only_pairs(loading):
        return _planned(loading)
    pairs = live_scaling(loading)
    if len(loading.held) <= 2 * len(loading.replicas):
        return pairs
    planned = _planned(loading)
    # In pairs, complete nodes keep the floor for what they serve alone; else they may not have to.
    return pairs if _sum(pairs) >= (1 - REPLICA_FLOOR) * _sum(planned) else planned


def _only_pairs(loading: Loading) -> bool:
    """Whether all paths that serve now are of a node and a complete one."""
    shared = [path.stages for path in loading.previous if len(path.stages) > 1]
    complete = frozenset(loading.replicas)
    return all(len(stages) == 2 and stages[1][0] in complete for stages in shared)


def _sum(paths: Iterable[WeightedPath]) -> float:
    return sum(path.weight for path in paths)


def pools_of_targets(loading: Loading) -> tuple[WeightedPath, ...]:
    """Only destinations are stages. Sources send, and serve alone (λScale)."""
    held = [
        frozenset[int]() if node in loading.sources else have
        for node, have in enumerate(loading.held)
    ]
    targets = replace(loading, held=held)
    return beside_replicas(loading, _opened(targets, _planned(targets)))


def _planned(loading: Loading) -> tuple[WeightedPath, ...]:
    """The plan of the most capacity, which may have complete nodes alone as well."""
    return plan_paths(
        loading.held,
        loading.blocks,
        speeds=loading.speeds,
        max_stages=loading.max_stages,
        hop_cost=loading.hop_cost,
        previous=loading.previous,
    )


def _opened(loading: Loading, planned: Collection[WeightedPath]) -> list[WeightedPath]:
    """Paths of several stages.

    The plan of the most capacity may take all of the complete nodes for paths, even where that
    gains little and makes every request slower. So the weights of paths are scaled by the gain, as
    a share of the replicas' capacity, over `_WORTH` (at most by 1). Paths open with the first block
    that helps, and grow with the gain.
    """
    replicas = sum(loading.speeds[node] for node in loading.replicas)
    gain = _sum(planned) - replicas
    share = max(0.0, min(1.0, gain / (_WORTH * replicas))) if replicas else 1.0
    return [
        WeightedPath(path.stages, path.weight * share) for path in planned if len(path.stages) > 1
    ]
