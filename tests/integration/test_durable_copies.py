"""Durable copies with real processes: no model is lost with one machine."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shared.ids import NodeId
from shared.messages.pool import Tier
from tests.support.cluster import LIMIT_S, Oracle, Running, prompts, running
from tests.support.models import TINY

SETTINGS = {
    "LAMBDASCALE_REGISTRY_DURABLE_COPIES": "2",
    "LAMBDASCALE_REGISTRY_RESTORE_AFTER_S": "0.5",
    "LAMBDASCALE_PLANNER_IDLE_S": "0.5",
}


def whole(up: Running, tier: Tier) -> set[NodeId]:
    """Nodes that say that they hold the whole model in this tier."""
    return {
        status.node
        for status in up.statuses.values()
        for holding in status.holdings
        if holding.tier is tier and len(holding.blocks) == up.record.n_blocks
    }


def stored(up: Running) -> set[NodeId]:
    return whole(up, Tier.DISK)


def lose(up: Running, node: NodeId) -> None:
    """SIGKILL, and its disk goes with it."""
    up.kill(node)
    shutil.rmtree(up.cluster.spec.directory / "nodes" / node)
    del up.statuses[node]


def copying(up: Running) -> set[NodeId]:
    """Nodes that say that they make a durable copy."""
    return {status.node for status in up.statuses.values() if status.copying}


def tell_to_stop(up: Running, node: NodeId) -> None:
    os.kill(up.pid(node), signal.SIGTERM)


def give_notice(up: Running, node: NodeId) -> None:
    """As a cloud does: the machine has ten minutes left."""
    moment = datetime.now(UTC) + timedelta(minutes=10)
    notice = {"action": "terminate", "time": f"{moment:%Y-%m-%dT%H:%M:%SZ}"}
    (up.cluster.spec.directory / "nodes" / node / "notice").write_text(json.dumps(notice))


@pytest.mark.parametrize(
    ("tell", "evacuate_s"), [(tell_to_stop, "200"), (give_notice, "0")], ids=["SIGTERM", "notice"]
)
async def test_a_node_that_is_about_to_go_hands_over_the_only_copy_and_ends(
    tmp_path: Path, checkpoint: Path, tell: Callable[[Running, NodeId], None], evacuate_s: str
) -> None:
    """The copy would take a minute if nobody were about to go."""
    settings = SETTINGS | {
        "LAMBDASCALE_REGISTRY_COPY_BYTES_PER_S": "10000",
        "LAMBDASCALE_NODE_EVACUATE_S": evacuate_s,
        "LAMBDASCALE_NODE_NOTICE": "notice",
    }
    async with running(tmp_path, checkpoint, nodes=2, settings=settings, min_instances=0) as up:
        first, second = NodeId("node-0"), NodeId("node-1")
        await up.until(lambda: copying(up) == {second}, "a copy under way")
        tell(up, first)
        await up.until(lambda: second in stored(up), "a copy on the other node")
        assert stored(up) == {first, second}
        async with asyncio.timeout(LIMIT_S):
            assert await up.cluster.ended(first) == 0


async def test_the_node_that_imported_a_model_and_its_disk_are_lost(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    """The model sleeps, so that nothing but disks has it."""
    async with running(tmp_path, checkpoint, nodes=3, settings=SETTINGS, min_instances=0) as up:
        first = NodeId("node-0")
        await up.until(lambda: len(stored(up)) == 2, "a second durable copy")
        assert first in stored(up)
        lose(up, first)

        (prompt,) = prompts(1, TINY.vocab_size)
        answer = await up.ask(prompt, 12)
        assert answer.error == ""
        assert [answer.tokens] == oracle.tokens([prompt], 12)
        await up.until(
            lambda: stored(up) - {first} == {NodeId("node-1"), NodeId("node-2")},
            "a new second copy",
        )


@pytest.mark.parametrize("tier", [Tier.GPU, Tier.HOST], ids=["device", "host"])
async def test_the_node_with_the_only_copy_in_memory_and_its_disk_are_lost(
    tmp_path: Path, checkpoint: Path, oracle: Oracle, tier: Tier
) -> None:
    """It serves, or its copy sleeps in host memory."""
    awake = tier is Tier.GPU
    async with running(
        tmp_path, checkpoint, nodes=3, settings=SETTINGS, min_instances=int(awake)
    ) as up:
        first, second = prompts(2, TINY.vocab_size)
        assert [(await up.ask(first, 12)).tokens] == oracle.tokens([first], 12)
        await up.until(lambda: len(stored(up)) == 2, "a second durable copy")
        await up.until(lambda: len(whole(up, tier)) == 1, f"one copy in tier {tier.value}")
        (holder,) = whole(up, tier)
        lose(up, holder)

        answer = await up.ask(second, 12)
        assert answer.error == ""
        assert [answer.tokens] == oracle.tokens([second], 12)
        left = {NodeId(f"node-{number}") for number in range(3)} - {holder}
        await up.until(lambda: stored(up) == left, "two durable copies")
