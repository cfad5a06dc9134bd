"""The planner's core driven by hand: explicit times, and answers when the test gives them."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from services.planner.core import commands, instances
from services.planner.core.archive import Archive
from services.planner.core.commands import Command, Publish, Question
from services.planner.core.desk import Settings
from services.planner.core.orders import WAVE_S
from services.planner.core.part_plans import plan_parts, repair_parts
from services.planner.core.placement import append_transfers
from services.planner.core.planner import Planner
from services.planner.core.rhythm import History
from services.planner.core.serving.strategies import SERVING
from services.planner.core.stimuli import (
    Answer,
    Appended,
    Failed,
    PathsPlanned,
    Pinged,
    Planned,
    PoolRead,
    Repaired,
    Replied,
    Stimulus,
    Wake,
)
from services.planner.core.tickets import Moment
from shared.errors import LambdaScaleError
from shared.ids import EventId, GatewayId, Generation, InstanceId, ModelId, ModelName, NodeId
from shared.messages import Message, Ok
from shared.messages.instances import InstanceSet
from shared.messages.load import GatewayLoad, ModelLoad
from shared.messages.pool import (
    Duty,
    Holding,
    ModelAdded,
    ModelProfile,
    ModelRecord,
    NodeGone,
    NodeInfo,
    NodeJoined,
    NodeStatus,
    PoolState,
    Profile,
    Reserved,
    Source,
    Sources,
    Tier,
)
from shared.messages.scaling import (
    BlockArrived,
    BlocksArrived,
    EventChanged,
    EventRecord,
    Landed,
)
from simulation.checked import CheckedCore
from tests.unit.planner.scripted import BLOCK_BYTES, BLOCKS, MODEL, NAME, record

EPOCH = 7
WALL_NS = 1_700_000_000 * 10**9
EVERY = tuple(range(BLOCKS))
Q = TypeVar("Q", bound=Question)


def settings(scale_up_hold_s: float = 0.0, idle_s: float = 2.0, strategy: str = "auto") -> Settings:
    ids = itertools.count()
    return Settings(
        epoch=EPOCH,
        new_id=lambda prefix: f"{prefix}-{next(ids)}",
        new_trace=lambda: "",
        serving=SERVING["pools"],
        strategy=strategy,
        tick_s=0.1,
        queue_per_instance=0.25,
        prefill_wait_s=0.5,
        fill=1.0,
        idle_s=idle_s,
        scale_up_hold_s=scale_up_hold_s,
        horizon_s=1.0,
        stray_s=10.0,
        anticipate=True,
        max_stages=4,
        link_bytes_per_s=10_000,
        disk_bytes_per_s=10**9,
        step_overhead_s=0.001,
    )


def info(node: str, generation: int = 1, slots: int = 4) -> NodeInfo:
    return NodeInfo(
        node=NodeId(node),
        generation=Generation(generation),
        address=f"tcp://{node}",
        host="host",
        device="cpu",
        arena_bytes=1000,
        link_bytes_per_s=0,
        slots=slots,
    )


class Driver:
    def __init__(
        self, given: Settings | None = None, archive: Archive | None = None, checked: bool = True
    ) -> None:
        """`checked`: an error in the core fails the test."""
        kind = CheckedCore if checked else Planner
        self._settings = given or settings()
        self.core = kind(self._settings, archive or Archive())
        self.at = 100.0
        self.said: list[Command] = []
        """All commands so far."""
        self.open: list[Question] = []
        """Questions that the test has not answered yet, oldest first."""
        self.wake_at = float("inf")
        self._seq = itertools.count(1)
        self.feed(Wake())
        self.answer(self.asked(commands.ReadPool), PoolState(nodes=(), models=()))

    def replace_planner(self) -> None:
        """Another planner takes over, with what this one has had stored. Nobody answers this one's
        questions any more, and the registry is still to answer the new one's."""
        records: dict[EventId, EventRecord] = {}
        fixed: dict[ModelId, int] = {}
        histories: dict[ModelId, History] = {}
        for command in self.said:
            match command:
                case commands.StoreEvent(event=event, record=None):
                    records.pop(EventId(event), None)
                case commands.StoreEvent(event=event, record=EventRecord() as stored):
                    records[EventId(event)] = stored
                case commands.StoreFixed(model=model, count=None):
                    fixed.pop(ModelId(model), None)
                case commands.StoreFixed(model=model, count=int() as count):
                    fixed[ModelId(model)] = count
                case commands.StoreHistory(model=model, history=History() as history):
                    histories[ModelId(model)] = history
        self._settings = replace(self._settings, epoch=self._settings.epoch + 1)
        self.core = type(self.core)(self._settings, Archive(records.values(), fixed, histories))
        self.open, self.wake_at = [], float("inf")
        self.feed(Wake())

    # --- what happens ---

    def feed(self, stimulus: Stimulus) -> list[Command]:
        moment = Moment(self.at, WALL_NS + round(self.at * 1e9))
        found: list[Command] = self.core.handle(stimulus, moment)
        self.said += found
        for command in found:
            if isinstance(command, Question):
                self.open.append(command)
            elif isinstance(command, commands.WakeAt):
                self.wake_at = command.at
        return found

    def wait(self, seconds: float) -> list[Command]:
        """Time passes; the core is woken when it asked to be."""
        end, found = self.at + seconds, list[Command]()
        while self.wake_at <= end:
            self.at, self.wake_at = max(self.at, self.wake_at), float("inf")
            found += self.feed(Wake())
        self.at = end
        return found

    def join(self, *nodes: str) -> None:
        for node in nodes:
            self.feed(NodeJoined(info=info(node)))

    def duty(self, node: str, duty: Duty, leave_by_ns: int = 0) -> None:
        """The registry says what the node may be used for."""
        known = info(node)
        changed = msgspec.structs.replace(known, duty=duty, leave_by_ns=leave_by_ns)
        self.feed(NodeJoined(info=changed))

    def gone(self, node: str) -> None:
        message = NodeGone(node=NodeId(node), generation=Generation(1), reason="expired")
        self.feed(message)

    def publish(self, model: ModelRecord | None = None) -> None:
        self.feed(ModelAdded(record=model or record()))

    def status(
        self,
        node: str,
        *holdings: Holding,
        generation: int = 1,
        free: int = 500,
        load_bytes_per_s: float = 0.0,
        unfit: str = "",
        ran: tuple[ModelProfile, ...] = (),
        kv_bytes: tuple[int, int] = (0, 0),
    ) -> None:
        """`ran`: what the node measured of models. `kv_bytes`: sent and received since its
        start."""
        status = NodeStatus(
            node=NodeId(node),
            generation=Generation(generation),
            seq=next(self._seq),
            arena_free=free,
            holdings=holdings,
            profile=Profile(load_bytes_per_s=load_bytes_per_s, models=ran),
            unfit=unfit,
            kv_sent_bytes=kv_bytes[0],
            kv_received_bytes=kv_bytes[1],
        )
        self.feed(status)

    def holds(self, node: str, blocks: Sequence[int] = EVERY, tier: Tier = Tier.GPU) -> None:
        self.status(node, Holding(MODEL, tier, tuple(blocks)))

    def load(
        self,
        queued: int = 0,
        name: str = NAME,
        gateway: str = "gateway-0",
        since_ns: int = 0,
        **on: int,
    ) -> list[Command]:
        """`on`: requests by replica's node. `since_ns`: see ModelLoad.waiting_since_ns."""
        replicas = {InstanceId(f"replica-{node}"): count for node, count in on.items()}
        return self.load_on(replicas, queued, name, gateway, since_ns)

    def load_on(
        self,
        on: Mapping[InstanceId, int],
        queued: int = 0,
        name: str = NAME,
        gateway: str = "gateway-0",
        since_ns: int = 0,
    ) -> list[Command]:
        """`on`: requests by instance."""
        of_model = ModelLoad(
            model=ModelName(name),
            queued_requests=queued,
            queued_tokens=10 * queued,
            running_requests=sum(on.values()),
            running_tokens=10 * sum(on.values()),
            waiting_since_ns=since_ns,
            instance_requests=dict(on),
        )
        return self.feed(GatewayLoad(gateway=GatewayId(gateway), models=(of_model,)))

    def arrived(self, node: str, block: int, source: str, event: EventRecord) -> list[Command]:
        at = WALL_NS + round(self.at * 1e9)
        message = BlockArrived(
            event=event.id,
            revision=event.revision,
            node=NodeId(node),
            generation=Generation(1),
            model_id=MODEL,
            block=block,
            source=NodeId(source),
            transport="tcp",
            nbytes=BLOCK_BYTES,
            started_ns=at,
            first_byte_ns=at,
            finished_ns=at,
            ready_ns=at,
        )
        return self.feed(message)

    def arrived_together(self, node: str, blocks: Mapping[int, float], event: EventRecord) -> None:
        """The node reports several blocks, and for how many seconds it has had each."""
        self.feed(self.report(node, blocks, event))

    def report(self, node: str, blocks: Mapping[int, float], event: EventRecord) -> BlocksArrived:
        at = WALL_NS + round(self.at * 1e9)
        landed = [
            Landed(
                block=block, source=NodeId("a"), transport="tcp", nbytes=BLOCK_BYTES,
                started_ns=ended, first_byte_ns=ended, finished_ns=ended, ready_ns=ended,
            )
            for block, since_s in blocks.items()
            for ended in (at - round(since_s * 1e9),)
        ]  # fmt: skip
        return BlocksArrived(
            event=event.id,
            revision=event.revision,
            node=NodeId(node),
            generation=Generation(1),
            model_id=MODEL,
            sent_ns=at,
            blocks=tuple(landed),
        )

    # --- questions and answers ---

    def asked(self, kind: type[Q]) -> Q:
        """The only open question of the kind."""
        (found,) = self.all_asked(kind)
        return found

    def all_asked(self, kind: type[Q]) -> list[Q]:
        return [question for question in self.open if isinstance(question, kind)]

    def answer(
        self, question: Question, reply: Message | PoolState | LambdaScaleError
    ) -> list[Command]:
        """Answers a question that was sent as a request on the bus."""
        if isinstance(reply, LambdaScaleError):
            return self.reply(question, Failed(question.ticket, reply))
        if isinstance(reply, PoolState):
            return self.reply(question, PoolRead(question.ticket, reply))
        return self.reply(question, Replied(question.ticket, reply))

    def reply(self, question: Question, answer: Answer) -> list[Command]:
        self.open.remove(question)
        return self.feed(answer)

    def think(self) -> list[Command]:
        """Answers what is asked of threads."""
        found: list[Command] = []
        for question in list(self.open):
            if isinstance(
                question, commands.MakePlan | commands.Repair | commands.Append | commands.PlanPaths
            ):
                found += self.reply(question, thought(question))
        return found

    def reserve(self, *targets: str, sources: Sequence[str]) -> None:
        """Answers the registry's part of an event that begins; sources hold all on the device."""
        infos = tuple(info(node) for node in targets)
        self.answer(self.asked(commands.Reserve), Reserved(targets=infos))
        found = tuple(Source(info(node), Tier.GPU, EVERY, True) for node in sources)
        self.answer(self.asked(commands.FindSources), Sources(sources=found))

    def begin(self, *targets: str, sources: Sequence[str] = ("a",)) -> EventRecord:
        """An event that begins is planned, and all its targets take their plans."""
        self.reserve(*targets, sources=sources)
        self.think()
        for plan in self.orders():
            self.answer(plan, Ok())
        return self.event

    def orders(self) -> list[commands.SendPlan]:
        """What targets are told to do, when all have been told and none has answered."""
        self.wait(WAVE_S)
        return self.all_asked(commands.SendPlan)

    def ping(self, there: bool) -> list[Command]:
        """Answers all that are open."""
        found: list[Command] = []
        for ping in self.all_asked(commands.Ping):
            found += self.reply(ping, Pinged(ping.ticket, there))
        return found

    # --- what came of it ---

    @property
    def sets(self) -> list[InstanceSet]:
        published = (c.message for c in self.said if isinstance(c, Publish))
        return [message for message in published if isinstance(message, InstanceSet)]

    @property
    def events(self) -> list[EventRecord]:
        """All that was told of events, oldest first."""
        published = (c.message for c in self.said if isinstance(c, Publish))
        return [message.record for message in published if isinstance(message, EventChanged)]

    @property
    def event(self) -> EventRecord:
        return self.core.events(1)[0]

    def replicas(self, name: str = NAME) -> set[str]:
        (found,) = (s for s in self.core.sets() if s.name == name)
        return {i.leader for i in found.instances if i.is_replica}


