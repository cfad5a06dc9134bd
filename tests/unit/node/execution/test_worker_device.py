"""The engine thread with a device whose memory blocks must be brought to first."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.node.engine.base import Weights
from services.node.execution.worker import Worker
from services.node.memory.arena import Arena
from services.node.memory.device import DeviceArena
from shared import telemetry
from shared.config import TelemetryConfig
from shared.errors import Conflict
from shared.ids import GatewayId, ModelId, NodeId
from shared.messages.serving import Tokens
from tests.support.hash_engine import HashEngine, continuation
from tests.support.links import SlowLink
from tests.support.submits import BLOCKS, MODEL, WHOLE, submit
from tests.support.worker_cluster import HASH_MODEL

OTHER = ModelId("other")
NBYTES = 5000


class Engine(HashEngine):
    """Notes what it is given, and warms models up in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[tuple[ModelId, int], bytes] = {}
        self.pieces = 0
        self.warmed: list[int] = []
        """How many blocks had been run before each piece of a warm-up."""
        self.may_warm = threading.Event()
        self.may_warm.set()
        self.fails = False

    def attach(self, model_id: ModelId, block: int, weights: Weights) -> None:
        assert isinstance(weights, torch.Tensor)
        self.given[model_id, block] = weights.numpy().tobytes()
        super().attach(model_id, block, weights)

    def warm_up(self, model_id: ModelId) -> Iterator[None]:
        for _ in range(self.pieces):
            assert self.may_warm.wait(20)
            self.warmed.append(sum(len(sweep.ran) for sweep in self.sweeps))
            if self.fails:
                raise RuntimeError("no such kernel")
            yield


class Node:
    def __init__(self) -> None:
        self.arena = Arena(1 << 20)
        self.link = SlowLink()
        self.engine = Engine()
        self.tokens: list[int] = []
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.device = DeviceArena(self.arena.memory, torch.device("cpu"), self.link)
        self.worker = Worker(
            node=NodeId("a"),
            make_engine=lambda: self.engine,
            device=self.device,
            slots=4,
            step_tokens=4,
            send=lambda *_: None,
            emit=self._emit,
            ran=lambda *_: None,
        )
        span = self.arena.allocate(2 * BLOCKS * NBYTES)
        span.memory[:] = b"".join(bytes([i]) * NBYTES for i in range(2 * BLOCKS))
        self.blocks = [span.memory[i * NBYTES : (i + 1) * NBYTES] for i in range(2 * BLOCKS)]

    def _emit(self, gateway: GatewayId, tokens: Tokens) -> None:
        self._loop.call_soon_threadsafe(self._on_tokens, tokens)

    def _on_tokens(self, tokens: Tokens) -> None:
        self.tokens += [token.token for token in tokens.tokens]
        if tokens.tokens[-1].finish:
            self._over.set()

    async def generate(self) -> list[int]:
        self.tokens.clear()
        self._over.clear()
        await self.worker.submit(submit("r", WHOLE))
        await asyncio.wait_for(self._over.wait(), 20)
        return self.tokens

    async def load(self) -> None:
        await self.worker.open_model(MODEL, HASH_MODEL)
        for block in range(BLOCKS):
            await self.worker.attach(MODEL, {block: self.blocks[block]})

    async def begin_upload(self) -> "asyncio.Task[dict[int, BaseException]]":
        """Begins to upload block 0 of the other model. The upload gets stuck on the way."""
        await self.worker.open_model(OTHER, HASH_MODEL)
        self.link.copies.shut()
        upload = asyncio.create_task(self.worker.attach(OTHER, {0: self.blocks[BLOCKS]}))
        assert await asyncio.to_thread(self.link.copies.waited.wait, 10)
        return upload


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    with node.device:
        node.worker.start()
        await node.worker.ready()
        yield node
        node.link.copies.open()
        await node.worker.stop()


async def test_the_engine_gets_blocks_that_are_on_the_device(node: Node) -> None:
    await node.load()
    assert node.engine.given == {(MODEL, i): bytes([i]) * NBYTES for i in range(BLOCKS)}
    assert node.worker.staging == "pinned host arena"
    assert await node.generate() == continuation((3, 1, 4, 1, 5), 8, BLOCKS)


async def test_a_model_that_wakes_where_it_slept_is_not_copied_again(node: Node) -> None:
    await node.load()
    await node.worker.close_model(MODEL, asleep=True)
    node.engine.given.clear()
    await node.load()
    assert node.link.copies.done == [NBYTES] * BLOCKS
    assert node.engine.given == {(MODEL, i): bytes([i]) * NBYTES for i in range(BLOCKS)}
    assert await node.generate() == continuation((3, 1, 4, 1, 5), 8, BLOCKS)


async def test_others_run_while_a_block_is_on_its_way(node: Node) -> None:
    await node.load()
    upload = await node.begin_upload()
    assert await node.generate() == continuation((3, 1, 4, 1, 5), 8, BLOCKS)
    assert node.engine.held(OTHER) == frozenset()
    node.link.copies.open()
    await upload
    assert node.engine.given[OTHER, 0] == bytes([BLOCKS]) * NBYTES


async def test_a_model_is_closed_when_nothing_is_copied_any_more(node: Node) -> None:
    await node.load()
    upload = await node.begin_upload()
    upload.cancel()
    closing = asyncio.create_task(node.worker.close_model(OTHER))
    await node.generate()  # long enough for the engine thread to close it, were it asked to
    assert not closing.done()
    node.link.copies.open()
    await closing
    assert not node.link.copies.pending
    assert (OTHER, 0) not in node.engine.given


