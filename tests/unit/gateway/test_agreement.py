"""Which replica is wrong, by what all of them answer."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.agreement import Agreement, Verdict
from shared.ids import NodeId
from shared.known_tokens import TOLERANCE, Answer, alike

A, B, C = (NodeId(name) for name in "abc")
RIGHT: Answer = (-1.0, -2.0, -3.0)
WRONG: Answer = (-9.0, -1.0, -12.0)


def test_one_node_alone_proves_nothing() -> None:
    found = Agreement()
    assert [found.hear(A, RIGHT) for _ in range(3)] == [Verdict.OPEN] * 3
    assert found.hear(B, WRONG) is Verdict.OPEN


def test_two_that_agree_are_right_and_the_third_is_asked_again() -> None:
    found = Agreement()
    found.hear(A, WRONG)
    found.hear(B, RIGHT)
    assert found.hear(C, RIGHT) is Verdict.ALIKE
    assert set(found.doubts) == {A}
    assert found.hear(A, WRONG) is Verdict.WRONG
    found.forget(A)
    assert found.hear(A, WRONG) is Verdict.OTHER, "its next process"
    assert found.hear(A, RIGHT) is Verdict.ALIKE
    assert not found.doubts


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ((-1.1, -2.1, -2.9), True),
        ((-1.0, -2.0, -3.0 - 3.1 * TOLERANCE), False),
        ((-1.0, -2.0, nan), False),
        ((-1.0, -2.0, -inf), False),
        ((-1.0, -2.0), False),
    ],
)
def test_rounding_is_no_fault(other: Answer, expected: bool) -> None:
    assert alike(RIGHT, other) is expected
    assert alike((-1.0, -inf), (-1.0, -inf))


@given(order=st.permutations([A, B, C, NodeId("d"), NodeId("e")]), rounds=st.integers(3, 6))
def test_whatever_the_order_only_the_wrong_ones_are_found(order: list[NodeId], rounds: int) -> None:
    """Two of five are wrong, each in its own way."""
    wrong = {A: (-9.0, -9.0, -9.0), B: (-30.0, 0.0, nan)}
    found, condemned = Agreement(), set()
    for _ in range(rounds):
        for node in order:
            if found.hear(node, wrong.get(node, RIGHT)) is Verdict.WRONG:
                condemned.add(node)
    assert condemned == set(wrong)
