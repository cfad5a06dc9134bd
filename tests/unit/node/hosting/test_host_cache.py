"""The host cache over real nodes: what moves there, what comes back, and who reads it there."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from ctypes import Structure
from pathlib import Path

import msgspec
import pytest

from services.node.checkpoints.reading import Wanted
from services.node.core.load import WorkerLoad
from services.node.engine.base import Weights
from services.node.engine.engine import TorchEngine
from services.node.engine.kernels import Kernels, Packing
from services.node.execution.worker import Worker
from services.node.hosting import hosting
from services.node.hosting.host_cache import CacheDraft, HostCache
from shared import subjects
from shared.errors import CapacityExceeded, Conflict
from shared.ids import ModelId, NodeId
from shared.layout import Manifest
from shared.messages.copies import DropCopy, KeepCopy
from shared.messages.pool import ModelRemove, Source, Tier
from tests.unit.node.cluster import ALL, ARENA, BLOCKS, NAME, WAIT_S, Nodes, nodes
from tests.unit.node.gates import Gate

FAST = 1 << 40
DISK = {Tier.DISK: ALL}
CACHED = {Tier.CACHE: ALL}


@pytest.fixture
async def up(tmp_path: Path, checkpoint: Path) -> AsyncIterator[Nodes]:
    """Nodes `a`, with the model on its disk, and `b`; each has a host cache."""
    async with nodes(tmp_path, checkpoint, "a", "b", settings={"host_bytes": ARENA}) as running:
        yield running


async def keep(up: Nodes, name: str, *sources: str) -> None:
    order = KeepCopy(
        node=NodeId(name),
        generation=up.info(name).generation,
        model_id=up.record.model_id,
        sources=tuple(Source(up.info(s), Tier.DISK, ALL, complete=True) for s in sources),
        bytes_per_s=FAST,
        tier=Tier.CACHE,
    )
    await up.request(subjects.node_keep(NodeId(name)), order)


async def drop(up: Nodes, name: str) -> None:
    message = DropCopy(
        node=NodeId(name),
        generation=up.info(name).generation,
        model_id=up.record.model_id,
        why="the test says so",
    )
    await up.request(subjects.node_drop(NodeId(name)), message)


def free(up: Nodes, name: str) -> tuple[int, int]:
    status = up.status(name)
    assert status is not None
    return status.arena_free, status.host_free


async def told(up: Nodes, name: str) -> list[str]:
    return [each.text for each in await up.services[name].story(up.record.model_id)]


async def test_a_released_copy_moves_and_wakes_with_the_same_tokens(up: Nodes) -> None:
    await up.promoted("a")
    tokens = await up.generate("a")
    await up.release("a", Tier.HOST)
    await up.until_holds("a", DISK | CACHED)
    assert free(up, "a")[0] == ARENA
    assert free(up, "a")[1] < ARENA

    up.stored("a").rename(up.stored("a").with_name("away"))  # it cannot come from the disk
    await up.apply("a", promote=ALL, event="wake")
    assert {m.transport for m in await up.until_arrived("a", ALL, "wake")} == {"host cache"}
    assert await up.generate("a", request="again") == tokens
    await up.until_holds("a", DISK | CACHED | {Tier.GPU: ALL})

    await up.release("a", Tier.HOST)  # the copy is there already
    await up.until_holds("a", DISK | CACHED)
    assert any("is in the host cache" in text for text in await told(up, "a"))


async def test_all_blocks_are_copied_while_the_first_is_attended_to(up: Nodes) -> None:
    await up.promoted("a")
    await up.release("a", Tier.CACHE)
    cache = up.services["a"]._hosting.cache
    place = cache._places[up.record.model_id]
    into = [memoryview(bytearray(block.nbytes)) for block in place.manifest.blocks]
    wanted = [Wanted(index, each, frozenset()) for index, each in enumerate(into)]
    async with aclosing(cache.read(up.record.model_id, wanted)) as outcomes:
        await anext(outcomes)
        async with asyncio.timeout(WAIT_S):
            while into != [place.space.block(n) for n in ALL]:  # noqa: ASYNC110 - a thread
                await asyncio.sleep(0.001)
        assert [outcome.block async for outcome in outcomes] == [*ALL[1:]]


async def test_peers_pull_from_a_host_cache(up: Nodes) -> None:
    await up.promoted("a")
    tokens = await up.generate("a")
    await up.release("a", Tier.CACHE)
    await up.until_holds("a", DISK | CACHED)
    await up.apply("b", dict.fromkeys(ALL, "a"), event="pull")
    await up.until_arrived("b", ALL, "pull")
    assert await up.generate("b", request="b") == tokens


async def test_a_peer_goes_on_reading_while_the_copy_wakes_and_sleeps(up: Nodes) -> None:
    """A block's place changes from the host cache to the arena and back."""
    await up.promoted("a")
    await up.release("a", Tier.CACHE)
    await up.apply("b", dict.fromkeys(ALL, "a"), event="pull")
    await up.apply("a", promote=ALL, event="wake")
    await up.release("a", Tier.CACHE)
    await up.until_arrived("b", ALL, "pull")
    assert not up.failed("b")


