"""Nodes that run each model with several processes, in a real cluster: a replica, a path, and a
rank that is killed."""

import asyncio
import os
import signal
from pathlib import Path

from tests.support.cluster import Oracle, Running, prompts, running
from tests.support.models import TINY

SETTINGS = {
    "LAMBDASCALE_NODE_TENSOR_PARALLEL": "2",
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.05",
    "LAMBDASCALE_NODE_KEEP_WEIGHTS_S": "0",
}


def ranks_of(pid: int) -> list[int]:
    """The children of a process that are ranks."""
    found: list[int] = []
    if not Path(f"/proc/{pid}/task").exists():
        return found
    for tasks in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (tasks / "children").read_text().split()):
            if b"services.node.engine.rank" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


async def test_replicas_paths_and_a_rank_that_is_killed(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    async with running(tmp_path, checkpoint, nodes=2, settings=SETTINGS, min_instances=2) as up:
        nodes = {name: ranks_of(up.pid(name)) for name in ("node-0", "node-1")}
        assert [len(ranks) for ranks in nodes.values()] == [1, 1]
        asked = prompts(4, TINY.vocab_size)
        answers = await up.ask_all(asked, 20)
        assert {answer.error for answer in answers} == {""}
        assert [answer.tokens for answer in answers] == oracle.tokens(asked, 20)

        stages = await up.path("node-0", "node-1")
        assert [await up.over_path(stages, asked[0], 12)] == oracle.tokens(asked[:1], 12)

        await killed_while_serving(up, asked, oracle, nodes["node-1"])


async def killed_while_serving(
    up: Running, asked: list[list[int]], oracle: Oracle, ranks: list[int]
) -> None:
    """The node of the rank ends, and its requests go on at the other, exactly."""
    streams = asyncio.gather(*(up.ask(prompt, 60) for prompt in asked))
    await up.until(lambda: up.watch.load is not None and up.watch.load.running_requests == 4,
                   "four streams")  # fmt: skip
    node = up.pid("node-1")
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)
    answers = await streams
    assert {answer.error for answer in answers} == {""}
    assert [answer.tokens for answer in answers] == oracle.tokens(asked, 60)
    await up.replicas(1)
    assert ranks_of(node) == []
