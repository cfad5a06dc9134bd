"""Decoders over several GPUs, with NCCL; and over one GPU that two ranks share, where gloo does
NCCL's part, so that the rest is tested on a machine with a single GPU."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from services.node.engine.device_ranks import DeviceRanks
from shared.errors import EngineFailed
from tests.gpu import NEEDS_GPU
from tests.unit.node.engine.models import MODEL, make_model, part, row, run
from tests.unit.node.engine.test_against_transformers import FORMS
from tests.unit.node.engine.test_device_ranks import FAMILIES, OnDevices
from tests.unit.node.engine.test_encoder import expected_logits, image, make_vit
from tests.unit.node.engine.test_encoder import row as image_row
from tests.unit.node.engine.test_ranks import PROMPT

pytestmark = NEEDS_GPU
COUNT = 64
GPUS = torch.cuda.device_count()
ONE_EACH = pytest.param(
    [torch.device("cuda", 0), torch.device("cuda", 1)],
    id="nccl",
    marks=pytest.mark.skipif(GPUS < 2, reason="fewer than two GPUs here: NCCL is not tested"),
)
SHARED = pytest.param([torch.device("cuda", 0)] * 2, id="gloo on one GPU")


@pytest.fixture(scope="module", params=[ONE_EACH, SHARED])
def divided(request: pytest.FixtureRequest) -> Iterator[OnDevices]:
    made = OnDevices(request.param)
    yield made
    made.device_ranks.close()


@pytest.mark.parametrize("form", FAMILIES)
def test_the_tokens_of_transformers(divided: OnDevices, form: str) -> None:
    model = make_model(seed=3, **FORMS[form])
    with divided.holding(model) as path:
        assert path.generate(PROMPT, COUNT) == model.expected_tokens(PROMPT, COUNT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_batches_in_half_precision(divided: OnDevices, dtype: str) -> None:
    """No numbers to compare with: it runs, alone and together."""
    model = make_model(dtype=dtype, **FORMS["qwen3_moe_mixed"])
    with divided.holding(model) as path:
        for step in range(3):
            rows = [row(str(i), 9 * step, PROMPT[:9], draw=step) for i in range(7)]
            assert all(len(tokens) == 1 for tokens in path.run(rows))
        divided.engine.free(tuple(str(i) for i in range(7)))


def test_the_arena_is_page_locked_here(divided: OnDevices) -> None:
    assert divided.device_ranks.staging == "slices of the pinned host arena"


def test_a_warm_up_beside_steps(divided: OnDevices) -> None:
    model = make_model(seed=3)
    with divided.holding(model) as path:
        pieces = divided.engine.warm_up(MODEL)
        tokens: list[int] = []
        for step in range(4):
            next(pieces)
            given, at = (tokens[-1:], len(PROMPT) + step - 1) if step else (PROMPT, 0)
            ((token,),) = path.run([row("s", at, given, draw=step)])
            tokens.append(token)
        assert len([*pieces]) > 3
        assert tokens == model.expected_tokens(PROMPT, 4)
        divided.engine.free(("s",))


def test_a_classifier_runs_on_the_first_gpu_alone(divided: OnDevices) -> None:
    model = make_vit()
    with divided.holding(model):
        given = part([image_row("i", image(1))], 0, model.n_blocks)
        (tokens,) = run(divided.engine, given).sampled
        assert [*tokens] == [int(expected_logits(model, [image(1)]).argmax())]


def test_slices_leave_the_devices_with_their_model(divided: OnDevices) -> None:
    model, device = make_model(hidden_size=256, intermediate_size=512), torch.device("cuda", 0)
    left: list[int] = []
    for _ in range(3):
        with divided.holding(model) as path:
            path.generate(PROMPT, 2)
        left.append(torch.cuda.memory_allocated(device))
    assert left[1] == left[2]


@pytest.mark.parametrize("devices", [ONE_EACH, SHARED])
def test_a_rank_that_is_killed_in_a_step_ends_it(devices: Sequence[Any]) -> None:
    made = OnDevices(devices)
    ranks: DeviceRanks = made.device_ranks
    model, (rank,) = make_model(), ranks.processes
    with made.hosting(MODEL, model):
        os.kill(rank, signal.SIGSTOP)

        def kill() -> None:
            time.sleep(0.5)
            os.kill(rank, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(EngineFailed, match="signal 9"):
            run(made.engine, part([row("s", 0, PROMPT, draw=0)], 0, model.n_blocks))
        killer.join()
    assert "ended with signal 9" in ranks.broken
    ranks.close()
