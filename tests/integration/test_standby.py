"""Planners and registries that stand by: the active ones are killed, stopped and continued."""

import asyncio
import signal
from pathlib import Path

from benchmarks.takeover import lease_of, process_of
from shared import subjects
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
