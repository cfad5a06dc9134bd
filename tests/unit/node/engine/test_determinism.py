"""A request's logits are the same, bit for bit, however it is run. Resumption relies on it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from services.node.core.kv import PAGE
from services.node.engine import drawing, kernels
from services.node.engine.base import Draw, Row, StagePart, Sweep
from services.node.engine.engine import TorchEngine
from services.node.engine.pages import FreePages
from services.node.engine.sampling import Drawn
from tests.support.amounts import examples
from tests.unit.node.engine.conftest import Logits
from tests.unit.node.engine.models import GREEDY, MODEL, Model, Path, make_model, part, row, run

LENGTH = 400
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
TOKENS = random.Random(7).choices(range(96), k=LENGTH)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"num_key_value_heads": 1, "hidden_size": 40, "intermediate_size": 100},
        {"num_key_value_heads": 4, "head_dim": 12, "vocab_size": 101},
        {"dtype": "bfloat16"},
        {"model_type": "mistral", "sliding_window": 150},
        QWEN3_MOE,
        QWEN3_MOE | {"dtype": "bfloat16"},
    ],
    ids=str,
)
def any_model(request: pytest.FixtureRequest) -> Model:
    return make_model(seed=5, **request.param)


def decoded_alone(model: Model, logits: Logits) -> torch.Tensor:
    """[LENGTH, vocab]: one position a step, nothing else in the batch."""
    path = Path(model)
    for position, token in enumerate(TOKENS):
        path.run([row("s", position, [token], draw=position)])
    return logits.take()


def chunks(lengths: list[int]) -> list[tuple[int, int]]:
    """(start, stop) of chunks of these lengths, and one with the rest."""
    found, start = [], 0
    for length in lengths:
        if start + length < LENGTH:
            found.append((start, start + length))
            start += length
    return [*found, (start, LENGTH)]


def companions(rng: random.Random, step: int) -> list[Row]:
    """0 to 12 other sequences that start with this step."""
    return [
        row(f"{step}-{i}", 0, rng.choices(range(96), k=rng.choice([1, 2, 5, 40])), limit=40, draw=0)
        for i in range(rng.randrange(13))
    ]


@given(
    lengths=st.lists(st.sampled_from([1, 1, 2, 3, 5, 17, 64, 130, 260]), max_size=20),
    seed=st.integers(0, 2**32),
    cuts=st.sets(st.integers(1, 5), max_size=4),
    threads=st.sampled_from([1, 2]),
)
@settings(
    max_examples=examples(10),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_same_bits_however_it_is_run(
    any_model: Model,
    logits: Logits,
    lengths: list[int],
    seed: int,
    cuts: set[int],
    threads: int,
) -> None:
    expected = _expected(any_model, logits)
    rng, path = random.Random(seed), Path(any_model, tuple(sorted(cuts)))
    with torch_threads(threads):
        for step, (start, stop) in enumerate(chunks(lengths)):
            others = companions(rng, step)
            at = rng.randrange(len(others) + 1)
            mine = row("s", start, TOKENS[start:stop], draw=0)
            path.run([*others[:at], mine, *others[at:]])
            assert torch.equal(logits.take()[at], expected[stop - 1])
            for engine, _, _ in path.stages:
                engine.free(tuple(other.sequence for other in others))


class Accepting:
    """Stands for `sample` in a step whose last row has proposed tokens: what is drawn is these."""

    logits: torch.Tensor

    def __init__(self, before: int, tokens: list[int], wrong: int) -> None:
        """So many draws before the row's; so many proposed tokens after those accepted."""
        self._before = before
        self._drawn = [0] * before + tokens + [0]
        self._wrong = wrong

    def __call__(self, values: torch.Tensor, *_: Any) -> list[Drawn]:
        self.logits = values[self._before :].clone()
        return [*map(Drawn, self._drawn), *[Drawn(None)] * self._wrong]


@given(
    steps=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=30),
    start=st.integers(1, 300),
    cuts=st.sets(st.integers(1, 5), max_size=2),
    seed=st.integers(0, 2**32),
)
@settings(
    max_examples=examples(10),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_same_bits_with_proposed_tokens(
    any_model: Model,
    logits: Logits,
    steps: list[tuple[int, int]],
    start: int,
    cuts: set[int],
    seed: int,
) -> None:
    """A step has one position, so many right proposed tokens and so many wrong ones. Which are
    right is for TOKENS to say: nothing is really drawn."""
    expected = _expected(any_model, logits)
    rng, path = random.Random(seed), Path(any_model, tuple(sorted(cuts)))
    path.run([row("s", 0, TOKENS[:start])])
    position = start
    for right, wrong in steps:
        if position + right >= LENGTH:
            return
        tokens = [*TOKENS[position : position + 1 + right], *rng.choices(range(96), k=wrong)]
        draw = Draw(0, GREEDY, proposed=tuple(tokens[1:]))
        others = companions(rng, position)
        accepting = Accepting(len(others), tokens[1 : 1 + right], wrong)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drawing, "sample", accepting)
            path.run([*others, replace(row("s", position, tokens), draw=draw)])
        end = position + 1 + right
        assert torch.equal(accepting.logits[: 1 + right], expected[position:end])
        for engine, _, _ in path.stages:
            engine.free(tuple(other.sequence for other in others))
        position = end


