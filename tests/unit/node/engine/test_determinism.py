"""A request's logits are the same, bit for bit, however it is run. Resumption relies on it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.node.engine.base import Row
from tests.unit.node.engine.conftest import Logits
from tests.unit.node.engine.models import Model, Path, make_model, row

LENGTH = 400
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
    max_examples=25,
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


_decoded: dict[int, torch.Tensor] = {}


def _expected(model: Model, logits: Logits) -> torch.Tensor:
    if id(model) not in _decoded:
        _decoded[id(model)] = decoded_alone(model, logits)
    return _decoded[id(model)]
