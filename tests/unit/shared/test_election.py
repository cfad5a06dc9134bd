"""One process of a role is active at a time, whatever dies, pauses or loses the store."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import pytest

from shared import subjects, telemetry
from shared.bus.base import On
from shared.bus.memory import MemoryBroker, MemoryBus, MemoryKeyValue
from shared.clock import now
from shared.election.active_bus import ActiveBus
from shared.election.election import CALL_S, LOOK_S, Election
from shared.election.lease import (
    ABSENT_S,
    GRACE_S,
    KNOWN_S,
    PAUSE_S,
    PROMISE_S,
    RENEW_S,
    SILENT_S,
)
from shared.errors import BusTimeout, CutOff, NoResponders, StaleEpoch, Superseded
from shared.ids import RequestId
from shared.messages import Message, Ok
from shared.messages.serving import Cancel

pytestmark = pytest.mark.virtual_time
ROLE = "planner"
BUCKET = "bucket"
T = TypeVar("T")


class Store(MemoryKeyValue):
    refuses: Callable[[], bool]
    back: asyncio.Event
    """Set unless calls wait for the connection."""
    late_s: Callable[[], float]
    """After how long what has been written is acknowledged."""

    async def _at(self, key: str, act: Callable[[], T]) -> T:
        await self.back.wait()
        if self.refuses():
            raise BusTimeout("no JetStream leader")
        return await super()._at(key, act)

    async def update(
        self, key: str, value: bytes, revision: int, *, ttl: float | None = None
    ) -> int:
        written = await super().update(key, value, revision, ttl=ttl)
        await asyncio.sleep(self.late_s())
        return written


class Candidate:
    """A process that stands for the role. `keeps`: the task that renews its lease."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        self.broker = broker
        self.bus = MemoryBus(broker, name)
        self.outage = False
        """Whether the store refuses this process."""
        self.acknowledged_after_s = 0.0
        """How long the store's acknowledgements take to come to this process."""
        self.connected = asyncio.Event()
        self.connected.set()
        self.unreachable = ""
        """What the subjects begin with where this process reaches nobody."""
        vars(self.bus)["kv"] = self._kv
        vars(self.bus)["request"] = self._request
        self.election = Election(self.bus, ROLE, telemetry.logger(ROLE, name=name))
        self.won_at = -1.0
        self.keeps: asyncio.Task[None] | None = None

    async def _kv(self, bucket: str) -> Store:
        store = Store(self.bus, self.broker.bucket(bucket))
        store.refuses, store.back = lambda: self.outage, self.connected
        store.late_s = lambda: self.acknowledged_after_s
        return store

    async def _request(self, subject: str, *args: Any, **settings: Any) -> Message:
        if self.unreachable and subject.startswith(self.unreachable):
            raise NoResponders(f"{subject}: cut off")
        return await MemoryBus.request(self.bus, subject, *args, **settings)

    async def stand(self) -> None:
        await self.election.win()
        self.won_at = now()
        self.wake()

    def wake(self) -> None:
        self.keeps = asyncio.create_task(self.election.keep())

    def pause(self) -> None:
        """It computes no more. What it was about to do, the test does when it has woken up."""
        assert self.keeps is not None
        self.keeps.cancel()

    async def die(self) -> None:
        self.pause()
        await self.bus.__aexit__(None, None, None)

    @property
    def active_bus(self) -> ActiveBus:
        return ActiveBus(self.bus, self.election, ROLE)


