"""What the pool knows that matters for placement, gathered for one question about one model."""

import math
from collections import Counter
from collections.abc import Collection, Iterator

from services.registry.core.holdings import Blocks, Holdings
from services.registry.core.leases import Leases
from services.registry.core.placement import Candidate, Sender
from services.registry.core.reservations import Reservation, Reservations
from shared.ids import EventId, ModelId, NodeId
from shared.layout import room_of
from shared.messages.pool import (
    ARENA,
    MEMORY,
    ModelRecord,
    NodeInfo,
    NodeStatus,
    Source,
    Tier,
)
from shared.parts import Part

_EMPTY: frozenset[int] = frozenset()


class Survey:
    """Costs O(holders of the model, and of other models in memory that other events move).
    `candidates` costs one step more for each node."""

    def __init__(
        self,
        record: ModelRecord,
        event: EventId | None,
        leases: Leases,
        holdings: Holdings,
        reservations: Reservations,
    ) -> None:
        """`event`: the event that asks. Its own reservations do not count against a node."""
        self.record = record
        self._event = event
        self._leases = leases
        self._holdings = holdings
        self._reservations = reservations
        self._every = frozenset(range(record.n_blocks))
        others = reservations.others(event)
        self._crowds = Counter(info.rack for r in others if (info := leases.info(r.node)))
        moved = {r.model_id for r in others} - {record.model_id}
        # Whatever the number of their blocks, because targets of an event send too.
        self._sending = {info.node for model in moved for info in self._sharers(model)}
        copies = [
            info
            for info in self._sharers(record.model_id)
            if leases.stands(info.node) and _memory(self._blocks(info)) >= self._every
        ]
        self._racks = {info.rack for info in copies}
        self._hosts = {info.host for info in copies if info.host}

    # --- targets ---

    def candidates(self, nbytes: int, exclude: Collection[NodeId]) -> Iterator[Candidate]:
        """Usable nodes that have reported, are fit, have room, and belong to no other event.
        `nbytes`: the least room that is of use.

        A node that has space for the model in its arena needs no more: space is taken whole before
        the first block, and a copy that sleeps in the arena keeps it.
        """
        for info in self._leases.usable:
            held = self._reservations.of(info.node)
            if info.node in exclude or (held and held.event != self._event):
                continue
            status = self._holdings.of(info)
            if status is not None and status.unfit:
                continue
            # The event that has the node may have filled it already.
            has_space = held is not None or bool(self._blocks(info).keys() & set(ARENA))
            if status is not None and (has_space or status.arena_free >= nbytes):
                yield self._candidate(info, status, held)

    def room(self, part: Part) -> int:
        """The bytes of an arena that a part takes, at most."""
        return sum(map(room_of, self.record.block_bytes[part.start : part.stop]))

    def serving_hosts(self) -> set[str]:
        """The machines on which the model is open on some device."""
        return {info.host for info in self._holders() if Tier.GPU in self._blocks(info)}

    def serving_racks(self) -> set[str]:
        """The racks in which the model is open on some device."""
        return {info.rack for info in self._holders() if Tier.GPU in self._blocks(info)}

    def _candidate(self, info: NodeInfo, status: NodeStatus, held: Reservation | None) -> Candidate:
        """`held`: what reserves it for the event that asks."""
        blocks = self._blocks(info)
        spaces = (
            h.part
            for h in status.holdings
            if h.model_id == self.record.model_id and h.tier in ARENA
        )
        others = [
            tiers.keys()
            for model, tiers in self._holdings.in_memory(info).items()
            if model != self.record.model_id
        ]
        rate = _rate(info, status)
        return Candidate(
            info=info,
            free=status.arena_free,
            own=held is not None,
            part=held.part if held is not None else next(spaces, None),
            has_space=held is not None or bool(blocks.keys() & set(ARENA)),
            in_memory=len(_memory(blocks) & self._every),
            on_device=len(blocks.get(Tier.GPU, _EMPTY) & self._every),
            on_disk=len(blocks.get(Tier.DISK, _EMPTY) & self._every),
            active=sum(Tier.GPU in tiers for tiers in others),
            asleep=sum(Tier.HOST in tiers and Tier.GPU not in tiers for tiers in others),
            beside=info.local_bytes_per_s > rate and info.host in self._hosts,
            rate=rate,
            sending=info.node in self._sending,
            source_rack=info.rack in self._racks,
            crowd=self._crowds[info.rack],
        )

    # --- sources ---

    def senders(self) -> Iterator[Sender]:
        """One sender for each node and tier that has blocks."""
        targets = {
            info.rack
            for held in self._reservations.others(self._event)
            if held.model_id == self.record.model_id and (info := self._leases.info(held.node))
        }
        for info in self._holders():
            status = self._holdings.of(info)
            for tier, held in self._blocks(info).items():
                blocks = held & self._every
                if status is not None and blocks:
                    complete = len(blocks) == self.record.n_blocks
                    yield Sender(
                        Source(info, tier, tuple(sorted(blocks)), complete=complete),
                        running=status.running,
                        sending=info.node in self._sending,
                        same_rack=info.rack in targets,
                        rate=_rate(info, status),
                    )

    # --- what is known ---

    def _holders(self) -> Iterator[NodeInfo]:
        """Nodes with a standing lease that hold something of the model, by name."""
        return filter(None, map(self._leases.stands, self._holdings.holders(self.record.model_id)))

    def _blocks(self, info: NodeInfo) -> Blocks:
        return self._holdings.blocks(info, self.record.model_id)

    def _sharers(self, model: ModelId) -> Iterator[NodeInfo]:
        """Nodes that have blocks of a model in memory, in no order."""
        for node, generation in self._holdings.sharers(model):
            info = self._leases.info(node)
            if info is not None and info.generation == generation:
                yield info


def _memory(blocks: Blocks) -> frozenset[int]:
    return _EMPTY.union(*(blocks.get(tier, _EMPTY) for tier in MEMORY))


def _rate(info: NodeInfo, status: NodeStatus) -> float:
    """bytes/s of the port: the configured rate, or else the highest that was seen, or else 0."""
    profile = status.profile
    seen = max(profile.in_bytes_per_s, profile.out_bytes_per_s)
    return info.link_bytes_per_s or (seen if math.isfinite(seen) else 0.0)
