"""A node's process is killed, and the next one goes on with the weights that its keeper held."""

import asyncio
from pathlib import Path

from services.local import processes
from shared import subjects
from shared.bus.base import On
from shared.messages.scaling import BlockArrived
from tests.support.cluster import Answer, Oracle, prompts, running
from tests.support.models import TINY

SETTINGS = {
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.05",
    "LAMBDASCALE_NODE_HOST_BYTES": str(4 << 20),
}
TOKENS = 60


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
