"""What each node holds, by its own last word (NodeStatus).

Kept a generation, whatever the leases say: a report may overtake the lease it belongs to. Reports
of generations that have no lease, or no longer, are forgotten after a while.
"""

from collections.abc import Collection
from dataclasses import dataclass

from shared.ids import Generation, ModelId, NodeId
from shared.messages.pool import NodeInfo, NodeStatus, Tier

ORPHAN_S = 10.0
"""How long a report is kept without a lease of its generation."""
TIERS = tuple(Tier)
"""Nearest to execution first."""

Key = tuple[NodeId, Generation]


@dataclass(frozen=True, slots=True)
class _Report:
    status: NodeStatus
    at: float


class Residency:
    def __init__(self) -> None:
        self._latest: dict[Key, _Report] = {}

    def report(self, status: NodeStatus, now: float) -> bool:
        """False if a later report of the same generation is known already."""
        key = (status.node, status.generation)
        known = self._latest.get(key)
        if known is not None and status.seq <= known.status.seq:
            return False
        self._latest[key] = _Report(status, now)
        return True

    def of(self, info: NodeInfo) -> NodeStatus | None:
        report = self._latest.get((info.node, info.generation))
        return None if report is None else report.status

    def blocks(self, info: NodeInfo, model_id: ModelId) -> dict[Tier, frozenset[int]]:
        """Tier -> the model's blocks there. A tier that was reported is there, even if empty."""
        status = self.of(info)
        found: dict[Tier, frozenset[int]] = {}
        for holding in status.holdings if status else ():
            if holding.model_id == model_id:
                found[holding.tier] = found.get(holding.tier, frozenset()).union(holding.blocks)
        return found

    def prune(self, present: Collection[Key], now: float) -> None:
        """Forgets old reports of generations that have no lease."""
        for key in [k for k, r in self._latest.items() if now - r.at >= ORPHAN_S]:
            if key not in present:
                del self._latest[key]
