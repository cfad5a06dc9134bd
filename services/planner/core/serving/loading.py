"""The input of a serving strategy: who holds what while the model's weights spread."""

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from services.planner.core.paths import REPLICA_FLOOR, WeightedPath
from services.planner.core.pricing import loads


@dataclass(frozen=True, slots=True)
class Loading:
    held: Sequence[AbstractSet[int]]
    """The blocks that each node holds now."""
    blocks: int
    speeds: Sequence[float]
    """The throughput of each node alone, once it is complete, in units of an ordinary node."""
    sources: AbstractSet[int]
    """Nodes that were complete before the loading began."""
    max_stages: int
    hop_cost: float
    """The share of a pass through the model that one more stage costs."""
    previous: tuple[WeightedPath, ...] = ()
    """Paths that serve now."""

    @property
    def replicas(self) -> list[int]:
        """Complete nodes."""
        return [node for node, have in enumerate(self.held) if len(have) == self.blocks]


ServingStrategy = Callable[[Loading], tuple[WeightedPath, ...]]
"""The paths that take new requests, with their weights. No node's load exceeds its speed, no node
stands in a path twice, and every complete node has a path of its own. Deterministic, ordered by
stages."""


def beside_replicas(loading: Loading, paths: Iterable[WeightedPath]) -> tuple[WeightedPath, ...]:
    """Adds each complete node as a path of its own, with the share of it that `paths` leave.

    That share is at least `REPLICA_FLOOR`: a path that would leave less gets less weight.
    """
    speeds = loading.speeds
    spare = {node: speeds[node] for node in loading.replicas}
    chosen: list[WeightedPath] = []
    for path in paths:
        load = loads(path.stages, loading.blocks)
        limits = [
            (spare[node] - REPLICA_FLOOR * speeds[node]) / load[node]
            for node in load
            if node in spare
        ]
        weight = min([path.weight, *limits])
        if weight > 0:
            chosen.append(WeightedPath(path.stages, weight))
            for node in load.keys() & spare.keys():
                spare[node] -= weight * load[node]
    alone = [WeightedPath(((node, 0, loading.blocks),), left) for node, left in spare.items()]
    return tuple(sorted(chosen + alone, key=lambda path: path.stages))
