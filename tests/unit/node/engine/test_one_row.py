"""Products of one row by the GPU's kernel beside torch's. Where it runs: see
test_paged_attention.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

pytest.importorskip("triton", reason="Triton is not installed here: its kernels are not tested")

from services.node.engine import one_row
from services.node.engine.linear import Stored, StoredGate
from services.node.engine.ops import TorchOps

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if GPU else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EPS = 1e-5


@given(
    width=st.sampled_from([8, 100, 512, 700, 1024]),
    columns=st.sampled_from([1, 4, 10, 16]),
    biased=st.booleans(),
    dtype=st.sampled_from([*TOLERANCE]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60 if GPU else 12, deadline=None)
def test_what_torch_gets(
    width: int, columns: int, biased: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x, norm = torch.randn(1, width).to(dtype), (torch.rand(width) + 0.5).to(dtype)
    weight = (torch.randn(2 * columns, width) / width**0.5).to(dtype)
    bias = torch.randn(2 * columns).to(dtype) if biased else None
    before = torch.randn(1, 2 * columns).to(dtype)
    matrix = Stored(weight.to(DEVICE), None if bias is None else bias.to(DEVICE))

    exact = functional.rms_norm(x.float(), (width,), norm.float(), EPS)
    product, wide = _product(exact, weight, bias), _product(x.float(), weight, bias)
    gate, up = product.chunk(2, dim=1)

    there = x.to(DEVICE)
    close(one_row.normed_product(there, norm.to(DEVICE), EPS, matrix), product)
    gated = StoredGate(matrix, TorchOps().silu_times)
    got = one_row.gated_product(there, norm.to(DEVICE), EPS, gated)
    close(got, functional.silu(gate) * up)
    to = before.to(DEVICE, copy=True)
    one_row.add_product(there, matrix, to)
    close(to, before.float() + wide)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(x, weight.float(), None if bias is None else bias.float())


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    error = (got.cpu().float() - expected).norm(dim=1)
    assert (error <= TOLERANCE[got.dtype] * expected.norm(dim=1).clamp(min=0.1)).all()
