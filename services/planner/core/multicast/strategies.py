"""Every way to multicast, by the name that users give it, and the bound that none can beat."""

from collections.abc import Callable, Mapping, Sequence

from services.planner.core.multicast.baselines import binary_tree, chain
from services.planner.core.multicast.groups import binomial
from services.planner.core.multicast.schedule import Schedule
from shared.errors import BadInput

Strategy = Callable[[int, int, Sequence[int]], Schedule]
"""(nodes, blocks, sources) -> schedule. BadInput where `check_inputs` says so."""

DEFAULT = "binomial"
STRATEGIES: Mapping[str, Strategy] = {
    "binomial": binomial,
    "chain": chain,
    "tree": binary_tree,
}


def strategy(name: str) -> Strategy:
    if name not in STRATEGIES:
        raise BadInput(f"no multicast algorithm {name!r}: use one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def lower_bound(nodes: int, blocks: int, sources: int) -> int:
    """Least steps that any schedule can take: b + ceil(log2(N/k)) - 1 (0 if k = N).

    Holders of any block at best double in a step, so that the last destination gets its first
    block at step ceil(log2(N/k)) or later, and then one block a step.
    """
    if nodes <= sources:
        return 0
    return blocks + (-(-nodes // sources) - 1).bit_length() - 1
