"""Classes of alike nodes, so that paths can be planned over classes instead of nodes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush, heapreplace

from services.planner.core.multicast.groups import balanced
from services.planner.core.pricing import Stage, Stages, loads

LEAST = 0.01
"""Paths of less weight are left out."""
_APART = 40
"""Up to this many nodes are planned for one by one."""
_CLASSES = 64
"""The most classes of incomplete nodes."""
_TINY = 1e-6
_INF = float("inf")


class Classes:
    """Nodes of one speed that hold the same blocks, taken together. The linear programme then has a
    row for each class instead of each node. A thousand nodes that load at the same pace form dozens
    of classes; if their paces differ, nodes that differ in little are put into one class too.

    Dealing paths out to the members of classes loses one or two per cent where a path needs two
    nodes of a class. So in small clusters every node is a class of its own.
    """

    def __init__(
        self, held: Sequence[AbstractSet[int]], blocks: int, speeds: Sequence[float]
    ) -> None:
        """`held`: what each node holds. Complete nodes of one speed are a class by themselves."""
        self._blocks = blocks
        sets = [frozenset(have) for have in held]
        if len(held) <= _APART:
            self._of = list(range(len(held)))
            self.held = sets  # for each class, the blocks that all its members hold
            self.speeds = list(speeds)
        else:
            common = {
                speed: _in_common(
                    [have for have, other in zip(sets, speeds, strict=True) if other == speed],
                    blocks,
                )
                for speed in sorted(set(speeds))
            }
            kinds = [(common[s][have], s) for have, s in zip(sets, speeds, strict=True)]
            classes = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
            self.held = [have for have, _ in classes]
            self.speeds = [speed for _, speed in classes]
            self._of = [classes[kind] for kind in kinds]
        self.members: list[list[int]] = [[] for _ in self.held]
        for node, i in enumerate(self._of):
            self.members[i].append(node)

    def path_of(self, stages: Stages) -> Stages:
        """The path over classes that corresponds to a path over nodes."""
        return tuple((self._of[node], start, stop) for node, start, stop in stages)

    def deal(
        self, packed: Mapping[Stages, float], previous: Mapping[Stages, float], free: list[float]
    ) -> dict[Stages, float]:
        """Turns weights of paths over classes into weights of paths over nodes.

        Previous paths go on where they fit. New paths take the nodes that are most `free` (for each
        node, what is left of it; it is changed here).
        """
        left = dict(packed)
        hand = _Hand(self._blocks, free)
        order = Freest(self.members, free)
        # First as much as they had, so that no path takes a node from another; then more.
        for most in previous, dict.fromkeys(previous, _INF):
            for stages, limit in most.items():
                of = self.path_of(stages)
                if left.get(of, 0.0) > 0:
                    left[of] -= hand.give(stages, min(limit, left[of]))
        # A path that needs two nodes of a class comes while these are free, and takes them in turn.
        for of in sorted(left, key=self._turns, reverse=True):
            turn = left[of] / self._turns(of)
            given = _INF
            while left[of] > LEAST and given > _TINY:
                given = hand.give(order.path(of), min(turn, left[of]))
                left[of] -= given
        return hand.weights

    def _turns(self, of: Stages) -> int:
        """Into how many parts a path is dealt out: the number of members, if it needs two of a
        class."""
        classes = [i for i, _, _ in of]
        return max(len(self.members[i]) if classes.count(i) > 1 else 1 for i in classes)


class Freest:
    """Finds the freest member of a class, the first among equals. Members only become less free, so
    an entry that is out of date stands too early, and is put back when its turn comes."""

    def __init__(self, members: Sequence[Sequence[int]], free: Sequence[float]) -> None:
        self._free = free
        self._heaps = [
            [(-free[node], index, node) for index, node in enumerate(nodes)] for nodes in members
        ]
        for heap in self._heaps:
            heapify(heap)

    def path(self, of: Stages) -> Stages:
        """The path over the freest nodes of these classes, no node twice."""
        stages: list[Stage] = []
        for i, start, stop in of:
            used = {node for node, _, _ in stages}
            stages.append((self._of_class(self._heaps[i], used), start, stop))
        return tuple(stages)

    def _of_class(self, heap: list[tuple[float, int, int]], used: AbstractSet[int]) -> int:
        passed: list[tuple[float, int, int]] = []
        while True:
            known, index, node = heap[0]
            if -known != self._free[node]:
                heapreplace(heap, (-self._free[node], index, node))
            elif node in used:
                passed.append(heappop(heap))
            else:
                break
        for each in passed:
            heappush(heap, each)
        return node


class _Hand:
    """Weights given to paths over nodes, within what is free of each node."""

    def __init__(self, blocks: int, free: list[float]) -> None:
        self.weights: dict[Stages, float] = {}
        self._blocks = blocks
        self._free = free

    def give(self, stages: Stages, most: float) -> float:
        """Gives as much as fits. A weight too small to be worth a path is lost."""
        load = loads(stages, self._blocks)
        weight = min([most, *(self._free[node] / share for node, share in load.items())])
        for node, share in load.items():
            self._free[node] -= weight * share
        if weight > LEAST:
            self.weights[stages] = self.weights.get(stages, 0.0) + weight
        return weight


def _in_common(sets: Sequence[frozenset[int]], blocks: int) -> dict[frozenset[int], frozenset[int]]:
    """For each kind of holding, the blocks that its class has in common: the holding itself, unless
    there are too many kinds.

    In that case alike kinds (neighbours in the order by their most common blocks) form one class,
    except for the kind of the complete nodes.
    """
    counts, holders = Counter(sets), Counter[int]()
    for have, count in counts.items():
        for block in have:
            holders[block] += count
    kinds = sorted(
        (have for have in counts if len(have) < blocks),
        key=lambda have: sorted((-holders[block], block) for block in have),
    )
    common = {have: have for have in counts if len(have) == blocks}
    for indices in balanced(range(len(kinds)), min(len(kinds), _CLASSES)):
        run = [kinds[i] for i in indices]
        common |= dict.fromkeys(run, frozenset.intersection(*run))
    return common
