import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.registry import store as store_module
from services.registry.core.reservations import Reservation
from services.registry.store import Store
from shared import telemetry
from shared.bus.memory import MemoryBroker
from shared.errors import BusTimeout
from shared.ids import NodeId
from shared.messages.pool import ModelRecord
from shared.subjects import KV_MODELS, KV_RESERVATIONS
from tests.unit.registry.builders import EVENT, MODEL, info, record
from tests.unit.registry.cluster import WAIT_S, FailingBus

pytestmark = pytest.mark.virtual_time
A = NodeId("a")


@pytest.fixture
async def bus() -> AsyncIterator[FailingBus]:
    async with FailingBus(MemoryBroker()) as bus:
        yield bus


@asynccontextmanager
async def running(bus: FailingBus) -> AsyncIterator[Store]:
    store = Store(bus, telemetry.logger("test"))
    await store.load()
    async with asyncio.TaskGroup() as group:
        writer = group.create_task(store.write())
        yield store
        writer.cancel()


def reservation(node: str = "a") -> Reservation:
    of = info(node)
    return Reservation(node=of.node, generation=of.generation, event=EVENT, model_id=MODEL)


async def load(bus: FailingBus) -> store_module.Saved:
    return await Store(bus, telemetry.logger("test")).load()


async def test_what_was_written_is_loaded(bus: FailingBus) -> None:
    async with running(bus) as store:
        store.node(A, info())
        store.reservation(A, reservation())
        await store.model(MODEL, record(), None)
        assert await store.settled(WAIT_S)
    saved = await load(bus)
    assert (saved.models, saved.nodes, saved.reservations) == (
        [record()],
        [info()],
        [reservation()],
    )


async def test_the_newest_value_counts(bus: FailingBus) -> None:
    async with running(bus) as store:
        store.reservation(A, reservation())
        store.reservation(A, None)
        assert await store.settled(WAIT_S)
    assert (await load(bus)).reservations == []


async def test_an_outage_delays_writes_and_loses_none(bus: FailingBus) -> None:
    async with running(bus) as store:
        bus.outage.on = True
        store.reservation(A, reservation())
        store.reservation(NodeId("b"), reservation("b"))
        await asyncio.wait_for(bus.outage.refused.wait(), WAIT_S)
        assert not await store.settled(0.01)
        store.reservation(A, None)
        bus.outage.on = False
        assert await store.settled(WAIT_S)
    assert (await load(bus)).reservations == [reservation("b")]


async def test_a_model_that_cannot_be_stored_is_refused_and_undone(bus: FailingBus) -> None:
    async with running(bus) as store:
        bus.outage.on = True
        with pytest.raises(BusTimeout, match="nothing was changed, try again"):
            await store.model(MODEL, record(), None)
        bus.outage.on = False
        assert await store.settled(WAIT_S)
    assert (await load(bus)).models == []


async def test_a_removal_that_cannot_be_stored_is_undone(bus: FailingBus) -> None:
    async with running(bus) as store:
        await store.model(MODEL, record(), None)
        bus.outage.on = True
        with pytest.raises(BusTimeout):
            await store.model(MODEL, None, record())
        bus.outage.on = False
        assert await store.settled(WAIT_S)
    assert (await load(bus)).models == [record()]


async def test_an_unchanged_value_is_not_written_again(bus: FailingBus) -> None:
    async with running(bus) as store:
        store.node(A, info())
        assert await store.settled(WAIT_S)
        bus.outage.on = True
        store.node(A, info())
        assert await store.settled(0.01)


@pytest.mark.parametrize("bucket", [KV_MODELS, KV_RESERVATIONS])
async def test_entries_that_make_no_sense_are_ignored(bus: FailingBus, bucket: str) -> None:
    await (await bus.kv(bucket)).put("junk", b"\xc1")
    async with running(bus) as store:
        await store.model(MODEL, record(), None)
    saved = await load(bus)
    models: list[ModelRecord] = saved.models
    assert (models, saved.reservations) == ([record()], [])