def thought(question: commands.Compute) -> Answer:
    """The answer of a thread."""
    match question:
        case commands.MakePlan():
            plan = plan_parts(
                question.roles,
                question.held,
                question.model,
                question.links,
                strategy=question.strategy,
                executing=question.executing,
                max_stages=question.max_stages,
            )
            return Planned(question.ticket, plan)
        case commands.Repair():
            try:
                transfers = repair_parts(
                    question.held,
                    question.targets,
                    question.model,
                    question.links,
                    reluctant=question.reluctant,
                )
            except LambdaScaleError as error:
                return Failed(question.ticket, error)
            return Repaired(question.ticket, transfers)
        case commands.Append():
            try:
                appended = append_transfers(
                    question.held,
                    question.running,
                    question.wanted,
                    question.model,
                    question.links,
                    can_send=question.can_send,
                )
            except LambdaScaleError as error:
                return Failed(question.ticket, error)
            return Appended(question.ticket, appended)
        case commands.PlanPaths():
            paths = instances.plan(question.previous, question.members, question.rules)
            return PathsPlanned(question.ticket, paths)


def model(name: str, min_instances: int = 0) -> ModelRecord:
    return record(min_instances=min_instances, name=name)


def id_of(name: str) -> ModelId:
    return record(name=name).model_id