async def test_what_a_plan_has_others_send_comes_from_the_host_cache_if_it_is_there(
    up: Nodes,
) -> None:
    await keep(up, "b", "a")
    await up.until_holds("b", CACHED)
    await up.apply("b", dict.fromkeys(ALL, "a"), event="pull")
    assert {m.source for m in await up.until_arrived("b", ALL, "pull")} == {"b"}


async def test_an_ordered_copy_comes_from_a_peer_or_the_own_disk(up: Nodes) -> None:
    await up.promoted("a")
    tokens = await up.generate("a")
    await up.release("a")
    await keep(up, "b", "a")
    await up.until_holds("b", CACHED)
    await up.apply("a", dict.fromkeys(ALL, "b"), event="back")
    assert {m.source for m in await up.until_arrived("a", ALL, "back")} == {"b"}
    await up.release("a")
    await keep(up, "a", "a")
    await up.until_holds("a", DISK | CACHED)
    await up.stop("a")
    await up.apply("b", promote=ALL, event="wake")
    await up.until_arrived("b", ALL, "wake")
    assert await up.generate("b", request="b") == tokens


async def test_a_copy_that_does_not_fit_sleeps_in_the_arena_until_there_is_room(
    tmp_path: Path, checkpoint: Path
) -> None:
    settings = {"host_bytes": ARENA, "arena_bytes": 2 * ARENA}
    async with nodes(tmp_path, checkpoint, "a", settings=settings) as up:
        await keep(up, "a", "a")
        await up.until_holds("a", DISK | CACHED)
        first = up.record
        up.record = await up.import_model(called="other", blocks=5)
        five = tuple(range(5))
        await up.apply("a", promote=five, event="other")
        await up.until_arrived("a", five, "other")
        await up.release("a", Tier.HOST)
        assert any("stays in the arena" in text for text in await told(up, "a"))
        status = up.status("a")
        assert status is not None
        assert status.host_free < ARENA // 2

        other, up.record = up.record, first
        await drop(up, "a")
        assert any("the test says so" in text for text in await told(up, "a"))
        up.record = other

        def moved() -> bool:
            status = up.status("a")
            held = [(h.model_id, h.tier) for h in status.holdings] if status else []
            in_memory = [each for each in held if each[1] is not Tier.DISK]
            return in_memory == [(other.model_id, Tier.CACHE)]

        await up.statuses.until(moved)


