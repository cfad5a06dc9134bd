"""`lambdascale events ID --story`: the stories of all services, merged by time."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.cli import story
from services.cli.story import Merged, ToldStep
from shared import subjects
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.ids import GatewayId, Generation, ModelId, ModelName, NodeId
from shared.messages.load import GatewayLoad
from shared.messages.pool import (
    ModelRecord,
    Models,
    ModelsQuery,
    NodeInfo,
    Nodes,
    NodesQuery,
)
from shared.messages.story import Step, StoryQuery, Told

pytestmark = pytest.mark.virtual_time

NAME, MODEL = ModelName("llama"), ModelId("m0d3l")
GATEWAY = GatewayId("gateway-0-1")
RECORD = ModelRecord(
    name=NAME, model_id=MODEL, manifest="", files={}, nbytes=1, n_blocks=1, block_bytes=(1,),
    context_length=8, created_ns=0,
)  # fmt: skip


def info(node: str) -> NodeInfo:
    return NodeInfo(
        node=NodeId(node), generation=Generation(1), address="tcp://h:1", host="h", device="cpu",
        arena_bytes=1, link_bytes_per_s=0, slots=8,
    )  # fmt: skip


def step(at_ns: int, text: str) -> Step:
    return Step(at_ns, "ev-1", (MODEL, "ev-1"), text)


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBus(MemoryBroker()) as bus:
        yield bus


async def serve_pool(bus: MemoryBus, *nodes: str) -> None:
    async def tell_nodes(_: NodesQuery) -> Nodes:
        return Nodes(nodes=tuple(info(node) for node in nodes))

    async def tell_models(_: ModelsQuery) -> Models:
        return Models(records=(RECORD,))

    await bus.serve(subjects.REGISTRY_NODES, NodesQuery, tell_nodes)
    await bus.serve(subjects.REGISTRY_MODELS, ModelsQuery, tell_models)


async def serve_story(bus: MemoryBus, topic: str, *steps: Step) -> None:
    """A service that remembers these steps of the model, and nothing of anything else."""

    async def tell(query: StoryQuery) -> Told:
        return Told(steps=steps if query.subject == MODEL else ())

    await bus.serve(topic, StoryQuery, tell)


async def gather_with_gateway(bus: MemoryBus, subject: str) -> Merged:
    """The merged story. A gateway reports its load while it is gathered."""
    gathering = asyncio.create_task(story.gather(bus, subject))
    while not gathering.done():
        await bus.publish(subjects.LOAD_GATEWAY, GatewayLoad(gateway=GATEWAY, models=()))
        await asyncio.wait([gathering], timeout=story.GATEWAYS_S / 3)
    return await gathering


async def test_every_service_tells_its_part_in_order_of_time(bus: MemoryBus) -> None:
    await serve_pool(bus, "n1")
    await serve_story(bus, subjects.PLANNER_STORY, step(10, "decided"), step(40, "complete"))
    await serve_story(bus, subjects.REGISTRY_STORY, step(20, "reserved"))
    await serve_story(bus, subjects.node_story(NodeId("n1")), step(30, "active"))
    await serve_story(bus, subjects.gateway_story(GATEWAY), step(50, "resumed"))
    told = await gather_with_gateway(bus, NAME)
    assert [(each.teller, each.step.text) for each in told.steps] == [
        ("planner", "decided"),
        ("registry", "reserved"),
        ("n1", "active"),
        ("planner", "complete"),
        (GATEWAY, "resumed"),
    ]
    assert told.errors == ()
    assert set(told.names.values()) == {NAME}
    assert await gather_with_gateway(bus, "nobody") == Merged((), (), told.names)


async def test_a_service_that_does_not_answer_is_named(bus: MemoryBus) -> None:
    await serve_pool(bus, "n1")
    await serve_story(bus, subjects.PLANNER_STORY, step(10, "decided"))
    await serve_story(bus, subjects.REGISTRY_STORY)
    told = await gather_with_gateway(bus, MODEL)
    assert [each.step.text for each in told.steps] == ["decided"]
    node, gateway = told.errors
    assert node.startswith("node n1 does not answer")
    assert gateway.startswith(f"gateway {GATEWAY} does not answer")


async def test_a_story_is_told_without_the_registry(bus: MemoryBus) -> None:
    await serve_story(bus, subjects.PLANNER_STORY, step(10, "decided"))
    told = await story.gather(bus, MODEL)
    assert [each.step.text for each in told.steps] == ["decided"]
    (error,) = told.errors
    assert error.startswith("the registry does not answer")


def test_a_line_names_who_took_the_step_its_cause_and_the_model() -> None:
    second = 1_700_000_000 * 10**9
    first, then = story.lines(
        (
            ToldStep("planner", Step(second + 4_000_000, "load", ("m0d3l", "ev-1"), "begins")),
            ToldStep("n1", Step(second + 9_000_000, "ev-1", ("ev-1", "node-1"), "goes on")),
        ),
        {"m0d3l": "llama"},
    )
    assert first.endswith(".004  planner  load  llama ev-1: begins")
    assert then.endswith(".009  n1       ev-1  node-1: goes on")
