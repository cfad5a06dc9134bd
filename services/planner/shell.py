"""Carries out the commands of the planner's core, and feeds back the results.

A question becomes a task: a request on the bus, or a computation in a thread. Whatever happens to
it, it ends as one answer with the question's ticket. Nothing is decided here.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ParamSpec, TypeVar

import msgspec
from structlog.stdlib import BoundLogger

from services.planner.core import commands, instances
from services.planner.core.commands import Command, Log, Publish, Question, Span
from services.planner.core.part_plans import plan_parts, repair_parts
from services.planner.core.placement import append_transfers
from services.planner.core.planner import Planner
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
)
from services.planner.core.tickets import Moment
from services.planner.store import Store
from shared import subjects, telemetry
from shared.bus.base import Bus
from shared.capabilities import LIFETIME_S, Signer
from shared.clock import now, wall_ns
from shared.containment import is_containable
from shared.errors import BusError, BusTimeout, CutOff, LambdaScaleError, NoResponders, Superseded
from shared.ids import EventId
from shared.messages import Message, Ok
from shared.messages import Ping as PingMessage
from shared.messages.pool import ReportStatus, Reserved, Sources
from shared.messages.scaling import (
    ApplyPlan,
    BlockArrived,
    BlocksArrived,
    EventChanged,
    EventRecord,
    SetInstances,
)
from shared.pool_pages import read_pool

REGISTRY_TIMEOUT_S = 2.0
PLAN_TIMEOUT_S = 5.0
RELEASE_TIMEOUT_S = 10.0
PING_TIMEOUT_S = 0.5
PINGS = 2
FEW = 16
"""Nodes. What is computed for so few takes a millisecond or two, and a thread takes longer to begin
and to hand over its result while this one is busy."""

P = ParamSpec("P")
T = TypeVar("T")
Spawn = Callable[[Coroutine[Any, Any, None], str], object]


class Shell:
    def __init__(
        self,
        bus: Bus,
        planner: Planner,
        store: Store,
        log: BoundLogger,
        spawn: Spawn,
        observe: Callable[[EventRecord], None],
        signer: Signer | None = None,
    ) -> None:
        """`observe` is told of every change of an event. `signer`: signs what targets may read;
        None: nobody asks for that."""
        self.ready = asyncio.Event()
        """Set once the core knows the pool."""
        self._bus = bus
        self._planner = planner
        self._store = store
        self._observe = observe
        self._signer = signer
        self._log = log
        self._spawn = spawn
        self._outbox: asyncio.Queue[tuple[str, Message]] = asyncio.Queue()
        self._asked: dict[int, asyncio.Future[Message]] = {}
        """Operators' requests that are open."""
        self._numbers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._gathered: dict[EventId, list[BlockArrived | BlocksArrived]] = {}
        """Reports of blocks that came just now, by event."""
        self._soon: asyncio.Handle | None = None
        """When they are fed."""

    def gather(self, report: BlockArrived | BlocksArrived) -> None:
        """Feeds a report of blocks in a moment, together with those that wait to be handled."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._feed_gathered)
        self._gathered.setdefault(report.event, []).append(report)

    def _feed_gathered(self) -> None:
        gathered, self._gathered, self._soon = self._gathered, {}, None
        for event, reports in gathered.items():
            self.feed(Together(event, reports))

    def feed(self, stimulus: Stimulus) -> None:
        if self._gathered:  # these reports came first
            self._feed_gathered()
        for command in self._planner.handle(stimulus, Moment(now(), wall_ns())):
            self._do(command)

    async def ask(self, message: SetInstances) -> Message:
        """The core's reply to an operator. Raises the error with which the core refuses."""
        self._numbers += 1
        number = self._numbers
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[number] = reply
        try:
            self.feed(Asked(number, message))
            return await reply
        finally:
            del self._asked[number]

    async def send_outbox(self) -> None:
        """Publishes in order. A message that cannot be published is dropped: instance sets are
        repeated."""
        while True:
            subject, message = await self._outbox.get()
            try:
                await self._bus.publish(subject, message)
            except Superseded:
                raise  # this process has lost its role, and ends
            except BusError as error:
                self._log.warning("not published", subject=subject, error=str(error))
            except BaseException as error:
                if not is_containable(error):
                    raise
                self._log.error("not published", subject=subject, exc_info=error)

    def close(self) -> None:
        for waiting in self._timer, self._soon:
            if waiting is not None:
                waiting.cancel()

    # --- commands ---

    def _do(self, command: Command) -> None:
        match command:
            case Question():
                self._spawn(self._answer(command), type(command).__name__.lower())
            case Publish(message=EventChanged() as message):
                self._observe(message.record)
                self._outbox.put_nowait((subjects.EVENTS, message))
            case Publish(message=message):
                self._outbox.put_nowait((subjects.INSTANCES, message))
            case commands.AskStatus(node=node):
                wanted = ReportStatus(cause=command.cause)
                self._outbox.put_nowait((subjects.node_report(node), wanted))
            case commands.Greet(node=node):
                # Any message of this term does, where only planners speak.
                hello = PingMessage(cause=command.cause)
                self._outbox.put_nowait((subjects.node_release(node), hello))
            case commands.StoreEvent() | commands.StoreFixed() | commands.StoreHistory():
                self._store.write(command)
            case commands.WakeAt():
                self._wake_at(command.at)
            case commands.Answer():
                self._reply(command)
            case commands.Ready():
                self.ready.set()
            case Log():
                self._say(command)
            case Span():
                record_span(command, command.parent)

    def _wake_at(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self.feed, Wake())

    def _reply(self, command: commands.Answer) -> None:
        reply = self._asked.get(command.number)
        if reply is None or reply.done():
            return
        if isinstance(command.reply, Exception):
            reply.set_exception(command.reply)
        else:
            reply.set_result(command.reply)

    def _say(self, command: Log) -> None:
        say = getattr(self._log, command.level)
        say(command.text, cause=command.cause, exc_info=command.error, **command.fields)

    # --- questions ---

    async def _answer(self, question: Question) -> None:
        """Answers a question in any case: an error of any kind is an answer, too."""
        answer: Answer
        try:
            answer = await self._find(question)
        except LambdaScaleError as error:
            answer = Failed(question.ticket, error)
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the service ends
            self._log.error("a command failed", command=type(question).__name__, exc_info=error)
            answer = Failed(question.ticket, LambdaScaleError(f"the planner failed: {error!r}"))
        self.feed(answer)

    async def _find(self, question: Question) -> Answer:
        match question:
            case commands.Ping():
                return Pinged(question.ticket, await self._ping(question))
            case commands.MakePlan():
                roles = question.roles.values()
                plan = await compute(
                    sum(len(r.memory) + len(r.disk) + len(r.receiving) for r in roles),
                    plan_parts,
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
                transfers = await compute(
                    len(question.held),
                    repair_parts,
                    question.held,
                    question.targets,
                    question.model,
                    question.links,
                    reluctant=question.reluctant,
                )
                return Repaired(question.ticket, transfers)
            case commands.Append():
                appended = await compute(
                    len(question.held) + len(question.can_send),
                    append_transfers,
                    question.held,
                    question.running,
                    question.wanted,
                    question.model,
                    question.links,
                    can_send=question.can_send,
                )
                return Appended(question.ticket, appended)
            case commands.ReadPool(message=query):
                within_s = partial(self._bus.request, timeout=REGISTRY_TIMEOUT_S)
                return PoolRead(question.ticket, await read_pool(within_s, query))
            case commands.PlanPaths():
                paths = await compute(
                    len(question.members),
                    instances.plan,
                    question.previous,
                    question.members,
                    question.rules,
                )
                return PathsPlanned(question.ticket, paths)
            case _:
                return Replied(question.ticket, await self._request(question))

    async def _request(self, question: Question) -> Message:
        ask = self._bus.request
        match question:
            case commands.Reserve(message=message):
                subject = subjects.REGISTRY_RESERVE
                return await ask(subject, message, Reserved, timeout=REGISTRY_TIMEOUT_S)
            case commands.FindSources(message=query):
                subject = subjects.REGISTRY_SOURCES
                return await ask(subject, query, Sources, timeout=REGISTRY_TIMEOUT_S)
            case commands.Unreserve(message=end):
                subject = subjects.REGISTRY_UNRESERVE
                return await ask(subject, end, Ok, timeout=REGISTRY_TIMEOUT_S)
            case commands.SendPlan(message=plan):
                subject = subjects.node_plan(plan.node)
                return await ask(subject, self._signed(plan), Ok, timeout=PLAN_TIMEOUT_S)
            case commands.Release(message=release):
                subject = subjects.node_release(release.node)
                return await ask(subject, release, Ok, timeout=RELEASE_TIMEOUT_S)
        raise LambdaScaleError(f"{type(question).__name__} is no request")

    def _signed(self, plan: ApplyPlan) -> ApplyPlan:
        """With what lets the node read the blocks that it shall pull."""
        if self._signer is None or not plan.pulls:
            return plan
        blocks = [pull.block for pull in plan.pulls]
        until_ns = wall_ns() + round(LIFETIME_S * 1e9)
        capability = self._signer.sign(plan.node, plan.model_id, blocks, until_ns)
        return msgspec.structs.replace(plan, capability=capability)

    async def _ping(self, ping: commands.Ping) -> bool:
        """Whether the node's process is there. Answering with an error shows that, too."""
        message, subject = PingMessage(cause=ping.cause), subjects.node_ping(ping.node)
        tries = 0
        while tries < PINGS:
            try:
                await self._bus.request(subject, message, Ok, timeout=PING_TIMEOUT_S)
                return True
            except NoResponders:
                return False
            except CutOff:  # that says nothing of the node
                await asyncio.sleep(PING_TIMEOUT_S)
            except BusTimeout:
                tries += 1
            except LambdaScaleError:
                return True
        return False


async def compute(nodes: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The function's result: in a thread if it is about many nodes."""
    if nodes <= FEW:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def record_span(span: Span, parent: str) -> None:
    own = telemetry.record(
        span.name,
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        parent=parent,
        own=span.own,
        attributes=span.attributes,
        error=span.error,
    )
    for child in span.children:
        record_span(child, own)
