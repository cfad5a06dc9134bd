"""Sleep and wake, and services that are killed and come back, with real processes."""

import asyncio
from functools import partial
from pathlib import Path

from shared import subjects
from shared.errors import BusError
from shared.ids import Generation, NodeId
from shared.messages.pool import Holding, Tier
from shared.messages.scaling import PlannerQuery, PlannerState
from shared.pool_pages import read_pool
from tests.support.cluster import LIMIT_S, Oracle, Running, prompts, running
from tests.support.models import TINY

PACED = {
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.05",
    "LAMBDASCALE_NODE_SLOTS": "4",
    "LAMBDASCALE_PLANNER_IDLE_S": "0.5",
}


async def test_asleep_until_a_request_comes_and_asleep_again(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    """From the disk the first time, from the copy that host memory keeps the second time."""
    async with running(tmp_path, checkpoint, nodes=2, settings=PACED, min_instances=0) as up:
        asked = prompts(2, TINY.vocab_size)
        for tier, prompt in zip((Tier.DISK, Tier.HOST), asked, strict=True):
            assert tier in await tiers(up)
            answer = await up.ask(prompt, 12)
            assert answer.error == ""
            assert [answer.tokens] == oracle.tokens([prompt], 12)
            await up.replicas(0)
            await up.until(lambda: not any(up.watch.held.values()), "no block on a device")
        assert Tier.GPU not in await tiers(up)


async def tiers(up: Running) -> set[Tier]:
    """Where whole copies of the model are."""
    pool = await read_pool(partial(up.bus.request, timeout=60.0))
    holdings: list[Holding] = [holding for view in pool.nodes for holding in view.holdings]
    return {h.tier for h in holdings if len(h.blocks) == up.record.n_blocks}


async def test_planner_registry_and_a_node_killed_and_back(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    """Streams go on without planner and registry; after they are back the cluster scales again."""
    async with running(tmp_path, checkpoint, nodes=3, settings=PACED) as up:
        first, rest = prompts(16, TINY.vocab_size)[:3], prompts(16, TINY.vocab_size)[3:]
        streams = asyncio.gather(*(up.ask(prompt, 60) for prompt in first))
        await up.until(lambda: up.watch.load is not None and up.watch.load.running_requests == 3,
                       "three streams")  # fmt: skip
        killed = (await generations(up))[NodeId("node-2")]
        up.kill("planner")
        up.kill("registry")
        answers = await streams
        assert {answer.error for answer in answers} == {""}
        assert [answer.tokens for answer in answers] == oracle.tokens(first, 60)

        up.kill("node-2")
        for role in ("registry", "planner"):
            up.cluster.start_service(role)
        up.cluster.start_node("node-2")
        await answered(up, after=killed)
        async with asyncio.timeout(LIMIT_S):  # a fast machine answers before the weights are there
            while max(sample.replicas for sample in up.watch.samples) < 3:
                answers = await up.ask_all(rest, 40)
                assert {answer.error for answer in answers} == {""}
                assert [answer.tokens for answer in answers] == oracle.tokens(rest, 40)
        await up.replicas(1)


async def generations(up: Running) -> dict[NodeId, Generation]:
    pool = await read_pool(partial(up.bus.request, timeout=1.0))
    return {view.info.node: view.info.generation for view in pool.nodes}


async def answered(up: Running, *, after: Generation) -> None:
    """Waits until the planner and the registry answer, and node-2 is a process `after` that one."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                now = await generations(up)
                query = PlannerQuery(events=1)
                await up.bus.request(subjects.PLANNER_STATE, query, PlannerState, timeout=1.0)
                if now.get(NodeId("node-2"), 0) > after and len(now) == 3:
                    return
            except BusError:
                pass
            await up.watch.change()
