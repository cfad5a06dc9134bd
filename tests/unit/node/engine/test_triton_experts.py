"""Experts by the GPU's kernel beside those of a CPU. Where it runs: see test_paged_attention.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed here: its kernels are not tested")

from services.node.checkpoints.config import ExpertsConfig
from services.node.engine import triton_experts
from services.node.engine.experts import add_experts
from services.node.engine.linear import gate, linear
from services.node.engine.ops import TorchOps
from services.node.engine.weights import ExpertMlp

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if GPU else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
"""The interpreter multiplies the bits of bfloat16 as integers."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def mlp_of(router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> ExpertMlp:
    return ExpertMlp(
        router=linear(router, None, "stored"),
        experts=range(len(down)),
        gate_up=tuple(gate(each, None, "stored", TorchOps().silu_times) for each in gate_up),
        down=tuple(linear(each, None, "stored") for each in down),
        matrices=(gate_up, down),
    )


@given(
    n=st.integers(1, 40),
    experts=st.sampled_from([(4, 1), (4, 4), (8, 2), (20, 3)]),
    sizes=st.sampled_from([(32, 40), (40, 32), (72, 130)]),
    favourite=st.booleans(),
    normalized=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200 if GPU else 12, deadline=None)
def test_what_a_cpu_gets(
    n: int,
    experts: tuple[int, int],
    sizes: tuple[int, int],
    favourite: bool,
    normalized: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """`favourite`: all rows choose the last expert, so that it has several tiles of rows."""
    torch.manual_seed(seed)
    (count, per_token), (width, inner) = experts, sizes
    config = ExpertsConfig(count, per_token, inner, normalized, {})
    router = torch.randn(count, width) / width**0.5
    gate_up = (torch.randn(count, 2 * inner, width) / width**0.5).to(dtype)
    down = (torch.randn(count, width, inner) / inner**0.5).to(dtype)
    normed = torch.randn(n, width).to(dtype)
    if favourite:
        router[-1] = normed.float().mean(0).sign()
        normed = (normed.float() + router[-1]).to(dtype)
    hidden = torch.randn(n, width).to(dtype)
    expected = hidden.float().clone()
    exact = mlp_of(router, gate_up.float(), down.float())
    add_experts(expected, normed.float(), exact, config)
    ours = hidden.to(DEVICE, copy=True)
    mlp = mlp_of(*(each.to(DEVICE) for each in (router, gate_up, down)))
    triton_experts.add_experts(ours, normed.to(DEVICE), mlp, config)
    error = (ours.cpu().float() - expected).norm(dim=1)
    assert (error <= TOLERANCE[dtype] * expected.norm(dim=1)).all()
