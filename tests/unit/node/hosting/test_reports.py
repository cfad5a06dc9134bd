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

        def said() -> list[int]:
            several = [m for m in up.arrivals.messages if isinstance(m, BlocksArrived)]
            return [each.block for message in several for each in message.each()]

        await up.arrivals.until(lambda: len(up.arrived("b")) + len(said()) == len(ALL))
        assert len(up.arrived("b")) == 1
        assert {up.arrived("b")[0].block, *said()} == set(ALL)
