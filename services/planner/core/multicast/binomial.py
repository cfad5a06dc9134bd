"""The binomial pipeline from one node to any number, in b + ceil(log2 N) - 1 steps: the optimum.

Source: Ganesan and Seshadri 2005 (hypercube and twins). RDMC 2018 uses it for powers of two.

The nodes sit on the V = 2^h vertices of a hypercube, h = floor(log2 N), with the source alone on
vertex 0. In step t (from 0) every vertex sends to its neighbour across dimension t mod h. If N is
no power of two, N - V vertices hold two nodes, called twins. In each step one twin is the vertex's
Receiver and the other its Sender, and the Receiver also hands its twin a block that it lacks.

The source takes nothing in, so its neighbour's Sender has nothing to send in any step. It is an
output tap, which can pass the blocks on, in order, to a node outside. A tap can feed another
pipeline as a source does, since the source need not be one node (see `taps.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.planner.core.multicast.schedule import Move

_Exchange = tuple[int, int, int]
"""(v, w, shift): in a step t of its dimension, v sends virtual block t + shift to w."""


@dataclass(frozen=True)
class Pipeline:
    moves: list[Move]
    """In order of their steps. The first step is `start` + 1."""
    taps: Sequence[int]
    """taps[m] holds order[m], and sends nothing in step start + lag + m + 1."""
    lag: int
    """floor(log2 N): the steps between the source's sending of a block and the tap's."""


def pipeline(
    roots: Sequence[int], nodes: Sequence[int], order: Sequence[int | None], start: int = 0
) -> Pipeline:
    """Sends the blocks from a source to N - 1 nodes that hold nothing.

    A different node may be the source in every step: roots[m] sends order[m] in step start + m + 1
    (nothing if that is None). The last root sends the last block in up to floor(log2 N) further
    steps. No block is sent to a node that holds it. If every step has a block, the nodes together
    hold all blocks at step start + len(order).
    """
    if not nodes:
        return Pipeline([], roots, 0)
    build = _Build(roots, nodes, order, start)
    build.run()
    return Pipeline(build.moves, build.taps, build.h)


def _shift(w: int, i: int, h: int) -> int:
    """In a step t of dimension i, vertex w gets virtual block t + shift (none if negative)."""
    if not w >> i & 1:
        return -h
    ahead = (w >> (i + 1)) | (w << (h - i - 1))  # bit j-1 is bit (i+j) mod h of w
    return (ahead & -ahead).bit_length() - h


def _twin_shift(v: int, i: int, h: int) -> int:
    """In a step t of dimension i, the Receiver of vertex v hands its twin virtual block t + shift.

    It is the block that came in the step before. If the node was the Sender then (roles change
    after a step of a set bit), it is the block that it got when it was last the Receiver in such a
    step.
    """
    back = 1
    if v >> ((i - 1) % h) & 1:
        back = next(j for j in range(2, h + 2) if v >> ((i - j) % h) & 1)
    return _shift(v, (i - back) % h, h) - back


class _Build:
    """The state of the construction: which twin receives on each vertex, and which nodes have
    finished.

    A vertex gets each virtual block once. Only for the last block, which stands in for all later
    ones, the construction must remember who holds it.
    """

    def __init__(
        self, roots: Sequence[int], nodes: Sequence[int], order: Sequence[int | None], start: int
    ) -> None:
        self.h = h = (1 + len(nodes)).bit_length() - 1
        vertices = 1 << h
        twins = 1 + len(nodes) - vertices
        shared = range(1, twins + 1)
        self.roots = roots
        self.order = order
        self.start = start
        self.receiver = [roots[0], *nodes[: vertices - 1]]
        self.sender = [roots[0], *nodes[vertices - 1 :], *nodes[twins : vertices - 1]]
        self.finished: set[int] = set()
        self.exchanges: list[list[_Exchange]] = [
            [(w ^ (1 << i), w, _shift(w, i, h)) for w in range(1, vertices)] for i in range(h)
        ]
        self.hand_overs = [[(v, v, _twin_shift(v, i, h)) for v in shared] for i in range(h)]
        self.swaps = [[v for v in shared if v >> i & 1] for i in range(h)]
        self.moves: list[Move] = []
        self.taps: list[int] = []

    def run(self) -> None:
        for t in range(len(self.order) + self.h):
            i = t % self.h
            self.sender[0] = self.roots[min(t, len(self.roots) - 1)]
            self._send(t, self.sender, self.exchanges[i], self.receiver)
            self._send(t, self.receiver, self.hand_overs[i], self.sender)
            if t >= self.h:
                self.taps.append(self.sender[1 << i])
            for v in self.swaps[i]:
                self.receiver[v], self.sender[v] = self.sender[v], self.receiver[v]

    def _send(
        self, t: int, src: Sequence[int], exchanges: Iterable[_Exchange], dst: Sequence[int]
    ) -> None:
        """Sends from src[v] to dst[w] for every exchange. (This takes most of the time of
        planning.)"""
        step, order, moves = self.start + t + 1, self.order, self.moves
        last = len(order) - 1
        for v, w, shift in exchanges:
            virtual = t + shift
            if virtual < 0:
                continue
            if virtual >= last:
                if dst[w] in self.finished:
                    continue
                self.finished.add(dst[w])
                virtual = last
            block = order[virtual]
            if block is not None:
                moves.append(Move(step, src[v], dst[w], block))
