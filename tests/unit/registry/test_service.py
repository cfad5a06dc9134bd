"""The registry over the memory bus."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
import pytest

from services.registry.service import STORED_WAIT_S, RegistryService
from shared import subjects
from shared.bus.base import KvOp, On
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.clock import now, wall_ns
from shared.config import RegistryConfig
from shared.errors import BadInput, BadMessage, BusTimeout, Conflict, NotFound
from shared.ids import EventId, ModelName, NodeId
from shared.messages import Message, Ok
from shared.messages.copies import KeepCopy
from shared.messages.pool import (
    ModelAdd,
    ModelAdded,
    ModelRecord,
    ModelRemove,
    ModelRemoved,
    Models,
    ModelSet,
    ModelsQuery,
    NodeGone,
    NodeJoined,
    PoolQuery,
    PoolState,
    ReportStatus,
    Reserve,
    Reserved,
    Sources,
    SourcesQuery,
    Tier,
    Unreserve,
)
from shared.messages.story import StoryQuery, Told
from shared.pool_pages import read_pool
from tests.unit.registry.builders import EVENT, MODEL, holding, info, record, reserve, status
from tests.unit.registry.cluster import WAIT_S, FailingBus, Node, Observer

pytestmark = pytest.mark.virtual_time
CONFIG = RegistryConfig(report_s=0.02)
WHOLE = holding(Tier.GPU, 0, 1, 2, 3)


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def bus(broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    """The bus of everybody but the registry."""
    async with MemoryBus(broker) as bus:
        yield bus


@pytest.fixture
async def own(broker: MemoryBroker) -> AsyncIterator[FailingBus]:
    """The registry's bus."""
    async with FailingBus(broker) as own:
        yield own


@pytest.fixture
async def registry(own: FailingBus) -> AsyncIterator[RegistryService]:
    async with RegistryService(own, CONFIG) as registry:
        yield registry


async def publish_model(bus: MemoryBus) -> None:
    await bus.request(subjects.REGISTRY_MODEL_ADD, ModelAdd(record=record()), Ok, timeout=WAIT_S)


async def sources(bus: MemoryBus) -> list[str]:
    query = SourcesQuery(model_id=MODEL)
    reply = await bus.request(subjects.REGISTRY_SOURCES, query, Sources, timeout=WAIT_S)
    return [source.info.node for source in reply.sources]


async def reserved(bus: MemoryBus, request: Reserve) -> list[str]:
    reply = await bus.request(subjects.REGISTRY_RESERVE, request, Reserved, timeout=WAIT_S)
    return [target.node for target in reply.targets]


async def pool(bus: MemoryBus) -> PoolState:
    return await read_pool(partial(bus.request, timeout=WAIT_S))


async def models(bus: MemoryBus) -> list[str]:
    reply = await bus.request(subjects.REGISTRY_MODELS, ModelsQuery(), Models, timeout=WAIT_S)
    return [r.name for r in reply.records]


async def test_a_node_joins_and_leaves(bus: MemoryBus, registry: RegistryService) -> None:
    nodes = await Observer.of(bus, subjects.POOL_NODES)
    node = Node(bus, info())
    await node.join()
    assert await nodes.next() == NodeJoined(info=info(), cause="lease_put")
    await node.renew()
    await node.leave()
    gone = await nodes.next()
    assert isinstance(gone, NodeGone)
    assert gone.reason == "it gave its lease back"


async def test_a_lease_that_expires_ends_the_node(
    bus: MemoryBus, registry: RegistryService
) -> None:
    nodes = await Observer.of(bus, subjects.POOL_NODES)
    await Node(bus, info(), ttl=1).join()
    assert isinstance(await nodes.next(), NodeJoined)
    gone = await nodes.next()
    assert isinstance(gone, NodeGone)
    assert "silent" in gone.reason
    assert (await pool(bus)).nodes == ()


async def test_a_node_whose_lease_expires_while_it_reports_may_take_it_again(
    bus: MemoryBus, registry: RegistryService
) -> None:
    nodes = await Observer.of(bus, subjects.POOL_NODES)
    await Node(bus, info("a"), ttl=1).join()  # its report counts for longer than its lease
    assert await nodes.next() == NodeJoined(info=info("a"), cause="lease_put")
    leases = await bus.kv(subjects.KV_LEASES)
    async with asyncio.timeout(WAIT_S):
        async for entry in leases.watch():
            if entry is not None and entry.op is KvOp.DELETE:
                break
    assert [view.info for view in (await pool(bus)).nodes] == [info("a")]
    await leases.create("a", msgspec.msgpack.encode(info("a")), ttl=60)
    await Node(bus, info("b")).join()
    assert await nodes.next() == NodeJoined(info=info("b"), cause="lease_put")
    assert registry.pool.leases.standing == (info("a"), info("b"))


