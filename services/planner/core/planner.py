"""The planner: stimuli in, commands out.

It passes what it hears on to whom it concerns: the view of the pool (`pool_view`), the machine of
each model (`machines`), the load that gateways report (`load_reports`).
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import msgspec

from services.planner.core import commands
from services.planner.core.alarms import Alarms
from services.planner.core.archive import Archive, fitting
from services.planner.core.arrivals import Arrivals, News, arrivals_of
from services.planner.core.census import Census, census, wanted_nodes
from services.planner.core.commands import Command
from services.planner.core.desk import ASK_S, RELEASE_S, Desk, Settings
from services.planner.core.events import TERMINAL
from services.planner.core.machines import Machines
from services.planner.core.model import ModelMachine
from services.planner.core.pool_view import REFRESH, PoolView
from services.planner.core.steady import SteadyClock
from services.planner.core.stimuli import (
    Answer,
    Appended,
    Asked,
    Failed,
    PathsPlanned,
    Pinged,
    Planned,
    PoolRead,
    Repaired,
    Replied,
    Stimulus,
    Together,
    Wake,
    cause_of,
)
from services.planner.core.strays import Strays
from services.planner.core.tickets import Moment
from shared.errors import BadInput, BusTimeout, LambdaScaleError, NotFound, NotReady
from shared.ids import EventId, ModelId, ModelName, NodeId
from shared.messages.chronicle import Chronicle, EventPast, ModelPast
from shared.messages.decisions import Decided
from shared.messages.instances import InstanceSet
from shared.messages.load import GatewayLoad
from shared.messages.pool import (
    ModelAdded,
    ModelRemoved,
    NodeGone,
    NodeInfo,
    NodeJoined,
    NodeStatus,
)
from shared.messages.scaling import (
    BlockArrived,
    BlocksArrived,
    EventRecord,
    FirstPartialToken,
    PeerSuspect,
    PullFailed,
    ReleaseModel,
    ScaleAccepted,
)
from shared.story import Transition
from shared.wording import counted

LOOKS_PER_STRAY = 10
"""How often all arenas are looked through in `planner.stray_s`."""
LOST_S = 1.0
"""How often questions are looked for whose answers count as lost."""
MOST_ROUNDS = 1000
"""One stimulus is handled in a few rounds, in each of which all models that wait may ask for room.
A planner that needs more than this goes round for ever."""
AGAIN_S = 1.0
"""How long after an error an alarm is due again."""
LEAST_WAIT_S = 0.001
NEVER = float("inf")
ANSWERS = (Replied, PoolRead, Pinged, Planned, Repaired, Appended, PathsPlanned, Failed)
STRAYS, LOST, DISKS = ".strays", ".lost", ".disks"
"""Names of the planner's own alarms."""


