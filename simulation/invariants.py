"""What must hold of a cluster at all times, whatever goes wrong, and what must hold once it is at
rest.

Everything here only looks: at messages that reach the bus, and at what living nodes really hold.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from services.node.memory.arena import PAGE, ModelSpace
from services.node.service import NodeService
from services.planner.core.events import TERMINAL
from services.planner.core.ledger import tiles
from shared.clock import now
from shared.ids import EventId, ModelId, ModelName, NodeId
from shared.layout import Manifest
from shared.messages.instances import Instance, InstanceState
from shared.messages.pool import ARENA, NodeGone, NodeStatus, NodeView, PoolState, Tier
from shared.messages.scaling import EventRecord, PlannerState
from shared.parts import Part

LEARN_S = 2.0
"""How long after the announcement of a node's end the planner may still decide without knowing
it."""

Say = Callable[[str], None]


# --- at all times ---


class Events:
    """A node is a target of at most one running event, and a record accounts for its event's
    time."""

    def __init__(self, *, timed: bool = True) -> None:
        """`timed`: whether wall clocks are right, so that the times of records mean something."""
        self._timed = timed
        self.running: dict[EventId, EventRecord] = {}
        self._gone: dict[EventId, set[NodeId]] = {}
        """Targets that ended after the event was last planned. The event may not have noticed yet,
        and another event may have whoever comes back under such a name."""

    def changed(self, record: EventRecord) -> list[str]:
        before = self.running.pop(record.id, None)
        if before is None or before.revision != record.revision:
            self._gone[record.id] = set()
        if record.state in TERMINAL:
            del self._gone[record.id]
            return unaccounted(record) if self._timed else []
        targets = self._targets(record)
        wrong = [
            f"{node} is a target of {other.id} and of {record.id}"
            for other in self.running.values()
            for node in sorted(self._targets(other) & targets)
        ]
        self.running[record.id] = record
        return wrong

    def gone(self, node: NodeId) -> None:
        for gone in self._gone.values():
            gone.add(node)

    def planner_died(self) -> None:
        """Ends all events, because they end with their planner."""
        self.running.clear()
        self._gone.clear()

    def _targets(self, record: EventRecord) -> set[NodeId]:
        return set(record.targets) - self._gone[record.id]


def unaccounted(record: EventRecord) -> list[str]:
    """Whether the ledger of an event that is over leaves out or invents time, or its phases do not
    follow each other."""
    begin, (_, end) = record.waiting_ns, record.history[-1]
    whole = (end - begin) / 1e9
    found = sum(spent.seconds for spent in record.ledger)
    wrong = []
    if abs(whole - found) > 0.001 * whole:
        wrong.append(f"{record.id} took {whole:.6f} s, its ledger has {found:.6f} s")
    if any(spent.seconds < 0 for spent in record.ledger):
        wrong.append(f"{record.id} has a phase of less than no time: {record.ledger}")
    row = tiles(record, end)
    if any(before[2] != after[1] for before, after in pairwise(row)):
        wrong.append(f"{record.id} has phases that do not follow each other: {row}")
    return wrong


@dataclass(slots=True)
class _Copies:
    nodes: frozenset[str] = frozenset()
    """Nodes that hold a full copy in memory."""
    was: bool = False
    """Whether there was a copy, and no crash took the last one since."""


@dataclass(slots=True)
class Pool:
    """A model that was loaded stays in some node's memory, unless a crash takes the last copy, or
    the node with the last copy was told to leave. This holds where memory is ample.

    Decisions that the planner takes before it can know of a crash are the crash's fault.
    """

    models: Mapping[ModelId, int]
    """Number of blocks of each model."""
    ample: bool
    leaving: set[str] = field(default_factory=set)
    """Nodes that were told to leave."""
    _copies: dict[ModelId, _Copies] = field(default_factory=dict)
    _crashed: dict[tuple[str, int], tuple[ModelId, ...]] = field(default_factory=dict)
    """(node, generation) whose end nobody knows yet -> the models that it held a copy of."""
    _learnt_at: dict[ModelId, float] = field(default_factory=dict)
    """When the end of a node with a copy was last announced."""

    @property
    def kept(self) -> list[ModelId]:
        """Models of which there is a copy."""
        return [model for model, copies in self._copies.items() if copies.was]

    def look(self, nodes: Mapping[str, NodeService]) -> list[str]:
        wrong: list[str] = []
        for model, blocks in self.models.items():
            copies = self._copies.setdefault(model, _Copies())
            holders = frozenset(n for n, s in nodes.items() if has_copy(s, model, blocks))
            if copies.was and not holders:
                excused = any(model in held for held in self._crashed.values())
                excused = excused or copies.nodes <= self.leaving
                if (
                    self.ample
                    and not excused
                    and now() - self._learnt_at.get(model, float("-inf")) > LEARN_S
                ):
                    last = ", ".join(sorted(copies.nodes))
                    wrong.append(f"no copy of {model} in memory any more; the last: {last}")
            copies.nodes, copies.was = holders, bool(holders)
        return wrong

    def crashed(self, node: NodeService) -> None:
        """Records what the node holds, because it is about to crash."""
        held = tuple(m for m, b in self.models.items() if has_copy(node, m, b))
        self._crashed[node.info.node, node.info.generation] = held
        for model in held:
            copies = self._copies.setdefault(model, _Copies())
            copies.nodes -= {node.info.node}
            copies.was = copies.was and bool(copies.nodes)

    def gone(self, message: NodeGone) -> None:
        for model in self._crashed.pop((message.node, message.generation), ()):
            self._learnt_at[model] = now()


def has_copy(node: NodeService, model: ModelId, blocks: int) -> bool:
    """Whether the node has all of the model in host or device memory."""
    return len(in_memory(node, model)) == blocks


def in_memory(node: NodeService, model: ModelId) -> set[int]:
    """The blocks that the node has in host or device memory."""
    held: set[int] = set()
    for holding in node.holdings():
        if holding.model_id == model and holding.tier is not Tier.DISK:
            held.update(holding.blocks)
    return held


# --- at rest: no load, no fault for a while ---


@dataclass(frozen=True, slots=True)
class Rest:
    """Everything that is known of a cluster that should be at rest."""

    nodes: Mapping[str, NodeService]
    """The nodes that live."""
    pool: PoolState
    """What the registry says."""
    planner: PlannerState
    said: Mapping[NodeId, NodeStatus]
    """What each node said last."""
    reserved: Iterable[str]
    """Nodes that the registry keeps for events."""
    manifests: Mapping[ModelName, Manifest]
    ids: Mapping[ModelName, ModelId]
    replicas: int
    """How many replicas each model should have."""
    loaded: Iterable[ModelId]
    """Models that must have a copy in memory."""
    arena_bytes: int
    warm: bool = False
    """Whether copies may sleep beside those that are needed, as models' histories say."""

    def wrong(self) -> list[str]:
        return [
            *self._of_events(),
            *self._of_sets(),
            *self._of_copies(),
            *self._of_registry(),
            *(each for name in self.nodes for each in self._of_node(NodeId(name))),
        ]

    def _of_events(self) -> list[str]:
        wrong = [
            f"{r.id} is {r.state.value}" for r in self.planner.events if r.state not in TERMINAL
        ]
        return wrong + [f"{node} is still reserved" for node in self.reserved]

    def _of_sets(self) -> list[str]:
        wrong = []
        sets = {found.name: found for found in self.planner.sets}
        for name in self.manifests:
            instances = sets[name].instances if name in sets else ()
            if len(instances) != self.replicas or not all(map(_serves_alone, instances)):
                wrong.append(f"{name} has {' '.join(map(brief, instances)) or 'no instance'}")
            open_on = {n for n, s in self.nodes.items() if self.ids[name] in _open(s)}
            if open_on != {stage.node for each in instances for stage in each.stages}:
                wrong.append(
                    f"{name} takes device memory on {', '.join(sorted(open_on)) or 'none'}"
                )
        return wrong

    def _of_copies(self) -> list[str]:
        """Models with too few or too many copies in memory. A model needs one copy for each
        replica, or one in all if it has no replica and the pool must keep a copy. It may have more
        only where copies may sleep. Of a model that fits no device, one copy of each part may
        sleep, but none has to."""
        wrong = []
        for name, model in self.ids.items():
            blocks = self.manifests[name].n_blocks
            held = {n: in_memory(s, model) for n, s in self.nodes.items()}
            counts = [sum(block in each for each in held.values()) for block in range(blocks)]
            wanted = self.replicas or int(model in self.loaded)
            fits = self.manifests[name].nbytes <= self.arena_bytes
            most = max(wanted, 0 if fits else 1)
            if min(counts) < wanted or (max(counts) > most and not self.warm):
                holders = ", ".join(sorted(node for node, each in held.items() if each))
                wrong.append(f"{name} has copies on {holders or 'no node'}: {counts}")
        return wrong

    def _of_registry(self) -> list[str]:
        known = {view.info.node for view in self.pool.nodes}
        if known != set(self.nodes):
            return [f"the registry knows {sorted(known)}, there are {sorted(self.nodes)}"]
        return []

    def _of_node(self, node: NodeId) -> list[str]:
        wrong, service = [], self.nodes[node]
        service.validate()
        for view in (v for v in self.pool.nodes if v.info.node == node):
            wrong += self._of_view(view, service)
        said = self.said.get(node)
        if said is None or said.generation != service.info.generation:
            return [*wrong, f"{node} has said nothing"]
        if said.running or said.waiting or said.kv_used:
            wrong.append(
                f"{node} has {said.running} sequences, {said.waiting} wait, {said.kv_used} KV"
            )
        if said.violations:
            wrong.append(f"{node} has refused {said.violations} messages of peers")
        if said.faults:
            wrong.append(f"{node} has contained {said.faults} bugs")
        return wrong

    def _of_view(self, view: NodeView, service: NodeService) -> list[str]:
        node, wrong = view.info.node, []
        if view.info.generation != service.info.generation:
            wrong.append(
                f"{node} is generation {service.info.generation}, not {view.info.generation}"
            )
        if set(view.holdings) != set(service.holdings()):
            wrong.append(f"{node} holds other blocks than the registry says")
        if view.reserved_by:
            wrong.append(f"{node} is reserved by {view.reserved_by}")
        manifests = {self.ids[name]: manifest for name, manifest in self.manifests.items()}
        taken = sum(
            _pages(ModelSpace.size(manifests[model], part))
            for model, part in _in_arena(service).items()
        )
        if view.arena_free != _pages(self.arena_bytes) - taken:
            wrong.append(f"{node} has {view.arena_free} bytes free, {taken} are taken")
        return wrong


def _serves_alone(instance: Instance) -> bool:
    return instance.lasts and instance.state is InstanceState.SERVING


def brief(instance: Instance) -> str:
    """The instance in a few words, for people."""
    stages = " ".join(f"{s.node}[{s.start}:{s.stop}]" for s in instance.stages)
    return f"({stages} {instance.state.value} {instance.capacity:.3f})"


def _in_arena(node: NodeService) -> dict[ModelId, Part | None]:
    return {h.model_id: h.part for h in node.holdings() if h.tier in ARENA}


def _open(node: NodeService) -> set[ModelId]:
    return {h.model_id for h in node.holdings() if h.tier is Tier.GPU}


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
