"""Schedules from any holdings: after a node died, joined or failed a pull during a multicast.

The binomial pipeline needs a clean start. Here every step is a new matching between ports: the
rarest block first (others will wait for a block that few hold), then augmented until no more nodes
can receive in the step. On equal links the result is nearly always within a step or two of a lower
bound, from a clean start as well as from the middle of a multicast. On unequal links slow nodes
would hold up the nodes that they relay to, so the schedule is made with and without them as relays.
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby, pairwise

from services.planner.core.costs import arrival_times
from services.planner.core.multicast.fabric import Task
from services.planner.core.multicast.schedule import Move
from shared.errors import PlanError

FASTER = 1.25
"""Rates that differ by less than this factor are in one class of speed."""
CLASSES = 4


def repair_soonest(
    held: Sequence[AbstractSet[int]],
    wanted: Iterable[int],
    task: Task,
    *,
    reluctant: Collection[int] = (),
) -> tuple[Move, ...]:
    """The repair that is over first on the task's links (the task's sources do not matter here).

    It tries with none of the slow classes of senders reluctant, then the slowest, the two slowest,
    and so on. Nodes named in `reluctant` are reluctant in any case, and more so than slow ones.
    """
    wanted = tuple(wanted)
    can_send = [node for node, port in enumerate(task.fabric.ports) if port.out > 0]
    speeds = _classes([port.out for port in task.fabric.ports])
    best: tuple[Move, ...] = ()
    soonest = math.inf
    for slow in range(max(speeds) + 1):
        moves = repair(
            held,
            task.blocks,
            wanted,
            can_send=can_send,
            reluctance=[
                2 if node in reluctant else int(speed < slow) for node, speed in enumerate(speeds)
            ],
            speeds=speeds,
        )
        over = max(arrival_times(moves, task).values(), default=0.0)
        if slow == 0 or over < soonest:
            best, soonest = moves, over
    return best


def _classes(rates: Sequence[float]) -> list[int]:
    """For each node its class of speed, 0 for the slowest. The classes are split at the widest gaps
    between rates."""
    ordered = sorted(set(rates))
    gaps = [(fast / slow if slow else math.inf, fast) for slow, fast in pairwise(ordered)]
    starts = sorted(fast for ratio, fast in sorted(gaps)[-(CLASSES - 1) :] if ratio >= FASTER)
    return [bisect_right(starts, rate) for rate in rates]


def repair(
    held: Sequence[AbstractSet[int]],
    blocks: int,
    wanted: Iterable[int],
    *,
    can_send: Collection[int] | None = None,
    reluctance: Sequence[int] = (),
    speeds: Sequence[int] = (),
    start_step: int = 1,
) -> tuple[Move, ...]:
    """Moves, in order of steps from `start_step`, after which the `wanted` nodes hold all blocks.

    `held[n]` is what node n holds now. A node that is gone is left out of `can_send` (None: every
    node sends). A wanted node that may not send only receives. `reluctance` and `speeds` are lists
    by node (empty: all alike). A sender gives only what no sender of less `reluctance` has; nodes
    of higher `speeds` go first, at both ends. PlanError names the blocks that no sender holds.
    """
    senders = range(len(held)) if can_send is None else sorted(can_send)
    full = (1 << blocks) - 1
    have = [sum(1 << block for block in blocks_held) & full for blocks_held in held]
    receivers = [node for node in dict.fromkeys(wanted) if have[node] != full]
    _check_sources(have, senders, receivers, blocks)
    moves: list[Move] = []
    step = start_step
    alike = [0] * len(held)
    while receivers:
        gives = _offers(have, senders, reluctance or alike)
        arriving = _Step(have, gives, receivers, blocks, speeds or alike).match()
        for dst, (src, block) in sorted(arriving.items()):
            moves.append(Move(step, src, dst, block))
            have[dst] |= 1 << block
        receivers = [node for node in receivers if have[node] != full]
        step += 1
    return tuple(moves)


def _check_sources(
    have: Sequence[int], senders: Iterable[int], receivers: Sequence[int], blocks: int
) -> None:
    reachable = 0
    for node in senders:
        reachable |= have[node]
    lost = [
        block
        for block in range(blocks)
        if not reachable >> block & 1 and any(not have[node] >> block & 1 for node in receivers)
    ]
    if lost:
        raise PlanError(f"no node that may send holds blocks {lost}: load them from a lower tier")


def _offers(
    have: Sequence[int], senders: Iterable[int], reluctance: Sequence[int]
) -> dict[int, int]:
    """For each sender that can give anything, the blocks that it gives."""
    gives: dict[int, int] = {}
    given = 0
    ordered = sorted(senders, key=reluctance.__getitem__)
    for _, alike in groupby(ordered, key=reluctance.__getitem__):
        offers = {node: have[node] & ~given for node in alike}
        for offer in offers.values():
            given |= offer
        gives |= {node: offer for node, offer in offers.items() if offer}
    return gives


class _Step:
    """One step's matching of free send ports with free receive ports, with a block for each
    pair."""

    def __init__(
        self,
        have: Sequence[int],
        gives: Mapping[int, int],
        receivers: Sequence[int],
        blocks: int,
        speeds: Sequence[int],
    ) -> None:
        def rank(node: int) -> tuple[int, int]:
            return -speeds[node], have[node].bit_count()

        self.have = have
        self.gives = gives
        self.senders = sorted(gives, key=rank)
        self.receivers = sorted(receivers, key=rank)
        self.copies = [sum(mask >> block & 1 for mask in have) for block in range(blocks)]
        self.fed_by: dict[int, tuple[int, int]] = {}
        """dst -> (src, block)"""
        self.feeds: dict[int, int] = {}
        """src -> dst"""
        self.givers = [
            sum(1 << i for i, src in enumerate(self.senders) if gives[src] >> block & 1)
            for block in range(blocks)
        ]
        """Who gives each block: a bit for each place among the senders."""

    def match(self) -> dict[int, tuple[int, int]]:
        self._rarest_first()
        self.free = sum(1 << i for i, src in enumerate(self.senders) if src not in self.feeds)
        self.tried = 0
        """Senders from which no way leads to a free one: no later search succeeds over them."""
        for dst in self.receivers:
            if not self.free:
                break
            if dst not in self.fed_by:
                self._augment(dst)
        return self.fed_by

    def _rarest_first(self) -> None:
        """Among the fastest nodes, those that hold least send first (they are of least use
        otherwise) and receive first."""
        for block in sorted(range(len(self.copies)), key=self.copies.__getitem__):
            sources = [
                n for n in self.senders if n not in self.feeds and self.gives[n] >> block & 1
            ]
            targets = (
                n for n in self.receivers if n not in self.fed_by and not self.have[n] >> block & 1
            )
            for src, dst in zip(sources, targets, strict=False):
                self._pair(src, dst, block)

    def _pair(self, src: int, dst: int, block: int) -> None:
        self.feeds[src] = dst
        self.fed_by[dst] = (src, block)

    def _augment(self, dst: int) -> None:
        """Finds a sender for dst, moving other receivers to other senders (Kuhn's algorithm). If
        there is none, all that was tried is out of question for the rest of the step (it is a
        Hungarian tree)."""
        tried, path = self.tried, [dst]
        found_by: dict[int, int] = {}
        """sender -> the receiver that would move to it"""
        while path:
            node = path[-1]
            open_ = self._givers_to(node) & ~tried
            if not open_:
                path.pop()
                continue
            free = open_ & self.free
            lowest = free & -free or open_ & -open_
            tried |= lowest
            src = self.senders[lowest.bit_length() - 1]
            if free:
                self.free ^= lowest
                self._move(node, src, found_by)
                return
            found_by[src] = node
            path.append(self.feeds[src])
        self.tried = tried

    def _givers_to(self, dst: int) -> int:
        lacks, givers = ~self.have[dst], 0
        for block, mask in enumerate(self.givers):
            if lacks >> block & 1:
                givers |= mask
        return givers

    def _move(self, dst: int, src: int, found_by: Mapping[int, int]) -> None:
        """Gives `src` to `dst`, whose sender goes to the receiver that found it, and so on."""
        while True:
            before = self.fed_by.get(dst)
            self._pair(src, dst, self._rarest(self.gives[src] & ~self.have[dst]))
            if before is None:
                return
            src = before[0]
            dst = found_by[src]

    def _rarest(self, offer: int) -> int:
        blocks = [block for block in range(len(self.copies)) if offer >> block & 1]
        return min(blocks, key=self.copies.__getitem__)
