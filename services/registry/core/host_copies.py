"""Copies in memory: of each model one while it is idle, as in BlitzScale's parameter pool.

What is missing is made in host caches (`node.host_bytes`), from disks or from other memory. Where
the caches are too small for all models, those are kept that are worth most: the time to bring the
model back, times the chance that it is asked for. A copy gives way for a model that is kept, never
the last copy in memory of such a model.
"""

from collections.abc import Collection, Iterable, Iterator
from math import exp, inf

from services.registry.core.catalog import Catalog
from services.registry.core.giving_way import GiveWay, Resident, Sized, kept, make_room
from services.registry.core.goals import Place, machine_of
from services.registry.core.holdings import Holdings, Key
from services.registry.core.kept import Keeping, KeptCopies
from services.registry.core.leases import Leases
from shared.ids import Generation, ModelId, NodeId
from shared.layout import PAGE, room_of
from shared.messages.pool import MEMORY, ModelRecord, NodeInfo, Tier
from shared.schedule import least
from shared.story import Story

LOAD_BYTES_PER_S = 1e9
"""What a disk is taken to read if no node has measured it."""
ASKED_S = 600.0
"""How far back use counts for the chance that a model is asked for."""
DROPPING_S = 3.0
"""Seconds in which an ordered eviction shows in its node's report."""
SCHEDULE = "schedule"
"""The cause of copies that are wanted because a window of the model's schedule has begun."""


