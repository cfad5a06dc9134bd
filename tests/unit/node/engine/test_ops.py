"""Our kernels beside torch's operators: the same but for rounding, whatever the shapes."""

import random
import shutil
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.node.core.kv import PAGE, pages_of
from services.node.core.rows import SequenceKey
from services.node.engine import kernels
from services.node.engine.attention import Attention, Span
from services.node.engine.kv import Sequence
from services.node.engine.ops import KernelOps, Ops, TorchOps
from services.node.engine.rope import inverse_frequencies
from services.node.model.config import ModelConfig
from shared.ids import ModelId
from tests.unit.node.engine.models import make_model

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")

CPU = torch.device("cpu")
LONGEST = 700


def kernel_ops() -> KernelOps:
    compiled = kernels.load()
    assert compiled is not None
    return KernelOps(compiled)


def near(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    error = (one.double() - other.double()).norm() / other.double().norm()
    return bool(error <= (1e-2 if dtype == torch.bfloat16 else 2e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 15, 16, 40, 768, 1001])
def test_norms(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(9, width).to(dtype), torch.randn(width).to(dtype)
    ours, theirs = kernel_ops(), TorchOps()
    assert near(ours.rms_norm(x, weight, 1e-5), theirs.rms_norm(x, weight, 1e-5), dtype)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(heads, kv heads, head_dim, window)."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    dim = draw(st.sampled_from([4, 8, 12, 16, 20, 64, 80, 128]))
    return kv_heads * group, kv_heads, dim, draw(st.sampled_from([0, 0, 1, 5, 16, 150]))


@given(
    shape=shapes(),
    lengths=st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from([1, 1, 2, 15, 16, 17, 40])),
        min_size=1, max_size=4,
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    normed=st.booleans(),
    rng=st.randoms(use_true_random=False),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_attention(
    shape: tuple[int, int, int, int],
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    normed: bool,
    rng: random.Random,
) -> None:
    """Sequences of (cached, new) positions, on pages that lie anywhere."""
    heads, kv_heads, dim, window = shape
    config = config_of(heads, kv_heads, dim, window)
    total = sum(pages_of(cached + new) for cached, new in lengths)
    pages = rng.sample(range(total), total)
    starts = [0, *accumulate(pages_of(cached + new) for cached, new in lengths)]
    sequences = [
        Sequence(SequenceKey(str(i)), ModelId("m"), (0, 1), range(1), LONGEST, pages=pages[a:b])
        for i, (a, b) in enumerate(pairwise(starts))
    ]
    torch.manual_seed(rng.randrange(1000))
    width = (heads + 2 * kv_heads) * dim
    norm = torch.randn(heads + kv_heads, dim).to(dtype) if normed else None
    before = torch.randn(sum(cached for cached, _ in lengths) or 1, width).to(dtype)
    new = torch.randn(sum(count for _, count in lengths), width).to(dtype)
    cached = [(s, 0, n) for s, (n, _) in zip(sequences, lengths, strict=True) if n]
    spans = [(s, done, n) for s, (done, n) in zip(sequences, lengths, strict=True)]
    results = []
    for ops in (kernel_ops(), TorchOps()):
        kv = torch.zeros(total * PAGE, 2, kv_heads, dim)
        if cached:
            attend(ops, config, cached, before, norm, kv)
        results.append(attend(ops, config, spans, new, norm, kv))
    assert near(results[0], results[1], dtype)


def attend(
    ops: Ops, config: ModelConfig, spans: list[Span], qkv: torch.Tensor,
    norm: torch.Tensor | None, kv: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    attention = Attention(config, LONGEST, torch.float32, CPU)
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    step = ops.attention(attention, frequencies, spans)
    attended = step.run(qkv, norm, kv, config.layers[0].window)
    assert torch.isfinite(attended).all()
    return attended


def config_of(heads: int, kv_heads: int, dim: int, window: int) -> ModelConfig:
    raw = make_model(
        model_type="mistral",
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        sliding_window=window or None,
    ).manifest.config
    return ModelConfig.from_hf(raw)


def test_threads_change_no_bits() -> None:
    config = config_of(6, 2, 64, 0)
    sequence = Sequence(
        SequenceKey("s"), ModelId("m"), (0, 1), range(1), LONGEST, pages=list(range(40))
    )
    qkv = torch.randn(640, 10 * 64)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        kv = torch.zeros(640, 2, 2, 64)
        results.append(attend(kernel_ops(), config, [(sequence, 0, 640)], qkv, None, kv))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_nan_stays_in_its_sequence() -> None:
    config = config_of(2, 1, 16, 0)
    sequences = [
        Sequence(SequenceKey(str(i)), ModelId("m"), (0, 1), range(1), LONGEST, pages=[i])
        for i in range(2)
    ]
    qkv = torch.randn(8, 4 * 16)
    qkv[:4, 3] = torch.nan
    kv = torch.zeros(32, 2, 1, 16)
    step = kernel_ops().attention(
        Attention(config, LONGEST, torch.float32, CPU),
        inverse_frequencies(config.rope, config.head_dim),
        [(sequences[0], 0, 4), (sequences[1], 0, 4)],
    )
    attended = step.run(qkv, None, kv, 0)
    assert attended[:4].isnan().any()
    assert torch.isfinite(attended[4:]).all()
