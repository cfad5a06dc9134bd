"""The registry's whole state as one machine: events in, effects out, without a clock of its own.

Invariants: a node belongs to at most one event; a reservation is of a node and generation that is
present; only nodes with a standing lease are sources or targets.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import msgspec

from services.registry.core import replication
from services.registry.core.catalog import Catalog
from services.registry.core.durable import DurableCopies
from services.registry.core.duties import Duties, NodeDuty
from services.registry.core.goals import Choice
from services.registry.core.holdings import Holdings, Taken
from services.registry.core.host_copies import HostCopies
from services.registry.core.kept import (
    SOURCES,
    CopyOrdered,
    Keeping,
    KeptCopies,
    ModelSkipped,
)
from services.registry.core.leases import Change, Leases
from services.registry.core.pages import nodes_of, page_of
from services.registry.core.placement import Target, choose, choose_groups, sender_rank
from services.registry.core.replication import Copies
from services.registry.core.reservations import Reservation, Reservations
from services.registry.core.survey import Survey
from shared.errors import BadInput, NotFound
from shared.ids import EventId, ModelId, NodeId
from shared.messages.copies import Leave
from shared.messages.pool import (
    ModelRecord,
    NodeGone,
    NodeInfo,
    NodeJoined,
    Nodes,
    NodesQuery,
    NodeStatus,
    NodeView,
    PoolPage,
    PoolQuery,
    Profile,
    Reserve,
    SetDuty,
    Source,
    Tier,
    Unreserve,
)
from shared.parts import Part
from shared.story import Story


class StatusWanted(msgspec.Struct, frozen=True):
    """The node has to say all that it holds."""

    node: NodeId


class DutySaid(msgspec.Struct, frozen=True):
    """What an operator has said of a node has changed. None: it may be used for all."""

    node: NodeId
    duty: NodeDuty | None


class ReservationMade(msgspec.Struct, frozen=True):
    reservation: Reservation


class ReservationEnded(msgspec.Struct, frozen=True):
    reservation: Reservation
    reason: str


class CopyDropped(msgspec.Struct, frozen=True):
    """A copy in a host cache gives way."""

    info: NodeInfo
    model_id: ModelId
    why: str
    cause: str
    """What made the room needed."""


CopyEffect = CopyOrdered | CopyDropped | ModelSkipped
Effect = (
    NodeJoined
    | StatusWanted
    | NodeGone
    | DutySaid
    | ReservationMade
    | ReservationEnded
    | CopyEffect
)
"""An effect has to be announced, stored, sent to a node, or logged."""


DURABLE = Keeping(copies=2, after_s=60.0)
HOST = Keeping(copies=1, after_s=0.0)
"""Nobody waits for what was in the memory of a process that has ended."""


class Pool:
    def __init__(self, durable: Keeping = DURABLE, host: Keeping = HOST) -> None:
        self.story = Story()
        """What happened to nodes and reservations, and why."""
        self.catalog = Catalog()
        self.duties = Duties()
        self.leases = Leases(self.story, self.duties)
        self.holdings = Holdings()
        self.reservations = Reservations()
        parts = self.catalog, self.leases, self.holdings, self.story
        self.durable, self.host = DurableCopies(durable, *parts), HostCopies(host, *parts)
        self._tiers: tuple[KeptCopies, ...] = (self.durable, self.host)
        self.at = 0.0
        """The time of what happens, for the story. The shell sets it before a request. Other events
        bring their time along."""

    # --- what happens to models ---

    def model_put(self, record: ModelRecord, cause: str) -> None:
        """A record that the catalog has admitted, or changed, holds from now on. `cause`: the
        request's."""
        self.catalog.put(record)
        for tier in self._tiers:
            tier.changed(record.model_id, cause)

    # --- what happens to nodes ---

    def restore(
        self, nodes: Iterable[NodeInfo], reservations: Iterable[Reservation], now: float
    ) -> None:
        """Takes in what was stored before a restart. `leases_are` then tells what still holds."""
        for info in nodes:
            self.leases.restore(info, now)
            self._joined(info)
            self.at = now
        for reservation in reservations:
            self.reservations.add(reservation)

    def lease_put(self, info: NodeInfo, now: float) -> list[Effect]:
        return self._after(self.leases.put(info, now), now)

    def lease_dropped(self, node: NodeId, now: float) -> list[Effect]:
        return self._after(self.leases.dropped(node, now), now)

    def leases_are(self, nodes: Collection[NodeId], now: float) -> list[Effect]:
        """The complete list of leases. Everything that rests on other leases is in doubt or
        ends."""
        effects = self._after(self.leases.only(nodes, now), now)
        for held in self.reservations.all:
            info = self.leases.info(held.node)
            if info is None or info.generation != held.generation:
                self.reservations.lose(held.node, held.generation)
                effects.append(
                    self._ended(held, "its node did not outlive the restart", "lease_watch")
                )
        return effects

    def status(self, status: NodeStatus, now: float) -> list[Effect]:
        if self.leases.is_over(status.node, status.generation):
            return [self.leases.gone_again(status.node, status.generation, status.origin)]
        taken = self.holdings.report(status, now)
        if taken is not Taken.LATE:
            self.leases.heard(status.node, status.generation, now)
        return [StatusWanted(status.node)] if taken is Taken.GAP else []

    def start(self, now: float) -> None:
        """The nodes have reported: copies may be ordered from now on."""
        for tier in self._tiers:
            tier.start(now)

    def _joined(self, info: NodeInfo) -> None:
        for tier in self._tiers:
            tier.joined(info)

    def tick(self, now: float, wall_ns: int = 0) -> list[Effect]:
        """Ends whatever has been in doubt for too long, and orders copies."""
        effects = self._after(self.leases.overdue(now), now)
        present = {(info.node, info.generation) for info in self.leases.present}
        self.holdings.prune(present, now)
        effects += self._copies_to_order(self.durable, now)
        if self.host.due(now):
            self.host.look(now, wall_ns)
            effects += self._copies_to_drop(now)
        return [*effects, *self._copies_to_order(self.host, now)]

    def set_duty(self, request: SetDuty, now: float, wall_ns: int) -> list[Effect]:
        """An operator says what a node may be used for. NotFound if there is no such node, BadInput
        if the limit makes no sense."""
        node = request.node
        if self.leases.info(node) is None and self.duties.said(node) is None:
            raise NotFound(f"there is no node {node!r}: `lambdascale status` lists the nodes")
        self.duties.say(request, wall_ns)
        limit = f" within {request.within_s:g} s" if request.within_s else ""
        self.story.tell(now, request.origin, f"duty: {request.duty.value}{limit}", node)
        return [DutySaid(node, self.duties.said(node)), *self._duty_changed(node, "operator", now)]

    def leave(
        self, leave: Leave, now: float, wall_ns: int
    ) -> tuple[tuple[ModelId, ...], list[Effect]]:
        """A node is about to end. Returns the models that it should wait for: nobody else has them
        on disk, or in memory, and somebody is about to."""
        node, info = leave.node, self.leases.info(leave.node)
        if info is None or info.generation != leave.generation:
            return (), []
        effects: list[Effect] = []
        if self.duties.ends(leave, wall_ns):
            self.story.tell(now, "leave", "is about to end", node)
            effects = self._duty_changed(node, "leave", now)
        models = tuple(
            record.model_id
            for record in self.catalog.records
            if any(t.hands_over(record, node, self.givers(record)) for t in self._tiers)
        )
        return models, effects

    def _duty_changed(self, node: NodeId, cause: str, now: float) -> list[Effect]:
        effects = self._after(self.leases.duty_changed(node, cause), now)
        info = self.leases.info(node)
        for tier in self._tiers:
            if info is not None and info.duty.leaves:
                tier.leaves(node)
            tier.look_soon(now)
        return effects

    def _copies_to_drop(self, now: float) -> list[CopyDropped]:
        dropped = []
        for info, way in self.host.evictions(now):
            dropped.append(CopyDropped(info, way.model_id, way.why, way.cause))
            text = f"leaves the host cache: {way.why}"
            self.story.tell(now, way.cause, text, info.node, way.model_id)
        return dropped

    def _copies_to_order(self, kept: KeptCopies, now: float) -> list[CopyEffect]:
        if not kept.due(now):
            return []
        kept.settle(now)
        lacking: dict[ModelId, frozenset[NodeId]] = {}
        for record in self.catalog.records:
            givers = kept.attempt(
                record.model_id, partial(self._givers_if_lacking, kept, record, now), None
            )
            if givers is not None:
                lacking[record.model_id] = givers
        orders: list[CopyEffect] = []
        for choice in (*kept.step(lacking, now).choices, *kept.hurried()):
            ordered = partial(self._order, kept, choice, now)
            if order := kept.attempt(choice.model_id, ordered, None):
                orders.append(order)
        skipped, kept.skipped = kept.skipped, []
        return [*orders, *skipped]

    def _givers_if_lacking(
        self, kept: KeptCopies, record: ModelRecord, now: float
    ) -> frozenset[NodeId] | None:
        return self.givers(record) if kept.lacking(record, now) else None

    def _order(self, kept: KeptCopies, choice: Choice, now: float) -> CopyOrdered:
        model, info = choice.model_id, choice.info
        best = self._feeding(model, info, kept.tier)
        rate = kept.rate(model, info, [source.info for source in best])
        kind = "durable copy" if kept.tier is Tier.DISK else "copy in the host cache"
        givers = ", ".join(s.info.node for s in best)
        why = f"is ordered a {kind} from {givers} at {rate / 1e6:.1f} MB/s"
        cause = kept.cause(model)
        self.story.tell(now, cause, why, info.node, model)
        return CopyOrdered(info, model, best, rate, kept.tier, cause)

    def order_failed(self, order: CopyOrdered, why: str, now: float) -> None:
        """A node refused an order, or did not answer."""
        for tier in self._tiers:
            if tier.tier is order.tier:
                tier.failed(order, why, now)

    def _feeding(self, model: ModelId, target: NodeInfo, tier: Tier) -> tuple[Source, ...]:
        """Who gives the blocks of a copy: for the host cache the node's own disk, if it has all."""
        sources = self.sources(model)
        own = [s for s in sources if s.info.node == target.node and s.tier is Tier.DISK]
        if tier is not Tier.DISK and any(source.complete for source in own):
            return tuple(own)
        return tuple([s for s in sources if s.info.node != target.node][:SOURCES])

    def givers(self, record: ModelRecord) -> frozenset[NodeId]:
        """Nodes that hold the model whole in some tier, or else those that do so together."""
        sources = self.sources(record.model_id)
        whole = frozenset(source.info.node for source in sources if source.complete)
        blocks = {block for source in sources for block in source.blocks}
        together = frozenset(source.info.node for source in sources)
        return whole or (together if len(blocks) == record.n_blocks else frozenset())

    def _after(self, changes: Iterable[Change], now: float) -> list[Effect]:
        self.at = now
        effects: list[Effect] = []
        for change in changes:
            effects.append(change)
            if isinstance(change, NodeJoined):
                self._joined(change.info)
            if isinstance(change, NodeGone):
                self.duties.ended(change.node, change.generation)
                for tier in self._tiers:
                    tier.gone(change.node, change.generation, now)
                lost = self.reservations.lose(change.node, change.generation)
                if lost is not None:
                    reason = f"its node is gone: {change.reason}"
                    effects.append(self._ended(lost, reason, change.cause))
        return effects

    def validate(self) -> None:
        """Raises AssertionError if parts of the state contradict each other."""
        self.catalog.validate()
        self.leases.validate()
        self.holdings.validate()
        self.reservations.validate()
        for kept in self._tiers:
            kept.validate()
        for held in self.reservations.all:
            info = self.leases.info(held.node)
            assert info is not None
            assert info.generation == held.generation

    # --- what is asked of the pool ---

    def reserve(self, request: Reserve) -> tuple[tuple[Target, ...], list[Effect]]:
        """Targets for an event, best first. Asking again gives the same nodes: nodes that the event
        has, and does not exclude, are taken first and count.

        BadInput: negative numbers. NotFound: no such model. Conflict: the event moves another
        model.
        """
        if request.count < 0 or request.nbytes < 0:
            raise BadInput(
                f"reserve for event {request.event}: count {request.count} and nbytes "
                f"{request.nbytes} must not be negative"
            )
        self.reservations.check_model(request.event, request.model_id)
        survey = self._survey(request.model_id, request.event)
        exclude, blocks = frozenset(request.exclude), survey.record.n_blocks
        chosen: Sequence[tuple[Target, Part | None]]
        if request.groups:
            self._check_groups(request, blocks)
            parts = (part for group in request.groups for part in group)
            room = survey.candidates(min(map(survey.room, parts)), exclude)
            hosts = survey.serving_hosts()
            chosen = choose_groups(room, request.groups, survey.room, blocks, hosts)
        else:
            room, racks = survey.candidates(request.nbytes, exclude), survey.serving_racks()
            chosen = [(target, None) for target in choose(room, request.count, blocks, racks)]
        effects: list[Effect] = []
        for target, part in chosen:
            info = target.info
            if self.reservations.of(info.node) is None:
                made = Reservation(
                    node=info.node,
                    generation=info.generation,
                    event=request.event,
                    model_id=request.model_id,
                    part=part,
                )
                self.reservations.add(made)
                self._tell(made, f"reserved for {part}" if part else "reserved", made.event)
                effects.append(ReservationMade(made))
        return tuple(target for target, _ in chosen), effects

    def _check_groups(self, request: Reserve, blocks: int) -> None:
        if not all(request.groups):
            raise BadInput(f"reserve for event {request.event}: a group has no part")
        for part in (part for group in request.groups for part in group):
            if not 0 <= part.start < part.stop <= blocks:
                raise BadInput(f"reserve for event {request.event}: the model has no {part}")

    def _survey(self, model_id: ModelId, event: EventId | None) -> Survey:
        record = self.catalog.identified(model_id)
        return Survey(record, event, self.leases, self.holdings, self.reservations)

    def unreserve(self, request: Unreserve) -> list[Effect]:
        ended = self.reservations.release(request.event, request.nodes)
        return [self._ended(held, "unreserved", held.event) for held in ended]

    def _ended(self, held: Reservation, reason: str, cause: str) -> ReservationEnded:
        self._tell(held, f"reservation ended: {reason}", cause)
        return ReservationEnded(held, reason)

    def _tell(self, held: Reservation, text: str, cause: str) -> None:
        self.story.tell(self.at, cause, text, held.event, held.node, held.model_id)

    def sources(self, model_id: ModelId) -> tuple[Source, ...]:
        senders = self._survey(model_id, None).senders()
        return tuple(sender.source for sender in sorted(senders, key=sender_rank))

    def copies(self, model_id: ModelId) -> Copies:
        """Where the model is whole, among all nodes that are not gone."""
        record = self.catalog.identified(model_id)
        holders = (self.leases.info(node) for node in self.holdings.holders(model_id))
        return replication.copies(record, filter(None, holders), self.holdings)

    def copies_after(self, gone: NodeGone) -> list[tuple[ModelRecord, Copies]]:
        """For each model that the node held, where it is whole without the node. Models are left
        out that only the node's disk held and that another node holds whole: if every disk has all
        models, that is most of them."""
        found: list[tuple[ModelRecord, Copies]] = []
        for model, tiers in sorted(self.holdings.models(gone.node, gone.generation).items()):
            record = self.catalog.get(model)
            on_disk = tiers.keys() <= {Tier.DISK}
            if record is not None and not (on_disk and self._is_whole_somewhere(record)):
                found.append((record, self.copies(model)))
        return found

    def _is_whole_somewhere(self, record: ModelRecord) -> bool:
        for node, generation in self.holdings.reporters(record.model_id):
            info = self.leases.info(node)
            if info is not None and info.generation == generation:
                held = self.holdings.blocks(info, record.model_id).values()
                if any(len(blocks) == record.n_blocks for blocks in held):
                    return True
        return False

    def page(self, query: PoolQuery) -> PoolPage:
        """The next nodes that are not gone, by name, with what they hold."""
        return page_of(self._node_view(info, query.holdings) for info in self._after_node(query))

    def nodes(self, query: NodesQuery) -> Nodes:
        """The next nodes that are not gone, by name."""
        return nodes_of(self._after_node(query))

    def _after_node(self, query: PoolQuery | NodesQuery) -> Sequence[NodeInfo]:
        present = self.leases.present
        return present[bisect_right(present, query.after, key=lambda info: info.node) :]

    def _node_view(self, info: NodeInfo, holdings: bool) -> NodeView:
        status = self.holdings.of(info)
        held = self.reservations.of(info.node)
        reserved_by = held.event if held else None
        if not holdings:
            return NodeView(info=info, holdings=(), arena_free=0, reserved_by=reserved_by)
        return NodeView(
            info=info,
            seq=status.seq if status else 0,
            holdings=status.holdings if status else (),
            arena_free=status.arena_free if status else 0,
            reserved_by=reserved_by,
            running=status.running if status else 0,
            kv_used=status.kv_used if status else 0,
            kv_capacity=status.kv_capacity if status else 0,
            prompt_tokens=status.prompt_tokens if status else 0,
            cached_tokens=status.cached_tokens if status else 0,
            preemptions=status.preemptions if status else 0,
            profile=status.profile if status else Profile(),
            peers=status.peers if status else {},
            unfit=status.unfit if status else "",
        )