class Planner:
    def __init__(self, settings: Settings, archive: Archive) -> None:
        self._desk = Desk(settings, archive)
        self._cluster = self._desk.cluster
        self._alarms = Alarms()
        self._machines = Machines(self._desk, self._alarms)
        self._pool = PoolView(self._desk, self._machines, self._alarms)
        self._suspects: dict[int, NodeId] = {}
        """The open pings to suspects."""
        self._strays = Strays(settings.stray_s)
        self._clock = SteadyClock()
        self._woken_at = NEVER
        self._alarms.set(STRAYS, float("-inf"))
        self._alarms.set(LOST, float("-inf"))
        self._handlers: dict[type, Callable[[Any], None]] = {
            **dict.fromkeys(ANSWERS, self._on_answer),
            Wake: self._on_wake,
            Asked: self._on_asked,
            NodeStatus: self._on_status,
            NodeJoined: lambda message: self._pool.join(message.info),
            NodeGone: self._on_gone,
            ModelAdded: lambda message: self._machines.add(message.record),
            ModelRemoved: lambda message: self._machines.remove(message.name),
            GatewayLoad: self._on_load,
            BlockArrived: lambda message: self._on_reports((message,)),
            BlocksArrived: lambda message: self._on_reports((message,)),
            Together: lambda heard: self._on_reports(heard.reports),
            PullFailed: self._on_news,
            FirstPartialToken: self._on_news,
            PeerSuspect: self._on_suspect,
        }

    # --- the one door ---

    def handle(self, stimulus: Stimulus, now: Moment) -> list[Command]:
        """Returns what the shell has to do about the stimulus, in order."""
        desk = self._desk
        desk.now = self._clock.tell(now, self._machines.any_scaling)
        desk.cause, desk.out = cause_of(stimulus), []
        mark = len(desk.out)
        try:
            self._handlers[type(stimulus)](stimulus)
        except Exception as error:  # what was said makes no sense; what is known stays
            del desk.out[mark:]
            desk.complain("a stimulus was not understood", error)
        rounds = 0
        while desk.room_freed or desk.disks_at <= desk.at or self._machines.rooms.orders:
            rounds += 1
            if rounds > MOST_ROUNDS:  # a bug must not stop the planner
                desk.complain("models ask for room for ever", LambdaScaleError("given up for now"))
                desk.room_freed, desk.disks_at = False, desk.at + AGAIN_S
                break
            self._machines.make_way()
            if desk.room_freed:
                desk.room_freed = False
                self._machines.tell_of_room()
            if desk.disks_at <= desk.at:
                desk.disks_at = NEVER
                self._machines.tell_of_disks()
        self._alarms.bring_forward(DISKS, desk.disks_at)
        wake_at = max(self._alarms.next, now.at + LEAST_WAIT_S)
        if wake_at < self._woken_at:
            self._woken_at = wake_at
            desk.do(commands.WakeAt(at=wake_at, cause=desk.cause))
        return desk.out

    # --- what is so ---

    def sets(self, names: Collection[ModelName] = ()) -> tuple[InstanceSet, ...]:
        """The instances of these models, or of all if none is named."""
        models = self._machines.named
        wanted = (models[name] for name in names if name in models) if names else models.values()
        return tuple(model.fleet.set() for model in wanted)

    def events(self, count: int) -> tuple[EventRecord, ...]:
        """The records of the newest events, newest first. Large records come without their
        schedules."""
        return fitting(self._records()[: max(0, count)])

    def _records(self) -> list[EventRecord]:
        """Of all events, newest first."""
        records = dict(self._desk.archive.events)
        records |= {event.record.id: event.record for event in self._machines.events()}
        return sorted(records.values(), key=lambda r: r.decided_ns, reverse=True)

    def decisions(self, name: ModelName, limit: int) -> tuple[Decided, ...]:
        """The last decisions about a model, newest first. NotFound."""
        return self._named(name).journal.newest(limit)

    def chronicle(self, last_s: float, wall_ns: int) -> Chronicle:
        """What is remembered of the last so many seconds (0: of all time), and what has not ended.
        `wall_ns`: the wall clock."""
        since_ns = wall_ns - int(last_s * 1e9) if last_s else 0
        events = (
            msgspec.structs.replace(record, transfers=())
            for record in self._records()
            if record.state not in TERMINAL or record.history[-1][1] >= since_ns
        )
        pasts = (
            ModelPast(
                name=name,
                counts=self._desk.chronicle.counts(name, since_ns),
                decisions=model.journal.since(since_ns),
            )
            for name, model in self._machines.named.items()
        )
        return Chronicle(
            at_ns=wall_ns,
            events=fitting(events),
            models=tuple(past for past in pasts if past.counts or past.decisions),
            rates=self._desk.chronicle.rates(since_ns),
        )

    def event(self, event: EventId, after: int) -> EventPast:
        """What an event did; the asker knows so many of its arrivals already. NotFound."""
        record = next((r for r in self._records() if r.id == event), None)
        if record is None:
            raise NotFound(f"no event {event!r}; see `lambdascale events`")
        trail = self._desk.chronicle.trail(event)
        return EventPast(
            record=msgspec.structs.replace(record, transfers=()),
            arrivals=trail.after(after),
            arrived=len(trail.arrivals),
            forgotten=trail.forgotten,
            served=tuple(trail.served.values()),
        )

    def census(self) -> tuple[Census, ...]:
        return census(self._machines.named.values())

    def wanted_nodes(self) -> int:
        """How many nodes like those that are there would hold every replica that is wanted."""
        return wanted_nodes(self.census(), [info.arena_bytes for info in self.nodes])

    @property
    def nodes(self) -> Collection[NodeInfo]:
        return self._cluster.nodes.values()

    def story(self, subject: str) -> tuple[Transition, ...]:
        """The last transitions that concern an event, a node or a model (by its id)."""
        return self._desk.story.of(subject)

    def validate(self) -> None:
        """Raises AssertionError if parts of the state contradict each other."""
        self._desk.validate()
        self._cluster.validate()
        self._cluster.loads.validate()
        self._machines.validate()
        self._machines.rooms.validate()

    # --- time ---

    def _on_wake(self, _: Wake) -> None:
        self._woken_at = NEVER
        for name in self._alarms.due(self._desk.at):
            mark = len(self._desk.out)
            try:
                self._on_alarm(name)
            except Exception as error:  # the other alarms are due all the same
                del self._desk.out[mark:]
                self._desk.complain("an alarm was not answered", error, alarm=name)
                self._alarms.set(name, self._desk.at + AGAIN_S)

    def _on_alarm(self, name: str) -> None:
        at = self._desk.at
        if name == REFRESH:
            self._pool.refresh()
        elif name == STRAYS:
            self._alarms.set(STRAYS, at + self._desk.settings.stray_s / LOOKS_PER_STRAY)
            self._free_strays()
        elif name == DISKS:
            pass  # see `handle`
        elif name == LOST:
            self._alarms.set(LOST, at + LOST_S)
            for ticket in self._desk.lost():
                self._on_answer(Failed(ticket, BusTimeout("no answer came")))
        elif (id_ := ModelId(name)) in self._machines.broken:
            self._machines.renew(id_)
        elif (model := self._machines.by_id.get(id_)) is not None:
            self._machines.tell(model, lambda _: None)

    def _free_strays(self) -> None:
        """Frees what lies in arenas without use: parts of models, and models that are gone."""
        if not self._pool.ready or self._cluster.loads.blind(self._desk.at):
            return
        strays: dict[tuple[NodeId, ModelId], frozenset[int]] = {}
        members = {id_: model.fleet.members.keys() for id_, model in self._machines.by_id.items()}
        for node, holding in self._cluster.in_arenas(members):
            model, copy = self._machines.by_id.get(holding.model_id), (node, holding.model_id)
            if model is None or not model.owns(node, holding):
                strays[copy] = strays.get(copy, frozenset()).union(holding.blocks)
        for node, id_ in self._strays.look(strays, self._desk.at):
            if found := self._machines.by_id.get(id_):
                self._machines.tell(found, partial(_free_stray, node))
            else:
                self._free_unknown(self._cluster.nodes[node], id_)

    def _free_unknown(self, info: NodeInfo, id_: ModelId) -> None:
        """Asks once: if the node does not free it, the stray is found again."""
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
            if model := self._machines.by_id.get(ticket.model):
                self._machines.mention(model, lambda model: model.on_answer(answer))
        elif ticket.number in self._suspects:
            self._on_suspect_pinged(self._suspects.pop(ticket.number), answer)
        elif not self._pool.on_answer(answer) and isinstance(answer, Failed):
            self._desk.log("warning", "a request failed", error=str(answer.error))

    # --- broadcasts ---

    def _on_status(self, message: NodeStatus) -> None:
        self._desk.chronicle.on_status(message, self._desk.now.wall_ns)
        self._pool.on_status(message)

    def _on_gone(self, message: NodeGone) -> None:
        self._desk.chronicle.on_gone(message.node)
        self._pool.on_gone(message)

    def _on_load(self, load: GatewayLoad) -> None:
        for name in sorted(self._cluster.loads.on_load(load, self._desk.at)):
            model = self._machines.named.get(name)
            if model is not None and model.minds_load():
                self._machines.mention(model, ModelMachine.on_load)

    def _on_reports(self, reports: Sequence[BlockArrived | BlocksArrived]) -> None:
        """Each model hears once of all that has come of it."""
        news: dict[ModelId, list[tuple[Arrivals, frozenset[int]]]] = {}
        for report in reports:
            arrivals = arrivals_of(report)
            if not arrivals.blocks:
                continue
            self._desk.chronicle.on_blocks(arrivals.event, arrivals.node, arrivals.blocks)
            gained = self._cluster.on_arrived(arrivals, self._desk.at)
            news.setdefault(arrivals.model, []).append((arrivals, gained))
        for id_, of_model in news.items():
            if model := self._machines.by_id.get(id_):
                self._machines.mention(model, partial(_hear_blocks, of_model))

    def _on_news(self, message: PullFailed | FirstPartialToken) -> None:
        self._cluster.loads.on_sign_of_life(self._desk.at)
        if isinstance(message, FirstPartialToken):
            self._desk.chronicle.on_token(message)
        for model in list(self._machines.named.values()):
            if model.event is not None and model.event.record.id == message.event:
                self._machines.tell(model, lambda model: model.on_news(message))

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
            self._machines.tell_all(lambda model: model.on_suspect(node))

    # --- the operator ---

    def _on_asked(self, asked: Asked) -> None:
        mark = len(self._desk.out)
        try:
            reply: ScaleAccepted | LambdaScaleError = self._scale(asked)
        except LambdaScaleError as error:
            reply = error
        except Exception as error:
            del self._desk.out[mark:]
            self._desk.complain("an operator's request failed", error)
            reply = LambdaScaleError(f"the planner failed: {error!r}")
        self._desk.do(commands.Answer(number=asked.number, reply=reply, cause=self._desk.cause))

    def _scale(self, asked: Asked) -> ScaleAccepted:
        name, count = asked.message.name, asked.message.instances
        model = self._named(name)
        nodes = len(self._cluster.nodes)
        if count is not None and not 0 <= count <= nodes:
            raise BadInput(
                f"{counted(count, 'instance')} asked for, "
                f"{counted(nodes, 'node is', 'nodes are')} there"
            )
        id_ = model.record.model_id
        if id_ in self._machines.broken:
            raise NotReady(f"the planner failed at {name}, and begins it anew: try again")
        model.check_fixed(count)
        before = model.event
        self._desk.do(*self._desk.archive.fix(id_, count, self._desk.cause))
        self._machines.tell(model, lambda model: model.on_joined())
        if id_ in self._machines.broken:
            raise NotReady(
                f"the planner failed at {name}, and begins it anew; it keeps the number {count}"
            )
        event = model.event
        answers = event is not None and (event is not before or event.growing)
        return ScaleAccepted(event=event.record.id if event and answers else None)

    def _named(self, name: ModelName) -> ModelMachine:
        model = self._machines.named.get(name)
        if model is None:
            raise NotFound(f"model {name!r} is not published; see `lambdascale model ls`")
        return model


def _free_stray(node: NodeId, model: ModelMachine) -> None:
    model.free_stray(node)


def _hear_blocks(news: News, model: ModelMachine) -> float:
    return model.on_blocks(news)
