"""What a node says of blocks where its planner asks for few reports."""

from pathlib import Path

import msgspec

from services.node.core.residency import PlanId
from services.node.moving.events import Arrival
from shared import subjects
from shared.ids import NodeId
from shared.messages.pool import ReportStatus, Tier
from shared.messages.scaling import ApplyPlan, BlocksArrived
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


async def test_when_blocks_came_is_said_before_a_status_says_that_they_are_there(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        plan = msgspec.structs.replace(up.plan("a", promote=ALL), report_s=3600.0)
        reports = up.services["a"]._reports
        await reports.follow(plan)
        await reports.arrived(arrival(plan, 0), "")
        await up.until_arrived("a", (0,))
        await reports.arrived(arrival(plan, 1), "")
        before = len(up.statuses.messages)
        await up.bus.publish(subjects.POOL_REPORT, ReportStatus())
        await up.statuses.until(lambda: len(up.statuses.messages) > before)
        assert {each.block for each in up.arrived("a")} == {0, 1}


def arrival(plan: ApplyPlan, block: int) -> Arrival:
    return Arrival(
        plan=PlanId(plan.event, plan.revision), model_id=plan.model_id, block=block,
        source=NodeId("b"), transport="tcp", nbytes=1,
        started_ns=0, first_byte_ns=0, finished_ns=1,
    )  # fmt: skip
