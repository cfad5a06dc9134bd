"""Classes of alike nodes, which paths are planned for in place of nodes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from services.planner.core.multicast.groups import balanced
from services.planner.core.pricing import Stage, Stages, loads

LEAST = 0.01
"""Paths of less weight are left out."""
_APART = 40
"""Most nodes that are planned for one by one."""
_CLASSES = 64
"""Most classes of nodes that are not complete."""
_TINY = 1e-6
_INF = float("inf")


class Classes:
    """Nodes that hold the same blocks, taken together: the linear programme then has a row for
    each class instead of each node. Of a thousand nodes that load at the same pace there are
    dozens of classes; where paces differ, nodes that differ in little are one class too.

    Dealing paths out to the members loses a per cent or two where a path needs two nodes of a
    class, so that in small clusters every node is a class of its own.
    """

    def __init__(self, held: Sequence[AbstractSet[int]], blocks: int) -> None:
        """`held`: what nodes hold. Complete nodes are in a class by themselves."""
        self._blocks = blocks
        sets = [frozenset(have) for have in held]
        if len(held) <= _APART:
            self._of = list(range(len(held)))
            self.held = sets  # by class: what all of its members hold
        else:
            common = _in_common(sets, blocks)
            self.held = list(dict.fromkeys(common.values()))
            self._of = [self.held.index(common[have]) for have in sets]
        self.members: list[list[int]] = [[] for _ in self.held]
        for node, i in enumerate(self._of):
            self.members[i].append(node)

    def path_of(self, stages: Stages) -> Stages:
        """Of classes, for a path of nodes."""
        return tuple((self._of[node], start, stop) for node, start, stop in stages)

    def deal(
        self, packed: Mapping[Stages, float], previous: Mapping[Stages, float], free: list[float]
    ) -> dict[Stages, float]:
        """Weights of paths of nodes, from those of paths of classes.

        Previous ones go on where they fit; new ones take the nodes that are most `free` (by node,
        what is left of it; changed here).
        """
        left = dict(packed)
        hand = _Hand(self._blocks, free)
        # First as much as they had, so that one does not take a node from another; then more.
        for most in previous, dict.fromkeys(previous, _INF):
            for stages, limit in most.items():
                of = self.path_of(stages)
                if left.get(of, 0.0) > 0:
                    left[of] -= hand.give(stages, min(limit, left[of]))
        # What needs two nodes of a class comes while these are free, and lets all take turns.
        for of in sorted(left, key=self._turns, reverse=True):
            turn = left[of] / self._turns(of)
            given = _INF
            while left[of] > LEAST and given > _TINY:
                given = hand.give(self._freest(of, free), min(turn, left[of]))
                left[of] -= given
        return hand.weights

    def _turns(self, of: Stages) -> int:
        """In how many parts a path is dealt out: as many as members where it needs two of them."""
        classes = [i for i, _, _ in of]
        return max(len(self.members[i]) if classes.count(i) > 1 else 1 for i in classes)

    def _freest(self, of: Stages, free: Sequence[float]) -> Stages:
        stages: list[Stage] = []
        for i, start, stop in of:
            used = {node for node, _, _ in stages}
            ways = (node for node in self.members[i] if node not in used)
            stages.append((max(ways, key=free.__getitem__), start, stop))
        return tuple(stages)


class _Hand:
    """Weights given to paths of nodes, within what is free of each node."""

    def __init__(self, blocks: int, free: list[float]) -> None:
        self.weights: dict[Stages, float] = {}
        self._blocks = blocks
        self._free = free

    def give(self, stages: Stages, most: float) -> float:
        """As much as fits; too little to be worth a path is lost."""
        load = loads(stages, self._blocks)
        weight = min([most, *(self._free[node] / share for node, share in load.items())])
        for node, share in load.items():
            self._free[node] -= weight * share
        if weight > LEAST:
            self.weights[stages] = self.weights.get(stages, 0.0) + weight
        return weight


def _in_common(sets: Sequence[frozenset[int]], blocks: int) -> dict[frozenset[int], frozenset[int]]:
    """What each kind of holding has in common with its class: all, unless there are too many.

    Then kinds that are alike (neighbours in the order by their most common blocks) are taken
    together, but for that of the complete nodes.
    """
    holders = Counter(block for have in sets for block in have)
    kinds = sorted(
        {have for have in sets if len(have) < blocks},
        key=lambda have: sorted((-holders[block], block) for block in have),
    )
    common = {have: have for have in sets if len(have) == blocks}
    for indices in balanced(range(len(kinds)), min(len(kinds), _CLASSES)):
        run = [kinds[i] for i in indices]
        common |= dict.fromkeys(run, frozenset.intersection(*run))
    return common
