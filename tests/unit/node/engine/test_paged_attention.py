"""The GPU's kernels beside the CPU's attention, over any pages, lengths, windows and groups.

On a machine without a GPU they run in Triton's interpreter (tests/conftest.py), on the CPU: that
shows what they compute, not what they are compiled to.
"""

import random
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed here: its kernels are not tested")

from services.node.engine import paged_attention
from services.node.engine.attention import Attention, AttentionStep, Span
from services.node.engine.rope import inverse_frequencies
from tests.support.amounts import cases
from tests.unit.node.engine.paged import CAPACITY, LONGEST, config, spans_of

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if GPU else "cpu")
SHARED = {80: 99 << 10, 90: 227 << 10}
"""Bytes of shared memory that a program may take, by compute capability; of 8.x the least (CUDA C++
Programming Guide, table "Technical Specifications per Compute Capability")."""
COMPILED = cases([80], thorough=[90])
"""The capabilities that kernels are compiled for: first the one with the least shared memory."""
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
"""The interpreter multiplies the bits of bfloat16 as integers."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 150), st.sampled_from([1, 1, 1, 2, 8, 9, 40])),
        min_size=1,
        max_size=3,
    ),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (4, 1), (8, 1)]),
    head_dim=st.sampled_from([8, 12, 64, 128]),
    window=st.sampled_from([0, 0, 1, 16, 50, 128]),
    dtype=st.sampled_from(DTYPES),
    normed=st.booleans(),
    processors=st.sampled_from([1, 5]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200 if GPU else 15, deadline=None)
def test_what_a_cpu_gets(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    window: int,
    dtype: torch.dtype,
    normed: bool,
    processors: int,
    seed: int,
) -> None:
    """`normed`: queries and keys, as in Qwen3. `processors`: how many the GPU has,
    so into how many parts keys are divided."""
    torch.manual_seed(seed)
    spans = spans_of(lengths, random.Random(seed))
    shape = config(*heads, head_dim, window)
    n = sum(count for _, _, count in spans)
    frequencies = inverse_frequencies(shape.rope, head_dim)
    exact = Attention(shape, LONGEST, torch.float32, torch.device("cpu"))
    plain = AttentionStep(exact, frequencies, spans)
    attention = Attention(shape, LONGEST, dtype, DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "_processors", lambda _: processors)
        fused = paged_attention.paged_step(attention, frequencies.to(DEVICE), spans)
    kv = torch.randn(CAPACITY, 2, shape.n_kv_heads, head_dim).to(dtype)
    qkv = torch.randn(n, exact.q_size + 2 * exact.kv_size).to(dtype)
    ours = kv.clone().to(DEVICE)
    ours[written_after(spans)] = torch.nan
    norm = torch.randn(shape.n_heads + shape.n_kv_heads, head_dim).to(dtype) if normed else None
    on_device = None if norm is None else norm.to(DEVICE)
    attended = fused.run(qkv.clone().to(DEVICE), on_device, ours, window)
    theirs = kv.float()
    expected = plain.run(qkv.float(), None if norm is None else norm.float(), theirs, window)
    limit = TOLERANCE[dtype]
    assert torch.isfinite(attended).all()
    got = attended[:n].cpu().float()
    torch.testing.assert_close(got, expected[:n], atol=limit, rtol=limit)
    slots = [slot for sequence, first, count in spans for slot in sequence.slots(first, count)]
    torch.testing.assert_close(ours[slots].cpu().float(), theirs[slots], atol=limit, rtol=limit)


def written_after(spans: list[Span]) -> torch.Tensor:
    """[CAPACITY]: slots that no query may read."""
    unread = torch.ones(CAPACITY, dtype=torch.bool)
    for sequence, first, count in spans:
        unread[sequence.slots(0, first + count)] = False
    return unread


def test_the_kernels_compile() -> None:
    """The GPUs need not be here. Triton keeps what it has compiled on this machine, and knows it by
    the sources, the target and its own version."""
    compiled = subprocess.run(
        [sys.executable, "-m", "tests.unit.node.engine.compile_kernels", *map(str, COMPILED)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr[-2000:]
    taken = map(int, compiled.stdout.split())
    for capability, shared in zip(COMPILED, taken, strict=True):
        assert 0 < shared <= SHARED[capability], capability
