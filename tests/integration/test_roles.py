"""Prefill and decode on different real nodes: every token right, also when either side dies."""

import asyncio
from pathlib import Path

from shared import subjects
from shared.ids import NodeId
from shared.messages.instances import Role
from shared.messages.pool import Models, ModelSet
from tests.support.cluster import MODEL, Answer, Oracle, Running, prompts, running
from tests.support.models import TINY

REQUESTS, TOKENS, LENGTH = 6, 120, 40
SETTINGS = {
    "LAMBDASCALE_NODE_KV_MOVES": "always",  # to compute so little would be faster
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.02",
    "LAMBDASCALE_NODE_SPECULATION": "0",
    "LAMBDASCALE_PLANNER_IDLE_S": "600",
}


def by_role(up: Running) -> dict[Role, list[NodeId]]:
    found: dict[Role, list[NodeId]] = {}
    for instance in up.watch.instances:
        found.setdefault(instance.role, []).append(instance.leader)
    return found


async def separated(up: Running, count: int) -> None:
    await up.replicas(count)
    wish = ModelSet(name=MODEL, prefill_share=0.5)
    await up.bus.request(subjects.REGISTRY_MODEL_SET, wish, Models, timeout=10.0)
    await up.until(lambda: Role.DECODE in by_role(up), "instances with roles")
    await up.follow()


async def test_requests_are_prefilled_on_one_node_and_decoded_on_another(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    asked = prompts(REQUESTS, TINY.vocab_size, LENGTH)
    expected = oracle.tokens(asked, TOKENS)
    async with running(
        tmp_path / "cluster", checkpoint, nodes=2, min_instances=2, settings=SETTINGS, apart=True
    ) as up:
        await separated(up, 2)
        roles = by_role(up)
        (prefill,), (decode,) = roles[Role.PREFILL], roles[Role.DECODE]
        answers = await up.ask_all(asked, TOKENS)
        assert [(answer.tokens, answer.error) for answer in answers] == [(t, "") for t in expected]
        # All pages of a prompt but its last one came from the node that computed them.
        moved = REQUESTS * (LENGTH // 16 * 16)
        await up.until(lambda: up.statuses[decode].received_tokens >= moved, "KV that moved")
        assert up.statuses[prefill].prompt_tokens >= REQUESTS * LENGTH
        assert up.statuses[prefill].received_tokens == 0
        assert up.statuses[decode].tokens_out > up.statuses[prefill].tokens_out


async def begun(up: Running, answers: list[Answer]) -> None:
    await up.until(lambda: all(answer.tokens for answer in answers), "some tokens")


async def test_either_side_may_die(tmp_path: Path, checkpoint: Path, oracle: Oracle) -> None:
    asked = prompts(2 * REQUESTS, TINY.vocab_size, LENGTH)
    expected = oracle.tokens(asked, TOKENS)
    async with running(
        tmp_path / "cluster", checkpoint, nodes=4, min_instances=4, settings=SETTINGS, apart=True
    ) as up:
        await separated(up, 4)
        for role, part in (
            (Role.DECODE, slice(REQUESTS)),
            (Role.PREFILL, slice(REQUESTS, None)),
        ):
            victim = by_role(up)[role][0]
            answers = [Answer() for _ in asked[part]]
            asking = [
                asyncio.create_task(up.ask(prompt, TOKENS, into=answer))
                for prompt, answer in zip(asked[part], answers, strict=True)
            ]
            await begun(up, answers)
            up.kill(victim)
            await asyncio.gather(*asking)
            got = [(answer.tokens, answer.error) for answer in answers]
            assert got == [(tokens, "") for tokens in expected[part]]
