"""A model that fits no node, with real processes: groups of nodes serve it."""

from dataclasses import replace
from pathlib import Path

from services.local.demo_model import make_checkpoint
from tests.support.cluster import Oracle, prompts, running
from tests.support.models import TINY

LAYERS, BLOCKS, TOKENS = 14, 16, 12
SETTINGS = {
    "LAMBDASCALE_NODE_ARENA_BYTES": str(1_200_000),  # of 1.9 MB
    "LAMBDASCALE_NODE_SPECULATION": "0",
}


async def test_two_nodes_serve_what_fits_on_none(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    make_checkpoint(checkpoint, replace(TINY, layers=LAYERS))
    asked = prompts(4, TINY.vocab_size)
    async with running(
        tmp_path / "cluster", checkpoint, nodes=2, blocks=BLOCKS, settings=SETTINGS
    ) as up:
        (group,) = up.watch.replicas
        assert [(stage.start, stage.stop) for stage in group.stages] == [(0, 8), (8, 16)]
        got = await up.ask_all(asked, TOKENS)
        assert {answer.error for answer in got} == {""}
        assert [answer.tokens for answer in got] == Oracle(checkpoint).tokens(asked, TOKENS)