async def test_room_that_is_needed_is_given_back_even_if_nothing_can_be_kept(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a", settings={"host_bytes": 1}) as up:
        await up.promoted("a")
        await up.release("a", Tier.CACHE)
        await up.until_holds("a", DISK)
        await up.nothing_leaked("a")


async def test_a_copy_on_its_way_up_is_not_dropped(
    up: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await keep(up, "b", "a")
    await up.until_holds("b", CACHED)
    gate = Gate()
    landed = up.services["b"]._data.mark_held

    async def gated(*args: object) -> None:
        await asyncio.to_thread(gate)
        await landed(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(up.services["b"]._data, "mark_held", gated)
        await up.apply("b", promote=ALL, event="wake")
        await gate.wait()
        with pytest.raises(Conflict, match="on its way"):
            await drop(up, "b")
        gate.open()
        await up.until_arrived("b", ALL, "wake")
    await up.until_holds("b", CACHED | {Tier.GPU: ALL})
    async with asyncio.timeout(WAIT_S):
        while True:  # its reader ends a moment after the last block has come
            with suppress(Conflict):
                await drop(up, "b")
                break
            await asyncio.sleep(0.01)
    await up.until_holds("b", {Tier.GPU: ALL})


async def test_a_model_that_is_removed_leaves_the_host_cache(up: Nodes) -> None:
    await keep(up, "a", "a")
    await up.until_holds("a", DISK | CACHED)
    await up.request(subjects.REGISTRY_MODEL_REMOVE, ModelRemove(name=NAME))
    await up.until_holds("a", {})
    assert free(up, "a") == (ARENA, ARENA)


async def test_a_model_that_is_removed_while_its_copy_becomes_whole_leaves_the_host_cache(
    up: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def slow(self: HostCache, model: ModelId) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(HostCache, "lend", slow)
    await keep(up, "a", "a")
    await begun.wait()
    await up.request(subjects.REGISTRY_MODEL_REMOVE, ModelRemove(name=NAME))
    await up.until_holds("a", {})
    assert free(up, "a") == (ARENA, ARENA)


async def test_a_copy_that_was_ordered_takes_the_place_of_one_that_sleeps(
    up: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is given back while its copy is on its way."""
    gate, write = Gate(), CacheDraft.write

    def gated(self: CacheDraft, block: int, chunks: range, data: memoryview) -> None:
        gate()
        write(self, block, chunks, data)

    monkeypatch.setattr(CacheDraft, "write", gated)
    await up.promoted("a")
    tokens = await up.generate("a")
    await keep(up, "a", "a")
    await gate.wait()
    await up.release("a", Tier.HOST)
    await up.until_holds("a", DISK | {Tier.HOST: ALL})
    gate.open()
    await up.until_holds("a", DISK | CACHED)
    assert free(up, "a")[0] == ARENA
    await up.apply("a", promote=ALL, event="wake")
    await up.until_arrived("a", ALL, "wake")
    assert await up.generate("a", request="again") == tokens


class Packings:
    """Counts the matrices that are packed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._changed = threading.Condition()
        run = Kernels.run

        def counted(kernels: Kernels, argument: Structure, threads: int) -> None:
            run(kernels, argument, threads)
            if isinstance(argument, Packing):
                with self._changed:
                    self.count += 1
                    self._changed.notify_all()

        monkeypatch.setattr(Kernels, "run", counted)

    async def until(self, count: int) -> None:
        def wait() -> None:
            with self._changed:
                assert self._changed.wait_for(lambda: self.count >= count, WAIT_S)

        await asyncio.to_thread(wait)


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> Packings:
    return Packings(monkeypatch)


async def test_a_copy_that_was_ordered_is_packed_before_it_wakes(
    up: Nodes, packings: Packings
) -> None:
    await up.promoted("a")
    tokens = await up.generate("a")
    once = packings.count
    assert once > 0
    await keep(up, "b", "a")
    await packings.until(2 * once)
    await up.apply("b", promote=ALL, event="wake")
    await up.until_arrived("b", ALL, "wake")
    assert await up.generate("b", request="again") == tokens
    assert packings.count == 2 * once


async def test_a_copy_is_not_packed_while_requests_run(
    up: Nodes, packings: Packings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, idle = asyncio.Semaphore(0), asyncio.Event()

    def load(self: Worker) -> WorkerLoad:
        asked.release()
        return WorkerLoad(running=0 if idle.is_set() else 1)

    monkeypatch.setattr(hosting, "PREPARE_S", 0.001)
    monkeypatch.setattr(Worker, "load", load)
    await keep(up, "b", "a")
    await up.until_holds("b", CACHED)
    for _ in range(20):
        await asked.acquire()
    assert packings.count == 0
    idle.set()
    await packings.until(1)


async def test_a_copy_is_not_packed_while_another_model_loads(
    up: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, packs, prepare, load = asyncio.Semaphore(0), Gate(), TorchEngine.prepare, Worker.load

    def counted(self: Worker) -> WorkerLoad:
        looked.release()
        return load(self)

    def noted(
        self: TorchEngine, model_id: ModelId, manifest: Manifest, block: int, weights: Weights
    ) -> bool:
        packs()
        return prepare(self, model_id, manifest, block, weights)

    packs.open()
    monkeypatch.setattr(hosting, "PREPARE_S", 0.001)
    monkeypatch.setattr(TorchEngine, "prepare", noted)
    other = await up.import_model("b", called="other", blocks=BLOCKS - 1)
    plan = msgspec.structs.replace(up.plan("b", event="other"), model_id=other.model_id)
    await up.request(subjects.node_plan(NodeId("b")), plan)
    monkeypatch.setattr(Worker, "load", counted)
    await keep(up, "b", "a")
    for _ in range(50):
        await looked.acquire()
    assert not packs.reached.is_set()
    plan = msgspec.structs.replace(plan, promote=tuple(range(BLOCKS - 1)), revision=1)
    await up.request(subjects.node_plan(NodeId("b")), plan)
    await packs.wait()


async def test_a_copy_that_is_dropped_while_it_is_packed_gives_its_room_back(
    up: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, prepare = Gate(), TorchEngine.prepare

    def gated(
        self: TorchEngine, model_id: ModelId, manifest: Manifest, block: int, weights: Weights
    ) -> bool:
        gate()
        return prepare(self, model_id, manifest, block, weights)

    monkeypatch.setattr(TorchEngine, "prepare", gated)
    await keep(up, "b", "a")
    await gate.wait()
    await up.until_holds("b", CACHED)
    dropping = asyncio.create_task(drop(up, "b"))
    gate.open()
    await dropping
    await up.until_holds("b", {})
    assert free(up, "b") == (ARENA, ARENA)


async def test_a_node_without_a_host_cache_refuses_copies_there(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        with pytest.raises(CapacityExceeded, match=r"node\.host_bytes"):
            await keep(up, "a", "a")


async def test_a_wake_while_the_copy_moves_loses_nothing(
    up: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model serves again, and its copy in the host cache becomes whole beside it."""
    await up.promoted("a")
    tokens = await up.generate("a")
    gate, write = Gate(), CacheDraft.write

    def gated(self: CacheDraft, block: int, chunks: range, data: memoryview) -> None:
        gate()
        write(self, block, chunks, data)

    monkeypatch.setattr(CacheDraft, "write", gated)
    await up.release("a", Tier.HOST)
    await gate.wait()
    await up.apply("a", promote=ALL, event="wake")
    await up.until_arrived("a", ALL, "wake")
    assert await up.generate("a", request="again") == tokens
    gate.open()
    await up.until_holds("a", DISK | CACHED | {Tier.GPU: ALL})
    up.services["a"].validate()
