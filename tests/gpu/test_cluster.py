"""Two nodes on one GPU, each a process of its own, and all services around them."""

from pathlib import Path

import pytest

from services.local.demo_model import make_checkpoint
from tests.gpu import NEEDS_GPU
from tests.support.cluster import Oracle
from tests.support.models import TINY
from tests.support.modes import a_request_in_every_mode

pytestmark = NEEDS_GPU


@pytest.mark.timeout(300)  # each node makes a context and compiles kernels
@pytest.mark.parametrize("apart", [True, False], ids=["over TCP", "CUDA IPC"])
async def test_a_request_in_every_mode(tmp_path: Path, apart: bool) -> None:
    """fp32, greedy, random weights: rounding does not decide the tokens."""
    checkpoint = tmp_path / "tiny"
    make_checkpoint(checkpoint, TINY)
    oracle = Oracle(checkpoint)
    await a_request_in_every_mode(tmp_path, checkpoint, oracle, device="cuda:0", apart=apart)
