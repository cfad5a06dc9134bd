"""Finds the cheapest paths of stages over the holders of blocks, given each node's price of running
a block.

A dynamic programme from the last block to the first gives the least cost of every suffix. Paths are
then read out of it one after the other, each steered away from the nodes of the paths before it, so
that one pass yields a set of different paths. A node stands in a path at most once (it keeps one KV
cache for a sequence). Here "node" may also be a class of alike nodes, which stands in a path at
most as often as it has members. The dynamic programme ignores this rule. The reading enforces it
and may then miss the cheapest path, so a best-first search has the last word.
"""

import heapq
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

_INF = float("inf")
_STEER = 1.0
"""The price added to a node for each unit of load that paths of the same pass put on it. It is
large enough to separate nodes of nearly equal price, as the first passes over alike nodes need."""


Stage = tuple[int, int, int]
"""(node, start, stop): the node runs blocks start <= block < stop."""
Stages = tuple[Stage, ...]

_State = tuple[float, int, int, float, Stages]
"""A state of the search: (bound on the path's cost, -last block, its node, cost before it,
stages)."""


_EXPANSIONS = 500
"""The most states that the search for one path visits. Tens are usual."""


def loads(stages: Stages, blocks: int) -> dict[int, float]:
    """The load that a unit of a path's weight puts on each of its nodes."""
    load: dict[int, float] = {}
    for node, start, stop in stages:
        load[node] = load.get(node, 0.0) + (stop - start) / blocks
    return load


class Pricer:
    """Finds cheap paths. A path costs the sum over stages of price(node) x blocks / b, plus
    hop_cost for each hop."""

    def __init__(
        self,
        held: Sequence[AbstractSet[int]],
        blocks: int,
        *,
        counts: Sequence[int],
        max_stages: int,
        hop_cost: float,
    ) -> None:
        """`counts`: for each node that is a class, the number of its members; 1 for a single
        node."""
        self.blocks = blocks
        self.counts = counts
        self.max_stages = min(max_stages, blocks)
        self.hop_cost = hop_cost
        self.nodes = len(held)
        self.holders = [
            [node for node, have in enumerate(held) if block in have] for block in range(blocks)
        ]
        self._per_block: list[float] = []
        self._costs: list[list[list[float]]] = []
        """[s-1][block][node]: the least cost of the blocks from this one on, if `node` runs this
        one, in at most s stages."""
        self._tails: list[list[float]] = []
        """[s-1][block]: the least cost of the blocks from this one on after a hop, in fewer than s
        stages."""

    def cheap_paths(self, prices: Sequence[float], limit: float) -> list[Stages]:
        """Paths that cost less than `limit`, at most one from each holder of block 0."""
        self._fill(prices)
        first = self._costs[-1][0]
        load = [0.0] * self.nodes
        paths: list[Stages] = []
        for leader in sorted(self.holders[0], key=first.__getitem__):
            if first[leader] >= limit:
                break
            stages = self._read(leader, load)
            if stages is not None:
                paths.append(stages)
                for node, start, stop in stages:
                    load[node] += (stop - start) / self.blocks / self.counts[node]
        return paths

    def cheapest_path(self, limit: float) -> Stages | None:
        """The cheapest path that costs less than `limit`, at the prices of the last pass.

        The search is best first. Its admissible bound is the cost of the rest as the dynamic
        programme found it.
        """
        first = self._costs[-1][0]
        queue: list[_State] = [
            (first[node], 0, node, 0.0, ((node, 0, 1),))
            for node in self.holders[0]
            if first[node] < limit
        ]
        heapq.heapify(queue)
        for _ in range(_EXPANSIONS):
            if not queue:
                return None
            _, _, node, spent, stages = heapq.heappop(queue)
            if stages[-1][2] == self.blocks:
                return stages
            for state in self._extensions(stages, spent + self._per_block[node]):
                if state[0] < limit:
                    heapq.heappush(queue, state)
        return None

    def _extensions(self, stages: Stages, spent: float) -> Iterator[_State]:
        """All ways to run the next block. `spent` is the cost of the blocks before it."""
        node, start, block = stages[-1]
        left = self.max_stages - len(stages)
        bound = spent + self._costs[left][block][node]
        yield bound, -block, node, spent, (*stages[:-1], (node, start, block + 1))
        if left:
            spent += self.hop_cost
            used = [stage[0] for stage in stages]
            for other in self.holders[block]:
                if other != node and used.count(other) < self.counts[other]:
                    bound = spent + self._costs[left - 1][block][other]
                    yield bound, -block, other, spent, (*stages, (other, block, block + 1))

    def _fill(self, prices: Sequence[float]) -> None:
        per_block = self._per_block = [price / self.blocks for price in prices]
        self._costs, self._tails = [], []
        tails = [_INF] * self.blocks + [0.0]
        for _ in range(self.max_stages):
            self._tails.append(tails)
            costs = self._layer(per_block, tails)
            self._costs.append(costs)
            tails = [min(row, default=_INF) + self.hop_cost for row in costs] + [0.0]

    def _layer(self, per_block: Sequence[float], tails: Sequence[float]) -> list[list[float]]:
        costs: list[list[float]] = []
        after = [_INF] * self.nodes
        for block in range(self.blocks - 1, -1, -1):
            row = [_INF] * self.nodes
            tail = tails[block + 1]
            for node in self.holders[block]:
                stay = after[node]
                row[node] = (stay if stay <= tail else tail) + per_block[node]
            costs.append(row)
            after = row
        costs.reverse()
        return costs

    def _read(self, leader: int, load: Sequence[float]) -> Stages | None:
        """A path from `leader` on; None if every continuation leads through nodes that the path
        already uses."""
        stages: list[Stage] = []
        used = [leader]
        node, start = leader, 0
        for left in range(self.max_stages - 1, -1, -1):
            stop = self._stay(node, start, left)
            stages.append((node, start, stop))
            if stop == self.blocks:
                return tuple(stages)
            if left == 0:
                return None
            costs = self._costs[left - 1][stop]
            ways = [
                n
                for n in self.holders[stop]
                if n != node and costs[n] < _INF and used.count(n) < self.counts[n]
            ]
            if not ways:
                return None
            node, start = min(ways, key=lambda n: costs[n] + _STEER * load[n]), stop
            used.append(node)
        return None

    def _stay(self, node: int, start: int, left: int) -> int:
        """The block at which the node hands over, with `left` stages after its own."""
        costs, tails = self._costs[left], self._tails[left]
        stop = start + 1
        while stop < self.blocks and costs[stop][node] <= tails[stop]:
            stop += 1
        return stop
