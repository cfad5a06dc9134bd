"""The planner: stimuli in, commands out.

It holds what is known of the cluster and one machine for each model, and passes on to each what
concerns it. A machine that raises is made anew from what nodes hold, as by a planner that starts,
and the others go on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.planner.core import commands
from services.planner.core.alarms import Alarms
from services.planner.core.archive import Archive, fitting
from services.planner.core.commands import Command
from services.planner.core.desk import Desk, Settings
from services.planner.core.model import ModelMachine
from services.planner.core.stimuli import (
    Answer,
    Asked,
    Failed,
    PathsPlanned,
    Pinged,
    Planned,
    Repaired,
    Replied,
    Stimulus,
    Wake,
    cause_of,
)
from services.planner.core.strays import Strays
from services.planner.core.tickets import Moment
from shared.errors import BadInput, BusTimeout, LambdaScaleError, NotFound, NotReady
from shared.ids import Generation, ModelId, ModelName, NodeId
from shared.messages.instances import InstanceSet
from shared.messages.load import GatewayLoad
from shared.messages.pool import (
    ModelAdded,
    ModelRecord,
    ModelRemoved,
    NodeGone,
    NodeInfo,
    NodeJoined,
    NodeStatus,
    NodeView,
    PoolQuery,
    PoolState,
    Unreserve,
)
from shared.messages.scaling import (
    BlockArrived,
    EventRecord,
    FirstPartialToken,
    PeerSuspect,
    PullFailed,
    ReleaseModel,
    ScaleAccepted,
)
from shared.story import Transition

REFRESH_S = 5.0
"""Broadcasts can be lost: this often the planner compares what it knows with the registry."""
ASK_S = 5.0
"""An answer counts as lost after this long."""
RELEASE_S = 12.0
LOOKS_PER_STRAY = 10
"""How often all arenas are looked through in `planner.stray_s`."""
LOST_S = 1.0
"""How often questions are looked for whose answers count as lost."""
BROKEN_S = 1.0
"""A model whose machine raised is left alone for this long; doubles each time."""
BROKEN_MAX_S = 60.0
LEAST_WAIT_S = 0.001
MOST_SLOTS = 1 << 20
"""Of a node: who says more is not believed."""
NEVER = float("inf")
ANSWERS = (Replied, Pinged, Planned, Repaired, PathsPlanned, Failed)
REFRESH, STRAYS, LOST = ".refresh", ".strays", ".lost"
"""Names of the planner's own alarms; a model's is its id."""


@dataclass(frozen=True, slots=True)
class _PoolQuestion:
    """A question to the registry, and what was known when it was asked: only what was so before can
    be proved wrong by the answer."""

    number: int
    nodes: dict[NodeId, NodeInfo]
    over: dict[NodeId, Generation]
    models: frozenset[ModelId]


class Planner:
    def __init__(self, settings: Settings, archive: Archive) -> None:
        self._desk = Desk(settings, archive)
        self._cluster = self._desk.cluster
        self._models: dict[ModelName, ModelMachine] = {}
        self._by_id: dict[ModelId, ModelMachine] = {}
        self._broken: set[ModelId] = set()
        """Models whose machines raised, until they are made anew."""
        self._times_broken: dict[ModelId, int] = {}
        self._alarms = Alarms()
        self._suspects: dict[int, NodeId] = {}
        """Open pings."""
        self._strays = Strays(settings.stray_s)
        self._pool: _PoolQuestion | None = None
        self._ready = False
        self._started = False
        self._woken_at = NEVER
        self._alarms.set(REFRESH, float("-inf"))
        self._alarms.set(STRAYS, float("-inf"))
        self._alarms.set(LOST, float("-inf"))
        self._handlers: dict[type, Callable[[Any], None]] = {
            **dict.fromkeys(ANSWERS, self._on_answer),
            Wake: self._on_wake,
            Asked: self._on_asked,
            NodeStatus: self._on_status,
            NodeJoined: lambda message: self._join(message.info),
            NodeGone: self._on_gone,
            ModelAdded: lambda message: self._add(message.record),
            ModelRemoved: lambda message: self._remove(message.name),
            GatewayLoad: self._on_load,
            BlockArrived: self._on_block,
            PullFailed: self._on_news,
            FirstPartialToken: self._on_news,
            PeerSuspect: self._on_suspect,
        }

    # --- the one door ---

    def handle(self, stimulus: Stimulus, now: Moment) -> list[Command]:
        """What the shell is to do about it, in order."""
        desk = self._desk
        desk.now, desk.cause, desk.out = now, cause_of(stimulus), []
        if not self._started:
            self._started = True
            desk.do(*desk.archive.fail_unfinished(now.wall_ns, desk.cause))
        mark = len(desk.out)
        try:
            self._handlers[type(stimulus)](stimulus)
        except Exception as error:  # what was said makes no sense; what is known stays
            del desk.out[mark:]
            desk.complain("a stimulus was not understood", error)
        while desk.room_freed:
            desk.room_freed = False
            self._tell_all(lambda model: model.on_more_room())
        wake_at = max(self._alarms.next, now.at + LEAST_WAIT_S)
        if wake_at < self._woken_at:
            self._woken_at = wake_at
            desk.do(commands.WakeAt(at=wake_at, cause=desk.cause))
        return desk.out

    # --- what is so ---

    def sets(self) -> tuple[InstanceSet, ...]:
        return tuple(model.fleet.set() for model in self._models.values())

    def events(self, count: int) -> tuple[EventRecord, ...]:
        """The newest first; large ones without their schedules."""
        records = dict(self._desk.archive.events)
        for model in self._models.values():
            if model.event is not None:
                records[model.event.record.id] = model.event.record
        newest = sorted(records.values(), key=lambda r: r.decided_ns, reverse=True)
        return fitting(newest[: max(0, count)])

    def story(self, subject: str) -> tuple[Transition, ...]:
        """The last transitions that concern an event, a node or a model (by its id)."""
        return self._desk.story.of(subject)

    def validate(self) -> None:
        """Raises AssertionError if parts of the state contradict each other."""
        self._cluster.validate()
        assert {m.record.name for m in self._by_id.values()} == set(self._models)
        for id_, model in self._by_id.items():
            assert model.record.model_id == id_
            if id_ not in self._broken:
                model.validate()
        running = [m.event for m in self._models.values() if m.event and not m.event.over]
        assert len({event.record.id for event in running}) == len(running)

    # --- machines ---

    def _tell(self, model: ModelMachine, act: Callable[[ModelMachine], None]) -> None:
        """Something happens to a model, and it does all that is due."""
        id_ = model.record.model_id
        if id_ in self._broken:
            return
        mark = len(self._desk.out)
        try:
            act(model)
            model.settle()
        except Exception as error:
            del self._desk.out[mark:]
            self._break(model, error)
        else:
            self._alarms.set(id_, model.next_wake)

    def _tell_all(self, act: Callable[[ModelMachine], None]) -> None:
        for model in list(self._models.values()):
            self._tell(model, act)

    def _break(self, model: ModelMachine, error: Exception) -> None:
        """Leaves the model alone for a while; then it is made anew."""
        id_, desk = model.record.model_id, self._desk
        desk.complain("a model's machine failed", error, model=model.record.name)
        times = self._times_broken.get(id_, 0)
        self._times_broken[id_] = times + 1
        self._broken.add(id_)
        self._alarms.set(id_, desk.at + min(BROKEN_S * 2**times, BROKEN_MAX_S))
        if model.event is None or model.event.over:
            return
        mark = len(desk.out)
        try:
            model.event.fail(LambdaScaleError(f"the planner failed: {error!r}"))
        except Exception as again:
            del desk.out[mark:]
            desk.complain("an event could not be ended", again, model=model.record.name)

    def _renew(self, id_: ModelId) -> None:
        broken = self._by_id[id_]
        self._broken.discard(id_)
        try:
            model = ModelMachine(self._desk, broken.record)
        except Exception as error:
            self._break(broken, error)
            return
        self._models[model.record.name] = self._by_id[id_] = model
        self._tell(model, lambda _: None)

    # --- time ---

    def _on_wake(self, _: Wake) -> None:
        self._woken_at = NEVER
        at = self._desk.at
        for name in self._alarms.due(at):
            if name == REFRESH:
                self._refresh()
            elif name == STRAYS:
                self._alarms.set(STRAYS, at + self._desk.settings.stray_s / LOOKS_PER_STRAY)
                self._free_strays()
            elif name == LOST:
                self._alarms.set(LOST, at + LOST_S)
                for ticket in self._desk.lost():
                    self._on_answer(Failed(ticket, BusTimeout("no answer came")))
            elif (id_ := ModelId(name)) in self._broken:
                self._renew(id_)
            elif (model := self._by_id.get(id_)) is not None:
                self._tell(model, lambda _: None)

    def _free_strays(self) -> None:
        """Finds what lies in arenas without use, in part or of models that are gone."""
        if not self._ready or self._cluster.loads.blind(self._desk.at):
            return
        strays: dict[tuple[NodeId, ModelId], frozenset[int]] = {}
        for node, holding in self._cluster.in_memory():
            model, copy = self._by_id.get(holding.model_id), (node, holding.model_id)
            if model is None or not model.owns(node, holding):
                strays[copy] = strays.get(copy, frozenset()).union(holding.blocks)
        for node, id_ in self._strays.look(strays, self._desk.at):
            if found := self._by_id.get(id_):
                self._tell(found, partial(_free_stray, node))
            else:
                self._free_unknown(self._cluster.nodes[node], id_)

    def _free_unknown(self, info: NodeInfo, id_: ModelId) -> None:
        """Once: if it fails, the stray is found again."""
        self._desk.log("info", "memory of a model that is gone is given back", node=info.node)
        self._desk.tell("is released: the model is gone", info.node, id_)
        message = ReleaseModel(
            node=info.node,
            generation=info.generation,
            epoch=self._desk.settings.epoch,
            model_id=id_,
            keep=None,
            cause=self._desk.cause,
        )
        ticket = self._desk.ask(within=RELEASE_S)
        self._desk.do(commands.Release(ticket=ticket, message=message, cause=self._desk.cause))

    # --- answers ---

    def _on_answer(self, answer: Answer) -> None:
        ticket = answer.ticket
        if not self._desk.settle(ticket):
            return  # late, repeated, or another planner's
        if ticket.model is not None:
            if model := self._by_id.get(ticket.model):
                self._tell(model, lambda model: model.on_answer(answer))
        elif ticket.number in self._suspects:
            self._on_suspect_pinged(self._suspects.pop(ticket.number), answer)
        elif self._pool is not None and ticket.number == self._pool.number:
            self._on_pool_read(self._pool, answer)
        elif isinstance(answer, Failed):
            self._desk.log("warning", "a request failed", error=str(answer.error))

    # --- the registry's view ---

    def _refresh(self) -> None:
        desk = self._desk
        self._alarms.set(REFRESH, NEVER)
        ticket = desk.ask(within=ASK_S)
        self._pool = _PoolQuestion(
            ticket.number,
            dict(self._cluster.nodes),
            dict(self._cluster.over),
            frozenset(self._by_id),
        )
        desk.do(
            commands.ReadPool(ticket=ticket, message=PoolQuery(cause=desk.cause), cause=desk.cause)
        )

    def _on_pool_read(self, asked: _PoolQuestion, answer: Answer) -> None:
        """Learns all that the registry knows and the planner has missed."""
        self._pool = None
        again_s = REFRESH_S if self._ready else self._desk.settings.tick_s
        self._alarms.set(REFRESH, self._desk.at + again_s)
        if not isinstance(answer, Replied) or not isinstance(answer.reply, PoolState):
            error = str(answer.error) if isinstance(answer, Failed) else "it said something else"
            self._desk.log("info", "registry does not answer", error=error)
            return
        self._learn(asked, answer.reply)
        if not self._ready:
            self._ready = True
            self._alarms.set(REFRESH, self._desk.at + REFRESH_S)
            self._desk.do(commands.Ready(cause=self._desk.cause))

    def _learn(self, asked: _PoolQuestion, pool: PoolState) -> None:
        there = {(view.info.node, view.info.generation) for view in pool.nodes}
        for info in asked.nodes.values():
            if (info.node, info.generation) not in there:
                self._gone(info, "the registry does not know it")
        for view in pool.nodes:
            if asked.over.get(view.info.node) == view.info.generation:
                self._cluster.on_revived(view.info)
            self._learn_node(view)
        published = {record.model_id for record in pool.models}
        for model in list(self._models.values()):
            if model.record.model_id in asked.models - published:
                self._remove(model.record.name)
        for record in pool.models:
            if record.model_id not in asked.models - self._by_id.keys():  # not removed meanwhile
                self._add(record)
        self._unreserve_for_nobody(pool)
        self._cluster.forget(self._desk.at, self._by_id.keys())

    def _learn_node(self, view: NodeView) -> None:
        self._join(view.info)
        status = NodeStatus(
            node=view.info.node,
            generation=view.info.generation,
            seq=0,
            arena_free=view.arena_free,
            holdings=view.holdings,
            running=view.running,
            profile=view.profile,
        )
        self._on_status(status)

    def _unreserve_for_nobody(self, pool: PoolState) -> None:
        """Ends reservations of events that are over: of an earlier planner, or of an answer that
        came too late."""
        running = {m.event.record.id for m in self._models.values() if m.event and not m.event.over}
        held = {view.reserved_by for view in pool.nodes if view.reserved_by}
        for event in sorted(held - running):
            ticket = self._desk.ask(within=ASK_S)
            message = Unreserve(event=event, cause=self._desk.cause)
            self._desk.do(
                commands.Unreserve(ticket=ticket, message=message, cause=self._desk.cause)
            )

    # --- broadcasts ---

    def _on_status(self, status: NodeStatus) -> None:
        """Told to the models that it concerns: of a hundred, one or two."""
        change = self._cluster.on_status(status, self._desk.at)
        for id_ in sorted(change.models & self._by_id.keys()):
            gained = change.gained.get(id_, frozenset())
            self._tell(self._by_id[id_], partial(_holdings, status.node, gained))
        if change.more_room:
            self._desk.room_freed = True

    def _join(self, info: NodeInfo) -> None:
        if not 0 < info.slots <= MOST_SLOTS:
            self._desk.log("warning", "not a node", node=info.node, slots=info.slots)
            return
        known = self._cluster.nodes.get(info.node)
        before = self._cluster.on_joined(info)
        if before is not None:
            self._tell_gone(before, "a new process runs under its name")
        if info.node in self._cluster.nodes and (known is None or before is not None):
            self._desk.tell(f"joined as generation {info.generation}", info.node)
            self._tell_all(lambda model: model.on_joined())
            for id_ in self._cluster.models_on(info.node):
                if model := self._by_id.get(id_):
                    self._tell(model, partial(_holdings, info.node, frozenset()))

    def _on_gone(self, message: NodeGone) -> None:
        if self._cluster.on_gone(message.node, message.generation, self._desk.at):
            self._desk.tell(f"gone: {message.reason}", message.node)
            self._tell_all(lambda model: model.on_gone(message))

    def _gone(self, info: NodeInfo, reason: str) -> None:
        self._on_gone(NodeGone(node=info.node, generation=info.generation, reason=reason))

    def _tell_gone(self, info: NodeInfo, reason: str) -> None:
        """Of a node whose name another has now."""
        message = NodeGone(node=info.node, generation=info.generation, reason=reason)
        self._desk.tell(f"gone: {reason}", info.node)
        self._tell_all(lambda model: model.on_gone(message))

    def _add(self, record: ModelRecord) -> None:
        if not 0 < record.n_blocks == len(record.block_bytes):
            sizes = len(record.block_bytes)
            self._desk.log("warning", "not a model", name=record.name, sizes=sizes)
            return
        known = self._models.get(record.name)
        if known is not None and known.record.model_id != record.model_id:
            self._remove(record.name)
            known = None
        if known is not None:
            known.record = record
            self._tell(known, lambda model: model.decide_soon())
            return
        self._desk.tell(f"published as {record.name}", record.model_id)
        model = ModelMachine(self._desk, record)
        self._models[record.name] = self._by_id[record.model_id] = model
        self._tell(model, lambda _: None)

    def _remove(self, name: ModelName) -> None:
        model = self._models.pop(name, None)
        if model is None:
            return
        id_ = model.record.model_id
        del self._by_id[id_]
        self._alarms.set(id_, NEVER)
        self._broken.discard(id_)
        self._times_broken.pop(id_, None)
        self._desk.tell("removed", id_)
        model.remove()

    def _on_load(self, load: GatewayLoad) -> None:
        for name in sorted(self._cluster.loads.on_load(load, self._desk.at)):
            if model := self._models.get(name):
                self._tell(model, lambda model: model.on_load())

    def _on_block(self, message: BlockArrived) -> None:
        gained = self._cluster.on_arrived(message, self._desk.at)
        if model := self._by_id.get(message.model_id):
            self._tell(model, lambda model: model.on_block(message, gained))

    def _on_news(self, message: PullFailed | FirstPartialToken) -> None:
        self._cluster.loads.on_sign_of_life(self._desk.at)
        for model in list(self._models.values()):
            if model.event is not None and model.event.record.id == message.event:
                self._tell(model, lambda model: model.on_news(message))

    def _on_suspect(self, message: PeerSuspect) -> None:
        node = message.node
        if node in self._cluster.nodes and node not in self._suspects.values():
            self._desk.tell(f"suspected by {message.reporter}: {message.reason}", node)
            ticket = self._desk.ask(within=ASK_S)
            self._suspects[ticket.number] = node
            self._desk.do(commands.Ping(ticket=ticket, node=node, cause=self._desk.cause))

    def _on_suspect_pinged(self, node: NodeId, answer: Answer) -> None:
        there = isinstance(answer, Pinged) and answer.there
        if not there and not self._cluster.loads.blind(self._desk.at):
            self._desk.log("warning", "node does not answer", node=node)
            self._desk.tell("does not answer", node)
            self._tell_all(lambda model: model.on_suspect(node))

    # --- the operator ---

    def _on_asked(self, asked: Asked) -> None:
        try:
            reply: ScaleAccepted | LambdaScaleError = self._scale(asked)
        except LambdaScaleError as error:
            reply = error
        self._desk.do(commands.Answer(number=asked.number, reply=reply, cause=self._desk.cause))

    def _scale(self, asked: Asked) -> ScaleAccepted:
        name, count = asked.message.name, asked.message.instances
        model = self._models.get(name)
        if model is None:
            raise NotFound(f"model {name!r} is not published; see `lambdascale model ls`")
        nodes = len(self._cluster.nodes)
        if count is not None and not 0 <= count <= nodes:
            raise BadInput(f"{count} instances asked for, {nodes} nodes are there")
        if model.record.model_id in self._broken:
            raise NotReady(f"the planner failed at {name}, and begins it anew: try again")
        event = model.set_fixed(count)
        self._alarms.set(model.record.model_id, model.next_wake)
        return ScaleAccepted(event=event)


def _free_stray(node: NodeId, model: ModelMachine) -> None:
    model.free_stray(node)


def _holdings(node: NodeId, gained: frozenset[int], model: ModelMachine) -> None:
    model.on_holdings(node, gained)
