"""The binomial pipeline from one node to any number, in b + ceil(log2 N) - 1 steps: the optimum.

Source: Ganesan and Seshadri 2005 (hypercube and twins); RDMC 2018 uses it for powers of two.

The nodes sit on the V = 2^h vertices of a hypercube, h = floor(log2 N), the source alone on
vertex 0. In step t (from 0) every vertex sends to its neighbour across dimension t mod h. Where N
is no power of two, N - V vertices hold two nodes, twins: in each step one of them is the vertex's
Receiver and the other its Sender, and the Receiver also hands its twin a block that it lacks.

The source takes nothing in, so its neighbour's Sender rests in every step: an output tap, which
can hand the blocks on, in order, to somebody outside. What comes out of a tap can feed another
pipeline as a source does, since the source needs not be one node (see `taps.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.planner.core.multicast.schedule import Move

_Exchange = tuple[int, int, int]
"""(v, w, shift): in a step t of its dimension, v sends virtual block t + shift to w."""


@dataclass(frozen=True)
class Pipeline:
    moves: list[Move]
    """In order of their steps, the first of which is `start` + 1."""
    taps: Sequence[int]
    """taps[m] holds order[m] and sends nothing in step start + lag + m + 1."""
    lag: int
    """floor(log2 N): steps from the source's sending of a block to the tap's."""


def pipeline(
    roots: Sequence[int], nodes: Sequence[int], order: Sequence[int | None], start: int = 0
) -> Pipeline:
    """The blocks from a source to nodes that hold nothing: N - 1 of them.

    The source may be one node or another in every step: roots[m] sends order[m] in step
    start + m + 1 (nothing, where that is None), and the last of them the last block in up to
    floor(log2 N) steps after that. No block is sent to its holder. Where every step has its block,
    the nodes hold all between them at step start + len(order).
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

    That is what came in the step before; or, if it was the Sender then (roles change after a step
    of a set bit), what it got when it last was the Receiver in such a step.
    """
    back = 1
    if v >> ((i - 1) % h) & 1:
        back = next(j for j in range(2, h + 2) if v >> ((i - j) % h) & 1)
    return _shift(v, (i - back) % h, h) - back


class _Build:
    """The state of the construction: which twin receives on each vertex, and who has finished.

    A vertex gets each virtual block once, so only of the last block, which stands in for all
    later ones, it must be remembered who holds it.
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
        """From src[v] to dst[w] for every exchange. (Most of the time of planning goes by here.)"""
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
