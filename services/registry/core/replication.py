"""The pool's invariant: of every model, a full copy in host or GPU memory somewhere, on one node
or, in parts, on several.

After BlitzScale's global parameter pool, which keeps one host copy of each model in the cluster.
"""

from collections.abc import Iterable

import msgspec

from services.registry.core.holdings import Holdings
from shared.ids import NodeId
from shared.messages.pool import MEMORY, ModelRecord, NodeInfo, Tier


class Copies(msgspec.Struct, frozen=True, kw_only=True):
    """Where one model is whole."""

    memory: tuple[NodeId, ...]
    """Nodes that hold every block in host or GPU memory."""
    together: tuple[NodeId, ...] = ()
    """Nodes that hold a part each in memory, and together every block, as the devices of a group
    do. Empty if they lack some."""
    disk: tuple[NodeId, ...]
    """Nodes that hold every block if their disk counts too (including `memory`)."""
    missing: tuple[int, ...]
    """Blocks that no node holds in any tier. The model cannot be had until one of their holders
    comes back."""

    @property
    def safe(self) -> bool:
        return bool(self.memory or self.together)


def copies(record: ModelRecord, nodes: Iterable[NodeInfo], held: Holdings) -> Copies:
    """Where the model is whole, among these nodes and by what they have reported."""
    every = frozenset(range(record.n_blocks))
    memory: list[NodeId] = []
    disk: list[NodeId] = []
    parts: dict[NodeId, frozenset[int]] = {}
    anywhere: frozenset[int] = frozenset()
    for info in nodes:
        tiers = held.blocks(info, record.model_id)
        near = frozenset().union(*(tiers.get(tier, ()) for tier in MEMORY))
        all_tiers = near | tiers.get(Tier.DISK, frozenset())
        anywhere |= all_tiers
        if near >= every:
            memory.append(info.node)
        elif near:
            parts[info.node] = near
        if all_tiers >= every:
            disk.append(info.node)
    whole = frozenset[int]().union(*parts.values()) >= every
    return Copies(
        memory=tuple(memory),
        together=tuple(sorted(parts)) if whole else (),
        disk=tuple(disk),
        missing=tuple(sorted(every - anywhere)),
    )
