"""What the planner knows of the cluster: nodes, what they hold, and the load that gateways see.

This is the only place that says what nodes hold: events, members and releases ask here. Every node
reports at least once a second, mostly what it said before. What it says is sorted by model when it
changes, so that the cost of a question about one model does not grow with the others.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from math import inf
from statistics import median_low
from typing import TypeVar

from services.planner.core.arrivals import Arrivals
from services.planner.core.kv_traffic import KvTraffic
from services.planner.core.load_reports import LoadReports
from services.planner.core.measured import Measured
from services.planner.core.said import (
    MISSED,
    NO_CHANGE,
    NOTHING,
    Blocks,
    Change,
    Said,
    by_model,
    in_arena,
    in_tiers,
    load_rate,
    out_rate,
    put,
)
from shared.ids import Generation, ModelId, NodeId
from shared.messages.changes import applies
from shared.messages.pool import (
    ARENA,
    MEMORY,
    Holding,
    ModelRecord,
    NodeInfo,
    NodeStatus,
    Profile,
    Tier,
)
from shared.parts import Part

ARRIVAL_S = 1.0
"""A report that lacks a block which arrived less than this ago was made before it arrived."""
DISK_BYTES_PER_S = 10**9
"""What a disk is taken to read if no node has measured it, and nobody says otherwise."""
REMEMBER_S = 600.0
"""How long news of a generation that ended can still be on its way."""
_Key = TypeVar("_Key", ModelId, int)


class Cluster:
    """Plain state; every change comes in through one of the `on_` methods."""

    def __init__(self, disk_bytes_per_s: int = DISK_BYTES_PER_S) -> None:
        """`disk_bytes_per_s`: of disks that no node has measured."""
        self._disk_bytes_per_s = disk_bytes_per_s
        self.nodes: dict[NodeId, NodeInfo] = {}
        self.loads = LoadReports()
        self.measured = Measured()
        self.kv = KvTraffic()
        self._said: dict[NodeId, Said] = {}
        self._holders: dict[ModelId, set[NodeId]] = {}
        """The nodes, of any generation, that say they hold something of the model."""
        self._in_memory: dict[ModelId, set[NodeId]] = {}
        """Those of them that hold something of it in memory."""
        self._on_disk: dict[ModelId, dict[int, set[NodeId]]] = {}
        """The nodes that have something of each model on disk, by the number of its blocks."""
        self._whole_on_disk: dict[ModelId, tuple[int, frozenset[NodeId]]] = {}
        """Answers of `whole_on_disk` that still hold, with the number of the model's blocks. Disks
        have many models and change seldom."""
        self._fastest: dict[ModelId, float | None] = {}
        """Answers of `fastest_sender` that still hold."""
        self._speaking: frozenset[NodeId] | None = None
        """The live nodes that have said something; None: to be found anew."""
        self._disks: list[tuple[float, NodeId]] | None = None
        """The known rates of live nodes' disks, the fastest first; None: to be found anew."""
        self._largest: int | None = None
        """The size of the largest arena; None: it has to be found anew."""
        self.leaving: set[NodeId] = set()
        """The nodes that others are to take over from."""
        self._slots: int | None = None
        """The median of the nodes' slots; None: it has to be found anew."""
        self.over: dict[NodeId, Generation] = {}
        """For each node the generation that ended last. What is still heard of it is ignored."""
        self._over_at: dict[NodeId, float] = {}

    # --- what happens ---

    def on_joined(self, info: NodeInfo) -> NodeInfo | None:
        """Returns the node that had the name before, if this is another generation of it."""
        if self.over.get(info.node) == info.generation:
            return None
        before = self.nodes.get(info.node)
        self.nodes[info.node] = info
        (self.leaving.add if info.duty.leaves else self.leaving.discard)(info.node)
        self._forget_answers()
        if before is None or before.generation == info.generation:
            return None
        self.measured.on_gone(info.node)
        self.kv.on_gone(info.node)
        return before

    def leaves(self, node: NodeId) -> bool:
        """Whether other nodes are to take over what the node serves."""
        return node in self.leaving

    def left_s(self, node: NodeId, wall_ns: int) -> float:
        """Seconds until the node ends in any case what it serves; infinite if there is no limit."""
        info = self.nodes.get(node)
        if info is None or not info.leave_by_ns or not info.duty.leaves:
            return float("inf")
        return (info.leave_by_ns - wall_ns) / 1e9

    def meets(self, info: NodeInfo) -> bool:
        """Whether the node is there, for all that is known. A generation that has ended does not
        come back. A node that an answer names before it was announced counts as announced."""
        if info.node not in self.nodes:
            self.on_joined(info)
        known = self.nodes.get(info.node)
        return known is not None and known.generation == info.generation

    def on_gone(self, node: NodeId, generation: Generation, now: float) -> bool:
        """Takes note that a generation of the node has ended. Returns whether the node was known by
        that generation."""
        self.over[node], self._over_at[node] = generation, now
        said = self._said.get(node)
        if said is not None and said.status.generation <= generation:
            self._unsort(self._said.pop(node))
            self._speaking = None
        info = self.nodes.get(node)
        if info is None or info.generation != generation:
            return False
        del self.nodes[node]
        self.leaving.discard(node)
        self.measured.on_gone(node)
        self.kv.on_gone(node)
        self._forget_answers()
        return True

    def _forget_answers(self) -> None:
        """The live nodes are others now."""
        self._whole_on_disk.clear()
        self._fastest.clear()
        self._speaking = None
        self._slots = self._disks = self._largest = None

    def on_revived(self, info: NodeInfo) -> None:
        """The registry says that this generation lives, although it was asked after the planner
        heard of its end. (A registry that restarted may say so.) Everybody believes the registry,
        and so does the planner."""
        if self.over.get(info.node) == info.generation:
            del self.over[info.node], self._over_at[info.node]

    def on_status(self, status: NodeStatus, now: float) -> Change:
        self.loads.on_sign_of_life(now)
        if self.over.get(status.node) == status.generation:
            return NO_CHANGE
        said = self._said.get(status.node)
        known = said.status if said is not None else None
        if known and (status.generation, status.seq) <= (known.generation, known.seq):
            return NO_CHANGE
        if not applies(known, status):
            return MISSED
        measured = known is None or status.profile != known.profile
        if measured:
            self.measured.on_profile(status.node, status.profile)
        again = known is not None and known.generation == status.generation
        if not again or (measured and load_rate(known) != load_rate(status)):
            self._disks = None
        if not again or (measured and out_rate(known) != out_rate(status)):
            self._fastest.clear()
        self.measured.on_kv(status.node, status.kv_shares)
        self.kv.on_status(status.node, status.kv_sent_bytes, status.kv_received_bytes, now)
        more_room = known is None or status.arena_free > known.arena_free
        if said is None or not again:
            were = set(said.on_device) if said is not None else set[ModelId]()
            gained = dict(self._sort(status, now).on_device)
            models = frozenset(gained.keys() | were)
            return Change(more_room, models, models, gained)
        changed = self._sort_again(said, status, now)
        there = said.on_device
        models = frozenset(there)
        if not (changed or measured):  # nearly always
            return Change(more_room, models)
        gained = {
            model: new
            for model, before in changed.items()
            if (new := there.get(model, NOTHING) - (before or NOTHING))
        }
        models |= changed.keys()
        return Change(more_room, models, models if measured else frozenset(changed), gained)

    def _sort(self, status: NodeStatus, now: float) -> Said:
        """Takes in what a node says for the first time, or under a new generation."""
        if (before := self._said.get(status.node)) is not None:
            self._unsort(before)
        said = self._said[status.node] = Said(status, now)
        self._speaking = None
        for model, holdings in by_model(status.holdings).items():
            put(said, model, holdings)
            self._put(said, model, in_tiers(holdings))
        return said

    def _sort_again(
        self, said: Said, status: NodeStatus, now: float
    ) -> Mapping[ModelId, Blocks | None]:
        """Sorts what differs from what the node said before, and what has arrived since then.
        Returns the models of which its device memory has something else now, with what it had.
        Memory that was set aside for a model, and is still empty, is nothing else."""
        said.status, said.at = status, now
        changed = set(said.arrived)
        new = by_model(status.holdings)
        if status.since and not (new or status.dropped or changed):
            return {}
        named = (*new, *status.dropped) if status.since else said.holdings.keys() | new.keys()
        for model in named:
            if said.holdings.get(model, ()) != (holdings := new.get(model, ())):
                put(said, model, holdings)
                changed.add(model)
        before = {model: said.on_device.get(model) for model in changed}
        for model in changed:
            self._sort_model(said, model, now)
        found: dict[ModelId, Blocks | None] = {}
        for model, had in before.items():
            has = said.on_device.get(model)
            if has is not had and (has or had is not None):
                found[model] = had
        return found

    def _sort_model(self, said: Said, model: ModelId, now: float) -> None:
        """Sorts anew what the node holds of a model: what it says, and what arrived a moment
        ago."""
        held = in_tiers(said.holdings.get(model, ()))
        if arrived := said.arrived.pop(model, None):
            confirmed = held.get(Tier.GPU, NOTHING)
            waiting = {
                block: at
                for block, at in arrived.items()
                if block not in confirmed and now - at < ARRIVAL_S
            }
            if waiting:
                said.arrived[model] = waiting
                held[Tier.GPU] = confirmed.union(waiting)
        self._put(said, model, held)

    def _put(self, said: Said, model: ModelId, held: dict[Tier, Blocks]) -> None:
        """The node holds this of a model now, in these tiers."""
        node, before = said.status.node, said.models.get(model, {})
        if held == before:
            return
        if held:
            said.models[model] = held
        else:
            del said.models[model]
        if (on_disk := held.get(Tier.DISK)) != before.get(Tier.DISK):
            self._whole_on_disk.pop(model, None)
            by_count = self._on_disk.setdefault(model, {})
            if (was := before.get(Tier.DISK)) is not None:
                _list(by_count, len(was), node, there=False)
            if on_disk is not None:
                _list(by_count, len(on_disk), node, there=True)
            if not by_count:
                del self._on_disk[model]
        if (on_device := held.get(Tier.GPU)) is None:
            said.on_device.pop(model, None)
        elif on_device != said.on_device.get(model):
            said.on_device[model] = on_device
        if not (held and before):
            _list(self._holders, model, node, there=bool(held))
        (in_memory, lends), (was_in_memory, lent) = _memory(held), _memory(before)
        if in_memory != was_in_memory:
            _list(self._in_memory, model, node, there=in_memory)
        if lent and not lends:
            self._fastest.pop(model, None)
        elif lends and not lent and model in self._fastest and self._of_node(node) is said:
            rate, fastest = self.out_bytes_per_s(node), self._fastest[model]
            self._fastest[model] = rate if fastest is None else max(fastest, rate)

    def _unsort(self, said: Said) -> None:
        for model in list(said.models):
            self._put(said, model, {})

    def on_arrived(self, arrivals: Arrivals, now: float) -> Blocks:
        """Returns the blocks that this adds to the device memory of a live node."""
        self.loads.on_sign_of_life(now)
        node, model, generation = arrivals.node, arrivals.model, arrivals.generation
        info, said = self.nodes.get(node), self._said.get(node)
        if info is None or info.generation != generation:
            return frozenset()
        if said is None or said.status.generation != generation:
            nothing = NodeStatus(
                node=node, generation=generation, seq=-1, arena_free=0, holdings=()
            )
            said = self._sort(nothing, now)
        held = said.on_device.get(model)
        gained = frozenset([each.block for each in arrivals.blocks])
        if held:  # nearly always: only what it holds has changed
            gained -= held
            if not gained:
                return gained
            said.on_device[model] = said.models[model][Tier.GPU] = held | gained
        else:
            self._put(said, model, {**said.models.get(model, {}), Tier.GPU: gained})
        arrived = said.arrived.get(model)
        if arrived is None:
            arrived = said.arrived[model] = {}
        for block in gained:
            arrived[block] = now
        return gained

    def on_released(self, node: NodeId, model: ModelId, now: float) -> None:
        """The node has freed the model: what arrived before is not there any more."""
        said = self._said.get(node)
        if said is not None and model in said.arrived:
            del said.arrived[model]
            self._sort_model(said, model, now)

    def forget(self, now: float, models: Collection[ModelId]) -> None:
        """Forgets what can no longer matter. `models`: all models that are published."""
        for node in [node for node, at in self._over_at.items() if now - at > REMEMBER_S]:
            del self.over[node], self._over_at[node]
        for node, said in list(self._said.items()):
            if node not in self.nodes and now - said.at > REMEMBER_S:
                self._unsort(self._said.pop(node))
                self._speaking = None
        self.measured.forget(models)

    # --- what is known ---

    def held(self, node: NodeId, model: ModelId, tiers: Iterable[Tier]) -> Blocks:
        """Blocks that a live node holds in any of the tiers."""
        held = self._models(node).get(model, {})
        return frozenset().union(*(held.get(tier, ()) for tier in tiers))

    def executable(self, node: NodeId, model: ModelId) -> Blocks:
        """Blocks in a live node's device memory."""
        said = self._of_node(node)
        return said.on_device.get(model, NOTHING) if said is not None else NOTHING

    def holders(self, model: ModelId, tiers: Iterable[Tier]) -> dict[NodeId, Blocks]:
        """The nodes that hold something of the model in any of the tiers, by name, with their
        blocks."""
        tiers = tuple(tiers)
        index = self._holders if Tier.DISK in tiers else self._in_memory
        nodes = sorted(index.get(model, ()))
        found = {node: self.held(node, model, tiers) for node in nodes}
        return {node: blocks for node, blocks in found.items() if blocks}

    def in_memory(self, model: ModelId, blocks: Blocks) -> bool:
        """Whether nodes have all these blocks of the model in memory."""
        return blocks <= frozenset[int]().union(*self.holders(model, MEMORY).values())

    def hosts(self, node: NodeId, model: ModelId) -> bool:
        """Whether the node has device memory set aside for the model, filled or not."""
        return Tier.GPU in self._models(node).get(model, {})

    def part(self, node: NodeId, model: ModelId) -> Part | None:
        """The part of the model that a live node's arena has room for. None: all of it, or it has
        no room set aside."""
        said = self._of_node(node)
        holdings = said.in_arena.get(model, ()) if said is not None else ()
        return holdings[0].part if holdings else None

    def with_space(self, model: ModelId) -> Iterator[NodeId]:
        """Live nodes that have room in their arenas set aside for the model, filled or not."""
        for node in self._in_memory.get(model, ()):
            if self._models(node).get(model, {}).keys() & set(ARENA):
                yield node

    def models_on(self, node: NodeId) -> list[ModelId]:
        """Models that a live node has device memory set aside for."""
        return [model for model, tiers in self._models(node).items() if Tier.GPU in tiers]

    def profile(self, node: NodeId) -> Profile:
        """What a live node has measured itself."""
        said = self._of_node(node)
        return said.status.profile if said is not None else Profile()

    @property
    def largest_arena(self) -> int:
        """In bytes."""
        if self._largest is None:
            self._largest = max((info.arena_bytes for info in self.nodes.values()), default=0)
        return self._largest

    @property
    def slots(self) -> int:
        """The lower median of the nodes' slots. At least 1."""
        if self._slots is None:
            self._slots = median_low([info.slots for info in self.nodes.values()] or [1])
        return max(1, self._slots)

    def free(self, node: NodeId) -> int | None:
        """Free bytes of a live node's arena, as it said last; None: it has said nothing yet."""
        said = self._of_node(node)
        return said.status.arena_free if said is not None and said.status.seq >= 0 else None

    def come_since(self, node: NodeId) -> list[ModelId]:
        """Models of which something has arrived in the arena of a live node that had no space for
        them when it said what is free."""
        said = self._of_node(node)
        if said is None:
            return []
        return [m for m in said.arrived if not _in_arena(said.holdings.get(m, ()))]

    def load_s(self, model: ModelRecord) -> float:
        """About how many seconds it takes to bring a copy of the model back from the fastest disk
        that has it."""
        holders = self._holders.get(model.model_id, ())
        if self._disks is None:
            self._disks = self._known_disks()
        for rate, node in self._disks:
            if node in holders and self.held(node, model.model_id, [Tier.DISK]):
                return model.nbytes / rate
        return model.nbytes / self._disk_bytes_per_s

    def copy_s(self, model: ModelRecord, usual: int) -> float:
        """About how many seconds it takes to bring a copy of the model back while another is in
        memory. `usual`: bytes/s of a link that no node states or has measured; 0: not known."""
        rate = self.fastest_sender(model.model_id) or usual
        return min(self.load_s(model), model.nbytes / rate if rate else inf)

    def _known_disks(self) -> list[tuple[float, NodeId]]:
        rates = ((self.profile(node).load_bytes_per_s, node) for node in self.nodes)
        return sorted(((rate, node) for rate, node in rates if 0 < rate < inf), reverse=True)

    def whole_on_disk(self, model: ModelRecord) -> frozenset[NodeId]:
        """The live nodes whose disks have all of the model."""
        id_, blocks = model.model_id, model.n_blocks
        if (known := self._whole_on_disk.get(id_)) is None:
            known = self._whole_on_disk[id_] = blocks, self._with_whole(id_, blocks)
        return known[1]

    def _with_whole(self, model: ModelId, blocks: int) -> frozenset[NodeId]:
        if self._speaking is None:
            self._speaking = frozenset(filter(self._speaks, self._said))
        return self._speaking.intersection(self._on_disk.get(model, {}).get(blocks, ()))

    def out_bytes_per_s(self, node: NodeId) -> float:
        """The rate at which a live node sends, as it states or has measured it; 0: not known."""
        info = self.nodes.get(node)
        stated = float(info.link_bytes_per_s) if info is not None else 0.0
        return stated or self.profile(node).out_bytes_per_s

    def fastest_sender(self, model: ModelId) -> float | None:
        """The highest rate at which a node that holds something of the model in memory sends; 0:
        not known. None: no node holds any of it."""
        if model not in self._fastest:
            self._fastest[model] = self._fastest_of(model)
        return self._fastest[model]

    def _fastest_of(self, model: ModelId) -> float | None:
        nodes = self._in_memory.get(model, ())
        lenders = (node for node in nodes if _memory(self._models(node).get(model, {}))[1])
        return max(map(self.out_bytes_per_s, lenders), default=None)

    def in_arenas(
        self, beside: Mapping[ModelId, AbstractSet[NodeId]]
    ) -> Iterator[tuple[NodeId, Holding]]:
        """What lies in the arenas of live nodes, as they reported it. What each model has on the
        nodes in `beside` is left out, which is nearly all."""
        nobody = frozenset[NodeId]()
        for model, nodes in self._in_memory.items():
            for node in sorted(nodes - beside.get(model, nobody)):
                said = self._of_node(node)
                for holding in said.in_arena.get(model, ()) if said is not None else ():
                    yield node, holding

    def validate(self) -> None:
        """Raises AssertionError if parts of the state contradict each other."""
        assert self.over.keys() == self._over_at.keys()
        assert self.leaving == {node for node, info in self.nodes.items() if info.duty.leaves}
        assert self._disks in (None, self._known_disks())
        assert self._speaking in (None, set(filter(self._speaks, self._said)))
        for model, (blocks, nodes) in self._whole_on_disk.items():
            holders_on_disk = self.holders(model, [Tier.DISK]).items()
            assert nodes == {node for node, held in holders_on_disk if len(held) == blocks}
        on_disk: dict[ModelId, dict[int, set[NodeId]]] = {}
        for node, said in self._said.items():
            for model, held in said.models.items():
                if (blocks_there := held.get(Tier.DISK)) is not None:
                    by_count = on_disk.setdefault(model, {})
                    by_count.setdefault(len(blocks_there), set()).add(node)
        assert on_disk == self._on_disk
        for model, fastest in self._fastest.items():
            assert fastest == self._fastest_of(model)
        holders: dict[ModelId, set[NodeId]] = {}
        for node, said in self._said.items():
            assert said.status.node == node
            assert all(said.holdings.values()), "nothing is kept of what it does not hold"
            in_arenas = {m: in_arena(holdings) for m, holdings in said.holdings.items()}
            assert said.in_arena == {m: holdings for m, holdings in in_arenas.items() if holdings}
            for model, arrived in said.arrived.items():
                assert arrived
                assert arrived.keys() <= said.models[model][Tier.GPU]
            for model in said.models:
                holders.setdefault(model, set()).add(node)
            on_device = {m: t[Tier.GPU] for m, t in said.models.items() if Tier.GPU in t}
            assert said.on_device == on_device
        assert holders == self._holders
        in_memory = {
            model: {n for n in nodes if self._said[n].models[model].keys() - {Tier.DISK}}
            for model, nodes in holders.items()
        }
        assert {model: nodes for model, nodes in in_memory.items() if nodes} == self._in_memory

    def _of_node(self, node: NodeId) -> Said | None:
        """What the current generation of the node said; None if it has said nothing."""
        info, said = self.nodes.get(node), self._said.get(node)
        if info is None or said is None or said.status.generation != info.generation:
            return None
        return said

    def _speaks(self, node: NodeId) -> bool:
        """Whether the current generation of the node has said something."""
        info = self.nodes.get(node)
        return info is not None and self._said[node].status.generation == info.generation

    def _models(self, node: NodeId) -> dict[ModelId, dict[Tier, Blocks]]:
        said = self._of_node(node)
        return said.models if said is not None else {}


def _memory(held: Mapping[Tier, Blocks]) -> tuple[bool, bool]:
    """Whether there is memory set aside for it, and whether some of it is there."""
    there = lends = False
    for tier, blocks in held.items():
        if tier is not Tier.DISK:
            there, lends = True, lends or bool(blocks)
    return there, lends


def _list(index: dict[_Key, set[NodeId]], key: _Key, node: NodeId, *, there: bool) -> None:
    """Whether the node is among those under the key. No set that is empty is kept."""
    if there:
        index.setdefault(key, set()).add(node)
        return
    index[key].discard(node)
    if not index[key]:
        del index[key]


def _in_arena(holdings: Iterable[Holding]) -> bool:
    return any(holding.tier in ARENA for holding in holdings)