async def test_a_worker_may_end_while_a_block_is_on_its_way(node: Node) -> None:
    upload = await node.begin_upload()
    await node.worker.stop()
    assert not upload.done()
    node.link.copies.open()
    with pytest.raises(Conflict):
        await upload
    with pytest.raises(Conflict):
        await node.worker.attach(MODEL, {0: node.blocks[0]})


async def test_a_block_goes_to_the_device_once(node: Node) -> None:
    await node.load()
    await node.worker.close_model(MODEL)
    await node.worker.open_model(MODEL, HASH_MODEL)
    node.blocks[1][:] = bytes([99]) * NBYTES
    node.device.overwrites(node.blocks[1][:1])
    for block in range(BLOCKS):
        await node.worker.attach(MODEL, {block: node.blocks[block]})
    assert node.link.copies.done == [NBYTES] * (BLOCKS + 1)
    assert node.engine.given[MODEL, 0] == bytes(NBYTES)
    assert node.engine.given[MODEL, 1] == bytes([99]) * NBYTES


async def test_blocks_go_up_one_right_after_the_other(node: Node) -> None:
    """Not only once the engine, which may be in a step, has taken in the one before."""
    await node.worker.open_model(MODEL, HASH_MODEL)
    node.link.copies.shut()
    blocks = {block: node.blocks[block] for block in range(BLOCKS)}
    attached = asyncio.create_task(node.worker.attach(MODEL, blocks))
    await until(lambda: node.link.copies.most_pending == BLOCKS)
    node.link.copies.open()
    assert not await attached
    assert node.engine.given == {(MODEL, i): bytes([i]) * NBYTES for i in range(BLOCKS)}


async def test_a_block_that_was_lifted_goes_up_once(node: Node) -> None:
    await node.worker.open_model(MODEL, HASH_MODEL)
    node.link.copies.shut()
    for _ in range(2):
        node.worker.lift(MODEL, 0, node.blocks[0])
    await until(lambda: node.link.copies.most_pending == 1)
    node.link.copies.open()
    assert not await node.worker.attach(MODEL, {0: node.blocks[0]})
    assert node.engine.given == {(MODEL, 0): bytes(NBYTES)}
    assert node.link.copies.done == [NBYTES]


async def test_a_model_closes_once_what_was_lifted_is_there(node: Node) -> None:
    """Nothing is lifted for a model that is not open."""
    await node.worker.open_model(MODEL, HASH_MODEL)
    node.link.copies.shut()
    node.worker.lift(MODEL, 0, node.blocks[0])
    await until(lambda: node.link.copies.most_pending == 1)
    closing = asyncio.create_task(node.worker.close_model(MODEL))
    await asyncio.sleep(0)
    node.worker.lift(MODEL, 1, node.blocks[1])
    assert not closing.done()
    node.link.copies.open()
    await closing
    assert node.link.copies.done == [NBYTES]
    assert not node.engine.given


async def test_a_worker_that_ends_lifts_nothing_any_more(node: Node) -> None:
    await node.worker.open_model(MODEL, HASH_MODEL)
    node.link.copies.shut()
    before = asyncio.all_tasks()
    node.worker.lift(MODEL, 0, node.blocks[0])
    await until(lambda: node.link.copies.most_pending == 1)
    (lifting,) = asyncio.all_tasks() - before
    await node.worker.stop()
    await asyncio.wait([lifting], timeout=20)
    assert lifting.cancelled()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # the link's thread tells nobody  # noqa: ASYNC110
            await asyncio.sleep(0.001)


# --- warm-up ----------------------------------------------------------------


async def test_what_runs_has_its_steps_between_pieces_of_a_warm_up(node: Node) -> None:
    await node.load()
    node.engine.pieces = 5
    node.engine.may_warm.clear()
    await node.worker.open_model(OTHER, HASH_MODEL)
    running = asyncio.create_task(node.generate())
    await asyncio.sleep(0)  # submitted
    node.engine.may_warm.set()
    assert await running == continuation((3, 1, 4, 1, 5), 8, BLOCKS)
    # The second piece may have come before the submit was taken in.
    assert node.engine.warmed in ([0, 0, 1, 2, 3], [0, 1, 2, 3, 4])


async def test_a_warm_up_that_fails_is_no_more_than_that(node: Node) -> None:
    node.engine.pieces, node.engine.fails = 3, True
    await node.load()
    assert await node.generate() == continuation((3, 1, 4, 1, 5), 8, BLOCKS)
    assert len(node.engine.warmed) == 1


# --- traces -----------------------------------------------------------------


@pytest.fixture
def spans(tmp_path: Path) -> Iterator[Path]:
    telemetry.configure("node-a", TelemetryConfig(trace_dir=str(tmp_path)))
    yield tmp_path / "node-a.jsonl"
    telemetry.shutdown()


def read_spans(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_phases_are_in_the_trace_of_the_plan(node: Node, spans: Path) -> None:
    node.engine.pieces = 2
    with telemetry.span("apply_plan"):
        await node.worker.open_model(MODEL, HASH_MODEL)
        await node.worker.attach(MODEL, {0: node.blocks[0]})
    await node.worker.attach(MODEL, {1: node.blocks[1]})  # a block that landed, later
    await node.worker.stop()
    telemetry.shutdown()
    read = read_spans(spans)
    (plan,) = [span for span in read if span["name"] == "apply_plan"]
    children = [span for span in read if span is not plan]
    assert {span["parent_id"] for span in children} == {plan["span_id"]}
    names = sorted(span["name"] for span in children)
    assert names == ["open_model", "upload", "upload", "warm_up", "warm_up"]
    uploads = [span["attributes"] for span in children if span["name"] == "upload"]
    assert uploads == [{"block": 0, "nbytes": NBYTES}, {"block": 1, "nbytes": NBYTES}]
