"""A node whose weights have changed in memory: its answers are found to be wrong, and it is taken
out; its next process has the right weights."""

import asyncio
import os
from pathlib import Path

import aiohttp
import numpy as np

from shared.ids import NodeId
from tests.support.cluster import LIMIT_S, Oracle, Running, prompts, running
from tests.support.models import TINY

NODES, ILL, TOKENS = 3, NodeId("node-1"), 8
SETTINGS = {
    "LAMBDASCALE_GATEWAY_CHECK_S": "0.5",
    "LAMBDASCALE_NODE_CPU_WEIGHTS": "stored",  # it computes with what lies in the arena
    "LAMBDASCALE_NODE_SPECULATION": "0",
}


def scramble(pid: int) -> None:
    """Puts the weights in the process's arena into another order."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        if "lambdascale-arena" in os.readlink(path):
            with open(path, "r+b", buffering=0) as file:
                words = np.fromfile(file, np.uint32)
                used = np.flatnonzero(words)
                words[used] = np.random.default_rng(0).permutation(words[used])
                file.seek(0)
                file.write(words.tobytes())
            return
    raise AssertionError("no arena found")


async def checks(up: Running, verdict: str) -> int:
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{up.url}/metrics") as response,
    ):
        text = await response.text()
    name = "lambdascale_gateway_checks_total"
    found = [line for line in text.splitlines() if line.startswith(name)]
    return sum(int(float(line.split()[-1])) for line in found if f'"{verdict}"' in line)


async def test_a_node_with_other_weights_is_taken_out(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    async with running(
        tmp_path, checkpoint, nodes=NODES, min_instances=NODES, settings=SETTINGS
    ) as up:
        await up.replicas(NODES)
        await up.until(lambda: ILL in up.statuses, "the status of the node")
        asked = prompts(8 * NODES, TINY.vocab_size)
        expected = oracle.tokens(asked, TOKENS)
        async with asyncio.timeout(LIMIT_S):
            while await checks(up, "alike") < 2 * NODES:  # all have served, and were checked
                answers = await up.ask_all(asked, TOKENS)
                assert [answer.tokens for answer in answers] == expected
                await asyncio.sleep(1.0)
        scramble(up.pid(ILL))

        def unfit() -> bool:
            return "not those of other replicas" in up.statuses[ILL].unfit

        await up.until(unfit, "a node that is unfit")
        assert await checks(up, "wrong") == 1
        ill = up.statuses[ILL].generation
        up.cluster.start_node(ILL)  # it waits until the process before is gone
        await up.until(lambda: up.statuses[ILL].generation != ill, "the next process")
        await up.replicas(NODES)
        path = await up.path(ILL)
        assert await up.over_path(path, asked[0], TOKENS) == expected[0]
