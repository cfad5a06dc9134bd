"""Who can be relied on in one event, by what was seen of them in it."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet

from services.planner.context import Context
from services.planner.core.lateness import Late, Pace
from shared.clock import now
from shared.ids import NodeId
from shared.messages.scaling import PullFailed, Transfer

LOOK_S = 0.5
MAX_FAILURES = 4
"""Failed pulls, from senders that are well, after which it is the target that is not."""


class Trust:
    def __init__(self, context: Context) -> None:
        self.distrusted: set[NodeId] = set()
        """Senders that failed to deliver, or were slow: they give only what no other has."""
        self._context = context
        self._failures: dict[NodeId, int] = {}
        self._pace = Pace()
        self._looked_at = 0.0

    def begin(self) -> None:
        """A revision goes out."""
        self._pace.begin(now())

    def land(self, node: NodeId, block: int) -> None:
        self._pace.land(node, block, now())

    def slow(
        self,
        transfers: Sequence[Transfer],
        held: Mapping[NodeId, AbstractSet[int]],
        expected: Callable[[], Callable[[Transfer], float]],
    ) -> dict[NodeId, Late]:
        """Nodes that are found to be slow now, once each; looked for no more than every LOOK_S."""
        if now() - self._looked_at < LOOK_S:
            return {}
        self._looked_at = now()
        slow = self._pace.look(transfers, held, now(), expected())
        self.distrusted.update(slow)
        return slow

    async def blame(self, failures: Sequence[PullFailed]) -> set[NodeId]:
        """Nodes that the event goes on without: senders that are not there any more, and targets
        that fail with senders that are."""
        senders = {f.source for f in failures}
        unable = await self.not_answering(senders)
        self.distrusted |= senders - unable
        for target in {f.node for f in failures if f.source not in unable}:
            self._failures[target] = self._failures.get(target, 0) + 1
            if self._failures[target] > MAX_FAILURES:
                unable.add(target)
        return unable

    async def not_answering(self, nodes: Collection[NodeId]) -> set[NodeId]:
        nodes = sorted(nodes)
        answers = await asyncio.gather(*(self._context.answers(node) for node in nodes))
        return {node for node, answer in zip(nodes, answers, strict=True) if not answer}
