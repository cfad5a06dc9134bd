"""Nodes that run each model with two processes, in a real cluster: replicas, paths while blocks
arrive, and what is left when a rank or a node is killed."""

import asyncio
import os
import signal
import time
from pathlib import Path

from shared import subjects
from shared.messages.scaling import ScaleAccepted, SetInstances
from tests.support.cluster import LIMIT_S, MODEL, Answer, Oracle, Running, prompts, running
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
    """The children of a process that are ranks."""
    found = []
    for tasks in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (tasks / "children").read_text().split()):
            if is_rank(child):
                found.append(child)
    return found


def is_rank(pid: int) -> bool:
    try:
        return b"services.node.engine.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def wait_for_the_end(ranks: list[int]) -> None:
    until = time.monotonic() + LIMIT_S
    while any(map(is_rank, ranks)):
        assert time.monotonic() < until, f"ranks {ranks} outlive their node"
        time.sleep(0.01)


async def test_every_token_is_exact(tmp_path: Path, checkpoint: Path, oracle: Oracle) -> None:
    async with running(tmp_path, checkpoint, nodes=2, settings=SETTINGS) as up:
        asked = prompts(6, TINY.vocab_size)
        ranks = {name: ranks_of(up.pid(name)) for name in ("node-0", "node-1")}
        assert [len(each) for each in ranks.values()] == [1, 1]

        # A second replica loads meanwhile: paths, and requests that move.
        streams = asyncio.create_task(up.ask_all(asked, TOKENS))
        message = SetInstances(name=MODEL, instances=2)
        await up.bus.request(subjects.PLANNER_SCALE, message, ScaleAccepted, timeout=60.0)
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
