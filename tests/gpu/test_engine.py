"""The engine on a GPU, and a node around it."""

from pathlib import Path

import pytest
import torch

from services.cli.demo_model import make_checkpoint
from services.node.engine.engine import TorchEngine
from shared.messages.pool import Tier
from tests.gpu import NEEDS_GPU
from tests.support.models import TINY
from tests.unit.node.cluster import ALL, nodes
from tests.unit.node.engine.models import MODEL, make_model

pytestmark = NEEDS_GPU
CUDA = torch.device("cuda:0")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_warm_up_is_a_few_pieces_and_leaves_nothing(dtype: str) -> None:
    model = make_model(dtype=dtype)
    engine = TorchEngine("cuda:0", 1024, threads=1)
    engine.open_model(MODEL, model.manifest)
    before = torch.cuda.memory_allocated(CUDA)
    assert len(list(engine.warm_up(MODEL))) > 1
    assert torch.cuda.memory_allocated(CUDA) <= before + 32 * 2**20  # cuBLAS keeps a workspace
    engine.open_model(other := type(MODEL)("other"), model.manifest)
    pieces = engine.warm_up(other)
    next(pieces)
    engine.close_model(other)
    assert list(pieces) == []


async def test_a_node_on_a_gpu_says_what_one_on_a_cpu_says(tmp_path: Path) -> None:
    """fp32, greedy, random weights: rounding does not decide the first tokens."""
    checkpoint = tmp_path / "tiny"
    make_checkpoint(checkpoint, TINY)
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.promoted("a")
        await up.start("b", device="cuda:0")
        assert up.info("b").staging == "CUDA IPC, else pinned host arena"
        await up.apply("b", dict.fromkeys(ALL, "a"), event="ev-2")
        await up.until_arrived("b", ALL)
        tokens = await up.generate("a", request="on a")
        assert await up.generate("b", request="on b") == tokens
        assert await up.generate("a", "b", request="on both") == tokens
        assert await up.generate("b", "a", request="the other way") == tokens
        await up.release("b", keep=Tier.HOST)
        await up.apply("b", {}, event="ev-3")
        assert await up.generate("b", request="awake") == tokens
        await up.release("b")
        await up.nothing_leaked("b")
