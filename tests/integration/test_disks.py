"""A node's disk feeds other nodes, with real processes, whatever lies in the node's memory."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from services.local.cluster import CREDENTIALS
from services.local.credentials import all_users, make_users
from services.local.demo_model import make_checkpoint
from services.local.publishing import import_model
from shared import subjects
from shared.ids import ModelName, NodeId
from shared.messages.pool import ModelRecord, Tier
from shared.messages.scaling import EventRecord, ImportModel, PlannerQuery, PlannerState
from tests.support.cluster import Oracle, Running, prompts, running
from tests.support.models import TINY

ONE_EACH = {"LAMBDASCALE_NODE_ARENA_BYTES": str(1 << 20)}
"""Memory for one model on each node."""
PACED = {"LAMBDASCALE_NODE_LINK_BYTES_PER_S": "100000"}
OTHER = ModelName("other")
FIRST, SECOND, THIRD = (NodeId(f"node-{number}") for number in range(3))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "other"
    make_checkpoint(path, replace(TINY, seed=1))
    return path


async def publish(up: Running, path: Path) -> ModelRecord:
    request = ImportModel(path=str(path), name=OTHER)
    return await import_model(up.bus, request, node=FIRST, say=lambda _: None)


def stored(up: Running, record: ModelRecord) -> set[NodeId]:
    return {
        status.node
        for status in up.statuses.values()
        for holding in status.holdings
        if (holding.model_id, holding.tier) == (record.model_id, Tier.DISK)
        and len(holding.blocks) == record.n_blocks
    }


async def event_of(up: Running, name: ModelName) -> EventRecord:
    state = await up.bus.request(subjects.PLANNER_STATE, PlannerQuery(), PlannerState, timeout=60.0)
    return next(event for event in state.events if event.name == name)


async def test_a_model_whose_only_disk_copy_is_on_a_full_node_runs_on_an_empty_one(
    tmp_path: Path, checkpoint: Path, oracle: Oracle, other: Path
) -> None:
    """The full node serves on meanwhile."""
    settings = ONE_EACH | {"LAMBDASCALE_NODE_STEP_FLOOR_S": "0.02"}
    async with running(tmp_path, checkpoint, nodes=2, settings=settings) as up:
        first, second = prompts(2, TINY.vocab_size)
        serving = asyncio.create_task(up.ask(first, 400))
        record = await publish(up, other)
        answer = await up.ask(second, 12, OTHER)
        assert answer.error == ""
        assert [answer.tokens] == Oracle(other).tokens([second], 12)
        assert not serving.done()
        assert stored(up, record) == {FIRST}
        event = await event_of(up, OTHER)
        assert (event.sources, event.targets) == ((FIRST,), (SECOND,))
        assert (await serving).error == ""
        assert [(await serving).tokens] == oracle.tokens([first], 400)


async def test_a_disk_that_is_lost_while_it_feeds_is_replaced_by_another(
    tmp_path: Path, checkpoint: Path, other: Path
) -> None:
    """Two full nodes have the model on disk; the third takes it from both, until one is killed."""
    settings = ONE_EACH | PACED | {"LAMBDASCALE_REGISTRY_DURABLE_COPIES": "2"}
    make_users(tmp_path / CREDENTIALS, all_users([THIRD]))  # NATS lets in the third when it comes
    async with running(tmp_path, checkpoint, nodes=2, settings=settings, min_instances=2) as up:
        record = await publish(up, other)
        await up.until(lambda: stored(up, record) == {FIRST, SECOND}, "two durable copies")
        up.cluster.spec = replace(up.cluster.spec, nodes=3)
        up.cluster.start_node("node-2")
        (prompt,) = prompts(1, TINY.vocab_size)
        asked = asyncio.create_task(up.ask(prompt, 12, OTHER))
        await up.until(lambda: bool(partly(up, record)), "the first blocks on the third node")
        assert set((await event_of(up, OTHER)).sources) == {FIRST, SECOND}
        up.kill(FIRST)
        answer = await asked
        assert answer.error == ""
        assert [answer.tokens] == Oracle(other).tokens([prompt], 12)
        event = await event_of(up, OTHER)
        assert event.targets == (THIRD,)
        assert event.revision > 0


def partly(up: Running, record: ModelRecord) -> tuple[int, ...]:
    """What the third node has of the model, if it is not whole."""
    status = up.statuses.get(THIRD)
    held = [h.blocks for h in status.holdings if h.tier is Tier.GPU] if status else []
    return next((blocks for blocks in held if 0 < len(blocks) < record.n_blocks), ())
