"""The binomial pipeline from one node to any number, in b + ceil(log2 N) - 1 steps: the optimum.

Source: Ganesan and Seshadri 2005 (hypercube and twins); RDMC 2018 uses it for powers of two.

The nodes sit on the V = 2^h vertices of a hypercube, h = floor(log2 N), the source alone on
vertex 0. In step t (from 0) every vertex sends to its neighbour across dimension t mod h. Where N
is no power of two, N - V vertices hold two nodes, twins: in each step one of them is the vertex's
Receiver and the other its Sender, and the Receiver also hands its twin a block that it lacks.
"""

from collections.abc import Sequence

from services.planner.core.multicast.schedule import Move

_Exchange = tuple[int, int, int]
"""(v, w, shift): in a step t of its dimension, v sends virtual block t + shift to w."""


def binomial_moves(nodes: Sequence[int], order: Sequence[int]) -> list[Move]:
    """Moves from nodes[0], which holds all blocks, to the other nodes, which hold none.

    `order` is the order in which blocks leave the source. No block is sent to its holder. At step
    len(order) the destinations hold every block between them.
    """
    if len(nodes) < 2:
        return []
    return _Pipeline(nodes, order).run()


def _exchanges(h: int) -> list[list[_Exchange]]:
    """For every dimension, what each vertex but the source's gets, and from which neighbour."""
    return [
        [(w ^ (1 << i), w, _shift(w, i, h)) for w in range(1, 1 << h)] for i in range(h)
    ]  # fmt: skip


def _shift(w: int, i: int, h: int) -> int:
    """In a step t of dimension i, vertex w gets virtual block t + shift (none if negative)."""
    if not w >> i & 1:
        return -h
    ahead = (w >> (i + 1)) | (w << (h - i - 1))  # bit j-1 is bit (i+j) mod h of w
    return (ahead & -ahead).bit_length() - h


class _Pipeline:
    """The state of the construction: who holds what, and which twin receives on each vertex."""

    def __init__(self, nodes: Sequence[int], order: Sequence[int]) -> None:
        self.h = len(nodes).bit_length() - 1
        vertices = 1 << self.h
        twins = len(nodes) - vertices
        self.nodes = nodes
        self.order = order
        self.shared = range(1, twins + 1)
        """Vertices with two nodes (indices into `nodes`, like everything here)."""
        self.receiver = list(range(vertices))
        self.sender = [0, *range(vertices, len(nodes)), *range(twins + 1, vertices)]
        self.held = [set[int]() for _ in nodes]
        self.exchanges = _exchanges(self.h)
        self.moves: list[Move] = []

    def run(self) -> list[Move]:
        for t in range(len(self.order) + self.h):
            arriving: list[tuple[int, int]] = []
            self._cross(t, arriving)
            self._hand_over(t, arriving)
            for node, block in arriving:
                self.held[node].add(block)
        return self.moves

    def _move(
        self, t: int, src: int, dst: int, block: int, arriving: list[tuple[int, int]]
    ) -> None:
        if block not in self.held[dst]:
            self.moves.append(Move(t + 1, self.nodes[src], self.nodes[dst], block))
            arriving.append((dst, block))

    def _cross(self, t: int, arriving: list[tuple[int, int]]) -> None:
        """Every vertex sends across dimension t mod h; the last block stands in for later ones."""
        last = len(self.order) - 1
        for v, w, shift in self.exchanges[t % self.h]:
            if t + shift >= 0:
                block = self.order[min(t + shift, last)]
                self._move(t, self.sender[v], self.receiver[w], block, arriving)

    def _hand_over(self, t: int, arriving: list[tuple[int, int]]) -> None:
        """A Receiver gives its twin what came last, or, if it was the Sender then (roles change
        after a step of a set bit), what it got when it last was the Receiver in such a step."""
        for v in self.shared:
            got = t - 1 if not self._is_set(v, t - 1) else self._last_set(v, t - 1)
            virtual = got + _shift(v, got % self.h, self.h)
            if got >= 0 and virtual >= 0:
                block = self.order[min(virtual, len(self.order) - 1)]
                self._move(t, self.receiver[v], self.sender[v], block, arriving)
        for v in self.shared:
            if self._is_set(v, t):
                self.receiver[v], self.sender[v] = self.sender[v], self.receiver[v]

    def _is_set(self, v: int, t: int) -> bool:
        return bool(v >> (t % self.h) & 1)

    def _last_set(self, v: int, t: int) -> int:
        """The step before t in which v's bit was last set (negative: none)."""
        return next(s for s in range(t - 1, t - self.h - 1, -1) if self._is_set(v, s))
