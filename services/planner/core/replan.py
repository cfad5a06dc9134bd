"""A schedule from any holdings: after a node died, joined or failed a pull, in mid-multicast.

The binomial pipeline needs a clean start. Here every step is a matching between ports, made anew:
rarest block first (a block that few hold is the one that others will wait for), then augmented
until no more nodes can receive in the step. That is within a step or two of a lower bound nearly
always, from a clean start as well as from the middle of a multicast.
"""

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet

from services.planner.core.multicast.schedule import Move
from shared.errors import PlanError


def repair(
    held: Sequence[AbstractSet[int]],
    blocks: int,
    wanted: Iterable[int],
    *,
    can_send: Collection[int] | None = None,
    start_step: int = 1,
) -> tuple[Move, ...]:
    """Moves, in order of steps from `start_step`, after which the `wanted` nodes hold all blocks.

    `held[n]` is what node n holds now; a node that is gone is left out of `can_send` (None: every
    node sends). A wanted node that may not send only receives. PlanError naming the blocks that
    no sender holds.
    """
    senders = range(len(held)) if can_send is None else sorted(can_send)
    full = (1 << blocks) - 1
    have = [sum(1 << block for block in blocks_held) & full for blocks_held in held]
    receivers = [node for node in dict.fromkeys(wanted) if have[node] != full]
    _check_sources(have, senders, receivers, blocks)
    moves: list[Move] = []
    step = start_step
    while receivers:
        arriving = _Step(have, senders, receivers, blocks).match()
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


class _Step:
    """One step's matching of free send ports to free receive ports, with a block for each pair."""

    def __init__(
        self, have: Sequence[int], senders: Iterable[int], receivers: Sequence[int], blocks: int
    ) -> None:
        held = [mask.bit_count() for mask in have]
        self.have = have
        self.senders = sorted((node for node in senders if have[node]), key=held.__getitem__)
        self.receivers = sorted(receivers, key=held.__getitem__)
        self.copies = [sum(mask >> block & 1 for mask in have) for block in range(blocks)]
        self.fed_by: dict[int, tuple[int, int]] = {}
        """dst -> (src, block)"""
        self.feeds: dict[int, int] = {}
        """src -> dst"""

    def match(self) -> dict[int, tuple[int, int]]:
        self._rarest_first()
        for dst in self.receivers:
            if len(self.feeds) == len(self.senders):
                break
            if dst not in self.fed_by:
                self._augment(dst, set())
        return self.fed_by

    def _rarest_first(self) -> None:
        """Those that hold least send first (they are of least use otherwise) and get first."""
        for block in sorted(range(len(self.copies)), key=self.copies.__getitem__):
            sources = [n for n in self.senders if n not in self.feeds and self.have[n] >> block & 1]
            targets = (
                n for n in self.receivers if n not in self.fed_by and not self.have[n] >> block & 1
            )
            for src, dst in zip(sources, targets, strict=False):
                self._pair(src, dst, block)

    def _pair(self, src: int, dst: int, block: int) -> None:
        self.feeds[src] = dst
        self.fed_by[dst] = (src, block)

    def _augment(self, dst: int, tried: set[int]) -> bool:
        """Finds a sender for dst, moving others to other senders (Kuhn's algorithm)."""
        lacks = ~self.have[dst]
        for src in self.senders:
            offer = self.have[src] & lacks
            if not offer or src in tried:
                continue
            tried.add(src)
            if src not in self.feeds or self._augment(self.feeds[src], tried):
                self._pair(src, dst, self._rarest(offer))
                return True
        return False

    def _rarest(self, offer: int) -> int:
        blocks = [block for block in range(len(self.copies)) if offer >> block & 1]
        return min(blocks, key=self.copies.__getitem__)
