"""A node's process is killed, and the next one goes on with the weights that its keeper held: one
that is started then, or one that stands by."""

import asyncio
from pathlib import Path

from services.local import processes
from shared import subjects
from shared.bus.base import On
from shared.ids import NodeId
from shared.messages.scaling import BlockArrived
from tests.support.cluster import Answer, Oracle, prompts, running
from tests.support.models import TINY

SETTINGS = {
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.05",
    "LAMBDASCALE_NODE_HOST_BYTES": str(4 << 20),
}
TOKENS = 60
NODE = NodeId("node-0")
WAITS = "stands by"


async def test_a_killed_node_serves_on_with_its_weights_and_moves_no_byte(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    arrived: list[BlockArrived] = []

    async def hear(message: BlockArrived) -> None:
        arrived.append(message)

    (prompt,) = prompts(1, TINY.vocab_size)
    async with running(tmp_path, checkpoint, nodes=1, settings=SETTINGS) as up:
        await up.bus.subscribe(subjects.ARRIVALS, On(BlockArrived, hear))
        answer = Answer()
        stream = asyncio.create_task(up.ask(prompt, TOKENS, into=answer))
        await up.until(lambda: len(answer.tokens) > TOKENS // 6, "some tokens")
        up.kill("node-0")
        up.cluster.start_node("node-0")
        await stream
        assert (answer.error, answer.tokens) == ("", oracle.tokens([prompt], TOKENS)[0])
        assert arrived == []
    assert processes.strays(tmp_path) == []


async def test_a_process_that_stands_by_serves_on_with_the_weights(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    """Nobody starts anything. What was killed is started again later, and stands by in its turn."""
    arrived: list[BlockArrived] = []

    async def hear(message: BlockArrived) -> None:
        arrived.append(message)

    def last_waited(name: str) -> int:
        """Where in its log the process last said that it stands by; -1: it never did."""
        return (tmp_path / "logs" / f"{name}.log").read_text().rfind(WAITS)

    asked = prompts(2, TINY.vocab_size)
    names = ["node-0", "node-0-standby"]
    async with running(tmp_path, checkpoint, nodes=1, settings=SETTINGS, node_standbys=True) as up:
        await up.bus.subscribe(subjects.ARRIVALS, On(BlockArrived, hear))
        await up.until(lambda: max(map(last_waited, names)) >= 0, "a process stands by")
        for prompt, right in zip(asked, oracle.tokens(asked, TOKENS), strict=True):
            waiting = max(names, key=last_waited)
            (working,) = {*names} - {waiting}
            before, answer = up.statuses[NODE].generation, Answer()
            stream = asyncio.create_task(up.ask(prompt, TOKENS, into=answer))
            await up.until(lambda: len(answer.tokens) > TOKENS // 6, "some tokens")  # noqa: B023
            up.kill(working)
            await stream
            assert (answer.error, answer.tokens) == ("", right)
            assert up.statuses[NODE].generation > before
            since = last_waited(working)
            up.cluster.start_node(working)
            await up.until(lambda: last_waited(working) > since, "it stands by")  # noqa: B023
        assert arrived == []
    assert processes.strays(tmp_path) == []
