"""Plays a seed's scenario in virtual time: `python -m simulation.chaos SEED [--log FILE]`.

Prints the scenario in words, the log, and what was violated. The exit code is 1 if anything was. A
seed does the same thing every time.
"""

import argparse
import asyncio
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from services.gateway.frontend import Frontend
from services.registry.service import RegistryService
from shared import subjects
from shared.clock import now
from shared.errors import BusError, NotFound, RequestKillsNodes
from shared.ids import ModelName, RequestId
from shared.messages.scaling import EventRecord, PlannerQuery, PlannerState
from shared.pool_pages import read_pool
from simulation import invariants, loop
from simulation.clients import Bins, Replay
from simulation.cluster import PLANNER, REGISTRY, Cluster
from simulation.engine import token_of
from simulation.faults import ClockJump, Field
from simulation.scenario import Arrival, Scenario, scenario
from simulation.watch import Found, Watch, logged

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
    found = Found([], [], [])
    with logged(found.log):
        try:
            loop.run(_play(played, found, kind or Play, replay), seed=played.seed, limit_s=LIMIT_S)
        except Exception as error:  # whatever it is, the run is meant to find it
            found.log += "".join(traceback.format_exception(error)).splitlines()
            found.violations.append(f"the cluster failed: {_root(error)!r}")
    return Verdict(tuple(found.log), tuple(found.violations), found.began, tuple(found.ended))


def _root(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _play(played: Scenario, found: Found, kind: "type[Play]", replay: type[Replay]) -> None:
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