class HostCopies(KeptCopies):
    tier = Tier.CACHE
    counted = frozenset(MEMORY)
    least_handed_over = 1

    def __init__(
        self,
        settings: Keeping,
        catalog: Catalog,
        leases: Leases,
        holdings: Holdings,
        story: Story,
    ) -> None:
        super().__init__(settings, catalog, leases, holdings, story)
        self._chances: dict[ModelId, float] = {}
        """The share of the time in which each model was in use, of late."""
        self._kept: frozenset[ModelId] = frozenset()
        self._looked_at: float | None = None
        self._wall_ns = 0
        self._disks: list[tuple[float, NodeInfo]] = []
        """How fast each node reads its disk, the fastest first; 0: not known."""
        self._dropping: dict[tuple[NodeId, Generation], float] = {}

    def look(self, now: float, wall_ns: int) -> None:
        """Takes note of what is in use, and decides which models are kept."""
        since = now - self._looked_at if self._looked_at is not None else 0.0
        for record in self._catalog.records if self._looked_at is not None else ():
            if record.schedule and _warm(record, wall_ns) > _warm(record, self._wall_ns):
                self.changed(record.model_id, SCHEDULE)
        self._looked_at, self._wall_ns = now, wall_ns
        left = exp(-max(0.0, since) / ASKED_S)
        records = self._catalog.records
        self._chances = {
            r.model_id: self._chances.get(r.model_id, 0.0) * left
            + (1.0 - left) * any(True for _ in self._in_use(r))
            for r in records
        }
        self._dropping = {k: at for k, at in self._dropping.items() if now - at < DROPPING_S}
        self._disks = sorted(self._load_rates(), key=lambda disk: -disk[0])
        room = sum(place.info.host_bytes for place in self._places(set()))
        models = [
            Sized(r.model_id, self.size(r), self.worth(r), there=any(self._staying(r)))
            for r in records
            if self._asked_for(r)
        ]
        self._kept = kept(models, room)

    def size(self, record: ModelRecord) -> int:
        """At most, in whole pages, as nodes lay models out: large blocks begin at pages."""
        most = sum(map(room_of, record.block_bytes))
        return -(-most // PAGE) * PAGE

    def wanted(self, record: ModelRecord) -> int:
        return self._asked_for(record) if record.model_id in self._kept else 0

    def worth(self, record: ModelRecord) -> float:
        """Seconds that a request is expected to wait longer if no copy is in memory, for each byte
        that the copy takes."""
        on_disk = self._holdings.reporters(record.model_id)
        for rate, info in self._disks:
            if (info.node, info.generation) in on_disk and self._is_on_disk(info, record):
                return self._chances.get(record.model_id, 0.0) / (rate or LOAD_BYTES_PER_S)
        return inf  # it could not be brought back

    def worth_beside(self, record: ModelRecord, others: Iterable[NodeInfo]) -> float:
        """The same for a copy while others are in memory: it comes back over a link."""
        rate = max((info.link_bytes_per_s for info in others), default=0)
        over_link = self._chances.get(record.model_id, 0.0) / rate if rate else inf
        return min(self.worth(record), over_link)

    def _load_rates(self) -> Iterator[tuple[float, NodeInfo]]:
        for info in self._leases.present:
            if (status := self._holdings.of(info)) is not None:
                rate = status.profile.load_bytes_per_s
                yield (rate if 0 < rate < inf else 0.0), info

    def _is_on_disk(self, info: NodeInfo, record: ModelRecord) -> bool:
        held = self._holdings.blocks(info, record.model_id)
        return len(held.get(Tier.DISK, ())) == record.n_blocks

    def evictions(self, now: float) -> list[tuple[NodeInfo, GiveWay]]:
        """What gives way now: for models that lack a copy and find no room, and for copies that
        sleep in an arena because their node's host cache is full."""
        ordered: list[tuple[NodeInfo, GiveWay]] = []
        for record, nodes in self._without_room():
            open_ = [n for n in nodes if (n.node, n.generation) not in self._dropping]
            rooms = [
                (ways, info)
                for info in open_
                if (ways := make_room(self.size(record), self._free(info), self._residents(info)))
            ]
            if rooms:
                ways, info = min(
                    rooms, key=lambda room: (sum(w.worth for w in room[0]), room[1].node)
                )
                self._dropping[info.node, info.generation] = now
                cause = self.cause(record.model_id)
                ordered += [(info, way.for_(record.name, cause)) for way in ways]
        return ordered

    def _without_room(self) -> Iterator[tuple[ModelRecord, list[NodeInfo]]]:
        """Models that are to have room in a host cache, and the nodes where it may be."""
        places = {place.info.node: place.info for place in self._places(set())}
        for record in self._catalog.records:
            if not self.wanted(record):
                continue
            here = (info for info in self.there(record) if info.node in places)
            sleeping = [info for info in here if self._sleeps(info, record)]
            if full := [info for info in sleeping if self._free(info) < self.size(record)]:
                yield record, full
            machines = {machine_of(info) for info in self._staying(record)}
            if len(machines) < self.wanted(record):
                others = [i for i in places.values() if machine_of(i) not in machines]
                if others and all(self._free(info) < self.size(record) for info in others):
                    yield record, others

    def _residents(self, info: NodeInfo) -> list[Resident]:
        found = []
        for model, tiers in self._holdings.in_memory(info).items():
            record = self._catalog.get(model)
            if record is None or len(tiers.get(Tier.CACHE, ())) < record.n_blocks:
                continue
            # What gives way on other nodes, as their reports do not show yet, may be this model.
            others = [
                other
                for other in self._staying(record)
                if other.node != info.node and (other.node, other.generation) not in self._dropping
            ]
            machines = set(map(machine_of, others))
            last = model in self._kept and len(machines) < self.wanted(record)
            worth = self.worth_beside(record, others)
            found.append(Resident(model, record.name, self.size(record), worth, last))
        return found

    def _asked_for(self, record: ModelRecord) -> int:
        """How many machines are to have a copy if there is room: one while it is idle, and the warm
        copies beside what is in use. Nodes keep adapters in a room of their own."""
        if record.base:
            return 0
        used = {machine_of(info) for info in self._in_use(record)}
        groups = self.in_parts(record, (Tier.GPU,)) if not used else 0
        return max(self.settings.copies, len(used) + groups + _warm(record, self._wall_ns))

    def in_parts(self, record: ModelRecord, tiers: Collection[Tier] = MEMORY) -> int:
        counts = [0] * record.n_blocks
        for node, generation in self._holdings.sharers(record.model_id):
            info = self._leases.info(node)
            if info is None or info.generation != generation or not self._stays(info):
                continue
            held = self._holdings.blocks(info, record.model_id)
            blocks = frozenset[int]().union(*(held.get(tier, ()) for tier in tiers))
            for block in blocks if not self._has(info, record) else ():
                counts[block] += 1
        return min(counts)

    def _in_use(self, record: ModelRecord) -> Iterator[NodeInfo]:
        for info in self.there(record):
            if Tier.GPU in self._holdings.blocks(info, record.model_id):
                yield info

    def _sleeps(self, info: NodeInfo, record: ModelRecord) -> bool:
        """Whether the node's only copy in memory is one that sleeps in the arena."""
        held = self._holdings.blocks(info, record.model_id)
        return len(held.get(Tier.HOST, ())) == record.n_blocks and Tier.CACHE not in held

    def _free(self, info: NodeInfo) -> int:
        status = self._holdings.of(info)
        return status.host_free if status is not None else 0

    def _possible(self, model: ModelId) -> Collection[Key]:
        return self._holdings.sharers(model)

    def _has(self, info: NodeInfo, record: ModelRecord) -> bool:
        held = self._holdings.blocks(info, record.model_id)
        return len(frozenset().union(*(held.get(t, ()) for t in MEMORY))) == record.n_blocks

    def _places(self, busy: set[NodeId]) -> Iterator[Place]:
        for info in self._leases.usable:
            status = self._holdings.of(info)
            if status is not None and info.host_bytes:
                drafts = self._drafts(status)
                yield Place(info, status.host_free, 0, info.node in busy, drafts)


def _warm(record: ModelRecord, wall_ns: int) -> int:
    """How many warm copies are wanted at that time."""
    return least(record.schedule, record.min_instances, record.warm, (wall_ns,))[1]
