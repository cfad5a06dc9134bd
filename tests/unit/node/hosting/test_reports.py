"""What a node says of blocks where its planner asks for few reports."""

from pathlib import Path

import msgspec

from shared import subjects
from shared.ids import NodeId
from shared.messages.pool import Tier
from shared.messages.scaling import BlocksArrived
from tests.unit.node.cluster import ALL, nodes


async def test_blocks_are_reported_together_and_the_last_at_once(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        await up.promoted("a")
        pulls = dict.fromkeys(ALL, "a")
        plan = msgspec.structs.replace(up.plan("b", pulls), report_s=3600.0)
        await up.request(subjects.node_plan(NodeId("b")), plan)
        await up.until_holds("b", {Tier.GPU: ALL})

        def said() -> list[list[int]]:
            several = [m for m in up.arrivals.messages if isinstance(m, BlocksArrived)]
            together = [[each.block for each in message.each()] for message in several]
            return [[each.block] for each in up.arrived("b")] + together

        await up.arrivals.until(lambda: sum(map(len, said())) == len(ALL))
        assert {block for blocks in said() for block in blocks} == set(ALL)
        assert len(said()) <= 2  # those that came first, and the others
