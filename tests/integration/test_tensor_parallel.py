"""Nodes that run each model with two processes, in a real cluster: replicas, paths while blocks
arrive, and what is left when a rank or a node is killed."""

import asyncio
import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from services.local.demo_model import make_checkpoint
from services.local.publishing import import_model
from shared import subjects
from shared.ids import ModelId, ModelName, NodeId
from shared.messages.scaling import ImportModel
from shared.messages.story import StoryQuery, Told
from tests.support.cluster import LIMIT_S, Answer, Oracle, Running, prompts, running
from tests.support.models import TINY

TOKENS = 100
"""5 s with these steps."""
SETTINGS = {
    "LAMBDASCALE_NODE_TENSOR_PARALLEL": "2",
    "LAMBDASCALE_NODE_LINK_BYTES_PER_S": "200000",  # a copy of 0.6 MB takes 3 s
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.05",
    "LAMBDASCALE_NODE_SLOTS": "4",
    "LAMBDASCALE_NODE_SPECULATION": "0",  # or answers of random weights end before the blocks come
}


def ranks_of(pid: int) -> list[int]:
    """The ranks of a process: the children of the one that it has forked them from."""
    return [rank for child in children(pid) for rank in children(child) if is_rank(rank)]


def children(pid: int) -> list[int]:
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            found += map(int, (tasks / "children").read_text().split())
    return found


def is_rank(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("rank-")
    except OSError:
        return False


def wait_for_the_end(ranks: list[int]) -> None:
    until = time.monotonic() + LIMIT_S
    while any(map(is_rank, ranks)):
        assert time.monotonic() < until, f"ranks {ranks} outlive their node"
        time.sleep(0.01)


async def test_each_model_has_a_degree_of_its_own(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    """Which one the first model has depends on the machine. The second has one KV head."""
    settings = {"LAMBDASCALE_NODE_TENSOR_PARALLEL": "auto", "LAMBDASCALE_NODE_THREADS": "2"}
    alone = tmp_path / "alone"
    make_checkpoint(alone, replace(TINY, kv_heads=1))
    async with running(tmp_path, checkpoint, nodes=1, settings=settings) as up:
        assert len(ranks_of(up.pid("node-0"))) == 1
        name = ModelName("alone")
        other = await import_model(
            up.bus,
            ImportModel(path=str(alone), name=name, min_instances=1),
            say=lambda _: None,
        )
        node = NodeId("node-0")
        await up.until(lambda: other.model_id in up.statuses[node].kv_shares, "both open")
        of_other = Oracle(alone)
        for prompt in prompts(2, TINY.vocab_size):
            first, second = await asyncio.gather(up.ask(prompt, 20), up.ask(prompt, 20, name))
            assert first.error == second.error == ""
            assert [first.tokens] == oracle.tokens([prompt], 20)
            assert [second.tokens] == of_other.tokens([prompt], 20)
        (measured,) = await divisions(up, up.record.model_id)
        assert re.search(r"^[12] process.* it: .* ms with 1, .* ms with 2$", measured)
        (alone_since,) = await divisions(up, other.model_id)
        assert alone_since.startswith("1 process runs it: it has 1 KV head")

        # Without the rank, the node goes on: the same process, with one process for each model.
        pid, (rank,) = up.pid("node-0"), ranks_of(up.pid("node-0"))
        os.kill(rank, signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            told = await divisions(up, other.model_id, least=2)
        lost = f"its rank 1 (process {rank}) ended with signal 9"
        assert told[-1] == f"1 process runs it: no others are left, since {lost}"
        assert (await divisions(up, up.record.model_id))[-1] == told[-1]
        for prompt in prompts(2, TINY.vocab_size):
            first, second = await asyncio.gather(up.ask(prompt, 20), up.ask(prompt, 20, name))
            assert first.error == second.error == ""
            assert [first.tokens] == oracle.tokens([prompt], 20)
            assert [second.tokens] == of_other.tokens([prompt], 20)
        assert up.pid("node-0") == pid
        assert ranks_of(pid) == []


async def divisions(up: Running, model: ModelId, least: int = 1) -> list[str]:
    """What the node has said about the number of processes that run the model, oldest first, once
    it has said so much."""
    subject, said = subjects.node_story(NodeId("node-0")), list[str]()
    while len(said) < least:
        told = await up.bus.request(subject, StoryQuery(subject=model), Told, timeout=60.0)
        said = [each.text for each in told.steps if " it: " in each.text]
        await asyncio.sleep(0.05)
    return said


async def test_every_token_is_exact(tmp_path: Path, checkpoint: Path, oracle: Oracle) -> None:
    async with running(tmp_path, checkpoint, nodes=2, settings=SETTINGS) as up:
        asked = prompts(6, TINY.vocab_size)
        ranks = {name: ranks_of(up.pid(name)) for name in ("node-0", "node-1")}
        assert [len(each) for each in ranks.values()] == [1, 1]

        # A second replica loads meanwhile: paths, and requests that move.
        streams = asyncio.create_task(up.ask_all(asked, TOKENS))
        await up.scale(2)
        await up.replicas(2)
        check(oracle, asked, await streams)
        assert up.watch.partial_tokens
        assert up.watch.switched

        stages = await up.path("node-1", "node-0")
        assert [await up.over_path(stages, asked[0], 12)] == oracle.tokens(asked[:1], 12)

        # The node of a killed rank ends, and its requests go on at the other.
        streams = asyncio.create_task(up.ask_all(asked, TOKENS))
        await up.until(lambda: running_requests(up) == len(asked), "all streams")
        os.kill(ranks["node-1"][0], signal.SIGKILL)
        check(oracle, asked, await streams)
        await up.until(lambda: len(up.watch.replicas) == 1, "one replica")
        up.cluster.start_node("node-1")
        await up.replicas(2)
        check(oracle, asked, await up.ask_all(asked, TOKENS))

        others = [*ranks["node-0"], *ranks_of(up.pid("node-1"))]
        up.kill("node-0")
        up.kill("node-1")
        await asyncio.to_thread(wait_for_the_end, others)


def running_requests(up: Running) -> int:
    return up.watch.load.running_requests if up.watch.load else 0


def check(oracle: Oracle, asked: list[list[int]], answers: list[Answer]) -> None:
    assert {answer.error for answer in answers} == {""}
    assert [answer.tokens for answer in answers] == oracle.tokens(asked, TOKENS)