async def test_a_renewal_that_says_something_else_is_taken_in(
    bus: MemoryBus, registry: RegistryService
) -> None:
    nodes = await Observer.of(bus, subjects.POOL_NODES)
    leases = await bus.kv(subjects.KV_LEASES)
    moved = info(address="tcp://10.0.0.2:7001")
    for each in (info(), info(), moved, moved, info()):
        await leases.put("a", msgspec.msgpack.encode(each))
    joined = [await nodes.next() for _ in range(3)]
    assert joined == [NodeJoined(info=each, cause="lease_put") for each in (info(), moved, info())]


async def test_leases_that_make_no_sense_are_ignored(
    bus: MemoryBus, registry: RegistryService
) -> None:
    nodes = await Observer.of(bus, subjects.POOL_NODES)
    leases = await bus.kv(subjects.KV_LEASES)
    await leases.put("junk", b"\xc1")
    await leases.put("other", msgspec.msgpack.encode(info("a")))
    await leases.put("a.b", msgspec.msgpack.encode(info("a.b")))
    await Node(bus, info("good")).join()
    assert await nodes.next() == NodeJoined(info=info("good"), cause="lease_put")


async def test_models_are_added_once_and_removed(bus: MemoryBus, registry: RegistryService) -> None:
    heard = await Observer.of(bus, subjects.POOL_MODELS)
    await publish_model(bus)
    await publish_model(bus)
    assert await models(bus) == ["llama"]
    remove = ModelRemove(name=ModelName("llama"), cause="ev-9")
    await bus.request(subjects.REGISTRY_MODEL_REMOVE, remove, Ok, timeout=WAIT_S)
    assert await models(bus) == []
    assert await heard.next() == ModelAdded(record=record(), cause="model_add")
    assert await heard.next() == ModelRemoved(name=ModelName("llama"), model_id=MODEL, cause="ev-9")


async def test_what_a_model_is_to_have_is_changed_and_outlasts_a_second_import(
    bus: MemoryBus, registry: RegistryService
) -> None:
    heard = await Observer.of(bus, subjects.POOL_MODELS)
    await publish_model(bus)
    wish = ModelSet(name=ModelName("llama"), min_instances=2, priority=3, keep_alive_s=60.0)
    changed = msgspec.structs.replace(record(), min_instances=2, priority=3, keep_alive_s=60.0)
    for _ in range(2):  # the second changes nothing, and is not announced
        answer = await bus.request(subjects.REGISTRY_MODEL_SET, wish, Models, timeout=WAIT_S)
        assert answer.records == (changed,)
    assert await heard.next() == ModelAdded(record=record(), cause="model_add")
    assert await heard.next() == ModelAdded(record=changed, cause="model_set")
    await publish_model(bus)
    back = ModelSet(name=ModelName("llama"), keep_alive_s=-1.0)
    answer = await bus.request(subjects.REGISTRY_MODEL_SET, back, Models, timeout=WAIT_S)
    assert answer.records[0].priority == 3
    assert answer.records[0].keep_alive_s is None


async def test_objectives_and_schedules_outlast_an_import_and_a_restart(
    bus: MemoryBus, registry: RegistryService
) -> None:
    await publish_model(bus)
    window = "mon-fri 08:00-18:00 min=2"
    wish = ModelSet(name=ModelName("llama"), ttft_s=0.5, tpot_s=0.05, warm=1, schedule=window)
    wish = msgspec.structs.replace(wish, prefill_share=0.25)
    changed = msgspec.structs.replace(record(), ttft_s=0.5, tpot_s=0.05, warm=1, schedule=window)
    changed = msgspec.structs.replace(changed, prefill_share=0.25)
    answer = await bus.request(subjects.REGISTRY_MODEL_SET, wish, Models, timeout=WAIT_S)
    assert answer.records == (changed,)
    await publish_model(bus)
    stored = await (await bus.kv(subjects.KV_MODELS)).entries()
    assert [msgspec.msgpack.decode(e.value, type=ModelRecord) for e in stored] == [changed]
    back = ModelSet(
        name=ModelName("llama"), ttft_s=0.0, tpot_s=0.0, warm=0, schedule="", prefill_share=0.0
    )
    answer = await bus.request(subjects.REGISTRY_MODEL_SET, back, Models, timeout=WAIT_S)
    assert answer.records == (record(),)


