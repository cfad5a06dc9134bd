"""Who can send blocks of a model, and who should receive them."""

from collections.abc import Iterable
from typing import NamedTuple

from services.registry.core.residency import TIERS, Residency
from shared.messages.pool import ModelRecord, NodeInfo, Source, Tier

_RANK = {tier: rank for rank, tier in enumerate(TIERS)}


def sources(record: ModelRecord, nodes: Iterable[NodeInfo], held: Residency) -> list[Source]:
    """One source a node and tier that has blocks.

    Best first: the nearer tier; complete before partial; more blocks; then by node name.
    """
    every = frozenset(range(record.n_blocks))
    found = [
        Source(info, tier, tuple(sorted(blocks & every)), complete=blocks >= every)
        for info in nodes
        for tier, blocks in held.blocks(info, record.model_id).items()
        if blocks & every
    ]
    return sorted(found, key=source_order)


def source_order(source: Source) -> tuple[int, bool, int, str]:
    return _RANK[source.tier], not source.complete, -len(source.blocks), source.info.node


class Candidate(NamedTuple):
    """A possible target; sorts best first."""

    tier_rank: int
    """Nearest tier in which it holds blocks of the model."""
    fewer_blocks: int
    """Minus the blocks there."""
    less_memory: int
    """Minus the free bytes of its arena."""
    node: str


def candidate(
    record: ModelRecord, info: NodeInfo, nbytes: int, held: Residency
) -> Candidate | None:
    """None if the node has not reported, or has no room.

    A node that has space for the model in its arena needs no more: space is had whole before the
    first block, and a copy that sleeps in host memory keeps it.
    """
    status = held.of(info)
    if status is None:
        return None
    tiers = held.blocks(info, record.model_id)
    if status.arena_free < nbytes and not tiers.keys() & {Tier.GPU, Tier.HOST}:
        return None
    nearest = next((tier for tier in TIERS if tiers.get(tier)), None)
    if nearest is None:
        return Candidate(len(TIERS), 0, -status.arena_free, info.node)
    return Candidate(_RANK[nearest], -len(tiers[nearest]), -status.arena_free, info.node)
