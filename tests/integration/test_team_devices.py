"""A model that fits no device, on devices of one machine that may run each part together, with real
processes: while a second group loads, and when a rank and a device are killed."""

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from services.local.demo_model import make_checkpoint
from shared import subjects
from shared.ids import NodeId
from shared.messages.decisions import Decisions, DecisionsQuery
from shared.messages.scaling import EventState
from shared.messages.story import StoryQuery, Told
from tests.integration.test_groups import ask_into, check, parts, stages
from tests.integration.test_tensor_parallel import ranks_of
from tests.support.cluster import MODEL, Answer, Oracle, Running, prompts, running
from tests.support.models import TINY

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")

LARGE = replace(TINY, layers=4, hidden=768, intermediate=2048, heads=12, kv_heads=4)
"""115 MB, so that reading weights is most of a step, as it is in real models."""
BLOCKS, LONG = 6, 60
SETTINGS = {
    "LAMBDASCALE_NODE_TENSOR_PARALLEL": "auto",
    "LAMBDASCALE_NODE_TEAM_DEVICES": "2",
    "LAMBDASCALE_NODE_ARENA_BYTES": str(64 << 20),
    "LAMBDASCALE_NODE_KV_BYTES": str(64 << 20),
    "LAMBDASCALE_NODE_LINK_BYTES_PER_S": "20000000",
    "LAMBDASCALE_NODE_LOCAL_BYTES_PER_S": "20000000",  # a part takes 2.9 s
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.05",
    "LAMBDASCALE_NODE_SPECULATION": "0",
}


async def test_devices_that_may_run_together(tmp_path: Path) -> None:
    """Whether they do is chosen by what they measured, which depends on the machine. The event, the
    decisions and the nodes say the same of it, and tokens are the same in any case."""
    large = tmp_path / "large"
    make_checkpoint(large, LARGE)
    asked = prompts(4, TINY.vocab_size)
    expected = Oracle(large).tokens(asked, LONG)
    async with running(
        tmp_path, large, nodes=4, blocks=BLOCKS, settings=SETTINGS, apart=False
    ) as up:
        (first,) = up.watch.replicas
        assert parts(first) == [(0, 3), (3, 6)]
        (record,) = up.watch.records.values()
        assert " ms by 2 devices of " in record.way
        query = DecisionsQuery(name=MODEL)
        decided = await up.bus.request(subjects.PLANNER_DECISIONS, query, Decisions, timeout=60.0)
        assert any(record.way in each.why for each in decided.decisions)
        for stage in first.stages:
            said = await division(up, stage.node)
            assert ("2 devices run it together" in said) == record.together

        # Another group loads beside the first.
        answers = asyncio.create_task(up.ask_all(asked, LONG))
        event = (await up.scale(2)).event
        assert event is not None
        check(await answers, expected)
        await up.replicas(2)
        await up.until(lambda: up.watch.records[event].state is EventState.COMPLETE, "the end")

        # A rank is killed: its node goes on.
        streams = [Answer() for _ in asked]
        answers = asyncio.create_task(ask_into(up, asked, streams))
        await up.until(lambda: all(stream.tokens for stream in streams), "the first tokens")
        (rank,) = ranks_of(up.pid(first.stages[1].node))
        os.kill(rank, signal.SIGKILL)
        check(await answers, expected)
        check(await up.ask_all(asked, LONG), expected)

        # A device is killed.
        streams = [Answer() for _ in asked]
        answers = asyncio.create_task(ask_into(up, asked, streams))
        await up.until(lambda: all(stream.tokens for stream in streams), "the first tokens")
        victim = first.stages[0].node
        up.kill(victim)
        check(await answers, expected)
        await up.until(lambda: all(victim != s.node for s in stages(up)), "its group's end")


async def division(up: Running, node: NodeId) -> str:
    """What the node said last of who runs the model."""
    query = StoryQuery(subject=up.record.model_id)
    told = await up.bus.request(subjects.node_story(node), query, Told, timeout=60.0)
    return [step.text for step in told.steps if " it: " in step.text][-1]
