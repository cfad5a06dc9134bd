"""Events and the operator's numbers, written behind the planner's back and read at its start."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from services.planner.core import archive
from services.planner.core.archive import LARGEST, fitting
from services.planner.core.commands import StoreEvent
from services.planner.store import Store
from shared import subjects, telemetry
from shared.bus.delivery import MAX_PAYLOAD
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.ids import EventId, ModelId, NodeId
from shared.messages.scaling import EventRecord, EventState, Transfer
from tests.unit.planner.records import event

LOG = telemetry.logger("test")
M = ModelId("m")


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBus(MemoryBroker()) as bus:
        yield bus


class Opened:
    """An archive, and the store that writes its changes."""

    def __init__(self, bus: MemoryBus) -> None:
        self.store = Store(bus, LOG)
        bus.tasks.spawn(self.store.run(), name="store")

    async def load(self) -> None:
        self.archive = await self.store.load()
        for change in self.archive.fail_unfinished((), 2, "a start"):
            self.store.write(change)

    def put(self, record: EventRecord) -> None:
        for change in self.archive.put(record, "a test"):
            self.store.write(change)

    def fix(self, model: ModelId, count: int | None) -> None:
        for change in self.archive.fix(model, count, "a test"):
            self.store.write(change)

    async def settled(self) -> None:
        await self.store.settled()

    @property
    def events(self) -> dict[EventId, EventRecord]:
        return self.archive.events

    @property
    def fixed(self) -> dict[ModelId, int]:
        return self.archive.fixed


async def opened(bus: MemoryBus) -> Opened:
    found = Opened(bus)
    await found.load()
    return found


def over(number: int) -> EventRecord:
    return event(f"ev-{number}", EventState.COMPLETE, decided_ns=number)


async def test_what_is_put_is_there_at_the_next_start_oldest_first(bus: MemoryBus) -> None:
    first = await opened(bus)
    for number in (2, 1, 3):
        first.put(over(number))
    first.fix(M, 0)
    first.fix(ModelId("n"), 2)
    first.fix(ModelId("n"), None)
    await first.settled()
    second = await opened(bus)
    assert list(second.events) == ["ev-1", "ev-2", "ev-3"]
    assert second.fixed == {M: 0}


async def test_events_that_were_cut_off_have_failed(bus: MemoryBus) -> None:
    first = await opened(bus)
    first.put(event(state=EventState.SERVING))
    await first.settled()
    second = await opened(bus)
    (found,) = second.events.values()
    assert (found.state, found.error) == (EventState.FAILED, "the planner was restarted")
    await second.settled()
    third = await opened(bus)
    assert list(third.events.values()) == [found]


async def test_the_oldest_events_are_forgotten_those_that_run_are_not(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "KEEP", 3)
    first = await opened(bus)
    first.put(event("running", decided_ns=0))
    for number in range(1, 6):
        first.put(over(number))
    assert list(first.events) == ["running", "ev-3", "ev-4", "ev-5"]
    await first.settled()
    bucket = await bus.kv(subjects.KV_EVENTS)
    assert {entry.key for entry in await bucket.entries()} == set(first.events)


async def test_many_events_that_were_cut_off_are_no_trouble(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = await bus.kv(subjects.KV_EVENTS)
    for number in range(5):
        cut_off = event(f"ev-{number}", EventState.SERVING, decided_ns=number)
        await bucket.put(cut_off.id, msgspec.msgpack.encode(cut_off))
    monkeypatch.setattr(archive, "KEEP", 2)
    found = await opened(bus)
    assert list(found.events) == ["ev-3", "ev-4"]
    await found.settled()
    assert len(await bucket.entries()) == 2


async def test_what_cannot_be_read_is_passed_over(bus: MemoryBus) -> None:
    await (await bus.kv(subjects.KV_EVENTS)).put("ev-1", b"rubbish")
    await (await bus.kv(subjects.KV_SCALE)).put("m", msgspec.msgpack.encode("many"))
    found = await opened(bus)
    assert (found.events, found.fixed) == ({}, {})


def large(number: int, transfers: int) -> EventRecord:
    a, b = NodeId("a" * 20), NodeId("b" * 20)
    schedule = tuple(Transfer(step, a, b, step) for step in range(transfers))
    return event(f"ev-{number}", EventState.COMPLETE, number, schedule)


def test_records_fit_into_a_message() -> None:
    assert LARGEST < MAX_PAYLOAD
    records = [large(number, 12_000) for number in range(20)]
    found = fitting(records)
    assert [record.id for record in found] == [record.id for record in records]
    assert len(msgspec.msgpack.encode(found)) <= LARGEST
    assert found[0] == records[0]
    assert found[-1].transfers == ()


async def test_an_event_too_large_for_the_store_goes_without_its_schedule(bus: MemoryBus) -> None:
    first = await opened(bus)
    first.put(large(1, 50_000))
    await first.settled()
    (found,) = (await opened(bus)).events.values()
    assert found.transfers == ()
    assert len(first.events[found.id].transfers) == 50_000


async def test_what_is_too_large_for_the_store_holds_nothing_else_up(bus: MemoryBus) -> None:
    first = await opened(bus)
    first.store.write(StoreEvent(event="large", record=wide(), cause="a test"))
    first.put(event("small"))
    await first.settled()
    assert set((await opened(bus)).events) == {"small"}


def wide() -> EventRecord:
    return msgspec.structs.replace(event("large"), error="x" * MAX_PAYLOAD)


@pytest.mark.virtual_time
async def test_a_bug_at_one_write_delays_it_and_ends_nothing(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await opened(bus)
    real = Store._save

    async def failing(store: Store, bucket: str, key: str, value: bytes | None) -> None:
        monkeypatch.setattr(Store, "_save", real)
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(Store, "_save", failing)
    first.put(event("ev-1"))
    await first.settled()
    assert set((await opened(bus)).events) == {"ev-1"}