class World:
    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.broker = MemoryBroker()
        self._tasks: list[asyncio.Task[None]] = []
        self._candidates: list[Candidate] = []

    async def close(self) -> None:
        tasks = [*self._tasks, *(c.keeps for c in self._candidates if c.keeps)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def candidate(self, name: str) -> Candidate:
        candidate = Candidate(self.broker, name)
        self._candidates.append(candidate)
        await self._stack.enter_async_context(candidate.bus)
        return candidate

    async def active(self, name: str) -> Candidate:
        candidate = await self.candidate(name)
        await candidate.stand()
        return candidate

    async def standby(self, name: str) -> tuple[Candidate, "asyncio.Task[None]"]:
        candidate = await self.candidate(name)
        task = asyncio.create_task(candidate.stand())
        self._tasks.append(task)
        await asyncio.sleep(4 * SILENT_S)
        assert not task.done()
        return candidate, task

    async def listener(self, subject: str) -> list[Message]:
        bus = (await self.candidate("listener")).bus
        heard: list[Message] = []

        async def hear(message: Message) -> None:
            heard.append(message)

        await bus.subscribe(subject, On(Message, hear))
        return heard


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        world = World(stack)
        yield world
        await world.close()


async def was_sure(*, anew: bool = False) -> None:
    """As if the process had been paused after it made sure of its role."""


def cancel(attempt: int) -> Cancel:
    return Cancel(request=RequestId("r"), attempt=attempt)


async def test_a_standby_takes_over_soon_after_a_death(world: World) -> None:
    first = await world.active("a")
    second, task = await world.standby("b")
    died_at = now()
    await first.die()
    await task
    assert second.won_at - died_at <= ABSENT_S + 2 * LOOK_S
    assert second.election.term > first.election.term


async def test_a_standby_takes_over_at_once_when_the_role_is_given_back(world: World) -> None:
    first = await world.active("a")
    second, task = await world.standby("b")
    left_at = now()
    first.pause()
    await first.election.resign()
    await task
    assert second.won_at - left_at <= LOOK_S


async def test_a_standby_takes_over_from_a_paused_process_which_then_knows(world: World) -> None:
    first = await world.active("a")
    second, task = await world.standby("b")
    paused_at = now()
    first.pause()
    await task
    assert SILENT_S - RENEW_S <= second.won_at - paused_at <= SILENT_S + 2 * LOOK_S
    await asyncio.sleep(PAUSE_S)
    first.wake()
    with pytest.raises(Superseded, match="another process has the role"):
        await first.election.confirm()
    await second.election.confirm()


async def test_of_many_exactly_one_is_active(world: World) -> None:
    candidates = [await world.candidate(f"c{i}") for i in range(6)]
    tasks = {asyncio.create_task(c.stand()): c for c in candidates}
    terms = []
    while tasks:
        await asyncio.sleep(2 * SILENT_S)
        won = [task for task in tasks if task.done()]
        assert len(won) == 1
        winner = tasks.pop(won[0])
        terms.append(winner.election.term)
        await winner.die()
    assert terms == sorted(set(terms))


async def test_renewals_whose_acknowledgements_come_too_late_count(world: World) -> None:
    first = await world.active("a")
    _, task = await world.standby("b")
    first.acknowledged_after_s, began = 2 * CALL_S, now()
    while now() - began < 2 * GRACE_S:
        await asyncio.sleep(0.01)
        assert first.election.is_sure or now() - began < SILENT_S
    assert not task.done()
    assert first.keeps is not None
    assert not first.keeps.done()


async def test_an_outage_of_the_store_changes_nothing(world: World) -> None:
    first = await world.active("a")
    second, task = await world.standby("b")
    first.outage = second.outage = True
    began = now()
    while now() - began < GRACE_S - 1.0:
        await asyncio.sleep(0.01)
        assert first.election.is_sure
    first.outage = second.outage = False
    await asyncio.sleep(2 * SILENT_S)
    await first.election.confirm()
    assert not task.done()


async def test_a_standby_that_was_cut_off_with_the_holder_leaves_it_its_role(world: World) -> None:
    """Its look at the lease waited for the connection, as the holder's renewal did."""
    active = await world.active("a")
    standby, task = await world.standby("b")
    for candidate in (active, standby):
        candidate.connected.clear()
    await asyncio.sleep(2 * SILENT_S)
    for candidate in (standby, active):  # the standby looks first
        candidate.connected.set()
        await asyncio.sleep(LOOK_S / 2)
    await asyncio.sleep(4 * SILENT_S)
    assert not task.done()
    await active.election.confirm(anew=True)


async def test_who_alone_is_cut_off_from_the_store_is_silent_before_another_is_active(
    world: World,
) -> None:
    first = await world.active("a")
    second, task = await world.standby("b")
    first.outage, began = True, now()
    while not task.done():
        assert first.election.is_sure or now() - began > SILENT_S - RENEW_S
        await asyncio.sleep(0.01)
    assert not first.election.is_sure
    assert second.won_at - began <= SILENT_S + PROMISE_S + 2 * LOOK_S
    while first.keeps is not None and not first.keeps.done():
        assert not first.election.is_sure
        await asyncio.sleep(0.01)


async def test_who_is_cut_off_from_the_store_and_from_its_standby_gives_no_orders(
    world: World,
) -> None:
    """Those who hear nobody but the old one would follow them."""
    heard = await world.listener(subjects.EVENTS)
    first = await world.active("a")
    second, task = await world.standby("b")
    first.outage, began = True, now()
    first.unreachable = second.unreachable = subjects.candidate("")
    number = 0
    while not task.done():
        number += 1
        order = asyncio.create_task(first.active_bus.publish(subjects.EVENTS, cancel(number)))
        await asyncio.sleep(0.01)
        if not order.done():
            order.cancel()
    assert second.won_at - began <= SILENT_S
    before = len(heard)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(first.active_bus.publish(subjects.EVENTS, cancel(0)), 10.0)
    assert len(heard) == before


async def test_a_request_that_waits_for_the_role_is_not_sent_after_its_time(world: World) -> None:
    server = (await world.candidate("server")).bus
    asked: list[Message] = []

    async def take(message: Message) -> Message:
        asked.append(message)
        return Ok()

    await server.serve(subjects.REGISTRY_RESERVE, Cancel, take)
    first = await world.active("a")
    second, task = await world.standby("b")
    for each in (first, second):
        each.outage, each.unreachable = True, subjects.candidate("")
    await asyncio.sleep(ABSENT_S)
    with pytest.raises(CutOff, match="may not be active"):
        await first.active_bus.request(subjects.REGISTRY_RESERVE, cancel(1), Ok, timeout=1.0)
    first.outage = second.outage = False
    await first.active_bus.request(subjects.REGISTRY_RESERVE, cancel(2), Ok, timeout=1.0)
    assert asked == [cancel(2)]
    assert not task.done()


async def test_a_standby_that_is_gone_is_not_waited_for(world: World) -> None:
    first = await world.active("a")
    second, task = await world.standby("b")
    task.cancel()
    await second.bus.__aexit__(None, None, None)
    await asyncio.sleep(KNOWN_S)
    first.outage, began = True, now()
    while now() - began < GRACE_S - 1.0:
        await asyncio.sleep(0.01)
        assert first.election.is_sure


async def test_who_alone_is_cut_off_from_the_store_gives_up_in_the_end(world: World) -> None:
    first = await world.active("a")
    first.outage = True
    begun = now()
    assert first.keeps is not None
    with pytest.raises(Superseded, match="no renewal of its lease for 15 s"):
        await first.keeps
    assert GRACE_S <= now() - begun <= GRACE_S + 2 * RENEW_S
    with pytest.raises(Superseded):
        await first.election.confirm()


async def test_a_paused_process_writes_says_and_answers_nothing_when_it_wakes(world: World) -> None:
    heard = await world.listener(subjects.EVENTS)
    first = await world.active("a")
    old = first.active_bus
    written = await old.kv(BUCKET)
    await written.put("k", b"old")

    async def answer_old(message: Message) -> Message:
        return cancel(1)

    await old.serve(subjects.PLANNER_STATE, Cancel, answer_old)
    second, task = await world.standby("b")
    first.pause()
    await task
    new = second.active_bus
    await (await new.kv(BUCKET)).put("k", b"new")

    async def answer_new(message: Message) -> Message:
        await asyncio.sleep(0.1)  # the other one would be faster
        return cancel(2)

    await new.serve(subjects.PLANNER_STATE, Cancel, answer_new)
    first.wake()
    asked = asyncio.create_task(
        (await world.candidate("client")).bus.request(
            subjects.PLANNER_STATE, cancel(0), Cancel, timeout=1
        )
    )
    with pytest.raises(Superseded):
        await old.publish(subjects.EVENTS, cancel(1))
    with pytest.raises(Superseded):
        await old.request(subjects.PLANNER_STATE, cancel(1), Cancel, timeout=1)
    with pytest.raises(Superseded):
        await written.put("k", b"old again")
    with pytest.raises(Superseded):
        await written.delete("k")
    assert await asked == cancel(2)
    await new.publish(subjects.EVENTS, cancel(2))
    await asyncio.sleep(0)
    assert heard == [cancel(2)]
    entry = await written.get("k")
    assert entry is not None
    assert entry.value == b"new"


async def test_a_process_paused_in_the_midst_of_a_write_changes_nothing(world: World) -> None:
    """It has confirmed its role, and is paused just before the write leaves it."""
    first = await world.active("a")
    old = await first.active_bus.kv(BUCKET)
    await old.put("k", b"old")
    await old.put("gone", b"old")
    second, task = await world.standby("b")

    confirm = first.election.confirm

    async def confirm_then_pause(*, anew: bool = False) -> None:
        vars(first.election)["confirm"] = confirm
        await confirm(anew=anew)
        first.pause()
        await task
        new = await second.active_bus.kv(BUCKET)
        await new.put("k", b"new")
        await new.put("gone", b"new")
        first.wake()

    vars(first.election)["confirm"] = confirm_then_pause
    with pytest.raises(Superseded):
        await old.put("k", b"late")
    with pytest.raises(Superseded):
        await old.delete("gone")
    assert {e.key: e.value for e in await old.entries()} == {"k": b"new", "gone": b"new"}


async def test_a_write_that_was_not_acknowledged_is_no_obstacle(world: World) -> None:
    only = await world.active("a")
    bucket = await only.active_bus.kv(BUCKET)
    await bucket.put("k", b"1")
    raw = await only.bus.kv(BUCKET)
    await raw.put("k", b"2")  # as if by this process, and the acknowledgement lost
    await bucket.put("k", b"3")
    await bucket.delete("k")
    await bucket.delete("k")
    assert await bucket.get("k") is None
    await bucket.put("k", b"4")
    assert [e.value for e in await bucket.entries()] == [b"4"]


async def test_whoever_heard_the_later_term_refuses_the_earlier(world: World) -> None:
    first = await world.active("a")
    early = first.active_bus
    first.pause()
    second = await world.active("b")
    late = second.active_bus
    heard = await world.listener(subjects.EVENTS)
    server = (await world.candidate("server")).bus

    async def take(message: Message) -> Message:
        return Ok()

    await server.serve(subjects.REGISTRY_RESERVE, Cancel, take)

    vars(first.election)["confirm"] = was_sure
    await early.publish(subjects.EVENTS, cancel(0))
    await early.request(subjects.REGISTRY_RESERVE, cancel(0), Ok, timeout=1)
    await late.publish(subjects.EVENTS, cancel(1))
    await late.request(subjects.REGISTRY_RESERVE, cancel(1), Ok, timeout=1)
    await early.publish(subjects.EVENTS, cancel(2))
    with pytest.raises(StaleEpoch, match="a planner of term"):
        await early.request(subjects.REGISTRY_RESERVE, cancel(2), Ok, timeout=1)
    await asyncio.sleep(0)
    assert heard == [cancel(0), cancel(1)]
    assert server.stale == 1


async def test_an_answer_of_an_earlier_term_is_refused(world: World) -> None:
    first = await world.active("a")
    first.pause()
    second = await world.active("b")

    async def answer(message: Message) -> Message:
        return cancel(1)

    vars(first.election)["confirm"] = was_sure
    await first.active_bus.serve(subjects.PLANNER_STATE, Cancel, answer)
    await second.active_bus.serve(subjects.PLANNER_SCALE, Cancel, answer)
    client = (await world.candidate("client")).bus
    assert await client.request(subjects.PLANNER_STATE, cancel(0), Cancel, timeout=1) == cancel(1)
    assert await client.request(subjects.PLANNER_SCALE, cancel(0), Cancel, timeout=1) == cancel(1)
    with pytest.raises(StaleEpoch):
        await client.request(subjects.PLANNER_STATE, cancel(0), Cancel, timeout=1)


async def test_a_lease_that_makes_no_sense_is_replaced(world: World) -> None:
    candidate = await world.candidate("a")
    bucket = await candidate.bus.kv(subjects.KV_ACTIVE)
    await bucket.put(ROLE, b"\xc1")
    await candidate.stand()
    await candidate.election.confirm()
