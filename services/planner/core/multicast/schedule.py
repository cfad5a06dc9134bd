"""A multicast as data: moves of blocks between nodes, step by step, and the rules that they keep.

Step model (RDMC 2018; λScale, section 4.1): nodes are 0..N-1 and blocks 0..b-1. In one step a node
sends at most one block and receives at most one (full duplex); it sends only what it held at the
end of the step before. Steps count from 1. A block "arrives at step s" if it is held at the end of
step s.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from services.planner.core.multicast.fabric import Fabric
from shared.errors import BadInput, PlanError


class Move(NamedTuple):
    """In step `step`, `src` sends `block` to `dst`. (A tuple: large plans have 10^5 of them.)"""

    step: int
    src: int
    dst: int
    block: int


def by_step(moves: Iterable[Move]) -> list[Move]:
    """The moves in order of steps. Moves of one step keep their order."""
    return sorted(moves, key=_step)


_step = itemgetter(0)


@dataclass(frozen=True)
class Schedule:
    """Moves, in order of their steps, that take every block to every node."""

    nodes: int
    blocks: int
    sources: tuple[int, ...]
    """Nodes that hold every block from the start."""
    moves: tuple[Move, ...]
    own: tuple[int, ...] = ()
    """Destinations that load the model from their own host memory or disk instead."""
    setup_s: float = 0.0
    """Seconds for what must happen first, such as forming a group."""

    @property
    def steps(self) -> int:
        return self.moves[-1].step if self.moves else 0

    @property
    def destinations(self) -> tuple[int, ...]:
        return tuple(node for node in range(self.nodes) if node not in self.sources)

    @cached_property
    def _arrivals(self) -> dict[tuple[int, int], int]:
        first: dict[tuple[int, int], int] = {}
        for move in self.moves:
            first.setdefault((move.dst, move.block), move.step)
        return first

    def arrival(self, node: int, block: int) -> int | None:
        """The step at whose end the node holds the block (0 for sources); None if it never does."""
        return 0 if node in self.sources else self._arrivals.get((node, block))

    def held(self, step: int) -> tuple[frozenset[int], ...]:
        """What every node holds at the end of `step`."""
        every = frozenset(range(self.blocks))
        holdings: list[set[int]] = [set() for _ in range(self.nodes)]
        for move in self.moves:
            if move.step > step:
                break
            holdings[move.dst].add(move.block)
        return tuple(
            every if node in self.sources else frozenset(blocks)
            for node, blocks in enumerate(holdings)
        )


def check_inputs(nodes: int, blocks: int, sources: Sequence[int]) -> None:
    """BadInput unless there are nodes and blocks, and at least one source, and the sources are
    distinct nodes."""
    if nodes < 1 or blocks < 1:
        raise BadInput(f"{nodes} nodes and {blocks} blocks: both must be at least 1")
    if not sources or len(set(sources)) != len(sources):
        raise BadInput(f"sources {list(sources)}: name at least one node, and each only once")
    if not all(0 <= source < nodes for source in sources):
        raise BadInput(f"sources {list(sources)} must be nodes 0..{nodes - 1}")


def check(schedule: Schedule, fabric: Fabric | None = None) -> None:
    """Raises PlanError with the first rule that the schedule breaks. A valid schedule makes all
    nodes complete.

    Nodes of `own` need not get anything, because they load by themselves. With a fabric, its links
    count as well: see `check_moves`.
    """
    check_inputs(schedule.nodes, schedule.blocks, schedule.sources)
    wanted = set(range(schedule.nodes)).difference(schedule.own)
    check_moves(schedule.held(0), schedule.blocks, schedule.moves, wanted, fabric)


def check_moves(
    held: Sequence[Iterable[int]],
    blocks: int,
    moves: Iterable[Move],
    wanted: Iterable[int],
    fabric: Fabric | None = None,
) -> None:
    """Checks moves that start from any holdings and must make the `wanted` nodes complete.
    PlanError.

    Rules: moves are in order of their steps, counted from 1. In a step a node sends at most once
    and receives at most once. It sends only blocks that it has held since the step before, and
    never to a node that holds them. In a fabric, moves within a host take no ports (but a node
    still receives at most once a step over its local link), and a port that may not send does not.
    """
    now = [set(have) for have in held]
    links, arriving, step = _Links(fabric), set[tuple[int, int]](), 0
    for move in moves:
        if move.step < max(step, 1):
            raise PlanError(f"{move} stands after a move of step {step}")
        if move.step > step:
            _land(now, arriving)
            links, arriving, step = _Links(fabric), set(), move.step
        _check_move(move, now, blocks)
        links.take(move)
        if (move.dst, move.block) in arriving:
            raise PlanError(f"{move}: node {move.dst} gets the block from elsewhere as well")
        arriving.add((move.dst, move.block))
    _land(now, arriving)
    for node in sorted(wanted):
        if missing := sorted(set(range(blocks)) - now[node]):
            raise PlanError(f"node {node} never gets blocks {missing}")


class _Links:
    """The ports and local links that the moves of one step take."""

    def __init__(self, fabric: Fabric | None) -> None:
        self._fabric = fabric
        self._senders: set[int] = set()
        self._receivers: set[tuple[int, bool]] = set()
        """(node, over its local link)"""

    def take(self, move: Move) -> None:
        step, src, dst, _ = move
        local = self._fabric is not None and self._fabric.is_local(src, dst)
        if (dst, local) in self._receivers:
            raise PlanError(f"{move}: node {dst} receives twice in step {step}")
        self._receivers.add((dst, local))
        if local:
            return
        if self._fabric is not None and self._fabric.ports[src].out <= 0:
            raise PlanError(f"{move}: node {src} only receives")
        if src in self._senders:
            raise PlanError(f"{move}: node {src} sends twice in step {step}")
        self._senders.add(src)


def _land(now: Sequence[set[int]], arriving: set[tuple[int, int]]) -> None:
    for node, block in arriving:
        now[node].add(block)


def _check_move(move: Move, now: Sequence[set[int]], blocks: int) -> None:
    _, src, dst, block = move
    if not (0 <= src < len(now) and 0 <= dst < len(now) and 0 <= block < blocks) or src == dst:
        raise PlanError(f"{move} does not name two nodes of {len(now)} and a block of {blocks}")
    if block not in now[src]:
        raise PlanError(f"{move}: node {src} does not hold block {block} yet")
    if block in now[dst]:
        raise PlanError(f"{move}: node {dst} holds block {block} already")
