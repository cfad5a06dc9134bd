"""A node with KV for one request and a half, and many of them: all end, none is lost."""

from pathlib import Path

from tests.support.cluster import Oracle, prompts, running
from tests.support.models import TINY

TOKENS = 300
STARVED = {
    "LAMBDASCALE_NODE_ARENA_BYTES": str(1 << 20),
    "LAMBDASCALE_NODE_KV_BYTES": str(1 << 20),
}


async def test_long_requests_that_share_a_prefix_with_speculation(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    async with running(tmp_path, checkpoint, nodes=1, settings=STARVED) as up:
        (shared,) = prompts(1, TINY.vocab_size, length=96)
        asked = [shared + own for own in prompts(16, TINY.vocab_size)]
        answers = await up.ask_all(asked, TOKENS)
        assert {answer.error for answer in answers} == {""}
        assert [answer.tokens for answer in answers] == oracle.tokens(asked, TOKENS)

        def at_rest() -> bool:
            (status,) = up.statuses.values()
            return (status.running, status.waiting, status.kv_used) == (0, 0, 0)

        await up.until(at_rest, "a node at rest")
        (status,) = up.statuses.values()
        wanted = len(shared) + 12 + TOKENS
        assert wanted < status.kv_capacity < 2 * wanted
        assert status.preemptions > 0
        assert status.cached_tokens > 0
        assert status.tokens_proposed > status.tokens_accepted > 0
