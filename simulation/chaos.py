"""Plays a seed's scenario in virtual time: `python -m simulation.chaos SEED [--log FILE]`.

Prints the scenario in words, the log, and what was violated. The exit code is 1 if anything was. A
seed does the same thing every time.
"""

import argparse
import asyncio
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from services.gateway.frontend import Frontend
from services.planner.core.events import TERMINAL
from services.planner.core.multicast.strategies import LOCAL
from services.registry.service import RegistryService
from shared import subjects
from shared.bus.memory import MemorySubscription
from shared.clock import now
from shared.errors import BusError, IllegalTransition, NotFound, RequestKillsNodes
from shared.ids import ModelName, NodeId, RequestId
from shared.messages import decode
from shared.messages.changes import whole_set, whole_status
from shared.messages.instances import InstanceChange, InstanceSet, InstanceState
from shared.messages.pool import Duty, NodeGone, NodeJoined, NodeStatus
from shared.messages.scaling import (
    BlockArrived,
    BlocksArrived,
    EventChanged,
    EventRecord,
    PlannerQuery,
    PlannerState,
    PullFailed,
)
from shared.pool_pages import read_pool
from simulation import instance_sets, invariants, loop
from simulation.clients import Bins, Replay
from simulation.cluster import PLANNER, REGISTRY, Cluster
from simulation.engine import token_of
from simulation.faults import ClockJump, Field, Role
from simulation.scenario import Arrival, Scenario, scenario

LOOK_S = 0.1
"""Seconds between two looks at what nodes hold."""
ANSWER_S = 150.0
"""Seconds after the last request and the last fault by which all requests must have ended."""
REST_S = 120.0
"""Seconds after that by which the cluster must have come to rest."""
BACK_S = 3.0
"""Seconds until a node is back that a request has killed."""
AGAIN_S = 0.25
"""Seconds until a client whose gateway died asks again."""
LIMIT_S = 1000.0


@dataclass(frozen=True, slots=True)
class Verdict:
    log: tuple[str, ...]
    """What happened, one line for each event: virtual time and text."""
    violations: tuple[str, ...]
    began: float
    """When the scenario's time began."""
    ended: tuple[tuple[float, EventRecord], ...]
    """The scaling events that ended, and when that was heard."""


def play(
    played: Scenario, kind: "type[Play] | None" = None, replay: type[Replay] = Replay
) -> Verdict:
    """`kind` and `replay`: benchmarks see more of what happens."""
    found = _Found([], [], [])
    with _logged(found.log):
        try:
            loop.run(_play(played, found, kind or Play, replay), seed=played.seed, limit_s=LIMIT_S)
        except Exception as error:  # whatever it is, the run is meant to find it
            found.log += "".join(traceback.format_exception(error)).splitlines()
            found.violations.append(f"the cluster failed: {_root(error)!r}")
    return Verdict(tuple(found.log), tuple(found.violations), found.began, tuple(found.ended))


@dataclass(slots=True)
class _Found:
    """A verdict in the making."""

    log: list[str]
    violations: list[str]
    ended: list[tuple[float, EventRecord]]
    began: float = 0.0


