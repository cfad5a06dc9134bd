"""Requests that come while a node takes up the plan that wakes their model, or before."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from services.node.execution.worker import Worker
from services.node.hosting import hosting
from shared import subjects
from shared.errors import NotFound, NotReady, StaleEpoch
from shared.ids import ModelName, NodeId, RequestId
from shared.messages import Ok, Ping
from shared.messages.copies import DropCopy
from shared.messages.pool import Tier
from shared.messages.scaling import ImportModel, ModelImported
from shared.messages.serving import Cancel
from tests.support import adapters
from tests.support.adapters import AdapterSpec
from tests.unit.node.cluster import ALL, ARENA, WAIT_S, Nodes, nodes
from tests.unit.node.gates import Gate, reading

A = NodeId("a")
CACHED = {Tier.CACHE: ALL, Tier.DISK: ALL}


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits in vain is noticed by the test."""
    monkeypatch.setattr(hosting, "FIRST_BLOCK_S", 10 * WAIT_S)


@pytest.fixture
async def up(tmp_path: Path, checkpoint: Path) -> AsyncIterator[Nodes]:
    """Node `a`, with the model on its disk."""
    async with nodes(tmp_path, checkpoint, "a") as running:
        yield running


@pytest.fixture
async def cached(tmp_path: Path, checkpoint: Path) -> AsyncIterator[Nodes]:
    """Node `a`, with the model in its host cache."""
    async with nodes(tmp_path, checkpoint, "a", settings={"host_bytes": ARENA}) as running:
        await sleep(running, CACHED)
        yield running


async def sleep(up: Nodes, tiers: Mapping[Tier, tuple[int, ...]]) -> None:
    await up.promoted("a")
    await up.generate("a", request="before")
    await up.release("a", keep=Tier.HOST)
    await up.until_holds("a", tiers)


async def waiting(up: Nodes, request: str = "r") -> "asyncio.Task[None]":
    """A request that was sent to an instance which opens, and has come to its node."""
    asking = asyncio.create_task(up.submit("a", request=request, opening=True))
    for _ in range(5):
        await up.request(subjects.node_ping(A), Ping())
    assert not asking.done()
    return asking


@asynccontextmanager
async def waiting_for_the_disk(
    up: Nodes, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Gate, "asyncio.Task[None]"]]:
    """A request that waits for a block, and the gate before the disk."""
    with reading(monkeypatch) as gate:
        await up.apply("a", promote=ALL)
        await gate.wait()
        yield gate, await waiting(up)


async def right(up: Nodes) -> None:
    """The request's tokens are those of later ones."""
    await up.tokens.until(lambda: up.over("r"))
    assert up.failure("r") is None
    assert await up.generate("a", request="later") == [t.token for t in up.tokens_of("r")]


@pytest.mark.usefixtures("long")
async def test_it_waits_for_the_first_block(up: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    async with waiting_for_the_disk(up, monkeypatch) as (_, asking):
        with pytest.raises(NotFound, match="does not hold blocks"):
            await up.submit("a", request="of another instance")
    await asking
    await right(up)


@pytest.mark.usefixtures("long")
async def test_it_may_come_before_the_plan_where_the_model_sleeps(up: Nodes) -> None:
    await sleep(up, {Tier.HOST: ALL, Tier.DISK: ALL})
    asking = await waiting(up)
    await up.apply("a", promote=ALL, event="wake")
    await asking
    await right(up)


@pytest.mark.usefixtures("long")
async def test_it_may_come_before_the_plan_where_the_host_cache_has_the_model(
    cached: Nodes,
) -> None:
    asking = await waiting(cached)
    await cached.apply("a", promote=ALL, event="wake")
    await asking
    await right(cached)


@pytest.mark.usefixtures("long")
async def test_it_does_not_wait_where_nothing_is_in_memory(up: Nodes) -> None:
    with pytest.raises(NotFound, match="does not have model"):
        await up.submit("a", opening=True)


@pytest.mark.usefixtures("long")
async def test_it_does_not_wait_for_a_copy_that_leaves_the_host_cache(cached: Nodes) -> None:
    asking = await waiting(cached)
    drop = DropCopy(
        node=A,
        generation=cached.info("a").generation,
        model_id=cached.record.model_id,
        why="the test says so",
    )
    await cached.request(subjects.node_drop(A), drop)
    with pytest.raises(NotFound, match="does not have model"):
        await asking


@pytest.mark.usefixtures("long")
async def test_it_does_not_wait_for_a_model_that_is_given_back(
    up: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with waiting_for_the_disk(up, monkeypatch) as (gate, asking):
        releasing = asyncio.create_task(up.release("a"))
        gate.open()
        with pytest.raises(NotFound, match="does not"):
            await asking
        await releasing


@pytest.mark.usefixtures("long")
async def test_a_request_that_is_cancelled_meanwhile_does_not_begin(
    up: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with waiting_for_the_disk(up, monkeypatch) as (_, asking):
        cancel = Cancel(request=RequestId("r"), attempt=1)
        await up.bus.publish(subjects.node_cancel(A), cancel)
        await up.request(subjects.node_ping(A), Ping())
    with pytest.raises(StaleEpoch, match="comes after"):
        await asking


async def test_it_is_told_in_time_that_the_block_is_not_there(
    up: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it wait for an engine that is busy with something else by then."""
    begun, go_on, open_model = asyncio.Event(), asyncio.Event(), Worker.open_model

    async def slow(self: Worker, *model: Any) -> None:
        begun.set()
        await go_on.wait()
        await open_model(self, *model)

    monkeypatch.setattr(hosting, "FIRST_BLOCK_S", 0.01)
    monkeypatch.setattr(Worker, "open_model", slow)
    planning = asyncio.create_task(up.apply("a", promote=ALL))
    await begun.wait()
    with pytest.raises(NotReady, match="does not have the first block"):
        await up.submit("a", opening=True)
    go_on.set()
    await planning
    await up.until_arrived("a", ALL)
    await up.submit("a", opening=True)
    await right(up)


@pytest.mark.usefixtures("long")
async def test_its_adapter_is_loaded_once_the_model_runs(
    up: Nodes, tmp_path: Path, checkpoint: Path
) -> None:
    state = load_file(checkpoint / "model.safetensors")
    path = adapters.save(tmp_path / "sql", AdapterSpec(1, rank=8), state)
    message = ImportModel(path=str(path), name=ModelName("sql"), base=up.record.name)
    adapter: ModelImported = await up.request(subjects.node_import(A), message, ModelImported)
    await sleep(up, {Tier.HOST: ALL, Tier.DISK: ALL})
    submit = up.submission("a", opening=True, adapter=adapter.record.model_id)
    asking = asyncio.create_task(up.request(subjects.node_adapted(A), submit, Ok))
    await up.request(subjects.node_ping(A), Ping())
    await up.apply("a", promote=ALL, event="wake")
    await asking
    await up.tokens.until(lambda: up.over("r"))
    assert up.failure("r") is None
