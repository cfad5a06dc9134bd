"""Engine threads while nodes load: paths with different blocks in the same sweeps of one node."""

import asyncio

import pytest

from shared.errors import PeerLost
from shared.ids import RequestId
from shared.messages.serving import Cancel
from tests.support.hash_engine import continuation
from tests.support.submits import BLOCKS, WHOLE, stages, submit
from tests.support.worker_cluster import cluster

PROMPT = (3, 1, 4, 1, 5)
LOADING = (
    stages(("b", 0, 1), ("a", 1, BLOCKS)),
    stages(("c", 0, 3), ("a", 3, BLOCKS)),
    stages(("b", 0, 2), ("a", 2, 4), ("c", 4, BLOCKS)),
)
"""Paths of nodes that hold some blocks, over one that holds all and serves alone too."""
HOLDS = {"b": (0, 1), "c": (0, 1, 2, 4, 5)}
"""What they hold for these paths: they would run further blocks themselves, and leave the last one
of a path to the node that holds all, whenever that is busy."""


async def test_paths_of_loading_nodes_share_the_sweeps_of_the_source() -> None:
    messages = [
        submit(f"r{i}", (WHOLE, *LOADING)[i % 4], prompt=tuple(range(i, i + 5)), max_tokens=25)
        for i in range(16)
    ]
    async with cluster("a", "b", "c", slots=32, step_tokens=64, holds=HOLDS) as nodes:
        gate = nodes.gate("a", "r0", 1)
        attempts = [await nodes.submit(messages[0])]
        await gate.wait()
        attempts += await asyncio.gather(*(nodes.submit(m) for m in messages if m.stages != WHOLE))
        later = asyncio.gather(*(nodes.submit(m) for m in messages[4:] if m.stages == WHOLE))
        await asyncio.sleep(0)
        gate.open()
        attempts += await later
        for attempt in attempts:
            await attempt.end()
        for message in messages:
            assert nodes.attempt(message.request).ids == continuation(message.tokens, 25, BLOCKS)
        await nodes.all_free()
        swept = nodes.engines["a"].sweeps
        assert all(len(set(sweep.ran)) == len(sweep.ran) for sweep in swept)
        ranges = [{(part.start, part.stop) for part in sweep.parts} for sweep in swept]
        assert max(len(of_sweep) for of_sweep in ranges) >= 3


@pytest.mark.parametrize("block", [1, 4])
async def test_a_cancel_in_the_middle_of_a_sweep(block: int) -> None:
    async with cluster("a", "b", slots=32, step_tokens=64, holds=HOLDS) as nodes:
        gate = nodes.gate("a", "gone", 2, block)
        others = [
            await nodes.submit(submit(f"r{i}", path, max_tokens=60))
            for i, path in enumerate((WHOLE, LOADING[0], WHOLE))
        ]
        gone = await nodes.submit(submit("gone", WHOLE, max_tokens=100))
        await gate.wait()
        nodes.workers["a"].cancel(Cancel(request=RequestId("gone"), attempt=1))
        gate.open()
        for other in others:
            assert (await other.end()).ids == continuation(PROMPT, 60, BLOCKS)
        assert len(gone.ids) == 2
        await nodes.all_free()


async def test_the_engine_is_told_that_calls_wait_until_they_are_taken_in() -> None:
    async with cluster("a") as nodes:
        gate = nodes.gate("a", "r", 2, 3)
        attempt = await nodes.submit(submit("r", WHOLE))
        await gate.wait()
        nodes.workers["a"].cancel(Cancel(request=RequestId("unknown"), attempt=1))
        gate.open()
        await attempt.end()
        called = [block for sweep in nodes.engines["a"].sweeps for block in sweep.called]
        assert called == [3]


async def test_the_load_has_what_is_told() -> None:
    async with cluster("a") as nodes:
        await (await nodes.submit(submit("r", WHOLE, max_tokens=3))).end()
        assert [load.tokens_out for load in nodes.loads] == [1, 2, 3]
        assert [load.running for load in nodes.loads] == [1, 1, 0]


async def test_a_peer_lost_in_the_middle_of_a_sweep() -> None:
    async with cluster("a", "b", "c", slots=32, step_tokens=64, holds=HOLDS) as nodes:
        gate = nodes.gate("a", "through", 2, 4)
        others = [
            await nodes.submit(submit(f"r{i}", path, max_tokens=60))
            for i, path in enumerate((WHOLE, LOADING[1]))
        ]
        through = await nodes.submit(submit("through", LOADING[0], max_tokens=100))
        await gate.wait()
        nodes.cut.add("b")
        nodes.workers["a"].on_peer_lost("mem://b", PeerLost("connection reset"))
        nodes.workers["b"].on_peer_lost("mem://a", PeerLost("connection reset"))
        gate.open()
        assert (await through.end()).code == "peer_lost"
        for other in others:
            assert (await other.end()).ids == continuation(PROMPT, 60, BLOCKS)
        await nodes.all_free()
