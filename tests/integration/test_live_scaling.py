"""Live scaling with real processes: prompts that wait run through the blocks that have come."""

import re
from dataclasses import replace
from pathlib import Path

from services.local.demo_model import make_checkpoint
from services.node.core.batching import PULL
from shared import subjects
from shared.ids import NodeId
from shared.messages.story import StoryQuery, Told
from tests.support.cluster import Oracle, prompts, running
from tests.support.models import TINY

LAYERS, BLOCKS, PROMPTS, LENGTH, TOKENS = 14, 16, 14, 32, 3
NODES = NodeId("node-0"), NodeId("node-1")
CUT = re.compile(r"goes on at .*, block (\d+)")
SETTINGS = {
    "LAMBDASCALE_NODE_LINK_BYTES_PER_S": "400000",  # a copy of 1.7 MB takes 4 s
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.4",
    "LAMBDASCALE_NODE_STEP_TOKENS": str(LENGTH),
    "LAMBDASCALE_NODE_SLOTS": "2",
    "LAMBDASCALE_NODE_SPECULATION": "0",
}


async def test_a_prompt_goes_on_where_the_second_stage_takes_it(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    make_checkpoint(checkpoint, replace(TINY, layers=LAYERS))
    asked = prompts(PROMPTS, TINY.vocab_size, LENGTH)
    async with running(
        tmp_path / "cluster", checkpoint, nodes=2, blocks=BLOCKS, settings=SETTINGS
    ) as up:
        (replica,) = up.watch.replicas
        target = next(node for node in NODES if node != replica.leader)
        got = await up.ask_all(asked, TOKENS)
        assert {answer.error for answer in got} == {""}
        assert [answer.tokens for answer in got] == Oracle(checkpoint).tokens(asked, TOKENS)
        query = StoryQuery(subject=PULL)
        told = await up.bus.request(subjects.node_story(target), query, Told, timeout=60.0)
    cuts = {int(found[1]) for step in told.steps if (found := CUT.search(step.text))}
    assert len(cuts) > 2, told.steps
    assert max(cuts) < BLOCKS