@pytest.mark.parametrize(
    "wish",
    [
        {"min_instances": -1},
        {"min_instances": 3, "max_instances": 2},
        {"priority": 10**9},
        {"keep_alive_s": float("nan")},
        {"keep_alive_s": float("inf")},
        {"ttft_s": -0.5},
        {"tpot_s": float("nan")},
        {"warm": -1},
        {"schedule": "weekdays 8-18 min=2"},
        {"prefill_share": 1.0},
        {"prefill_share": -0.1},
        {"prefill_share": float("nan")},
    ],
)
async def test_what_a_model_cannot_have_is_refused(
    bus: MemoryBus, registry: RegistryService, wish: dict[str, Any]
) -> None:
    await publish_model(bus)
    request = ModelSet(name=ModelName("llama"), **wish)
    with pytest.raises(BadInput):
        await bus.request(subjects.REGISTRY_MODEL_SET, request, Models, timeout=WAIT_S)
    assert registry.pool.catalog.records == (record(),)


async def test_refusals_are_typed(bus: MemoryBus, registry: RegistryService) -> None:
    await publish_model(bus)
    other = ModelAdd(record=record(model_id="changed"))
    with pytest.raises(Conflict, match="publish under another name"):
        await bus.request(subjects.REGISTRY_MODEL_ADD, other, Ok, timeout=WAIT_S)
    unknown = ModelRemove(name=ModelName("unknown"))
    with pytest.raises(NotFound):
        await bus.request(subjects.REGISTRY_MODEL_REMOVE, unknown, Ok, timeout=WAIT_S)
    with pytest.raises(BadMessage, match="takes Reserve, not PoolQuery"):
        await bus.request(subjects.REGISTRY_RESERVE, PoolQuery(), Reserved, timeout=WAIT_S)


async def test_a_node_is_reserved_and_given_back(bus: MemoryBus, registry: RegistryService) -> None:
    await publish_model(bus)
    await Node(bus, info()).join()
    assert await reserved(bus, reserve(2)) == ["a"]
    assert (await pool(bus)).nodes[0].reserved_by == EVENT
    assert await reserved(bus, reserve(1, event="ev-2")) == []
    unreserve = Unreserve(event=EVENT)
    await bus.request(subjects.REGISTRY_UNRESERVE, unreserve, Ok, timeout=WAIT_S)
    assert await reserved(bus, reserve(1, event="ev-2")) == ["a"]


async def test_questions_about_nodes_wait_until_they_have_reported(
    bus: MemoryBus, own: FailingBus
) -> None:
    asked, release = asyncio.Event(), asyncio.Event()
    node = Node(bus, info(), WHOLE)
    leases = await bus.kv(subjects.KV_LEASES)
    await leases.create(info().node, msgspec.msgpack.encode(info()), ttl=60)

    async def report_late(message: Message) -> None:
        asked.set()
        await release.wait()
        await node.report()

    await bus.subscribe(subjects.POOL_REPORT, On(Message, report_late))
    async with RegistryService(own, RegistryConfig(report_s=0.5)), asyncio.TaskGroup() as group:
        await publish_model(bus)
        async with asyncio.timeout(WAIT_S):
            await asked.wait()
        found = group.create_task(sources(bus))
        viewed = group.create_task(pool(bus))
        assert await models(bus) == ["llama"]  # what is known anyway is told at once
        assert not found.done()
        assert not viewed.done()
        release.set()
        assert await found == ["a"]
        assert [view.holdings for view in (await viewed).nodes] == [(WHOLE,)]


async def test_a_restart_keeps_models_and_reservations(bus: MemoryBus, own: FailingBus) -> None:
    nodes = await Observer.of(bus, subjects.POOL_NODES)
    async with RegistryService(own, CONFIG):
        await publish_model(bus)
        await Node(bus, info("a"), WHOLE).join()
        await Node(bus, info("b")).join()
        assert await reserved(bus, reserve(1, "a")) == ["b"]
    reports = await Observer.of(bus, subjects.POOL_REPORT)
    async with RegistryService(own, CONFIG):
        assert isinstance(await reports.next(), ReportStatus)
        assert await models(bus) == ["llama"]
        assert await sources(bus) == ["a"]
        assert [view.reserved_by for view in (await pool(bus)).nodes] == [None, EVENT]
        assert await reserved(bus, reserve(1, "a")) == ["b"]
    joined = [await nodes.next() for _ in range(4)]
    assert joined == [NodeJoined(info=info(name), cause="lease_put") for name in "abab"]


async def test_a_node_that_died_while_no_registry_ran_is_told_to_be_gone(
    bus: MemoryBus, own: FailingBus
) -> None:
    nodes = await Observer.of(bus, subjects.POOL_NODES)
    node = Node(bus, info())
    async with RegistryService(own, CONFIG):
        await publish_model(bus)
        await node.join()
        assert await reserved(bus, reserve()) == ["a"]
    assert isinstance(await nodes.next(), NodeJoined)
    await node.leave()
    async with RegistryService(own, CONFIG) as registry:
        gone = await nodes.next()
        assert isinstance(gone, NodeGone)
        assert gone.generation == info().generation
        assert registry.pool.reservations.all == ()