def _root(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _play(played: Scenario, found: _Found, kind: "type[Play]", replay: type[Replay]) -> None:
    def unhandled(_: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        found.violations.append(f"not handled: {context.get('exception')!r}, {context['message']}")

    asyncio.get_running_loop().set_exception_handler(unhandled)
    cluster = Cluster(played.spec)
    jumps = (fault for fault in played.faults if isinstance(fault, ClockJump))
    timed = all(jump.process != PLANNER for jump in jumps)
    watch = Watch(cluster, found, timed=timed)
    async with cluster:
        await cluster.serving()
        watch.say("begins")
        found.began = now()
        await kind(played, cluster, watch, replay).run()


class Watch:
    """Watches what passes over the bus and what nodes hold, and writes the log."""

    def __init__(self, cluster: Cluster, found: _Found, *, timed: bool) -> None:
        """`timed`: whether the planners' wall clocks are right. Those of others do not matter."""
        self.said: dict[NodeId, NodeStatus] = {}
        self._cluster = cluster
        self._found = found
        self._names = {ModelName(name): model for name, model in cluster.model_ids.items()}
        self._blocks = {
            model: manifest.n_blocks
            for model, manifest in zip(self._names.values(), cluster.manifests, strict=True)
        }
        spec = cluster.spec
        # Where memory is short, the last copy of a model gives way to a model that is asked for.
        ample = sum(model.nbytes for model in spec.models) <= spec.arena_bytes
        pooled = spec.system.transfer != LOCAL
        self.pool = invariants.Pool(self._blocks if pooled else {}, ample)
        self._events = invariants.Events(timed=timed)
        self._sets: dict[ModelName, InstanceSet] = {}
        self._terms: dict[str, int] = {}
        """The latest term that was heard, by role."""
        for subject in (
            subjects.EVENTS,
            subjects.INSTANCES,
            subjects.POOL_NODES,
            subjects.ARRIVALS,
            subjects.POOL_STATUS,
        ):
            cluster.broker.listen(MemorySubscription(cluster.broker, subject, self._hear))

    def say(self, what: str) -> None:
        self._found.log.append(f"{now():11.6f} {what}")

    def violated(self, what: str) -> None:
        self.say(f"VIOLATED: {what}")
        self._found.violations.append(f"{now():.3f} s: {what}")

    def find(self, role: Role) -> list[str]:
        """Nodes that are up and have the role now."""
        found: list[str] = []
        records = [r for r in self._events.running.values() if r.transfers]
        if role is Role.SOURCE:
            found = [t.src for r in records for t in r.transfers if t.src not in r.targets]
        elif role is Role.TARGET:
            found = [node for r in records for node in r.targets]
        elif role is Role.RELAY:
            found = [t.src for r in records for t in r.transfers if t.src in r.targets]
        else:
            path = role is Role.LEADER
            found = [
                i.leader
                for s in self._sets.values()
                for i in s.instances
                if i.state is InstanceState.SERVING and i.lasts is not path
            ]
        nodes = self._cluster.nodes
        return [name for name in dict.fromkeys(found) if name in nodes]

    def crashed(self, name: str) -> None:
        nodes = self._cluster.nodes
        if name in nodes:
            self._look()
            self.pool.crashed(nodes[name])
        elif name == self._cluster.active(PLANNER):
            self._events.planner_died()

    async def look(self) -> None:
        """Looks again and again, without end."""
        while True:
            self._look()
            await asyncio.sleep(LOOK_S)

    def _look(self) -> None:
        for wrong in self.pool.look(self._cluster.nodes):
            self.violated(wrong)
        self._look_at_gateways()

    def _look_at_gateways(self) -> None:
        """Whether their cores agree with themselves."""
        for name, gateway in self._cluster.gateways.items():
            try:
                gateway.frontend.dispatch.validate()
            except IllegalTransition as error:
                self.violated(f"{name}: {error}")

    def _hear(self, data: bytes, _: object) -> None:
        message = decode(data)
        if (term := message.term) is not None:
            if term.number < self._terms.get(term.role, 0):
                self.say(f"too late: {type(message).__name__} of {term.role} {term.number}")
                return
            if term.role == PLANNER and term.number > self._terms.get(PLANNER, term.number):
                self._events.planner_died()  # what it has not heard of ended with the last one
            self._terms[term.role] = term.number
        wrong: list[str] = []
        match message:
            case EventChanged(record=record):
                targets = " ".join(record.targets)
                self.say(
                    f"{record.id} of {record.name} is {record.state.value}, revision "
                    f"{record.revision}, targets {targets or 'none'} {record.error}".rstrip()
                )
                wrong = self._events.changed(record)
                if record.state in TERMINAL:
                    self._found.ended.append((now(), record))
            case InstanceSet():
                wrong = self._on_set(message)
            case InstanceChange(now=InstanceSet(name=name)):
                if found := whole_set(self._sets.get(name), message):
                    wrong = self._on_set(found)
            case NodeJoined(info=info):
                duty = f", {info.duty.value}" if info.duty is not Duty.ALL else ""
                self.say(f"{info.node} joined as {info.generation}{duty}")
                (self.pool.leaving.add if info.duty.leaves else self.pool.leaving.discard)(
                    info.node
                )
            case NodeGone(node=node, generation=generation, reason=reason):
                self.say(f"{node} gone as {generation}: {reason}")
                self.pool.gone(message)
                self._events.gone(node)
            case BlockArrived():
                self.say(f"{message.node} has block {message.block} from {message.source}")
            case BlocksArrived():
                for block in message.blocks:
                    self.say(f"{message.node} has block {block.block} from {block.source}")
            case PullFailed():
                self.say(f"{message.node} got no block {message.block}: {message.message}")
            case NodeStatus():
                if status := whole_status(self.said.get(message.node), message):
                    self.said[message.node] = status
        for each in wrong:
            self.violated(each)
        self._look_at_gateways()

    def _on_set(self, message: InstanceSet) -> list[str]:
        before = self._sets.get(message.name)
        age = message.epoch, message.revision
        if before is not None and age < (before.epoch, before.revision):
            return [f"set {age} of {message.name} after {before.epoch, before.revision}"]
        self._sets[message.name] = message
        if before is None or age != (before.epoch, before.revision):
            instances = " ".join(map(invariants.brief, message.instances))
            self.say(f"{message.name} is served by {instances or 'nobody'}")
        return instance_sets.of_set(message, self._blocks[message.model_id])


@dataclass(slots=True)
class _Asked:
    """A request that has not ended, as its client knows it."""

    arrival: Arrival
    number: int
    tries: int = 0
    gateway: str = ""
    """The process that was asked last."""
    frontend: Frontend | None = None
    """Its front end."""
    replay: Replay | None = None
    """None: no gateway has it now."""


class Play:
    def __init__(
        self, played: Scenario, cluster: Cluster, watch: Watch, replay: type[Replay] = Replay
    ) -> None:
        self._replay = replay
        self._played = played
        self._cluster = cluster
        self._watch = watch
        self._open: dict[str, _Asked] = {}
        self._answered = asyncio.Event()
        """Set while no request is open."""
        self._answered.set()
        self._start = now()
        self._killed: dict[RequestId, int] = {}
        """How many nodes each request has killed, but for one that died while its gateway could not
        hear it: such a request may be cleared too early (`services.gateway.core.suspects`)."""
        self._unheard: set[RequestId] = set()
        """Requests of which such a death was left out."""
        self._group = asyncio.TaskGroup()
        self._field = Field(cluster, watch.find, watch.say, self._crashed)
        cluster.poisoned = self._kill
        self._died: set[str] = set()
        """The processes that died at least once."""

    async def run(self) -> None:
        async with self._group:
            await self._run()

    async def _run(self) -> None:
        watching = asyncio.create_task(self._watch.look(), name="watch")
        async with asyncio.TaskGroup() as group:
            for fault in self._played.faults:
                group.create_task(
                    self._happen(fault.at, fault.happen(self._field)), name=str(fault)
                )
            group.create_task(self._requests(), name="requests")
        self._watch.say("no more faults")
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._answered.wait()
            await self._rest()
        except TimeoutError:
            for name, asked in self._open.items():
                tokens = asked.replay.tokens if asked.replay else 0
                self._watch.violated(f"{name} has not ended, {tokens} tokens so far")
        watching.cancel()
        self._count()

    # --- requests ---

    async def _requests(self) -> None:
        for number, arrival in enumerate(self._played.requests):
            await self._sleep_until(arrival.at)
            name = f"req-{number}"
            self._open[name] = _Asked(arrival, number)
            self._answered.clear()
            self._ask(name)
            if arrival.leaves_after is not None:
                asyncio.get_running_loop().call_later(arrival.leaves_after, self._leave, name)

    def _ask(self, name: str) -> None:
        """Asks a gateway that is up, each client another first."""
        asked = self._open.get(name)
        if asked is None:
            return  # its client has hung up
        up = self._cluster.gateways
        if not up:
            self._ask_later(name)
            return
        asked.gateway = list(up)[asked.number % len(up)]
        asked.tries += 1
        arrival = asked.arrival
        vocab = next(m.vocab for m in self._played.spec.models if m.name == arrival.model)
        asked.replay = self._replay(
            RequestId(name if asked.tries == 1 else f"{name}.{asked.tries}"),
            arrival.model,
            self._cluster.model_ids[arrival.model],
            arrival.prompt_tokens,
            arrival.output_tokens,
            partial(_token, vocab),
            Bins(self._start, 1.0),
            partial(self._ended, name),
        )
        if arrival.kills_at is not None:
            poison = arrival.prompt_tokens - 1 + arrival.kills_at
            self._cluster.poison[asked.replay.id] = poison
        asked.frontend = up[asked.gateway].frontend
        asked.replay.begin(asked.frontend)

    def _ask_later(self, name: str) -> None:
        asyncio.get_running_loop().call_later(AGAIN_S, self._ask, name)

    def _kill(self, name: str, request: RequestId) -> None:
        if name in self._cluster.nodes:
            if request not in self._unheard and not self._hears(request):
                self._unheard.add(request)
            else:
                self._killed[request] = self._killed.get(request, 0) + 1
            self._watch.say(f"{name} dead, killed by {request}")
            self._watch.crashed(name)
            self._cluster.crash(name)
            self._group.create_task(self._back(name), name=f"{name} comes back")

    def _hears(self, request: RequestId) -> bool:
        """Whether the request's gateway hears what nodes say now."""
        asked = (a for a in self._open.values() if a.replay is not None and a.replay.id == request)
        return all(self._cluster.broker.reaches(each.gateway) for each in asked)

    async def _back(self, name: str) -> None:
        await asyncio.sleep(BACK_S)
        await self._cluster.begin(name)

    def _crashed(self, process: str) -> None:
        """Before a process is killed: clients of a gateway come again, from the beginning."""
        self._watch.crashed(process)
        self._died.add(process)
        for name, asked in self._open.items():
            if asked.replay is not None and asked.gateway == process:
                asked.replay.turn_away()
                asked.replay = None
                self._ask_later(name)

    def _leave(self, name: str) -> None:
        asked = self._open.get(name)
        if asked is None:
            return
        if asked.replay is not None and asked.frontend is not None:
            asked.replay.leave(asked.frontend)
        else:
            self._close(name)

    def _ended(self, name: str, replay: Replay) -> None:
        asked = self._open[name]
        arrival = asked.arrival
        if replay.error.startswith(NotFound.code) and asked.gateway in self._died:
            asked.replay = None  # the gateway's next process does not know the model yet
            self._ask_later(name)
            return
        self._close(name)
        self._watch.say(f"{replay.id} ended, {replay.tokens} tokens {replay.error}".rstrip())
        if arrival.leaves_after is not None and replay.error == "cancelled":
            return
        if arrival.kills_at is not None:
            killed = self._killed.get(replay.id, 0)
            if replay.id in self._unheard:
                self._watch.say(f"{replay.id} killed one more node while the bus was away")
            if not replay.error.startswith(RequestKillsNodes.code) or killed > 2:
                self._watch.violated(f"{replay.id} killed {killed} nodes: {replay.error}")
            return
        if replay.error.startswith(RequestKillsNodes.code) and self._field.hits > 1:
            return  # two nodes failed while they ran it, as if it had been the reason
        if replay.error or replay.tokens != arrival.output_tokens:
            self._watch.violated(
                f"{replay.id} got {replay.tokens} of {arrival.output_tokens}: {replay.error}"
            )

    def _close(self, name: str) -> None:
        del self._open[name]
        if not self._open:
            self._answered.set()

    # --- the end ---

    async def _rest(self) -> None:
        """Waits until nothing is wrong with a cluster at rest."""
        give_up = now() + REST_S
        while True:
            wrong = await self._wrong_at_rest()
            if not wrong:
                self._watch.say("at rest")
                return
            if now() > give_up:
                for each in wrong:
                    self._watch.violated(f"at rest: {each}")
                return
            await asyncio.sleep(0.5)

    async def _wrong_at_rest(self) -> list[str]:
        cluster = self._cluster
        ask = partial(cluster.bus.request, timeout=2.0)
        try:
            pool = await read_pool(ask)
            planner = await ask(subjects.PLANNER_STATE, PlannerQuery(events=100), PlannerState)
        except BusError as error:
            return [str(error)]
        registry: RegistryService = cluster.processes[cluster.active(REGISTRY)].running
        names = {ModelName(name): model for name, model in cluster.model_ids.items()}
        return invariants.Rest(
            nodes=cluster.nodes,
            pool=pool,
            planner=planner,
            said=self._watch.said,
            reserved=[held.node for held in registry.pool.reservations.all],
            manifests=dict(zip(names, cluster.manifests, strict=True)),
            ids=names,
            replicas=cluster.spec.min_instances,
            loaded=self._watch.pool.kept,
            arena_bytes=next(iter(cluster.parts.values())).config.arena_bytes,
            warm=cluster.spec.anticipate,
        ).wrong()

    def _count(self) -> None:
        for name, process in self._cluster.processes.items():
            bus = process.bus
            if bus is not None and (bus.failed or bus.rejected or bus.dropped):
                self._watch.violated(
                    f"{name}: {bus.failed} handlers failed, {bus.rejected} messages were "
                    f"malformed, {bus.dropped} were dropped"
                )
            if process.service is not None and process.service.failures:
                self._watch.violated(f"{name}: {process.service.failures} bugs were contained")

    # --- time ---

    async def _happen(self, at: float, work: Any) -> None:
        await self._sleep_until(at)
        await work

    async def _sleep_until(self, at: float) -> None:
        if (delay := self._start + at - now()) > 0:
            await asyncio.sleep(delay)


def _token(vocab: int, request: RequestId, index: int) -> int:
    return token_of(request, index, vocab)


# --- what services log ---


@contextmanager
def _logged(log: list[str]) -> Iterator[None]:
    """Writes what services log to the log as well."""

    def take(
        _: object, level: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        what = event.pop("event")
        who = event.pop("name", None) or event.pop("node", "")
        event.pop("role", None)
        rest = " ".join(f"{key}={value}" for key, value in event.items())
        log.append(f"{now():11.6f}   {who} {level}: {what} {rest}".rstrip())
        raise structlog.DropEvent

    before = structlog.get_config() if structlog.is_configured() else None
    structlog.configure(
        processors=[structlog.processors.format_exc_info, take],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        if before is None:
            structlog.reset_defaults()
        else:
            structlog.configure(**before)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation.chaos", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--log", type=Path, help="where the log goes; otherwise it is printed")
    given = parser.parse_args(arguments)
    played = scenario(given.seed)
    verdict = play(played)
    print(*played.in_words(), sep="\n")
    if given.log:
        given.log.write_text("".join(f"{line}\n" for line in verdict.log))
    else:
        print(*verdict.log, sep="\n")
    for each in verdict.violations:
        print(f"VIOLATED {each}")
    number = len(verdict.violations)
    print("no violation" if not number else f"{number} violation{'s' * (number > 1)}")
    return 1 if number else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
