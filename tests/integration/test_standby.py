"""Planners and registries that stand by: the active ones are killed, stopped and continued."""

import asyncio
import signal
from pathlib import Path

import msgspec

from shared import subjects
from shared.election.lease import LeaseRecord
from shared.messages.scaling import EventRecord, EventState, PlannerQuery, PlannerState
from tests.support.cluster import LIMIT_S, Oracle, Running, prompts, running
from tests.support.models import TINY

PACED = {
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.05",
    "LAMBDASCALE_NODE_SLOTS": "4",
    "LAMBDASCALE_PLANNER_IDLE_S": "1",
    "LAMBDASCALE_NODE_LINK_BYTES_PER_S": "300000",
}
ROLES = ("planner", "registry")


class Leases:
    """Who is active in each role."""

    def __init__(self, up: Running) -> None:
        self._up = up

    async def open(self) -> None:
        self._bucket = await self._up.bus.kv(subjects.KV_ACTIVE)

    async def of(self, role: str) -> LeaseRecord:
        entry = await self._bucket.get(role)
        assert entry is not None
        return msgspec.msgpack.decode(entry.value, type=LeaseRecord)

    async def after(self, role: str, term: int) -> LeaseRecord:
        """The lease of a later term."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                lease = await self.of(role)
                if lease.term > term and lease.holder:
                    return lease
                await asyncio.sleep(0.05)


async def process_of(up: Running, role: str, holder: str) -> str:
    """The name of the process that holds a role, by what its log says."""
    logs = up.cluster.spec.directory / "logs"
    for name, of in up.cluster.services.items():
        if of == role and f"holder={holder} " in (logs / f"{name}.log").read_text():
            return name
    raise AssertionError(f"no process says that it is {holder}")


async def events(up: Running) -> tuple[EventRecord, ...]:
    query = PlannerQuery(events=5)
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                state = await up.bus.request(
                    subjects.PLANNER_STATE, query, PlannerState, timeout=1.0
                )
                return state.events
            except Exception:  # between two planners
                await asyncio.sleep(0.05)


async def test_an_event_goes_on_while_planner_and_registry_are_replaced(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    """First both are stopped (SIGSTOP) in mid-event and continued later, then both are killed in
    the midst of the next event. Nothing is lost or wrong, and each event ends as it began."""
    asked = prompts(24, TINY.vocab_size)
    right = oracle.tokens(asked, 40)
    async with running(tmp_path, checkpoint, nodes=3, settings=PACED, standbys=1) as up:
        leases = Leases(up)
        await leases.open()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            before = {role: await leases.of(role) for role in ROLES}
            names = {role: await process_of(up, role, before[role].holder) for role in ROLES}
            known = {event.id for event in await events(up)}
            streams = asyncio.gather(*(up.ask(prompt, 40) for prompt in asked))
            await up.until(
                lambda: any(0 < len(held) < up.watch.n_blocks for held in up.watch.held.values()),
                "a node that holds a part",
            )
            (begun,) = [event for event in await events(up) if event.id not in known]
            for name in names.values():
                up.kill(name, number)
            for role in ROLES:
                await leases.after(role, before[role].term)
            answers = await streams
            assert {answer.error for answer in answers} == {""}
            assert [answer.tokens for answer in answers] == right
            for name in names.values():
                if number is signal.SIGSTOP:
                    up.kill(name, signal.SIGCONT)
                await up.cluster.ended(name)  # who was superseded ends by itself
                up.cluster.start_service(name)  # as `up` and systemd do
            await up.replicas(1)
            ended = {event.id: event.state for event in await events(up)}
            assert ended[begun.id] is EventState.COMPLETE
