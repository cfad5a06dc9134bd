"""The state of one scaling event, its open questions, and its record.

Its phases are in `event_phases`, and what it does in `event_machine` (the course of an event that
goes well) and `mending` (what is done when it does not).
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet

import msgspec

from services.planner.core import events
from services.planner.core.commands import Command, Span, Unreserve
from services.planner.core.desk import ASK_S, Desk
from services.planner.core.disks import Read, disks_of, share_of_time
from services.planner.core.event_phases import (
    STEPS,
    Case,
    Dropped,
    Effect,
    Freed,
    Joined,
    Phase,
    Taken,
    Trouble,
)
from services.planner.core.links import Links
from services.planner.core.orders import Orders
from services.planner.core.placement import Plan, Roles
from services.planner.core.standing import Standing
from services.planner.core.tickets import Ticket
from services.planner.core.tiers import machine
from services.planner.core.trust import Trust
from shared.errors import CapacityExceeded, LambdaScaleError
from shared.ids import NodeId
from shared.messages import pool
from shared.messages.pool import MEMORY, ModelRecord, NodeInfo, Tier
from shared.messages.scaling import EventRecord, EventState

STALL_S = 5.0
STALL_BYTES_PER_S = 20_000_000
"""If no block arrives for STALL_S and the time of one block at this rate, the event is planned
again."""
MAX_REVISIONS = 32
"""The event fails instead of making a further plan."""
READ_S = 0.1
"""For so long counts what an event was found to read from disks."""
THINK_S = 120.0
"""Seconds after which an answer of a thread counts as lost."""
NEVER = float("inf")
_NONE: AbstractSet[int] = frozenset()


class EventBase:
    def __init__(
        self, desk: Desk, model: ModelRecord, record: EventRecord, standing: Standing
    ) -> None:
        """`standing` belongs to the model; the event only reads it."""
        self.record = record
        self.phase = Phase.RESERVING
        self.effects: list[Effect] = []
        """Effects for the model to take in. The model empties the list."""
        self.no_room = False
        """Whether it failed because no target could be had."""
        self._desk = desk
        self._model = model
        self._standing = standing
        self._every = frozenset(range(model.n_blocks))
        self._orders = Orders(desk, model)
        self._trust = Trust()
        self._waits: dict[int, NodeId | None] = {}
        """The open questions of this phase, with the node that each is about, if any."""
        self._roles: Roles | None = None
        self._targets_of: tuple[NodeId, ...] = ()
        self._targets: AbstractSet[NodeId] = frozenset()
        """Those of `_targets_of`."""
        self._counted: dict[NodeId, set[int]] = {}
        """Arrivals whose bytes have been counted."""
        self._incomplete: dict[NodeId, None] = {}
        """Targets that lack blocks, as the cluster says."""
        self._promoting: dict[NodeId, frozenset[int]] = {}
        """For each target, the blocks that it loads from its own lower tiers."""
        self._unreadable: set[tuple[NodeId, int]] = set()
        """(target, block) that could not be loaded."""
        self._out: set[NodeId] = set()
        """Nodes that the event goes on without: gone, silent, or unable."""
        self._troubles: list[Trouble] = []
        self._case = Case("")
        self._stalls = 0
        self._news_at = desk.at
        self._reading_s: Mapping[str, float] = {}
        """See `Links`: when the event began."""
        self._begun_at = desk.at
        self._read: Read | None = None
        """See `read`."""
        self._read_of: tuple[bool, int] | None = None
        """The plan of which it was found: whether there was none yet, and its revision."""
        self._read_until = 0.0
        self._read_by: dict[str, float] = {}
        """When each disk should have read all that this plan needs of it."""
        self._patience = STALL_S + max(model.block_bytes, default=0) / STALL_BYTES_PER_S
        """For how long it waits for a block."""

    # --- what is so ---

    @property
    def over(self) -> bool:
        return self.phase is Phase.OVER

    @property
    def targets(self) -> AbstractSet[NodeId]:
        """The record's targets: a thousand of them are asked for at each block."""
        if self._targets_of is not self.record.targets:
            self._targets_of = self.record.targets
            self._targets = frozenset(self._targets_of)
        return self._targets

    def loads(self, node: NodeId) -> bool:
        """Whether the event is not over and the node is a target of it."""
        return not self.over and node in self.targets

    @property
    def lacking(self) -> tuple[NodeId, ...]:
        """The targets that lack blocks."""
        return tuple(self._incomplete)

    def gives_up(self, node: NodeId) -> bool:
        """Whether the event is about to go on without a node, because it was told so."""
        told = any(isinstance(t, Taken) and t.node == node for t in self._troubles)
        return told or node in self._case.taken

    def needs(self, node: NodeId) -> bool:
        """Whether the event is not over and the node has a part in it."""
        return self.loads(node) or self.sends(node)

    def sends(self, node: NodeId) -> bool:
        """Whether the event is not over and blocks are still to come from the node."""
        if self.over or self._roles is None:
            return False
        if self.record.state is EventState.DECIDED:
            return node in self._roles.memory or node in self._roles.disk
        return node in self._senders()

    def _held(self, node: NodeId) -> frozenset[int]:
        return self._desk.cluster.executable(node, self._model.model_id) & self._every

    def _wanted_by(self, node: NodeId) -> frozenset[int]:
        """The blocks that a target is to hold."""
        part = self.record.parts.get(node)
        return frozenset(part.blocks) if part else self._every

    def _joined(self, info: NodeInfo) -> Joined:
        """What the model is told of a new target."""
        own = self._desk.cluster.held(info.node, self._model.model_id, MEMORY)
        wakes = self._wanted_by(info.node) <= own
        return Joined(info, self.record.parts.get(info.node), wakes=wakes)

    def _of_targets(self) -> dict[NodeId, frozenset[int]]:
        return {node: self._held(node) for node in self.record.targets}

    def _receiving(self) -> tuple[NodeId, ...]:
        """Targets that lack blocks which they do not load themselves."""
        held, nothing = self._of_targets(), frozenset[int]()
        return tuple(
            node
            for node in self._incomplete
            if self._wanted_by(node) - held[node] - self._promoting.get(node, nothing)
        )

    def read(self) -> Read | None:
        """What it reads from disks. None: nothing, or nothing more.

        Models that wait ask every event again and again, and one of a thousand targets has much to
        look through. So what was found counts for READ_S, until there is another plan, or until all
        should be read. Meanwhile, and for blocks that have come in part, what should be left by now
        counts."""
        if self.over:
            return None
        decided = self.record.state is EventState.DECIDED
        at, plan = self._desk.at, (decided, self.record.revision)
        if self._read_of != plan or at >= self._read_until:
            self._read = found = self._find_read()
            if found is not None and self._read_of != plan:
                busy_s, since_s = self._reading_s, at - self._begun_at
                begin = {disk: at + max(0.0, s - since_s) for disk, s in busy_s.items()}
                self._read_by = {d: begin.get(d, at) + s for d, s in found.left.items()}
            left_s = max(found.left.values()) if found is not None else NEVER
            self._read_of, self._read_until = plan, at + min(READ_S, left_s)
        if self._read is None:
            return None
        return self._read.expected({disk: by - at for disk, by in self._read_by.items()})

    def _find_read(self) -> Read | None:
        sizes, cluster, model = self._model.block_bytes, self._desk.cluster, self._model
        if self._roles is None or self.record.state is EventState.DECIDED:
            if cluster.in_memory(model.model_id, self._every):
                return None
            disks = disks_of(cluster.nodes, self._on_disk())
            if not disks:
                return None
            return Read(dict.fromkeys(disks, NEVER), sum(sizes), model.priority)
        lacking = {node: self._wanted_by(node) - self._held(node) for node in self._incomplete}
        own = {n: self._promoting.get(n, _NONE) & blocks for n, blocks in lacking.items()}
        nbytes = Counter({n: sum(sizes[block] for block in own[n]) for n in own if own[n]})
        on_disk = self._on_disk()
        for transfer in self.record.transfers:
            if transfer.src in on_disk and transfer.block in lacking.get(transfer.dst, _NONE):
                nbytes[transfer.src] += sizes[transfer.block]
        if not nbytes:
            return None
        links, largest = self._links(), max(sizes)
        left, block_s = defaultdict[str, float](float), dict[str, float]()
        for node, count in nbytes.items():
            disk, rate = machine(cluster.nodes, node), links.disk_rate(node)
            left[disk] += count / rate if links.are_timed([node]) else NEVER
            block_s[disk] = largest / rate
        missing = frozenset[int]().union(*lacking.values())
        of_model = sum(sizes[block] for block in missing)
        share = share_of_time(links, nbytes.keys(), self.record.targets)
        return Read(left, of_model, model.priority, share, block_s)

    def _senders(self) -> set[NodeId]:
        """The senders of what is still to come."""
        held, every = self._of_targets(), self._every
        return {t.src for t in self.record.transfers if t.block not in held.get(t.dst, every)}

    def _participants(self) -> set[NodeId]:
        return {*self.record.targets, *self._senders()}

    def _links(self) -> Links:
        cluster, settings = self._desk.cluster, self._desk.settings
        return Links(
            dict(cluster.nodes),
            {node: cluster.profile(node) for node in cluster.nodes},
            settings.link_bytes_per_s,
            settings.step_overhead_s,
            frozenset(node for node in self._on_disk() if node not in self.record.targets),
            cluster.kv.flows(self._desk.at),
            settings.disk_bytes_per_s,
        )

    def _on_disk(self) -> dict[NodeId, frozenset[int]]:
        """What nodes have on their disks, if memory does not hold all of it there."""
        holders, id_ = self._desk.cluster.holders, self._model.model_id
        in_memory, nothing = holders(id_, MEMORY), frozenset[int]()
        disks = holders(id_, [Tier.DISK]).items()
        left = {node: blocks - in_memory.get(node, nothing) for node, blocks in disks}
        return {node: blocks & self._every for node, blocks in left.items() if blocks}

    @property
    def revisions_left(self) -> int:
        return MAX_REVISIONS - self.record.revision

    # --- steps ---

    def _step(self, phase: Phase) -> None:
        self._desk.story.check_step(self.record.id, STEPS, self.phase, phase)
        self._tell(f"{self.phase.value} -> {phase.value}")
        self.phase = phase
        self._waits = {}

    def _ask(self, within: float, about: NodeId | None = None) -> Ticket:
        ticket = self._ticket(within)
        self._waits[ticket.number] = about
        return ticket

    def _ticket(self, within: float) -> Ticket:
        return self._desk.ask(
            within=within,
            model=self._model.model_id,
            event=self.record.id,
            revision=self.record.revision,
        )

    def _do(self, command: Command) -> None:
        self._desk.do(command)

    def _drop(self, nodes: Collection[NodeId], fit: Collection[NodeId] = ()) -> None:
        """Goes on without these nodes. `fit`: those with which nothing is wrong, such as nodes that
        are gone: the next process of the name may be used at once."""
        if reserved := tuple(node for node in sorted(nodes) if node in self.targets):
            self._unreserve(reserved)
        for node in sorted(nodes):
            self._out.add(node)
            self._promoting.pop(node, None)
            if node in self.record.targets:
                self._incomplete.pop(node, None)
                targets = tuple(n for n in self.record.targets if n != node)
                self.record = msgspec.structs.replace(self.record, targets=targets)
                self._tell(f"goes on without {node}", node)
                self.effects.append(Freed(node) if node in fit else Dropped(node))

    # --- the record ---

    def _note(self, at_ns: int, timing: str) -> None:
        self._noted(events.note(self.record, at_ns, timing))

    def _noted(self, record: EventRecord) -> None:
        before, self.record = self.record, record
        if self.over and record.actual != before.actual:
            self._desk.keep(record)

    def _set(self, record: EventRecord) -> None:
        """Makes a change that observers and the store are told of."""
        self.record = record
        self._desk.announce(record)

    def cancel(self, reason: str) -> None:
        """Ends the event without an error. What has arrived stays where it is."""
        if not self.over:
            self._finish(EventState.CANCELLED, reason)

    def fail(self, error: LambdaScaleError) -> None:
        if not self.over:
            self.no_room = isinstance(error, CapacityExceeded)
            if self.record.state is EventState.DECIDED:
                self._span_of_plan(error=repr(error))
            self._finish(EventState.FAILED, str(error))

    def abandon(self, error: LambdaScaleError) -> None:
        """Ends the event by its record only, because ending it in order has raised. Its
        reservations end when the pool is next read (`PoolView`)."""
        self.phase, self._waits = Phase.OVER, {}
        if self.record.state not in events.TERMINAL:
            at = self._desk.now.wall_ns
            self._set(events.advance(self.record, EventState.FAILED, at, error=str(error)))

    def _finish(self, state: EventState, error: str = "") -> None:
        at = self._desk.now.wall_ns
        lost = list(self._incomplete)
        if state is EventState.COMPLETE:
            self._note(at, "all_complete_s")
        self._step(Phase.OVER)
        self._set(events.advance(self.record, state, at, error=error))
        self._tell(f"{state.value}: {error}" if error else state.value, *self.record.targets)
        self._do(
            Span(
                name="scale_event",
                start_ns=self.record.detected_ns,
                end_ns=at,
                own=self.record.trace,
                attributes=events.summary(self.record),
                cause=self.record.id,
            )
        )
        if error:
            self._log("warning", "event ended early", state=state.value, error=error)
        else:
            self._log("info", "event complete", seconds=self.record.actual.all_complete_s)
        if state is EventState.FAILED:
            self.effects += [Freed(node) for node in lost]
        self._unreserve()

    def _unreserve(self, nodes: tuple[NodeId, ...] = ()) -> None:
        """Gives reserved nodes back; all if none is named."""
        message = pool.Unreserve(event=self.record.id, nodes=nodes, cause=self.record.id)
        ticket = self._desk.ask(within=ASK_S)
        self._do(Unreserve(ticket=ticket, message=message, cause=self.record.id))

    # --- for people ---

    def _tell(self, text: str, *subjects: str) -> None:
        self._desk.tell(text, self.record.id, self._model.model_id, *subjects)

    def _log(self, level: str, text: str, **fields: str | int | float | None) -> None:
        self._desk.log(level, text, event_id=self.record.id, model=self.record.name, **fields)

    def _span_of_plan(
        self, *, plan: Plan | None = None, reserved_ns: int | None = None, error: str = ""
    ) -> None:
        """Records the span from the decision to a plan, or to what prevented it."""
        record, now_ns = self.record, self._desk.now.wall_ns
        parts = [("reserve", record.decided_ns, reserved_ns or now_ns)]
        if reserved_ns is not None:
            parts.append(("choose", reserved_ns, now_ns))
        attributes: Mapping[str, str | int] = {}
        if plan is not None:
            attributes = {
                "sources": ",".join(record.sources),
                "targets": ",".join(record.targets),
                "strategy": record.strategy,
                "transfers": len(record.transfers),
                "considered": "; ".join(map(str, plan.considered)),
                "ports": "; ".join(plan.ports),
            }
        self._desk.span(
            "plan",
            record.trace,
            since_ns=record.decided_ns,
            attributes=attributes,
            error=error,
            children=tuple(
                Span(name=name, start_ns=start, end_ns=end, cause=record.id)
                for name, start, end in parts
            ),
        )

    def validate(self) -> None:
        """Raises AssertionError if parts of the state contradict each other."""
        for number in self._waits:
            assert self._desk.is_open(number)
        assert (self.phase is Phase.OVER) == (self.record.state in events.TERMINAL)
        if self.over:
            return
        planned = self.record.state is not EventState.DECIDED
        assert planned == (self.phase not in (Phase.RESERVING, Phase.PLANNING))
        if planned:
            lacking = {n for n in self.record.targets if self._held(n) != self._wanted_by(n)}
            assert lacking == set(self._incomplete)
        assert self.targets == set(self.record.targets)
        assert not self._out & set(self.record.targets)
        assert self._promoting.keys() <= set(self.record.targets)
        for node, blocks in self._promoting.items():
            assert blocks <= self._wanted_by(node)
        waiting = (Phase.RESERVING, Phase.PLANNING, Phase.JUDGING, Phase.REPAIRING)
        assert bool(self._waits) == (self.phase in waiting)
        if self.phase is Phase.LOADING:
            assert self._incomplete
            assert not self._troubles
