"""The registry over a real nats-server, with leases owned by real processes."""

import asyncio
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from services.local.nats_server import NatsServer
from services.registry.service import RegistryService
from shared import clock, subjects
from shared.bus.nats import NatsBus
from shared.config import BusConfig, NodeConfig, RegistryConfig
from shared.messages import Ok
from shared.messages.pool import (
    ModelAdd,
    Models,
    ModelsQuery,
    NodeGone,
    NodeJoined,
    PoolState,
    Reserved,
    Sources,
    SourcesQuery,
    Tier,
)
from shared.pool_pages import read_pool
from tests.unit.registry.builders import EVENT, MODEL, holding, info, record, reserve
from tests.unit.registry.cluster import WAIT_S, Node, Observer

CONFIG = RegistryConfig(report_s=0.1)


@asynccontextmanager
async def registry_on(server: NatsServer) -> AsyncIterator[RegistryService]:
    async with (
        NatsBus(BusConfig(url=server.url), "registry") as bus,
        RegistryService(bus, CONFIG) as registry,
    ):
        yield registry


@asynccontextmanager
async def lease_owner(server: NatsServer, name: str) -> AsyncIterator[Process]:
    arguments = ["-m", "tests.integration.lease_owner", server.url, name]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, str(NodeConfig().lease_s)
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def publish_model(bus: NatsBus) -> None:
    await bus.request(subjects.REGISTRY_MODEL_ADD, ModelAdd(record=record()), Ok, timeout=WAIT_S)


async def pool(bus: NatsBus) -> PoolState:
    return await read_pool(partial(bus.request, timeout=WAIT_S))


async def reserved(bus: NatsBus, *exclude: str) -> list[str]:
    request = reserve(1, *exclude)
    reply = await bus.request(subjects.REGISTRY_RESERVE, request, Reserved, timeout=WAIT_S)
    return [target.node for target in reply.targets]


async def sources(bus: NatsBus) -> list[tuple[str, bool]]:
    query = SourcesQuery(model_id=MODEL)
    reply = await bus.request(subjects.REGISTRY_SOURCES, query, Sources, timeout=WAIT_S)
    return [(source.info.node, source.complete) for source in reply.sources]


async def test_a_killed_node_is_gone_within_three_seconds(
    nats_server: NatsServer, nats_bus: NatsBus
) -> None:
    nodes = await Observer.of(nats_bus, subjects.POOL_NODES)
    statuses = await Observer.of(nats_bus, subjects.POOL_STATUS)
    async with registry_on(nats_server), lease_owner(nats_server, "a") as owner:
        await publish_model(nats_bus)
        assert isinstance(await nodes.next(), NodeJoined)
        await statuses.next()
        assert await reserved(nats_bus) == ["a"]
        owner.kill()
        killed = clock.now()
        gone = await nodes.next()
        assert clock.now() - killed < 3.0  # a promise of the lease, not a measurement of speed
        assert isinstance(gone, NodeGone)
        assert gone.node == "a"
        assert (await pool(nats_bus)).nodes == ()
        assert await sources(nats_bus) == []


async def test_a_restart_keeps_models_and_reservations_and_hears_what_nodes_hold(
    nats_server: NatsServer, nats_bus: NatsBus
) -> None:
    await Node(nats_bus, info("a"), holding(Tier.GPU, 0, 1, 2, 3)).join()
    await Node(nats_bus, info("b"), holding(Tier.HOST, 0)).join()
    async with registry_on(nats_server):
        await publish_model(nats_bus)
        assert await reserved(nats_bus, "a") == ["b"]
    async with registry_on(nats_server):
        reply = await nats_bus.request(
            subjects.REGISTRY_MODELS, ModelsQuery(), Models, timeout=WAIT_S
        )
        assert reply.records == (record(),)
        assert await sources(nats_bus) == [("a", True), ("b", False)]
        assert [view.reserved_by for view in (await pool(nats_bus)).nodes] == [None, EVENT]


async def test_a_node_that_leaves_is_gone_at_once(
    nats_server: NatsServer, nats_bus: NatsBus
) -> None:
    nodes = await Observer.of(nats_bus, subjects.POOL_NODES)
    async with registry_on(nats_server):
        node = Node(nats_bus, info("a"))
        await node.join()
        assert isinstance(await nodes.next(), NodeJoined)
        await node.renew()
        await node.leave()
        gone = await nodes.next()
        assert isinstance(gone, NodeGone)
        assert gone.reason == "it gave its lease back"


async def test_a_node_that_comes_back_is_another_node(
    nats_server: NatsServer, nats_bus: NatsBus
) -> None:
    nodes = await Observer.of(nats_bus, subjects.POOL_NODES)
    async with registry_on(nats_server):
        await publish_model(nats_bus)
        first = Node(nats_bus, info("a"))
        await first.join()
        assert isinstance(await nodes.next(), NodeJoined)
        assert await reserved(nats_bus) == ["a"]
        await first.leave()
        await Node(nats_bus, info("a", generation=2)).join()
        heard = [await nodes.next() for _ in range(2)]
        assert [type(message) for message in heard] == [NodeGone, NodeJoined]
        assert [view.reserved_by for view in (await pool(nats_bus)).nodes] == [None]
