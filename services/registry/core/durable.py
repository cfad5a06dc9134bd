"""Durable copies: whole models on disks, where they survive the end of every process."""

from collections.abc import Iterator

from services.registry.core.goals import Place
from services.registry.core.kept import KeptCopies
from shared.ids import NodeId
from shared.messages.pool import ModelRecord, NodeInfo, Tier

FREE_SHARE = 0.02
"""The share of a disk that copies leave free."""


class DurableCopies(KeptCopies):
    tier = Tier.DISK
    counted = frozenset({Tier.DISK})
    least_handed_over = 2
    """Who wants one copy only takes the loss of it."""

    def wanted(self, record: ModelRecord) -> int:
        return self.settings.copies

    def worth(self, record: ModelRecord) -> float:
        """How many nodes have it in memory: the more, the more it is asked for."""
        return len(self._holdings.sharers(record.model_id))

    def _has(self, info: NodeInfo, record: ModelRecord) -> bool:
        held = self._holdings.blocks(info, record.model_id).get(Tier.DISK, ())
        return len(held) == record.n_blocks

    def _places(self, busy: set[NodeId]) -> Iterator[Place]:
        for info in self._leases.usable:
            status = self._holdings.of(info)
            if status is not None and status.disk_bytes:
                spare = int(FREE_SHARE * status.disk_bytes)
                yield Place(info, status.disk_free, spare, info.node in busy, self._drafts(status))
