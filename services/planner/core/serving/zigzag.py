"""Live scaling (BlitzScale, section 5.2): a target runs the layers it has, a source the rest.

BlitzScale splits batch by batch. Here requests are routed one by one, so the rule becomes a path of
two stages for each target, over a complete node. It is made for chains, in which a target loads
from the first block on.
"""

from collections import Counter
from collections.abc import Mapping
from heapq import heapify, heapreplace

from services.planner.core.paths import REPLICA_FLOOR, WeightedPath, run_end
from services.planner.core.serving.loading import Loading, beside_replicas


def live_scaling(loading: Loading) -> tuple[WeightedPath, ...]:
    """For each target the path (blocks up to the first that it lacks | a complete node), with as
    much weight as both can run. A complete node divides itself evenly among its targets."""
    if loading.max_stages < 2:
        return beside_replicas(loading, ())
    blocks = loading.blocks
    partners = _partners(loading)
    targets = Counter(partners.values())
    found: list[WeightedPath] = []
    for target, source in partners.items():
        first = run_end(loading.held[target], 0)
        share = (1 - REPLICA_FLOOR) / targets[source] * loading.speeds[source]
        weight = min(loading.speeds[target] * blocks / first, share * blocks / (blocks - first))
        found.append(WeightedPath(((target, 0, first), (source, first, blocks)), weight))
    return beside_replicas(loading, found)


def _partners(loading: Loading) -> Mapping[int, int]:
    """Target -> the complete node that it had before, or the one with the fewest targets."""
    replicas = loading.replicas
    targets = [
        node for node, have in enumerate(loading.held) if 0 in have and len(have) < loading.blocks
    ]
    had = {path.stages[0][0]: path.stages[1][0] for path in loading.previous if path.stages[1:]}
    complete = frozenset(replicas)
    partners = {target: had[target] for target in targets if had.get(target) in complete}
    if not replicas:
        return partners
    taken = Counter(partners.values())
    fewest = [(taken[replica], replica) for replica in replicas]
    heapify(fewest)
    for target in targets:
        if target not in partners:
            count, replica = fewest[0]
            partners[target] = replica
            heapreplace(fewest, (count + 1, replica))
    return partners
