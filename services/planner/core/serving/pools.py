"""Pools of holders: any node may run any block that it holds (see `paths`)."""

from dataclasses import replace

from services.planner.core.paths import WeightedPath, plan_paths
from services.planner.core.serving.loading import Loading, beside_replicas

_WORTH = 0.25
"""Complete nodes serve over paths as much as they can only if paths add at least this share to
their capacity. It is about what a hop adds to the time of a decode step."""


def pools(loading: Loading) -> tuple[WeightedPath, ...]:
    """Complete nodes and busy sources are stages like any other node."""
    return beside_replicas(loading, _paths(loading))


def pools_of_targets(loading: Loading) -> tuple[WeightedPath, ...]:
    """Only destinations are stages. Sources send, and serve alone (λScale)."""
    held = [
        frozenset[int]() if node in loading.sources else have
        for node, have in enumerate(loading.held)
    ]
    return beside_replicas(loading, _paths(replace(loading, held=held)))


def _paths(loading: Loading) -> list[WeightedPath]:
    """Paths of several stages.

    The plan of the most capacity may take all of the complete nodes for paths, even where that
    gains little and makes every request slower. So the weights of paths are scaled by the gain, as
    a share of the replicas' capacity, over `_WORTH` (at most by 1). Paths open with the first block
    that helps, and grow with the gain.
    """
    planned = plan_paths(
        loading.held,
        loading.blocks,
        speeds=loading.speeds,
        max_stages=loading.max_stages,
        hop_cost=loading.hop_cost,
        previous=loading.previous,
    )
    replicas = sum(loading.speeds[node] for node in loading.replicas)
    gain = sum(path.weight for path in planned) - replicas
    share = max(0.0, min(1.0, gain / (_WORTH * replicas))) if replicas else 1.0
    return [
        WeightedPath(path.stages, path.weight * share) for path in planned if len(path.stages) > 1
    ]
