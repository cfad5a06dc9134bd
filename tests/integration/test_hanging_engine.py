"""An engine whose thread never returns: its requests go on elsewhere, and its node comes back."""

import asyncio
import sys
from pathlib import Path

from services.local import processes
from services.local.nats_servers import Place
from shared.errors import EngineFailed
from shared.ids import NodeId
from tests.integration.hanging import FILE
from tests.support.cluster import LIMIT_S, Answer, Oracle, prompts, running
from tests.support.models import TINY

TOKENS = 60
NODES = (NodeId("node-0"), NodeId("node-1"))
SETTINGS = {
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.05",
    "LAMBDASCALE_NODE_ENGINE_TIMEOUT_S": "1",
}


async def test_requests_of_an_engine_that_hangs_go_on_elsewhere_and_its_node_comes_back(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    file = tmp_path / "hang"
    hangs = (sys.executable, "-m", "tests.integration.hanging")
    place = Place(within=hangs, settings={FILE: str(file)})
    asked = prompts(8, TINY.vocab_size)
    async with running(
        tmp_path / "cluster",
        checkpoint,
        nodes=2,
        min_instances=2,
        settings=SETTINGS,
        places={NODES[1]: place},
    ) as up:
        await up.replicas(2)
        before = {node: up.statuses[node].generation for node in NODES}
        answers = [Answer() for _ in asked]
        streams = asyncio.gather(
            *(
                up.ask(prompt, TOKENS, into=into)
                for prompt, into in zip(asked, answers, strict=True)
            )
        )
        await up.until(lambda: all(len(a.tokens) > 2 for a in answers), "some tokens of each")
        file.touch()
        await up.until(lambda: "its engine has been at" in up.statuses[NODES[1]].unfit, "unfit")
        await streams
        assert {answer.error for answer in answers} == {""}
        assert [answer.tokens for answer in answers] == oracle.tokens(asked, TOKENS)
        async with asyncio.timeout(LIMIT_S):
            assert await up.cluster.ended(NODES[1]) != 0
        assert EngineFailed.__name__ in (tmp_path / "cluster/logs/node-1.log").read_text()
        up.cluster.start_node(NODES[1])
        await up.until(
            lambda: up.statuses[NODES[1]].generation != before[NODES[1]], "the next process"
        )
        await up.replicas(2)
        assert up.statuses[NODES[0]].generation == before[NODES[0]], "its neighbour went on"
        path = await up.path(NODES[1])
        assert await up.over_path(path, asked[0], TOKENS) == oracle.tokens(asked[:1], TOKENS)[0]
    assert processes.strays(tmp_path / "cluster") == []
