import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.admission import (
    MAX_CHOICES,
    MAX_SCORES,
    check_choices,
    check_scores,
    derive_seed,
    output_limit,
)
from shared.errors import BadInput


def test_choices_have_a_limit() -> None:
    check_choices(2, MAX_CHOICES // 2)
    with pytest.raises(BadInput, match="n="):
        check_choices(3, MAX_CHOICES // 2)


def test_what_is_scored_has_a_limit() -> None:
    check_scores(MAX_SCORES // 2, 1)
    check_scores(MAX_SCORES, None)
    with pytest.raises(BadInput, match="send fewer"):
        check_scores(MAX_SCORES // 2 + 1, 1)


@pytest.mark.parametrize(
    ("prompt", "asked", "default", "expected"),
    [
        (10, 5, 16, 5),
        (10, None, 16, 16),
        (95, None, 16, 5),
        (10, None, None, 90),
        (10, 90, 16, 90),
        (100, 0, 16, 0),
    ],
)
def test_output_limits(prompt: int, asked: int | None, default: int | None, expected: int) -> None:
    assert output_limit(prompt, asked, default, context=100) == expected


@pytest.mark.parametrize(
    ("prompt", "asked"), [(10, 91), (100, None), (100, 1), (500, None), (101, 0)]
)
def test_the_context_is_not_exceeded(prompt: int, asked: int | None) -> None:
    with pytest.raises(BadInput, match="context length is 100 tokens"):
        output_limit(prompt, asked, 16, context=100)


@given(seed=st.integers(), choices=st.integers(1, MAX_CHOICES))
def test_seeds_differ_and_fit_the_wire(seed: int, choices: int) -> None:
    seeds = [derive_seed(seed, choice) for choice in range(choices)]
    assert len(set(seeds)) == choices
    assert all(0 <= value < 2**63 for value in seeds)


def test_the_first_choice_has_the_given_seed() -> None:
    assert derive_seed(42, 0) == 42
