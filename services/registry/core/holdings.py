"""What each node holds, by its own last report (NodeStatus), and who holds a model.

Reports are kept by generation, whatever the leases say, because a report may overtake its lease.
Reports of generations without a lease are forgotten after a while.

Nodes report every second, and mostly repeat themselves. Then nothing is computed anew. Questions
about a model look only at the nodes that hold something of it.
"""

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shared.ids import Generation, ModelId, NodeId
from shared.messages.changes import named_by, whole_status
from shared.messages.pool import Holding, NodeInfo, NodeStatus, Tier

ORPHAN_S = 10.0
"""How long a report is kept without a lease of its generation."""
TIERS = tuple(Tier)
"""The tier nearest to execution is first."""

Key = tuple[NodeId, Generation]
Blocks = Mapping[Tier, frozenset[int]]
"""Tier -> the model's blocks in it. A tier that was reported is present, even if it is empty."""


@dataclass(slots=True)
class _Report:
    status: NodeStatus
    at: float
    models: dict[ModelId, dict[Tier, frozenset[int]]] = field(default_factory=dict)
    in_memory: dict[ModelId, dict[Tier, frozenset[int]]] = field(default_factory=dict)
    """The models that are on the device or in host memory. They are few, even where disks hold
    all."""


class Taken(enum.Enum):
    """What became of a report."""

    IN = "in"
    LATE = "late"
    """A later one of the same generation is known already."""
    GAP = "gap"
    """It builds on reports that did not come. Nothing was taken in."""


class Holdings:
    def __init__(self) -> None:
        self._latest: dict[Key, _Report] = {}
        self._holders: dict[ModelId, set[Key]] = {}
        self._sharers: dict[ModelId, set[Key]] = {}
        """Who holds blocks of each model in memory."""

    def report(self, status: NodeStatus, now: float) -> Taken:
        key = (status.node, status.generation)
        known = self._latest.get(key)
        if known is not None and status.seq <= known.status.seq:
            return Taken.LATE
        whole = whole_status(known.status if known else None, status)
        if whole is None:
            return Taken.GAP
        if known is None:
            known = self._latest[key] = _Report(whole, now)
            self._list(key, known, whole.holdings)
            return Taken.IN
        before, known.status, known.at = known.status, whole, now
        if status.since:
            self._unlist(key, known, named_by(status))
            self._list(key, known, status.holdings)
        elif whole.holdings != before.holdings:
            self._unlist(key, known, list(known.models))
            self._list(key, known, whole.holdings)
        return Taken.IN

    def of(self, info: NodeInfo) -> NodeStatus | None:
        report = self._latest.get((info.node, info.generation))
        return None if report is None else report.status

    def blocks(self, info: NodeInfo, model_id: ModelId) -> Blocks:
        return self.models(info.node, info.generation).get(model_id, {})

    def models(self, node: NodeId, generation: Generation) -> Mapping[ModelId, Blocks]:
        """Everything that the node holds, or held last."""
        report = self._latest.get((node, generation))
        return {} if report is None else report.models

    def in_memory(self, info: NodeInfo) -> Mapping[ModelId, Blocks]:
        """Models that have space on the node's device, or are in its host memory."""
        report = self._latest.get((info.node, info.generation))
        return {} if report is None else report.in_memory

    def sharers(self, model_id: ModelId) -> Collection[Key]:
        """Who has blocks of the model in memory; O(their number)."""
        return self._sharers.get(model_id, ())

    def reporters(self, model_id: ModelId) -> Collection[Key]:
        """Who has reported the model, in no order."""
        return self._holders.get(model_id, ())

    def holders(self, model_id: ModelId) -> list[NodeId]:
        """Nodes of which some generation has reported the model, by name; O(their number)."""
        return sorted({node for node, _ in self._holders.get(model_id, ())})

    def prune(self, present: Collection[Key], now: float) -> None:
        """Forgets old reports of generations that have no lease."""
        for key in [k for k, r in self._latest.items() if now - r.at >= ORPHAN_S]:
            if key not in present:
                report = self._latest.pop(key)
                self._unlist(key, report, list(report.models))

    def validate(self) -> None:
        """Raises AssertionError if an index differs from what the reports say."""
        holders: dict[ModelId, set[Key]] = {}
        sharers: dict[ModelId, set[Key]] = {}
        for key, report in self._latest.items():
            assert key == (report.status.node, report.status.generation)
            assert report.models == _by_model(report.status.holdings)
            for model, tiers in report.models.items():
                holders.setdefault(model, set()).add(key)
                assert (model in report.in_memory) == bool(tiers.keys() - {Tier.DISK})
                if _is_shared(tiers):
                    sharers.setdefault(model, set()).add(key)
            assert report.in_memory.items() <= report.models.items()
        assert holders == self._holders
        assert sharers == self._sharers

    def _list(self, key: Key, report: _Report, holdings: Collection[Holding]) -> None:
        """Takes in models of which nothing is listed."""
        for model, tiers in _by_model(holdings).items():
            report.models[model] = tiers
            self._holders.setdefault(model, set()).add(key)
            if tiers.keys() - {Tier.DISK}:
                report.in_memory[model] = tiers
            if _is_shared(tiers):
                self._sharers.setdefault(model, set()).add(key)

    def _unlist(self, key: Key, report: _Report, models: Collection[ModelId]) -> None:
        for model in models:
            report.models.pop(model, None)
            report.in_memory.pop(model, None)
            for index in (self._holders, self._sharers):
                keys = index.get(model, set())
                keys.discard(key)
                if not keys:
                    index.pop(model, None)


def _is_shared(tiers: Blocks) -> bool:
    return any(blocks for tier, blocks in tiers.items() if tier is not Tier.DISK)


def _by_model(holdings: Collection[Holding]) -> dict[ModelId, dict[Tier, frozenset[int]]]:
    found: dict[ModelId, dict[Tier, frozenset[int]]] = {}
    for holding in holdings:
        tiers = found.setdefault(holding.model_id, {})
        tiers[holding.tier] = tiers.get(holding.tier, frozenset()).union(holding.blocks)
    return found
