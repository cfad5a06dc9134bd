"""Durable copies with real processes: no model is lost with one machine."""

import os
import shutil
import signal
from pathlib import Path

from shared.ids import NodeId
from shared.messages.pool import Tier
from tests.support.cluster import Oracle, Running, prompts, running
from tests.support.models import TINY

SETTINGS = {
    "LAMBDASCALE_REGISTRY_DURABLE_COPIES": "2",
    "LAMBDASCALE_REGISTRY_RESTORE_AFTER_S": "0.5",
    "LAMBDASCALE_PLANNER_IDLE_S": "0.5",
}


def stored(up: Running) -> set[NodeId]:
    """Nodes that say that their disk has the whole model."""
    return {
        status.node
        for status in up.statuses.values()
        for holding in status.holdings
        if holding.tier is Tier.DISK and len(holding.blocks) == up.record.n_blocks
    }


def copying(up: Running) -> set[NodeId]:
    """Nodes that say that they make a durable copy."""
    return {status.node for status in up.statuses.values() if status.copying}


async def test_a_node_that_is_told_to_stop_hands_over_the_only_copy(
    tmp_path: Path, checkpoint: Path
) -> None:
    """The copy would take a minute if nobody were about to go."""
    settings = SETTINGS | {
        "LAMBDASCALE_REGISTRY_COPY_BYTES_PER_S": "10000",
        "LAMBDASCALE_NODE_EVACUATE_S": "200",
    }
    async with running(tmp_path, checkpoint, nodes=2, settings=settings, min_instances=0) as up:
        first, second = NodeId("node-0"), NodeId("node-1")
        await up.until(lambda: copying(up) == {second}, "a copy under way")
        os.kill(up.pid(first), signal.SIGTERM)
        await up.until(lambda: second in stored(up), "a copy on the other node")
        assert stored(up) == {first, second}


async def test_the_node_that_imported_a_model_and_its_disk_are_lost(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    """The model sleeps, so that nothing but disks has it."""
    async with running(tmp_path, checkpoint, nodes=3, settings=SETTINGS, min_instances=0) as up:
        first = NodeId("node-0")
        await up.until(lambda: len(stored(up)) == 2, "a second durable copy")
        assert first in stored(up)
        up.kill(first)
        shutil.rmtree(up.cluster.spec.directory / "nodes" / first)
        del up.statuses[first]

        (prompt,) = prompts(1, TINY.vocab_size)
        answer = await up.ask(prompt, 12)
        assert answer.error == ""
        assert [answer.tokens] == oracle.tokens([prompt], 12)
        await up.until(
            lambda: stored(up) - {first} == {NodeId("node-1"), NodeId("node-2")},
            "a new second copy",
        )
