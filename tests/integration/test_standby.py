"""Planners and registries that stand by: the active ones are killed, stopped and continued, and all
nats-servers are killed at once while all of them run."""

import asyncio
import signal
from pathlib import Path

import pytest

from benchmarks.takeover import QUESTIONS, lease_of, process_of
from services.local.nats_servers import names as nats_names
from shared import subjects
from shared.election.lease import GRACE_S, LeaseRecord
from shared.errors import BusError
from shared.ids import EventId
from shared.messages.scaling import EventRecord, EventState, PlannerQuery, PlannerState
from tests.support.cluster import LIMIT_S, Oracle, Running, prompts, running
from tests.support.models import TINY

PACED = {
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.05",
    "LAMBDASCALE_NODE_SLOTS": "4",
    "LAMBDASCALE_PLANNER_IDLE_S": "1",
    # No copies that sleep: the second event would wake them in 30 ms, and be over before any fault.
    "LAMBDASCALE_PLANNER_ANTICIPATE": "false",
    "LAMBDASCALE_NODE_LINK_BYTES_PER_S": "300000",
}
ROLES = ("planner", "registry")


async def lease_after(up: Running, role: str, term: int) -> None:
    """Waits for a lease of a later term."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            lease = await lease_of(up.bus, role)
            if lease.term > term and lease.holder:
                return
            await asyncio.sleep(0.05)


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


async def loading(up: Running, known: set[EventId]) -> EventRecord:
    """The new event, once a target of it holds a part of the model. (A node may hold a part from
    before: a copy that was given up while it loaded.)"""
    async with asyncio.timeout(LIMIT_S):
        while True:
            for event in await events(up):
                held = [len(up.watch.held.get(node, ())) for node in event.targets]
                if event.id not in known and any(0 < count < up.watch.n_blocks for count in held):
                    return event
            await up.watch.change()


async def test_an_event_goes_on_while_planner_and_registry_are_replaced(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    """First both are stopped (SIGSTOP) in mid-event and continued later, then both are killed in
    the midst of the next event. Nothing is lost or wrong, and each event ends as it began."""
    asked = prompts(24, TINY.vocab_size)
    right = oracle.tokens(asked, 40)
    async with running(tmp_path, checkpoint, nodes=3, settings=PACED, standbys=1) as up:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            before = {role: await lease_of(up.bus, role) for role in ROLES}
            names = {role: process_of(up.cluster, role, before[role]) for role in ROLES}
            known = {event.id for event in await events(up)}
            streams = asyncio.gather(*(up.ask(prompt, 40) for prompt in asked))
            begun = await loading(up, known)
            for name in names.values():
                up.kill(name, number)
            for role in ROLES:
                await lease_after(up, role, before[role].term)
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


def leads_alone(up: Running, role: str, holder: str) -> bool:
    """Whether one process of the role says that it is this one, and the others stand by for it."""
    logs = up.cluster.spec.directory / "logs"
    last = []
    for name in (name for name, its_role in up.cluster.services.items() if its_role == role):
        lines = (logs / f"{name}.log").read_text().splitlines()
        said = [line for line in lines if " holder=" in line or " stands by " in line]
        last.append(said[-1] if said else "")
    leads = [f" holder={holder} " in line for line in last]
    follows = [f" active={holder} " in line for line in last]
    return sum(leads) == 1 and sum(follows) == len(last) - 1


async def leader(up: Running, role: str) -> LeaseRecord:
    """The lease of the one process that has the role, once it answers and the others stand by.
    Processes that have ended are started again meanwhile, as `up` and systemd do."""
    subject, question, answer = QUESTIONS[role]
    async with asyncio.timeout(LIMIT_S):
        while True:
            for each in up.cluster.state.processes:
                if up.cluster.services.get(each.name) == role and each.state != "running":
                    up.cluster.start_service(each.name)
            try:
                await up.bus.request(subject, question, answer, timeout=1.0)
                lease = await lease_of(up.bus, role)
                if leads_alone(up, role, lease.holder):
                    return lease
            except BusError:
                pass
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("away_s", [3.0, GRACE_S + 1])
async def test_all_nats_servers_are_killed_at_once_under_load(
    tmp_path: Path, checkpoint: Path, oracle: Oracle, away_s: float
) -> None:
    """In mid-event, and start again with their stores, before those who lead have given up or after
    that. All streams go on, the event ends as it began, and one planner and one registry lead."""
    asked = prompts(24, TINY.vocab_size)
    right = oracle.tokens(asked, 40)
    servers = nats_names(3)
    async with running(
        tmp_path, checkpoint, nodes=3, settings=PACED, standbys=1, nats_servers=3
    ) as up:
        before = {role: await leader(up, role) for role in ROLES}
        known = {event.id for event in await events(up)}
        streams = asyncio.gather(*(up.ask(prompt, 40) for prompt in asked))
        begun = await loading(up, known)
        for name in servers:
            up.kill(name)
        for name in servers:
            assert await up.cluster.ended(name) == -signal.SIGKILL
        meanwhile = asyncio.gather(*(up.ask(prompt, 40) for prompt in asked[:4]))
        await asyncio.sleep(away_s)
        await asyncio.gather(*(up.cluster.start_again(name) for name in servers))
        answers = await streams
        assert {answer.error for answer in answers} == {""}
        assert [answer.tokens for answer in answers] == right
        for answer, tokens in zip(await meanwhile, right, strict=False):
            assert answer.tokens == tokens or (answer.error and not answer.tokens)
        for role in ROLES:
            lease = await leader(up, role)
            if away_s > GRACE_S:
                assert lease.term > before[role].term
        ended = {event.id: event.state for event in await events(up)}
        assert ended[begun.id] is EventState.COMPLETE
        answers = await up.ask_all(asked, 40)
        assert {answer.error for answer in answers} == {""}
        assert [answer.tokens for answer in answers] == right
        await up.replicas(1)
