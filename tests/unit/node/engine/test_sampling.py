import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.node.engine import kernels, sampling
from services.node.engine.base import Context, Draw
from services.node.engine.kernel_step import KernelOps
from services.node.engine.processors import Logits, Processor
from services.node.engine.sampling import Drawn, allowed, sample, score, uniform
from shared.errors import BadInput, LambdaScaleError, ModelError
from shared.messages.serving import LogitRules, Sampling

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
PROBABILITIES = torch.tensor([0.4, 0.05, 0.3, 0.2, 0.05])
LOGITS = PROBABILITIES.log()


@pytest.fixture(params=[False, True], ids=["host", "device"])
def either(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where draws are made. Without a GPU its way of it runs on the CPU, in Triton's interpreter:
    a draw takes 50 ms there, so test_device_sampling.py has few of them."""
    if request.param:
        pytest.importorskip("triton", reason="Triton is not installed here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_on_device", lambda logits: request.param)
        yield


def there(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(DEVICE) if sampling._on_device(logits) else logits


def tokens(logits: torch.Tensor, draws: list[Draw]) -> list[int | None]:
    return [drawn.token for drawn in sample(there(logits), draws)]


def drawn(sampling: Sampling, count: int = 2000) -> Counter[int | None]:
    """Tokens with indices 0, 1, ... of one request."""
    draws = [Draw(index, sampling) for index in range(count)]
    return Counter(tokens(LOGITS.repeat(count, 1), draws))


@pytest.mark.usefixtures("either")
def test_greedy_takes_the_first_of_the_largest() -> None:
    rows = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]])
    assert tokens(rows, [Draw(0, Sampling())] * 2) == [1, 0]


@pytest.mark.skipif(kernels.load() is None, reason="the kernels cannot be compiled here")
@given(
    width=st.one_of(st.integers(1, 70), st.sampled_from([320, 1000])),
    values=st.lists(st.sampled_from([0.0, 1.0, 2.0, -2.0, -np.inf, np.inf, np.nan]), min_size=1),
    rng=st.randoms(use_true_random=False),
)
def test_kernels_find_the_same_largest(width: int, values: list[float], rng: random.Random) -> None:
    """A few different values, so that many are equal."""
    compiled = kernels.load()
    assert compiled is not None
    logits = torch.tensor([[rng.choice(values) for _ in range(width)] for _ in range(3)])
    found = KernelOps(compiled).largest_ids(logits)
    assert torch.equal(found, sampling.largest_ids(logits))


def test_temperature_one_draws_from_the_distribution() -> None:
    count = 4000
    shares = drawn(Sampling(temperature=1.0, seed=1), count)
    for token, probability in enumerate(PROBABILITIES.tolist()):
        assert shares[token] / count == pytest.approx(probability, abs=0.03)


@pytest.mark.parametrize(("top_p", "min_p"), [(1, 0), (0.9, 0), (1, 0.1)])
@pytest.mark.usefixtures("either")
def test_any_temperature_draws(top_p: float, min_p: float) -> None:
    assert drawn(Sampling(temperature=1e-308, top_p=top_p, min_p=min_p), count=5) == {0: 5}


def test_temperature_sharpens() -> None:
    cold = drawn(Sampling(temperature=0.25, seed=1))
    assert cold[0] / 2000 == pytest.approx(0.4**4 / (PROBABILITIES**4).sum().item(), abs=0.03)


CUTS = [
    (Sampling(temperature=1.0, top_k=1), {0}),
    (Sampling(temperature=1.0, top_k=3), {0, 2, 3}),
    (Sampling(temperature=1.0, top_k=4), {0, 1, 2, 3}),
    (Sampling(temperature=1.0, top_k=99), {0, 1, 2, 3, 4}),
    (Sampling(temperature=1.0, top_p=0.0), {0}),
    (Sampling(temperature=1.0, top_p=0.39), {0}),
    (Sampling(temperature=1.0, top_p=0.6), {0, 2}),
    (Sampling(temperature=1.0, top_p=0.92), {0, 1, 2, 3}),
    # top-p of what top-k leaves: 0.4 / 0.7 is enough for 0.5.
    (Sampling(temperature=1.0, top_k=2, top_p=0.5), {0}),
    (Sampling(temperature=1.0, min_p=0.49), {0, 2, 3}),
    (Sampling(temperature=1.0, min_p=0.51), {0, 2}),
    (Sampling(temperature=1.0, min_p=1.0), {0}),
    # top-p of what min-p leaves: 0.4 / 0.7 is enough for 0.57, not for 0.58.
    (Sampling(temperature=1.0, min_p=0.6, top_p=0.57), {0}),
    (Sampling(temperature=1.0, min_p=0.6, top_p=0.58), {0, 2}),
]
"""(sampling, what it leaves of PROBABILITIES)."""


@pytest.mark.parametrize(("sampling", "allowed"), CUTS)
def test_top_k_and_top_p(sampling: Sampling, allowed: set[int]) -> None:
    assert set(drawn(sampling)) == allowed


def test_equal_logits_with_top_p() -> None:
    draws = [Draw(i, Sampling(temperature=1.0, top_p=0.5)) for i in range(300)]
    assert set(tokens(torch.zeros(300, 10), draws)) == set(range(5))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(logprobs=2)])
@pytest.mark.usefixtures("either")
def test_a_row_of_no_numbers_fails_alone(value: float, sampling: Sampling) -> None:
    rows = torch.stack([LOGITS, LOGITS, LOGITS])
    rows[1] = value
    if value != float("-inf"):
        rows[1, 2:] = 1.0
    first, second, third = sample(there(rows), [Draw(0, sampling)] * 3)
    assert (second.token, type(second.error)) == (None, ModelError)
    assert first == third == sample(there(LOGITS[None]), [Draw(0, sampling)])[0]
    assert first.error is None


class Broken(Processor):
    """A processor with a bug."""

    def apply(self, logits: Logits) -> None:
        raise IndexError("out of bounds")


@pytest.mark.parametrize(
    ("rules", "error"),
    [
        (Broken(Context((1,), 1, (), LogitRules()), None), LambdaScaleError),
        (Processor(Context((1,), 1, (0, 1, 2, 3, 4), LogitRules(min_tokens=1)), None), BadInput),
    ],
)
@pytest.mark.usefixtures("either")
def test_a_row_whose_rules_break_fails_alone(
    rules: Processor, error: type[LambdaScaleError]
) -> None:
    draws = [Draw(0, Sampling())] * 3
    first, second, third = sample(there(LOGITS.repeat(3, 1)), draws, [None, rules, None])
    assert (second.token, type(second.error)) == (None, error)
    assert first == third == Drawn(0)


@given(st.integers(), st.integers(0, 2**40))
def test_uniform_is_a_function_of_seed_and_index(seed: int, index: int) -> None:
    assert 0 <= uniform(seed, index) < 1
    assert uniform(seed, index) == uniform(seed, index)


def test_uniform_values_are_pinned() -> None:
    """Streams must survive a change of version or machine: these are part of the protocol."""
    assert [uniform(0, 0), uniform(0, 1), uniform(7, 0), uniform(-1, 3)] == [
        0.011546754286331562,
        0.5023796042735054,
        0.8720734548204873,
        0.10224385374061784,
    ]


def test_seeds_and_indices_are_independent_streams() -> None:
    values = {uniform(seed, index) for seed in range(50) for index in range(50)}
    assert len(values) == 2500
    assert sum(values) / 2500 == pytest.approx(0.5, abs=0.03)


@given(
    st.lists(
        st.tuples(st.integers(0, 2**63), st.integers(0, 1000), st.sampled_from([0.0, 0.7, 1.3])),
        min_size=1,
        max_size=8,
    )
)
def test_a_draw_does_not_depend_on_the_batch(requests: list[tuple[int, int, float]]) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(requests), 50, generator=generator)
    draws = [
        Draw(index, Sampling(temperature=temperature, seed=seed, top_k=20, top_p=0.9))
        for seed, index, temperature in requests
    ]
    together = sample(logits, draws)
    assert together == [sample(logits[i : i + 1], [draw])[0] for i, draw in enumerate(draws)]


@given(
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, 70),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 1 - 1e-9)),  # between them rounding decides
    min_p=st.floats(0, 0.9),
)
def test_what_may_be_drawn_is_what_transformers_leaves(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(seed)).double() * 3
    warpers: list[Any] = [TemperatureLogitsWarper(temperature), MinPLogitsWarper(min_p)]
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = logits[None]
    for warper in warpers:
        expected = warper(None, expected)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, weights = allowed(logits.numpy(), sampling)
    assert ids.tolist() == expected[0].isfinite().nonzero().flatten().tolist()
    np.testing.assert_allclose(weights / weights.sum(), expected.softmax(-1)[0, ids], rtol=1e-9)


@pytest.mark.usefixtures("either")
def test_log_probabilities_are_the_models_own() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    expected = logits.double().log_softmax(-1)
    draws = [
        Draw(0, Sampling(logprobs=3)),
        Draw(1, Sampling(temperature=2.0, top_k=2, seed=4, logprobs=0)),
        Draw(2, Sampling(temperature=1.0)),
    ]
    first, second, third = sample(there(logits), draws)
    assert first.token is not None
    assert second.token is not None
    assert first.logprobs is not None
    assert second.logprobs is not None
    best = expected[0].topk(3)
    assert [token for token, _ in first.logprobs.top] == best.indices.tolist()
    assert [value for _, value in first.logprobs.top] == pytest.approx(best.values.tolist())
    assert first.logprobs.drawn == pytest.approx(float(best.values[0]))
    assert second.logprobs.top == ()
    assert second.logprobs.drawn == pytest.approx(float(expected[1, second.token]))
    assert third.logprobs is None


@pytest.mark.parametrize("top", [0, 3, 99])
@pytest.mark.usefixtures("either")
def test_known_tokens_are_scored(top: int) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    expected, known = logits.double().log_softmax(-1), (49, 0, 7, 7)
    for row, token, found in zip(expected, known, score(there(logits), known, top), strict=True):
        assert (found.token, found.error) == (None, None)
        assert found.logprobs is not None
        assert found.logprobs.drawn == pytest.approx(float(row[token]), abs=1e-5)
        best = row.topk(min(top, 50))
        assert [one for one, _ in found.logprobs.top] == best.indices.tolist()
        values = [value for _, value in found.logprobs.top]
        assert values == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_only_logits_that_are_numbers_are_scored(value: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 2] = value
    bad = [found.error for found in score(logits, (0, 0, 0), 2)]
    assert [isinstance(error, ModelError) for error in bad] == [False, True, False]
    logits[1, 2] = -torch.inf
    first, never, _ = score(logits, (0, 2, 0), 2)
    assert first.logprobs is not None
    assert never.logprobs is not None
    assert never.logprobs.drawn == -np.inf
