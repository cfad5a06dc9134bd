"""A node with KV for one request and a half, and many of them: all end, none is lost. Then two
models share it."""

import asyncio
import dataclasses
from pathlib import Path

from services.local.cluster import node_id
from services.local.demo_model import make_checkpoint
from services.local.publishing import import_model
from shared.ids import ModelName
from shared.messages.scaling import ImportModel
from tests.support.cluster import LIMIT_S, Oracle, Running, prompts, running
from tests.support.models import TINY

TOKENS, FEWER = 300, 250
OTHER = ModelName("other")
STARVED = {
    "LAMBDASCALE_NODE_ARENA_BYTES": "1400000",  # two models of 0.6 MB
    "LAMBDASCALE_NODE_KV_BYTES": str(800 << 10),
}


async def test_long_requests_that_share_a_prefix_with_speculation(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    async with running(tmp_path, checkpoint, nodes=1, settings=STARVED) as up:
        (shared,) = prompts(1, TINY.vocab_size, length=96)
        asked = [shared + own for own in prompts(16, TINY.vocab_size)]
        expected = oracle.tokens(asked, TOKENS)

        def at_rest() -> bool:
            found = [(s.running, s.waiting, s.kv_used) for s in up.statuses.values()]
            return found == [(0, 0, 0)]

        def preempted() -> bool:
            return any(status.preemptions > 0 for status in up.statuses.values())

        async with asyncio.timeout(LIMIT_S):  # a busy machine may let them come one by one
            while not preempted():
                answers = await up.ask_all(asked, TOKENS)
                assert {answer.error for answer in answers} == {""}
                assert [answer.tokens for answer in answers] == expected
                await up.until(at_rest, "a node at rest")
        (status,) = up.statuses.values()
        wanted = len(shared) + 12 + TOKENS
        assert wanted < status.kv_capacity < 2 * wanted
        assert status.cached_tokens > 0
        assert status.tokens_proposed > status.tokens_accepted > 0

        other = await publish_other(up, tmp_path / "other")
        few = [shared + own for own in prompts(6, TINY.vocab_size)]
        ours, theirs = await asyncio.gather(
            up.ask_all(few, FEWER), up.ask_all(few, FEWER, model=OTHER)
        )
        assert {answer.error for answer in (*ours, *theirs)} == {""}
        assert [answer.tokens for answer in ours] == oracle.tokens(few, FEWER)
        assert [answer.tokens for answer in theirs] == other.tokens(few, FEWER)
        (status,) = up.statuses.values()
        shares = status.kv_shares.values()
        assert len(shares) == 2
        assert min(shares) > len(few[0]) + FEWER
        assert sum(shares) <= status.kv_capacity


async def publish_other(up: Running, path: Path) -> Oracle:
    make_checkpoint(path, dataclasses.replace(TINY, seed=1))
    request = ImportModel(path=str(path), name=OTHER, min_instances=1)
    await import_model(up.bus, request, node=node_id(0), say=lambda _: None)
    return Oracle(path)
