"""Appends to a multicast that runs: newcomers, or what a node did not get as it was planned.

What flows goes on: the moves that are still to come keep their steps. In each step, newcomers get
blocks from ports that these moves leave free, and from each other. So a chain grows at its tail:
its last node feeds the first newcomer, which feeds the next one a step later. A source helps as
soon as its own sends are over. In a binomial pipeline whoever is free in a step feeds a newcomer.

A newcomer stays with the node that feeds it while that is possible, because every change of
partners costs time. With r steps of the running schedule left, b blocks and m newcomers, all is
over in r + b + m - 1 steps or fewer, where no trunk between racks is narrow and one of the nodes
that are complete by then may send. A chain that is appended to at its start takes only about m
steps longer.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet

from services.planner.core.costs import arrival_times
from services.planner.core.multicast.fabric import Task
from services.planner.core.multicast.schedule import Move, by_step
from shared.errors import PlanError

DELAY = 0.01
"""The share of its time by which an arrival may come later in the cost model and still count as
undisturbed."""

_Link = tuple[str, int | str]
"""(way, node or rack)"""


def append(
    held: Sequence[AbstractSet[int]],
    running: Sequence[Move],
    wanted: Mapping[int, AbstractSet[int]],
    task: Task,
    *,
    can_send: Collection[int] | None = None,
) -> tuple[Move, ...]:
    """The moves, in order of steps, that bring `wanted` blocks to nodes beside the `running` moves.

    `held[n]`: what node n holds now. `running`: the moves still to come, in order of steps; none
    brings a wanted block to its node, and some may pass such a block on. `can_send`: the nodes that
    may send wanted blocks (None: all). Ports that stand idle between two running moves are used
    only if that delays none of the running moves in the cost model. PlanError if some wanted block
    never comes to a node that may send it.
    """
    if not wanted:
        return ()
    undisturbed = arrival_times(running, task)
    moves: tuple[Move, ...] = ()
    for gaps, shared in ((True, True), (False, True), (False, False)):
        moves = _Appending(held, running, wanted, task, can_send, gaps=gaps, shared=shared).moves()
        if not shared:
            break
        timed = arrival_times(by_step((*running, *moves)), task)
        if all(timed[key] <= at * (1 + DELAY) for key, at in undisturbed.items()):
            break
    return moves


class _Appending:
    def __init__(
        self,
        held: Sequence[AbstractSet[int]],
        running: Sequence[Move],
        wanted: Mapping[int, AbstractSet[int]],
        task: Task,
        can_send: Collection[int] | None,
        *,
        gaps: bool,
        shared: bool,
    ) -> None:
        """`gaps`: whether links are used between running moves, too. `shared`: whether trunks that
        are no bottleneck are used beside running moves (which then wait in the cost model for a
        move that itself waits)."""
        self._fabric = task.fabric
        self._have = [set(blocks) for blocks in held]
        self._lacks = {node: set(blocks) - self._have[node] for node, blocks in wanted.items()}
        """The wanted blocks that have not come."""
        self._senders = sorted(range(len(held)) if can_send is None else can_send)
        self._newcomers = sorted(wanted, key=lambda node: -self._rate(node))
        self._copies = [sum(b in held[n] for n in wanted) for b in range(task.blocks)]
        """How many newcomers hold each block."""
        self._feeder: dict[int, int] = {}
        """For each newcomer, the node that fed it last."""
        self._running: dict[int, list[Move]] = defaultdict(list)
        self._from: dict[_Link, int] = {}
        self._until: dict[_Link, int] = {}
        """For each link, the steps of its first and of its last running move."""
        for move in running:
            self._running[move.step].append(move)
            for link in self._links(move.src, move.dst):
                self._from.setdefault(link, move.step)
                self._until[link] = move.step
        self._gaps = gaps
        self._taken: dict[_Link, int] = {}
        """How many moves take each link in the present step."""
        self._widths = self._trunk_widths(shared)

    def _rate(self, node: int) -> float:
        return min(self._fabric.ports[node].into, self._fabric.ports[node].out)

    def _trunk_widths(self, shared: bool) -> dict[str, int]:
        """For each rack whose trunk is counted, how many moves cross it side by side."""
        fastest = max(max(port.out, port.into) for port in self._fabric.ports)
        counted = self._fabric.tight_racks() if shared else self._fabric.trunks.keys()
        return {rack: max(1, int(self._fabric.trunks[rack] / fastest)) for rack in counted}

    def moves(self) -> tuple[Move, ...]:
        found: list[Move] = []
        step, last = min(self._running, default=1), max(self._running, default=0)
        due: list[Move] = []
        """Running moves that would have been over by now if their senders had the blocks."""
        while lacking := [node for node in self._newcomers if self._lacks[node]]:
            due += self._running[step]
            arriving = self._match(step, lacking)
            if not arriving and step > last:
                missing = sorted(self._lacks[lacking[0]])
                raise PlanError(f"no node that may send will hold blocks {missing}")
            over = [move for move in due if move.block in self._have[move.src]]
            due = [move for move in due if move.block not in self._have[move.src]]
            for move in arriving:
                self._copies[move.block] += 1
                self._lacks[move.dst].discard(move.block)
            for move in (*arriving, *over):
                self._have[move.dst].add(move.block)
            found += arriving
            step += 1
        return tuple(found)

    def _match(self, step: int, lacking: Sequence[int]) -> list[Move]:
        """The moves to newcomers in one step: first from whoever fed them last."""
        self._taken = defaultdict(int)
        for move in self._running[step]:
            self._take(move.src, move.dst)
        fed: dict[int, int] = {}
        """dst -> src"""
        for node in lacking:
            feeder = self._feeder.get(node)
            if feeder is not None and self._may_feed(feeder, node, step):
                fed[node] = feeder
                self._take(feeder, node)
        free = [src for src in self._senders if self._could_send(src, step)]
        for node in [node for node in lacking if node not in fed]:
            able = [src for src in free if self._may_feed(src, node, step)]
            if able:
                fed[node] = src = max(able, key=lambda src: self._worth(src, node))
                self._take(src, node)
                if not self._could_send(src, step):
                    free.remove(src)
        self._feeder |= fed
        return [Move(step, src, dst, self._block(src, dst)) for dst, src in sorted(fed.items())]

    def _could_send(self, src: int, step: int) -> bool:
        """Whether it has anything and could send in this step, over its port or within its
        host."""
        ways = ("out", src), ("local out", src)
        return bool(self._have[src]) and any(self._is_free(way, step) for way in ways)

    def _worth(self, src: int, node: int) -> tuple[float, int]:
        """The fastest way first; of these, whoever has most."""
        return self._fabric.rate(src, node), len(self._have[src])

    def _may_feed(self, src: int, node: int, step: int) -> bool:
        links = self._links(src, node)
        gives = src != node and not self._lacks[node].isdisjoint(self._have[src])
        return gives and all(self._is_free(link, step) for link in links)

    def _block(self, src: int, node: int) -> int:
        """The block that the fewest newcomers have, so that they can give it to each other."""
        return min(sorted(self._have[src] & self._lacks[node]), key=self._copies.__getitem__)

    def _links(self, src: int, dst: int) -> list[_Link]:
        fabric = self._fabric
        if fabric.is_local(src, dst):
            return [("local out", src), ("local in", dst)]
        racks = fabric.crosses(src, dst) or ()
        return [
            ("out", src),
            ("in", dst),
            *zip(("up", "down"), racks, strict=False),
        ]

    def _take(self, src: int, dst: int) -> None:
        for link in self._links(src, dst):
            self._taken[link] += 1

    def _is_free(self, link: _Link, step: int) -> bool:
        way, where = link
        if isinstance(where, str):
            if where not in self._widths:
                return True
            room = self._taken[link] < self._widths[where]
        else:
            room = not self._taken[link] and self._is_there(way, where)
        # Before its first move, a link may be late with moves that should be over by now.
        after = step > self._until.get(link, 0)
        return room and (after or (self._gaps and step > self._from[link]))

    def _is_there(self, way: str, node: int) -> bool:
        """Whether the node has the port or the local link at all."""
        port = self._fabric.ports[node]
        return port.host != "" if way == "local out" else way != "out" or port.out > 0