async def test_reservations_live_through_an_outage_of_the_store(
    bus: MemoryBus, own: FailingBus
) -> None:
    async with RegistryService(own, CONFIG):
        await publish_model(bus)
        await Node(bus, info()).join()
        own.outage.on = True
        assert await reserved(bus, reserve()) == ["a"]
        assert await reserved(bus, reserve(event="ev-2")) == []
        own.outage.on = False
    async with RegistryService(own, CONFIG):
        assert (await pool(bus)).nodes[0].reserved_by == EventId(EVENT)


@pytest.mark.parametrize("tier", [None, Tier.CACHE, Tier.HOST])
async def test_only_where_it_sleeps_in_the_arena_a_model_need_not_wait_for_the_store(
    bus: MemoryBus, own: FailingBus, tier: Tier | None
) -> None:
    """A reservation that is lost would lose its room, unless the copy has that already."""
    async with RegistryService(own, CONFIG):
        await publish_model(bus)
        held = [holding(tier, 0, 1, 2, 3)] if tier else []
        await Node(bus, info(), *held).join()
        assert await sources(bus) == (["a"] if tier else [])
        own.outage.on = True
        began = now()
        assert await reserved(bus, reserve()) == ["a"]
        assert now() - began == (0.0 if tier is Tier.HOST else STORED_WAIT_S)
        assert await reserved(bus, reserve()) == ["a"], "asked again: it is not durable yet"
        assert now() - began == (STORED_WAIT_S if tier is Tier.HOST else 2 * STORED_WAIT_S)
        own.outage.on = False


async def test_a_model_that_cannot_be_stored_is_not_published(
    bus: MemoryBus, own: FailingBus
) -> None:
    heard = await Observer.of(bus, subjects.POOL_MODELS)
    async with RegistryService(own, CONFIG):
        own.outage.on = True
        with pytest.raises(BusTimeout, match="nothing was changed"):
            await publish_model(bus)
        assert await models(bus) == []
        own.outage.on = False
        await publish_model(bus)
        assert await models(bus) == ["llama"]
    assert isinstance(await heard.next(), ModelAdded)
    assert heard.quiet


async def test_the_registry_tells_the_story_of_a_node(
    bus: MemoryBus, registry: RegistryService
) -> None:
    await publish_model(bus)
    await Node(bus, info("n1"), WHOLE).join()
    assert await reserved(bus, reserve(count=1)) == ["n1"], "the node is known by now"
    await bus.request(subjects.REGISTRY_UNRESERVE, Unreserve(event=EVENT), Ok, timeout=WAIT_S)
    before = wall_ns()
    assert await reserved(bus, reserve(count=1)) == ["n1"]
    query = StoryQuery(subject="n1")
    told = await bus.request(subjects.REGISTRY_STORY, query, Told, timeout=WAIT_S)
    (_, step) = [step for step in told.steps if step.text == "reserved"]
    assert step.cause == EVENT
    assert before <= step.at_ns <= wall_ns()


async def test_a_node_is_told_which_request_made_its_copy_needed(
    bus: MemoryBus, registry: RegistryService
) -> None:
    ordered: asyncio.Future[KeepCopy] = asyncio.get_running_loop().create_future()

    async def keep(order: KeepCopy) -> Ok:
        ordered.set_result(order)
        return Ok()

    whole = (holding(Tier.DISK, 0, 1, 2, 3),)
    for name, held in (("n1", whole), ("n2", ())):
        here = msgspec.structs.replace(info(name), host=name)
        await Node(bus, here, *held).join()
        said = msgspec.structs.replace(status(name, *held, seq=9), disk_bytes=9000, disk_free=9000)
        await bus.publish(subjects.POOL_STATUS, said)
    await bus.serve(subjects.node_keep(NodeId("n2")), KeepCopy, keep)
    assert len((await pool(bus)).nodes) == 2, "what is added now is no model from before"
    add = ModelAdd(record=record(), cause="import-7")
    await bus.request(subjects.REGISTRY_MODEL_ADD, add, Ok, timeout=WAIT_S)
    order = await asyncio.wait_for(ordered, WAIT_S)
    assert order.cause == "import-7"
    query = StoryQuery(subject="import-7")
    told = await bus.request(subjects.REGISTRY_STORY, query, Told, timeout=WAIT_S)
    assert [step.text.split(" at ")[0] for step in told.steps] == [
        "is ordered a durable copy from n1"
    ]
