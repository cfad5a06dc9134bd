"""The registry goes on serving, whatever it is asked, told, or let down by."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.registry.core.durable import DurableCopies
from services.registry.core.leases import Leases
from services.registry.core.pool import Pool
from services.registry.service import RegistryService
from shared import subjects
from shared.bus.delivery import MAX_PAYLOAD
from shared.bus.memory import MemoryBroker, MemoryBus, MemoryKeyValue
from shared.config import RegistryConfig
from shared.errors import BusTimeout, LambdaScaleError, NoResponders, ServiceFailed, Superseded
from shared.ids import EventId
from shared.messages import Message
from shared.messages.copies import CopiesQuery, Leave
from shared.messages.pool import (
    ModelAdd,
    ModelRemove,
    ModelSet,
    ModelsQuery,
    NodeGone,
    NodeInfo,
    NodeJoined,
    Nodes,
    NodesQuery,
    NodeStatus,
    PoolQuery,
    Reserve,
    SourcesQuery,
    Unreserve,
)
from shared.messages.story import StoryQuery
from simulation.loop import run
from tests.support.amounts import examples
from tests.support.malformed import ERRORS, well_framed
from tests.unit.registry.builders import EVENT, MODEL, info, record, reserve
from tests.unit.registry.cluster import WAIT_S, Node, Observer

REQUESTS: dict[str, type[Message]] = {
    subjects.REGISTRY_MODEL_ADD: ModelAdd,
    subjects.REGISTRY_MODEL_REMOVE: ModelRemove,
    subjects.REGISTRY_MODEL_SET: ModelSet,
    subjects.REGISTRY_MODELS: ModelsQuery,
    subjects.REGISTRY_SOURCES: SourcesQuery,
    subjects.REGISTRY_RESERVE: Reserve,
    subjects.REGISTRY_UNRESERVE: Unreserve,
    subjects.REGISTRY_POOL: PoolQuery,
    subjects.REGISTRY_NODES: NodesQuery,
    subjects.REGISTRY_COPIES: CopiesQuery,
    subjects.REGISTRY_LEAVE: Leave,
    subjects.REGISTRY_STORY: StoryQuery,
}
TICKS_S = 1.5
"""Seconds, of virtual time, in which the registry ticks and looks at durable copies."""
LIKELY: dict[str, Any] = {
    "node": ["a"],
    "generation": [1],
    "seq": [2, 3],
    "model_id": [MODEL],
    "name": ["llama"],
    "event": [EVENT],
    "n_blocks": [1],
    "nbytes": [1],
    "count": [1],
    "subject": ["a", MODEL, EVENT],
}


class World:
    """A registry with a model and a node, on a bus of its own."""

    def __init__(self, registry: RegistryService, own: MemoryBus, bus: MemoryBus) -> None:
        self.registry = registry
        self.own = own
        self.bus = bus

    async def ask(self, subject: str, request: Message) -> None:
        """Answered, or refused for a reason: neither a bug nor silence."""
        try:
            await self.bus.request(subject, request, Message, timeout=WAIT_S)
        except (ServiceFailed, BusTimeout, NoResponders):
            raise
        except LambdaScaleError:
            pass

    async def serves(self) -> None:
        found = await self.bus.request(subjects.REGISTRY_NODES, NodesQuery(), Nodes, timeout=WAIT_S)
        assert "a" in {node.node for node in found.nodes}
        self.registry.pool.validate()


def in_a_world(work: Callable[[World], Any]) -> None:
    """Fails if the registry failed by then."""

    async def all_of_it() -> None:
        broker = MemoryBroker()
        async with (
            MemoryBus(broker, "registry") as own,
            MemoryBus(broker) as bus,
            RegistryService(own, RegistryConfig(report_s=0.0)) as registry,
        ):
            world = World(registry, own, bus)
            await world.ask(subjects.REGISTRY_MODEL_ADD, ModelAdd(record=record()))
            await Node(bus, info(), ttl=100_000).join()
            await world.ask(subjects.REGISTRY_POOL, PoolQuery())
            await work(world)
            await world.serves()

    run(all_of_it())


NONSENSE = {
    kind: st.lists(well_framed(kind, **LIKELY), min_size=1, max_size=5)
    for kind in REQUESTS.values()
}


@pytest.mark.parametrize(("subject", "kind"), REQUESTS.items())
@settings(max_examples=examples(6))
@given(data=st.data())
def test_requests_that_make_no_sense_are_refused_by_type(
    subject: str, kind: type[Message], data: st.DataObject
) -> None:
    requests = data.draw(NONSENSE[kind])

    async def work(world: World) -> None:
        for request in requests:
            await world.ask(subject, request)
        assert (world.own.failed, world.registry.failures) == (0, 0)

    in_a_world(work)


@settings(max_examples=examples(12))
@given(statuses=st.lists(well_framed(NodeStatus, **LIKELY), min_size=1, max_size=5))
def test_reports_that_make_no_sense_harm_nobody(statuses: list[NodeStatus]) -> None:
    async def work(world: World) -> None:
        for status in statuses:
            await world.bus.publish(subjects.POOL_STATUS, status)
        for subject, request in QUESTIONS:
            await world.ask(subject, request)
        assert (world.own.failed, world.registry.failures) == (0, 0)

    in_a_world(work)


@settings(max_examples=examples(12))
@given(
    infos=st.lists(well_framed(NodeInfo, **(LIKELY | {"node": ["b"]})), min_size=1, max_size=5),
    junk=st.binary(max_size=8) | st.sampled_from([b"\x81\xa4node\xa1\xff", b"\x91" * 100_000]),
)
def test_leases_that_make_no_sense_harm_nobody(infos: list[NodeInfo], junk: bytes) -> None:
    async def work(world: World) -> None:
        leases = await world.bus.kv(subjects.KV_LEASES)
        for each in (*map(msgspec.msgpack.encode, infos), junk):
            await leases.put("b", each)
        for subject, request in QUESTIONS:
            await world.ask(subject, request)
        assert (world.own.failed, world.registry.failures) == (0, 0)

    in_a_world(work)


QUESTIONS: list[tuple[str, Message]] = [
    (subjects.REGISTRY_SOURCES, SourcesQuery(model_id=MODEL)),
    (subjects.REGISTRY_RESERVE, reserve(3)),
    (subjects.REGISTRY_POOL, PoolQuery()),
    (subjects.REGISTRY_UNRESERVE, Unreserve(event=EVENT)),
]


POOL = (
    "status", "lease_put", "lease_dropped", "leases_are", "copies_after", "reserve", "unreserve",
    "sources", "page", "tick",
)  # fmt: skip
DURABLE = ("due", "settle", "step", "lacking", "joined", "gone", "there")


@pytest.mark.parametrize(
    ("owner", "method"),
    [*((Pool, method) for method in POOL), *((DurableCopies, method) for method in DURABLE)],
)
def test_a_bug_in_the_core_costs_no_more_than_what_met_it(
    owner: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(world: World) -> None:
        leases = await world.bus.kv(subjects.KV_LEASES)
        for number, error in enumerate(ERRORS):

            def fail(*_: object, error: BaseException = error) -> None:
                raise error

            with monkeypatch.context() as patched:
                patched.setattr(owner, method, fail)
                other = info(f"b{number}")
                await Node(world.bus, other).join()
                await leases.delete(other.node)
                for subject, request in QUESTIONS:
                    await asked(world, subject, request)
                await asyncio.sleep(TICKS_S)
            await world.serves()

    in_a_world(work)


async def asked(world: World, subject: str, request: Message) -> None:
    """Answered, with whatever was injected."""
    with suppress(LambdaScaleError):
        await world.bus.request(subject, request, Message, timeout=WAIT_S)


def test_a_bus_that_takes_no_announcement_costs_that_announcement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = MemoryBus.publish

    async def work(world: World) -> None:
        raised: list[BaseException] = []

        async def publish(bus: MemoryBus, subject: str, message: Message) -> None:
            if bus is world.own and subject == subjects.POOL_NODES and len(raised) <= number:
                raised.append(error)
                raise error
            await real(bus, subject, message)

        monkeypatch.setattr(MemoryBus, "publish", publish)
        others = [error for error in ERRORS if not isinstance(error, Superseded)]
        for number, error in enumerate(others):
            await Node(world.bus, info(f"b{number}")).join()
            await asyncio.sleep(TICKS_S)
            assert raised[number:] == [error]
            await world.serves()
        told = await Observer.of(world.bus, subjects.POOL_NODES)
        await Node(world.bus, info("c")).join()
        assert isinstance(await told.next(), NodeJoined)

    in_a_world(work)


def test_an_announcement_that_is_too_large_for_the_bus_holds_no_other_up() -> None:
    async def work(world: World) -> None:
        told = await Observer.of(world.bus, subjects.POOL_NODES)
        room = MAX_PAYLOAD - len(msgspec.msgpack.encode(info("b"))) - 16  # its lease just fits
        await Node(world.bus, msgspec.structs.replace(info("b"), device="x" * room)).join()
        await Node(world.bus, info("c")).join()
        joined = await told.next()
        assert isinstance(joined, NodeJoined)
        assert joined.info.node == "c"
        await (await world.bus.kv(subjects.KV_LEASES)).delete("b")
        gone = await told.next()
        assert isinstance(gone, NodeGone)
        assert gone.node == "b"

    in_a_world(work)


def test_a_registry_that_has_lost_its_role_ends_when_it_would_announce_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(world: World) -> None:
        async def publish(*_: object) -> None:
            raise Superseded("injected")

        monkeypatch.setattr(world.own, "publish", publish)
        await world.ask(subjects.REGISTRY_MODEL_REMOVE, ModelRemove(name=record().name))
        await asyncio.sleep(TICKS_S)

    with pytest.raises(Superseded):
        in_a_world(work)


def test_stored_records_that_meet_a_bug_cost_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Leases.restore

    def restore(leases: Leases, info: NodeInfo, now: float) -> None:
        if info.node == "bad":
            raise ZeroDivisionError("injected")
        real(leases, info, now)

    async def work() -> None:
        broker = MemoryBroker()
        async with MemoryBus(broker, "registry") as own, MemoryBus(broker) as bus:
            async with RegistryService(own, RegistryConfig(report_s=0.0)):
                for node in ("a", "bad", "c"):
                    await Node(bus, info(node)).join()
                await bus.request(subjects.REGISTRY_NODES, NodesQuery(), Nodes, timeout=WAIT_S)
            monkeypatch.setattr(Leases, "restore", restore)
            async with RegistryService(own, RegistryConfig(report_s=0.0)) as again:
                assert {"a", "c"} <= {each.node for each in again.pool.leases.present}
                assert again.failures == 1

    run(work())


def test_a_store_that_fails_in_any_way_delays_what_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(world: World) -> None:
        for number, error in enumerate(ERRORS):

            async def fail(*_: object, error: BaseException = error) -> None:
                raise error

            with monkeypatch.context() as patched:
                patched.setattr(MemoryKeyValue, "delete", fail)
                patched.setattr(MemoryKeyValue, "put", fail)
                await asked(world, subjects.REGISTRY_RESERVE, reserve(1, event=f"ev-{number}"))
                await asked(world, subjects.REGISTRY_UNRESERVE, Unreserve(event=EVENT))
            await world.serves()
        for number, _ in enumerate(ERRORS):
            event = EventId(f"ev-{number}")
            await world.ask(subjects.REGISTRY_UNRESERVE, Unreserve(event=event))
        assert (await (await world.bus.kv(subjects.KV_RESERVATIONS)).entries()) == []

    in_a_world(work)
