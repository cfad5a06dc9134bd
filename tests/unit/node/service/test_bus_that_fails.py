"""A bus that fails under a node's reports and tokens."""

import asyncio
from pathlib import Path

from shared import subjects
from shared.messages.pool import Tier
from tests.unit.node.cluster import ALL, nodes
from tests.unit.node.service.builders import FROM_A, Trouble


async def test_reports_that_cannot_be_sent_cost_nothing_but_themselves(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        bus = Trouble(up.broker, "b")
        await up.start("b", bus=bus)
        bus.refused |= {subjects.ARRIVALS, subjects.POOL_STATUS}
        await up.promoted("a")
        await up.apply("b", FROM_A)
        await bus.until_lost(subjects.ARRIVALS, len(ALL))
        assert up.arrived("b") == []
        bus.refused.clear()
        await up.until_holds("b", {Tier.GPU: ALL})
        assert await up.generate("b", request="on b") == await up.generate("a", request="on a")


async def test_tokens_leave_in_the_order_they_were_drawn(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.promoted("a")
        await asyncio.gather(*(up.submit("a", request=f"r{i}", max_tokens=60) for i in range(8)))
        await up.tokens.until(lambda: all(up.over(f"r{i}") for i in range(8)))
        for i in range(8):
            tokens = up.tokens_of(f"r{i}")
            assert [t.index for t in tokens] == list(range(len(tokens)))
            assert [bool(t.finish) for t in tokens] == [False] * (len(tokens) - 1) + [True]
