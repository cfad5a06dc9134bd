"""Layers by our kernels beside torch's operators: the same but for rounding, in every shape."""

import random
import shutil
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.node.checkpoints.architecture import read_config
from services.node.checkpoints.config import ModelConfig
from services.node.core.kv import PAGE, pages_of
from services.node.core.rows import SequenceKey
from services.node.engine import kernels
from services.node.engine.attention import Span
from services.node.engine.bell import Bell
from services.node.engine.decoder import Decoder
from services.node.engine.kernel_step import KernelStep
from services.node.engine.kv_sequence import KvSequence
from services.node.engine.layer_step import LayerStep
from services.node.engine.linear import Form
from shared.ids import ModelId
from tests.support.amounts import examples
from tests.unit.node.engine.models import Model, make_model

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")

CPU = torch.device("cpu")
LONGEST = 700


class Side:
    """A decoder with all of a model's layers and a cache."""

    def __init__(self, model: Model, pages: int, form: Form) -> None:
        config = read_config(model.manifest.config)
        assert isinstance(config, ModelConfig)
        dtype = getattr(torch, config.dtype)
        compiled = kernels.load() if form != "stored" else None
        self.decoder = Decoder(config, dtype, CPU, LONGEST, compiled=compiled)
        units = [
            unit
            for spec, buffer in zip(model.manifest.blocks, model.buffers, strict=True)
            for unit in self.decoder.units(spec, memoryview(buffer), form)
        ]
        self.layers: Any = units[1:-1]
        shape = (len(self.layers), pages * PAGE, 2, config.n_kv_heads, config.head_dim)
        # What earlier sequences left in its pages does not matter to the kernels.
        left = torch.nan if compiled else 0.0
        self.kv = torch.full(shape, left, dtype=self.decoder.attention.dtype)

    def run(self, spans: list[Span], hidden: torch.Tensor) -> torch.Tensor:
        step, hidden = self.decoder.step(spans), hidden.clone()
        assert isinstance(step, LayerStep if self.layers_are_stored else KernelStep)
        step.run(0, (self.layers,), hidden, self.kv)
        return hidden

    @property
    def layers_are_stored(self) -> bool:
        return self.decoder.attention.dtype != self.decoder.dtype or self.decoder._compiled is None


def model_of(heads: int, kv_heads: int, dim: int, dtype: str = "float32", **changes: Any) -> Model:
    return make_model(
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        blocks=1,
        **changes,
    )


def sequence(pages: list[int], key: str = "s") -> KvSequence:
    return KvSequence(SequenceKey(key), ModelId("m"), (0, 1), range(1), LONGEST, pages=pages)


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    error = (one.double() - other.double()).norm() / other.double().norm()
    return bool(error <= (2e-2 if one.dtype == torch.bfloat16 else 5e-6))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """(heads, kv heads, head_dim)."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    return kv_heads * group, kv_heads, draw(st.sampled_from([4, 8, 12, 16, 20, 64, 80, 128]))


@given(
    shape=shapes(),
    lengths=st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from([1, 1, 2, 15, 16, 17, 40])),
        min_size=1, max_size=4,
    ),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    kind=st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
    window=st.sampled_from([None, 1, 5, 16, 150]),
    rng=st.randoms(use_true_random=False),
)  # fmt: skip
@settings(max_examples=examples(12), deadline=None)
def test_layers(
    shape: tuple[int, int, int],
    lengths: list[tuple[int, int]],
    dtype: str,
    kind: str,
    window: int | None,
    rng: random.Random,
) -> None:
    """Sequences of (cached, new) positions, on pages that lie anywhere."""
    heads, kv_heads, dim = shape
    changes: dict[str, Any] = {"sliding_window": window} if kind == "mistral" else {}
    changes["hidden_size"] = heads * (dim if kind == "qwen2" else 8)
    model = model_of(heads, kv_heads, dim, dtype, model_type=kind, **changes)
    total = sum(pages_of(cached + new) for cached, new in lengths)
    pages = rng.sample(range(total), total)
    starts = [0, *accumulate(pages_of(cached + new) for cached, new in lengths)]
    sequences = [sequence(pages[a:b], str(i)) for i, (a, b) in enumerate(pairwise(starts))]
    torch.manual_seed(rng.randrange(1000))
    width = model.manifest.config["hidden_size"]
    before = torch.randn(sum(cached for cached, _ in lengths), width).to(getattr(torch, dtype))
    new = torch.randn(sum(count for _, count in lengths), width).to(before.dtype)
    cached = [(s, 0, n) for s, (n, _) in zip(sequences, lengths, strict=True) if n]
    spans = [(s, done, n) for s, (done, n) in zip(sequences, lengths, strict=True)]
    results = []
    for form in ("packed", "stored"):
        side = Side(model, total, form)
        if cached:
            side.run(cached, before)
        results.append(side.run(spans, new))
    assert near(results[0], results[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_change_no_bits(dtype: str) -> None:
    model = model_of(6, 2, 64, dtype, hidden_size=384, intermediate_size=1000)
    hidden = torch.randn(640, 384).to(getattr(torch, dtype))
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(Side(model, 40, "packed").run([(sequence([*range(40)]), 0, 640)], hidden))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_nan_stays_in_its_sequence() -> None:
    model = model_of(2, 1, 16)
    hidden = torch.randn(8, 32)
    hidden[:4, 3] = torch.nan
    spans = [(sequence([0], "a"), 0, 4), (sequence([1], "b"), 0, 4)]
    got = Side(model, 2, "packed").run(spans, hidden)
    assert got[:4].isnan().all()
    assert torch.isfinite(got[4:]).all()


@pytest.mark.parametrize("experts", [False, True])
def test_a_call_runs_blocks_while_there_is_time_or_nobody_waits(experts: bool) -> None:
    """With the same bits, however many blocks are one call. Blocks with experts are calls of their
    own."""
    changes: dict[str, Any] = {"model_type": "mixtral", "num_local_experts": 4} if experts else {}
    model = make_model(num_hidden_layers=5, blocks=1, **changes)
    side, hidden = Side(model, 4, "packed"), torch.randn(40, model.manifest.config["hidden_size"])
    blocks = [side.layers[:1], side.layers[1:3], side.layers[3:]]
    spans = [(sequence([2, 0, 3]), 0, 40)]
    expected = side.run(spans, hidden)
    quiet, rung = Bell(), Bell()
    rung.ring()
    one, all_of = [1, 1, 1], [1, 1, 1] if experts else [3]
    for seconds, bell, counts in (
        (0.0, None, one), (1e9, None, all_of), (0.0, rung, one), (1e9, rung, all_of),
        (0.0, quiet, all_of),
    ):  # fmt: skip
        side.kv.fill_(torch.nan)
        step, got, at, ran = side.decoder.step(spans), hidden.clone(), 0, []
        while at < len(blocks):
            kv = side.kv[sum(map(len, blocks[:at])) :]
            ran.append(step.run(at, blocks[at:], got, kv, seconds, bell))
            at += ran[-1]
        assert ran == counts
        assert torch.equal(got, expected)
