"""Bodies of very many values are refused before they are decoded; text counts as one value."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway import bodies
from services.gateway.api_error import ApiError
from services.gateway.bodies import CompletionBody, decoded

TEXTS = st.text(alphabet='[]{}"\\a,:')
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)


def nested(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(nested, value))
    return 1 + sum(map(nested, value.values())) if isinstance(value, dict) else 0


def strings(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(strings, value))
    if isinstance(value, dict):
        return len(value) + sum(map(strings, value.values()))
    return int(isinstance(value, str))


@given(VALUES)
def test_values_are_counted_without_the_text_in_strings(value: Any) -> None:
    raw = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "MAX_NESTED", -1)
        assert bodies._count_nested(raw) == nested(value)
    assert strings(value) <= bodies._count_quotes(raw) <= 2 * strings(value)


@pytest.mark.parametrize(
    ("values", "named"),
    [(["a"] * (2 * bodies.MAX_STRINGS + 1), "strings"), ([[]] * (bodies.MAX_NESTED - 1), "arrays")],
)
def test_more_values_than_any_use_needs_are_refused(values: list[Any], named: str) -> None:
    with pytest.raises(ApiError, match=named) as refused:
        decoded(json.dumps({"model": "m", "prompt": values}).encode(), CompletionBody)
    assert refused.value.status == 413


def test_brackets_in_a_long_text_are_text() -> None:
    text = '[{"' * 100_000
    assert (
        decoded(json.dumps({"model": "m", "prompt": text}).encode(), CompletionBody).prompt == text
    )
