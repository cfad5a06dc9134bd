"""A node's generations: each process under its name is later than the one before."""

from pathlib import Path

import pytest

from shared import clock, subjects
from shared.bus.base import On
from shared.errors import StaleEpoch
from shared.messages import Message
from shared.messages.pool import NodeGone, NodeJoined, Tier
from shared.messages.scaling import ReleaseModel
from tests.unit.node.cluster import ALL, Heard, nodes
from tests.unit.node.service.builders import FROM_A


async def test_a_node_on_a_clock_that_went_back_is_the_later_process(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        before = up.info("a")
        yesterday = clock.wall_ns() - 86_400 * 10**9
        await up.stop("a")
        with monkeypatch.context() as patch:
            patch.setattr(clock, "wall_source", lambda: yesterday)
            await up.start("a")
        assert up.info("a").generation > before.generation


async def test_a_node_that_was_declared_gone_goes_on_as_a_new_one(
    tmp_path: Path, checkpoint: Path
) -> None:
    """It happens in the midst of a plan. The node keeps its blocks and reports them under the new
    generation."""
    async with nodes(tmp_path, checkpoint, "a", "b", settings={"lease_s": 1}) as up:
        await up.apply("a", promote=(0, 1, 2))
        await up.apply("b", FROM_A)
        await up.until_arrived("b", (0, 1, 2))
        old = up.info("b")
        plan = up.plan("b", FROM_A, revision=1)
        joined = Heard()
        await up.bus.subscribe(subjects.POOL_NODES, On(Message, joined.hear))
        gone = NodeGone(node=old.node, generation=old.generation, reason="test")
        await up.bus.publish(subjects.POOL_NODES, gone)
        await up.statuses.until(
            lambda: (
                (status := up.status("b")) is not None
                and status.generation == up.info("b").generation > old.generation
            )
        )
        await joined.until(
            lambda: any(
                isinstance(said, NodeJoined) and said.info == up.info("b")
                for said in joined.messages
            )
        )
        with pytest.raises(StaleEpoch, match="has generation"):
            await up.request(subjects.node_plan(old.node), plan)
        release = ReleaseModel(
            node=old.node, generation=old.generation, model_id=plan.model_id, keep=None
        )
        with pytest.raises(StaleEpoch, match="has generation"):
            await up.request(subjects.node_release(old.node), release)
        await up.apply("a", promote=(3, 4, 5), revision=1)
        late = [m for m in await up.until_arrived("b", ALL) if m.block in (3, 4, 5)]
        assert {m.generation for m in late} == {up.info("b").generation}
        await up.until_holds("b", {Tier.GPU: ALL})
        await up.bus.publish(subjects.POOL_NODES, gone)  # said again: of another node by now
        await up.apply("b", FROM_A, event="ev-2")
