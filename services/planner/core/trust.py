"""Which nodes an event can rely on, judged by what was seen of them in it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from services.planner.core.lateness import Late, Pace
from shared.ids import NodeId
from shared.messages.scaling import PullFailed, Transfer

LOOK_S = 0.5
LOOK_PER_TRANSFER_S = 5e-5
"""What each transfer of the plan adds to LOOK_S: a look takes about a microsecond for each, and 2 %
of the planner's time in a large event is enough."""
MAX_FAILURES = 4
"""A target that fails with senders that are well, in more revisions than this, is itself at
fault."""


class Trust:
    def __init__(self) -> None:
        self.distrusted: set[NodeId] = set()
        """Senders that failed to deliver, or were slow. They give only what no other node has."""
        self._failures: dict[NodeId, int] = {}
        self._pace = Pace()
        self._look_at = float("-inf")

    def begin(self, now: float, transfers: int) -> None:
        """A revision with this number of transfers is sent to the nodes now. No transfer is late
        yet."""
        self._pace.begin(now)
        self._look_at = max(self._look_at, _next_look(now, transfers))

    def land(self, node: NodeId, blocks: Mapping[int, float], *, vague: bool = False) -> None:
        """See Pace."""
        self._pace.land(node, blocks, vague=vague)

    def share(self, nodes: Iterable[NodeId], now: float) -> None:
        """See Pace."""
        self._pace.share(nodes, now)

    @property
    def look_at(self) -> float:
        """When slow nodes may be looked for again."""
        return self._look_at

    def slow(
        self,
        transfers: Sequence[Transfer],
        held: Mapping[NodeId, AbstractSet[int]],
        expected_s: Callable[[Transfer], float],
        now: float,
        untold_s: float = 0.0,
    ) -> dict[NodeId, Late]:
        """Nodes that are now found to be slow, once each. `untold_s`: see `late_transfers`."""
        self._look_at = _next_look(now, len(transfers))
        slow = self._pace.look(transfers, held, now, expected_s, untold_s)
        self.distrusted.update(slow)
        return slow

    def blame(
        self, failures: Sequence[PullFailed], silent: AbstractSet[NodeId]
    ) -> frozenset[NodeId]:
        """Nodes that the event goes on without: senders that are `silent`, and targets that have
        failed too often with senders that are not."""
        unable = {f.source for f in failures} & silent
        self.distrusted |= {f.source for f in failures} - unable
        for target in {f.node for f in failures if f.source not in unable}:
            self._failures[target] = self._failures.get(target, 0) + 1
            if self._failures[target] > MAX_FAILURES:
                unable.add(target)
        return frozenset(unable)


def _next_look(now: float, transfers: int) -> float:
    return now + LOOK_S + LOOK_PER_TRANSFER_S * transfers
