"""When an instance is left alone, tried, and used again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.breaker import (
    EJECTED_S,
    FORGIVEN_S,
    PAUSE_S,
    REFUSED_S,
    SHARE,
    Breaker,
    State,
    may_eject,
)
from shared.ids import RequestId

A, B = RequestId("a"), RequestId("b")


def test_refusals_keep_an_instance_out_for_longer_and_longer() -> None:
    one, now, waits = Breaker(), 100.0, []
    for _ in range(10):
        assert one.refuse(A, now)
        assert not one.refuse(B, now), "of the same burst"
        waits.append(one.until - now)
        assert not one.admits(now + 0.9 * waits[-1])
        now = one.until
        assert one.admits(now)
        one.begin(A)
    assert waits[:3] == pytest.approx([PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S])
    assert waits[-1] == pytest.approx(REFUSED_S)


def test_one_request_is_tried_and_others_wait_for_what_comes_of_it() -> None:
    one = Breaker()
    one.fail(A, True, 0.0)
    assert one.admits(PAUSE_S)
    one.begin(A)
    assert one.state is State.HALF_OPEN
    assert not one.admits(PAUSE_S + 1.0), "a is tried"
    assert not one.fail(B, True, PAUSE_S + 1.0), "it came before"
    assert not one.accepted(A), "it failed before, so acceptance says little"
    assert not one.gave(B, 2.0)
    assert one.gave(A, 2.0)
    assert one.admits(2.0)


def test_after_a_refusal_acceptance_is_enough() -> None:
    one = Breaker()
    one.refuse(A, 0.0)
    one.begin(A)
    assert one.accepted(A)
    assert one.state is State.CLOSED


def test_a_request_that_its_client_ends_says_nothing() -> None:
    one = Breaker()
    one.fail(A, True, 0.0)
    one.begin(A)
    one.end(A)
    assert one.state is State.HALF_OPEN
    assert one.admits(PAUSE_S)
    one.begin(B)
    assert not one.admits(PAUSE_S)


def test_who_failed_again_and_again_is_ejected_for_longer_and_then_forgiven() -> None:
    one, now, waits = Breaker(), 0.0, []
    for _ in range(12):
        one.begin(A)
        one.fail(A, True, now)
        waits.append(one.pause_s)
        now = one.until
    assert waits == sorted(waits)
    assert waits[-1] == EJECTED_S
    assert one.ejects
    one.begin(A)
    one.gave(A, now)
    one.gave(A, now + FORGIVEN_S + 1)
    one.fail(A, True, now + FORGIVEN_S + 1)
    assert one.pause_s == PAUSE_S


def test_who_may_not_be_ejected_is_soon_tried_again() -> None:
    one, now = Breaker(), 0.0
    for _ in range(12):
        one.begin(A)
        one.fail(A, False, now)
        assert one.pause_s <= REFUSED_S
        assert not one.ejects
        now = one.until


@given(count=st.integers(1, 40), ill=st.sets(st.integers(0, 39)), rounds=st.integers(1, 12))
def test_never_more_than_a_share_is_ejected(count: int, ill: set[int], rounds: int) -> None:
    breakers, now = [Breaker() for _ in range(count)], 0.0
    for _ in range(rounds):
        for number in ill:
            if number < count and (one := breakers[number]).admits(now):
                one.begin(A)
                one.fail(A, may_eject(one, breakers), now)
        ejected = sum(one.ejects for one in breakers)
        assert ejected <= max(min(1, count - 1), int(SHARE * count))
        now = max(now, *(one.until for one in breakers))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end", "refuse", "fail", "slow", "accepted", "gave"]),
        st.sampled_from([A, B]),
        st.floats(0, 3),
    )
)


@given(steps=STEPS)
def test_it_always_comes_back(steps: list[tuple[str, RequestId, float]]) -> None:
    """Whatever happens: while closed it admits; once its pause is over, it admits or tries one; and
    a trial that goes well closes it."""
    one, now = Breaker(), 0.0
    for what, request, seconds in steps:
        now += seconds
        match what:
            case "begin" if one.admits(now):
                one.begin(request)
            case "end":
                one.end(request)
            case "refuse":
                one.refuse(request, now)
            case "fail":
                one.fail(request, True, now)
            case "slow":
                one.slow(now)
            case "accepted":
                one.accepted(request)
            case "gave":
                one.gave(request, now)
        if one.state is State.CLOSED:
            assert one.admits(now)
            assert one.trial is None
        assert (one.state is State.OPEN) <= (one.trial is None)
        assert one.until <= now + EJECTED_S
    now = max(now, one.until)
    assert one.admits(now) or one.trial is not None
    if one.admits(now):
        one.begin(A)
    if one.trial is not None:
        one.accepted(one.trial)
    if one.trial is not None:
        one.gave(one.trial, now)
    if one.trial is not None:
        one.close()
    assert one.state is State.CLOSED


def test_what_answers_wrong_is_left_alone_whatever_else_happens() -> None:
    one = Breaker()
    one.condemn()
    assert one.wrong
    assert one.faulty
    one.begin(A)  # a check
    assert not one.refuse(A, 1.0)
    assert not one.fail(A, True, 1.0)
    assert not one.accepted(A)
    assert not one.gave(A, 2.0)
    one.end(A)
    assert not one.admits(1e9)
    one.close()
    assert one.admits(2.0)