class Crowd:
    """What else rides in a sweep: parts of any blocks, some joining on the way, some freed."""

    def __init__(self, model: Model, engine: TorchEngine, rng: random.Random) -> None:
        self._model, self._engine, self._rng = model, engine, rng
        self._made = 0

    def join(self, sweep: Sweep) -> None:
        for _ in range(self._rng.randrange(4)):
            start = self._rng.randrange(sweep.at, self._model.n_blocks)
            stop = self._rng.randint(start + 1, self._model.n_blocks)
            rows = [self._row(start) for _ in range(self._rng.randint(1, 5))]
            hidden = None
            if start:
                llama = self._model.oracle.config
                shape = (sum(row.count for row in rows), llama.hidden_size)
                hidden = torch.randn(shape, dtype=llama.dtype)
            sweep.join(StagePart(start, stop, tuple(rows), hidden))

    def _row(self, start: int) -> Row:
        self._made += 1
        tokens = self._rng.choices(range(96), k=self._rng.choice([1, 1, 2, 5, 40]))
        made = row(f"other {self._made}", 0, tokens, limit=40)
        return replace(made, tokens=()) if start else made

    def free(self, share: float) -> None:
        keys = [f"other {i + 1}" for i in range(self._made)]
        self._engine.free(tuple(key for key in keys if self._rng.random() < share))


@given(
    lengths=st.lists(st.sampled_from([1, 1, 2, 3, 17, 64, 130]), max_size=12),
    seed=st.integers(0, 2**32),
    cuts=st.sets(st.integers(1, 5), max_size=3),
)
@settings(
    max_examples=examples(10),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_same_bits_whoever_rides(
    any_model: Model, logits: Logits, lengths: list[int], seed: int, cuts: set[int]
) -> None:
    """One engine is all stages of the path, and runs parts of others in the same sweeps."""
    expected = _expected(any_model, logits)
    rng, engine = random.Random(seed), any_model.engine(kv_tokens=8192)
    crowd = Crowd(any_model, engine, rng)
    for start, stop in chunks(lengths):
        hidden: torch.Tensor | None = None
        for first, last in pairwise((0, *sorted(cuts), any_model.n_blocks)):
            mine = row(f"s {first}", start, TOKENS[start:stop], draw=0)
            mine = replace(mine, tokens=()) if first else mine
            sweep = engine.begin(MODEL)
            crowd.join(sweep)
            number = sweep.join(StagePart(first, last, (mine,), hidden))
            while not (left := sweep.advance()).get(number):
                crowd.free(0.2)
                crowd.join(sweep)
            hidden = left[number].hidden
            crowd.free(1)
        assert torch.equal(logits.take()[0], expected[stop - 1])


_decoded: dict[int, torch.Tensor] = {}


def _expected(model: Model, logits: Logits) -> torch.Tensor:
    if id(model) not in _decoded:
        _decoded[id(model)] = decoded_alone(model, logits)
    return _decoded[id(model)]


@pytest.mark.parametrize("changes", [{}, {"model_type": "mistral", "sliding_window": 150}], ids=str)
def test_the_same_without_our_kernels(
    changes: dict[str, Any], logits: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "load", lambda: None)
    model = make_model(seed=5, **changes)
    alone = decoded_alone(model, logits)
    path = Path(model)
    for start, stop in chunks([17, 1, 130, 3]):
        path.run([row("s", start, TOKENS[start:stop], draw=stop)])
        assert torch.equal(logits.take()[0], alone[stop - 1])
    assert alone.argmax(-1).tolist() == model.expected_logits(TOKENS).argmax(-1).tolist()


@given(
    lengths=st.lists(st.sampled_from([1, 1, 2, 3, 17, 64, 130]), max_size=12),
    rng=st.randoms(use_true_random=False),
    pieces=st.sampled_from([1, 3, 9]),
)
@settings(
    max_examples=examples(10),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_same_bits_wherever_pages_lie(
    any_model: Model, logits: Logits, lengths: list[int], rng: random.Random, pieces: int
) -> None:
    """Page by page anywhere, or a few at a time; and with a cached prefix of any length."""
    expected = _expected(any_model, logits)
    engine = any_model.engine(kv_tokens=2048)
    take = FreePages.take

    def scattered(self: FreePages, count: int, after: int | None) -> list[int]:
        free = take(self, self.count, None)
        found: list[int] = []
        while len(found) < count:
            start, n = rng.randrange(len(free)), min(pieces, count - len(found))
            found += free[start : start + n]
            del free[start : start + n]
        for page in free:
            self.add(page, page + 1)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FreePages, "take", scattered)
        for key in ("first", "second"):
            done = engine.adopt(MODEL, key, tuple(TOKENS), LENGTH)
            assert done == (0 if key == "first" else (LENGTH - 1) // PAGE * PAGE)
            for start, stop in chunks(lengths):
                if stop <= done:
                    continue
                mine = row(key, max(start, done), TOKENS[max(start, done) : stop], draw=0)
                run(engine, part([mine], 0, any_model.n_blocks))
                assert torch.equal(logits.take()[0], expected[stop - 1])
