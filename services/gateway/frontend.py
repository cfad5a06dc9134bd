"""The shell of the dispatch core: it hands events from the bus to the core, and carries out the
core's commands. Each client gets the pieces of its own request."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import structlog

from services.gateway.core import admission
from services.gateway.core.agreement import Verdict
from services.gateway.core.commands import (
    AskWhetherAlive,
    AskWhoDied,
    Broken,
    Checked,
    Command,
    Emit,
    End,
    Opened,
    Piece,
    Resumed,
    Scored,
    Send,
    Served,
    Switched,
    TellOfGone,
    Withdraw,
)
from services.gateway.core.dispatch import Dispatch
from services.gateway.core.requests import Request
from services.gateway.failures import Contain, failure_of
from services.gateway.metrics import Metrics
from services.gateway.progress import progress_text
from shared import subjects, telemetry
from shared.bus.base import Bus
from shared.clock import now, wall_ns
from shared.errors import BusError, CutOff, NoResponders
from shared.ids import ModelId, NodeId, RequestId
from shared.messages import Message, Ok, Ping
from shared.messages.instances import InstanceSet
from shared.messages.load import GatewayLoad
from shared.messages.scaling import FirstPartialToken
from shared.messages.serving import Distrust, GatewayGone, Submit, Tokens

SUBMIT_TIMEOUT_S = 3.0
PING_TIMEOUT_S = 0.3
PINGS = 3
"""How often a node is asked whether it lives, because a message may be lost."""
NO_BUS = "the gateway is not connected to NATS: try again later"
Client = Callable[[Piece], None]
Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


class _Switch:
    """A mode switch. It is over when every request that moved has its next token, or has ended."""

    def __init__(self, command: Switched) -> None:
        self.command = command
        self.started_ns = wall_ns()
        self.waiting = set(command.moved)


class Frontend:
    def __init__(
        self,
        bus: Bus,
        dispatch: Dispatch,
        metrics: Metrics,
        spawn: Spawn,
        contain: Contain,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self.dispatch = dispatch
        self.pressing = asyncio.Event()
        """Set when the load should be reported at once."""
        self._bus = bus
        self._metrics = metrics
        self._spawn = spawn
        self._contain = contain
        self._log = log
        self.busy = asyncio.Event()
        """Set while there are requests."""
        self._clients: dict[RequestId, Client] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._switches: dict[RequestId, _Switch] = {}
        self._withdrawals: set[asyncio.Task[None]] = set()

    async def idle(self) -> None:
        """Returns when no request is left."""
        await self._idle.wait()

    async def withdrawn(self) -> None:
        """Returns when all withdrawals of attempts were published."""
        await asyncio.gather(*self._withdrawals)

    def begin(self, clients: Mapping[Request, Client]) -> None:
        """Takes requests of one model, all or none. Each client is called with the pieces of its
        request, in order. CapacityExceeded if the queue is full, NotFound if the model is gone."""
        requests = list(clients)
        commands = self.dispatch.admit(requests, now())
        for request, client in clients.items():
            self._clients[request.id] = client
        self._idle.clear()
        self.busy.set()
        self.run(commands)
        if self.dispatch.pressing(requests[0].model_id):
            self.pressing.set()

    def progress(self, model_id: ModelId) -> str:
        """What the model's running scaling event has come to, in words; empty: none runs."""
        return progress_text(*self.dispatch.coming(model_id, now()))

    def end(self, requests: Iterable[Request]) -> None:
        """Cancels those of the requests that have not ended."""
        for request in requests:
            if self._forget(request.id):
                self.run(self.dispatch.cancel(request.id, now()))

    def finish(self, request: RequestId) -> None:
        """Ends a request whose client has all that it asked for, because a stop string was met."""
        self._forget(request)
        self.run(self.dispatch.finish(request, now()))

    async def on_tokens(self, message: Tokens) -> None:
        self.run(self.dispatch.on_tokens(message, now()))

    async def on_instances(self, message: InstanceSet) -> None:
        if fault := admission.fault_of(message):
            self._log.warning("instances not taken", model=message.name, fault=fault)
            return
        self.run(self.dispatch.on_instances(message, now()))

    async def on_load(self, message: GatewayLoad) -> None:
        self.run(self.dispatch.on_load(message, now()))

    def run(self, commands: list[Command]) -> None:
        for command in commands:
            try:
                self._do(command)
            except BaseException:
                with self._contain(f"a command {type(command).__name__}"):
                    raise

    def _do(self, command: Command) -> None:
        match command:
            case Emit():
                self._emit(command)
            case Scored():
                if client := self._clients.get(command.request):
                    client(command)
            case Send():
                self._spawn(self._submit(command), f"submit {command.submit.request}")
            case Withdraw():
                work = self._publish(subjects.node_cancel(command.node), command.cancel)
                task = self._spawn(work, f"cancel {command.cancel.request}")
                self._withdrawals.add(task)
                task.add_done_callback(self._withdrawals.discard)
            case End():
                self._end(command)
            case Resumed():
                self._metrics.resumptions.labels(command.name, command.reason).inc()
                self._log.debug("resumed", reason=command.reason, detail=command.detail)
            case Opened():
                self._metrics.opened.labels(command.name, command.why).inc()
            case Checked():
                self._checked(command)
            case Served():
                self._served(command)
            case Switched():
                self._switched(command)
            case AskWhetherAlive():
                self._spawn(self._judge(command), f"judge {command.request}")
            case AskWhoDied():
                self._spawn(self._find_dead(command), "who died")
            case TellOfGone(gateway):
                if self._bus.is_up:  # else nothing was heard of anybody
                    gone = GatewayGone(gateway=gateway)
                    self._spawn(self._publish(subjects.GATEWAYS_GONE, gone), f"{gateway} is gone")
            case Broken():
                raise command.error

    def _emit(self, command: Emit) -> None:
        request = command.request
        if command.begun and request in self._switches:
            self._settle(request)
        client = self._forget(request) if command.finish else self._clients.get(request)
        if client:
            client(command)

    def _end(self, command: End) -> None:
        if client := self._forget(command.request):
            away = End(command.request, BusError(NO_BUS), cause=command.cause)
            client(command if self._bus.is_up else away)

    def _forget(self, request: RequestId) -> Client | None:
        client = self._clients.pop(request, None)
        if not self._clients:
            self._idle.set()
            self.busy.clear()
        self._settle(request)
        return client

    async def _submit(self, command: Send) -> None:
        submit: Submit = command.submit
        to = subjects.node_adapted if submit.adapter else subjects.node_submit
        subject = to(command.node)
        asked = self._bus.request(subject, submit, Ok, timeout=SUBMIT_TIMEOUT_S)
        if failure := await failure_of(asked, self._contain, f"the submission to {command.node}"):
            # Without a connection to the bus no instance is at fault, and the request waits until
            # there is a connection again.
            error = CutOff(NO_BUS) if isinstance(failure, CutOff) else failure
            self._log.info(
                "attempt not taken",
                request=submit.request,
                attempt=submit.attempt,
                instance=submit.instance,
                error=str(error),
            )
            self.run(self.dispatch.on_not_taken(submit.request, submit.attempt, error, now()))
        else:
            self.run(self.dispatch.on_taken(submit.request, submit.attempt, now()))

    async def _judge(self, command: AskWhetherAlive) -> None:
        """Asks the nodes whether they live. The bus says that nobody answers only if a node's
        process is gone: it takes a process that is paused, or cut off, for connected."""
        dead: set[NodeId] = set()
        for _ in range(PINGS if command.surely else 1):
            dead, silent = await self._ping_all(command.nodes)
            if dead or not silent:
                break
        self.run(self.dispatch.on_judged(command.request, command.attempt, sorted(dead), now()))

    async def _find_dead(self, command: AskWhoDied) -> None:
        dead, _ = await self._ping_all(command.nodes)
        self.run(self.dispatch.on_found_dead(command.model_id, sorted(dead), now()))

    async def _ping_all(self, nodes: Sequence[NodeId]) -> tuple[set[NodeId], bool]:
        """The nodes that are dead, and whether any does not answer."""
        answers = await asyncio.gather(*(self._ping(node) for node in nodes))
        said = zip(nodes, answers, strict=True)
        return {node for node, error in said if isinstance(error, NoResponders)}, any(answers)

    async def _ping(self, node: NodeId) -> BusError | None:
        """The error that a node's answer is; None if it answers. Waits for a bus that is away."""
        while True:
            try:
                await self._bus.request(
                    subjects.node_ping(node), Ping(), Ok, timeout=PING_TIMEOUT_S
                )
                return None
            except CutOff:
                pass
            except BusError as error:
                return error
            await asyncio.sleep(PING_TIMEOUT_S)

    async def _publish(self, subject: str, message: Message) -> None:
        sent = self._bus.publish(subject, message)
        if error := await failure_of(sent, self._contain, f"a message on {subject}"):
            self._log.warning("not published", subject=subject, error=str(error))

    def _checked(self, command: Checked) -> None:
        self._metrics.checks.labels(command.name, Verdict.WRONG.value)  # 0, not absent, until then
        self._metrics.checks.labels(command.name, command.verdict).inc()
        if command.verdict != Verdict.WRONG.value:
            return
        why = f"its answers for model {command.name!r} are not those of other replicas"
        self._log.error("a node answers wrong", node=command.node, model=command.name)
        work = self._publish(subjects.node_distrust(command.node), Distrust(why=why))
        self._spawn(work, f"distrust {command.node}")

    # --- records -------------------------------------------------------------

    def _served(self, command: Served) -> None:
        instance = command.instance
        if instance.event is None:
            return
        at = wall_ns()
        telemetry.record(
            "first_token",
            start_ns=at - int((now() - command.submitted_at) * 1e9),
            end_ns=at,
            parent=command.trace,
            attributes={
                "model": command.name,
                "instance": instance.id,
                "stages": len(instance.stages),
            },
        )
        message = FirstPartialToken(
            event=instance.event,
            instance=instance.id,
            stages=len(instance.stages),
            at_ns=at,
            trace=command.trace,
        )
        self._spawn(self._publish(subjects.ARRIVALS, message), f"first token {instance.id}")

    def _switched(self, command: Switched) -> None:
        switch = _Switch(command)
        for request in command.moved:
            self._settle(request)
            self._switches[request] = switch
        for choice, count in (("moved", len(command.moved)), ("stayed", command.stayed)):
            self._metrics.switched.labels(command.name, choice).inc(count)
        if not command.moved:
            _record(switch)

    def _settle(self, request: RequestId) -> None:
        switch = self._switches.pop(request, None)
        if switch is None:
            return
        switch.waiting.discard(request)
        if not switch.waiting:
            _record(switch)


def _record(switch: _Switch) -> None:
    command = switch.command
    attributes: dict[str, telemetry.Attribute] = {
        "model": command.name,
        "moved": len(command.moved),
        "stayed": command.stayed,
        "waiting": command.waiting,
        "from_instances": ",".join(command.sources),
    }
    for choice, costs in (("moved", command.moved_costs), ("stayed", command.stayed_costs)):
        if costs is not None:
            attributes[f"{choice}_stay_s"] = round(costs.stay_s, 4)
            attributes[f"{choice}_move_s"] = round(costs.move_s, 4)
    telemetry.record(
        "mode_switch",
        start_ns=switch.started_ns,
        end_ns=wall_ns(),
        parent=command.trace,
        attributes=attributes,
    )
