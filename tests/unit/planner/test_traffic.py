"""Rates, prompts and stays from counts: right for a steady load, quick in a burst, forgetful."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.traffic import MERGE_S, WINDOWS_S, Arrivals, Traffic


def steady(rate: int, stay_s: float, seconds: float, tick_s: float = 0.1) -> Traffic:
    """Requests of 100 tokens at equal distances, each of which stays for `stay_s`."""
    traffic, asked = Traffic(), 0
    for tick in range(round(seconds / tick_s) + 1):
        now = tick * tick_s
        due, ended = int(now * rate + 1e-9), max(0, int((now - stay_s) * rate + 1e-9))
        there = due - ended
        new = due - asked
        traffic.note(now, new, 100 * new, inside=there, running=there, busy=0.0)
        asked = due
    return traffic


def test_nothing_is_known_of_a_model_that_nobody_asked_for() -> None:
    assert Traffic().arrivals(5.0) == Arrivals()


@pytest.mark.parametrize(("rate", "stay_s"), [(20, 1.5), (4, 6.0), (1, 0.5)])
def test_a_steady_load_is_measured(rate: int, stay_s: float) -> None:
    found = steady(rate, stay_s, seconds=60).arrivals(60.0)
    assert found.rate == pytest.approx(rate, rel=0.25)
    assert found.prompt_tokens == pytest.approx(100)
    assert found.stay_s == pytest.approx(stay_s, rel=0.1)


def test_a_burst_is_seen_within_half_a_second_and_soon_forgotten() -> None:
    traffic = steady(60, 4.0, seconds=0.5)
    assert 40 <= traffic.arrivals(0.5).rate <= 60
    assert traffic.arrivals(0.5 + WINDOWS_S[-1]).rate == 0.0


@pytest.mark.parametrize("seconds", [2.0, 5.0, 30.0])
def test_the_mean_is_known_soon_and_does_not_follow_a_burst(seconds: float) -> None:
    traffic = steady(20, 1.0, seconds)
    assert traffic.arrivals(seconds).steady == pytest.approx(20, rel=0.1)
    traffic.note(seconds, 20, 2000, inside=20, running=0, busy=0.0)
    assert traffic.arrivals(seconds).steady <= 20 * (1 + 1.3 / min(seconds, WINDOWS_S[-1]))
    assert Traffic().arrivals(0.0).steady == 0.0


def test_stays_that_still_go_on_are_not_taken_to_be_over() -> None:
    """Before the first request has ended nothing is known; then rather too long than too short."""
    assert steady(20, 4.0, seconds=3.9).arrivals(3.9).stay_s == 0.0
    assert steady(20, 4.0, seconds=5.0).arrivals(5.0).stay_s >= 4.0


@pytest.mark.parametrize("seconds", [1.0, 3.9, 5.0, 7.9])
def test_until_many_have_ended_what_runs_says_how_long_they_stay(seconds: float) -> None:
    """Too short while they become more, and never too long by much."""
    found = steady(20, 4.0, seconds).arrivals(seconds).stay_so_far_s
    assert found == pytest.approx(min(seconds, 4.0), rel=0.15)


def test_later_those_that_have_ended_say_it() -> None:
    traffic = steady(20, 4.0, seconds=60)
    usual = traffic.arrivals(60.0)
    assert usual.stay_so_far_s == usual.stay_s
    traffic.note(60.1, 60, 6000, inside=140, running=140, busy=0.0)
    assert traffic.arrivals(60.1).stay_so_far_s == pytest.approx(4.0, rel=0.1)


def test_those_that_stay_longer_than_others_did_are_seen_within_seconds() -> None:
    traffic = steady(4, 1.0, seconds=60)
    assert traffic.arrivals(60.0).lately_s < 1.0
    for tick in range(1, 41):
        traffic.note(60.0 + tick * 0.1, 0, 0, inside=4, running=4, busy=0.0)
    found = traffic.arrivals(64.0)
    assert found.stay_s < 1.2
    assert found.lately_s > 1.5


def test_a_stay_beside_prefills_counts_as_it_would_be_without() -> None:
    traffic = Traffic()
    for second in range(100):
        traffic.note(float(second), 1, 100, inside=4, running=4, busy=0.5)
    assert traffic.arrivals(99.0).stay_s == pytest.approx(2.0, rel=0.1)


def test_chance_alone_is_no_burst() -> None:
    """A thousand looks at Poisson arrivals, 5 a second: the rate is never far above."""
    draw, traffic, worst = random.Random(3), Traffic(), 0.0
    for tick in range(1000):
        asked = sum(draw.random() < 0.05 for _ in range(10))
        traffic.note(tick * 0.1, asked, asked, inside=0, running=0, busy=0.0)
        worst = max(worst, traffic.arrivals(tick * 0.1).rate)
    assert worst < 2.5 * 5


notes = st.tuples(st.floats(0, 5), st.integers(0, 50), st.integers(0, 500), st.floats(0, 1))


@given(st.lists(notes, max_size=60))
def test_never_negative_never_more_than_came_and_bounded(
    said: list[tuple[float, int, int, float]],
) -> None:
    traffic, now, total = Traffic(), 0.0, 0
    for passed, asked, inside, busy in said:
        now, total = now + passed, total + asked
        traffic.note(now, asked, 10 * asked, inside=inside, running=inside, busy=busy)
        found = traffic.arrivals(now)
        assert 0 <= found.rate <= total / WINDOWS_S[0]
        assert 0 <= found.prompt_tokens <= 10.0 + 1e-6
        assert found.stay_s >= 0
        assert found.lately_s >= 0
    assert len(traffic._longest._counts) <= WINDOWS_S[-1] / MERGE_S + 2


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.booleans()), max_size=100))
def test_windows_have_what_came_in_them(said: list[tuple[float, int, bool]]) -> None:
    """Counted anew each time, from all arrivals: those of MERGE_S count as the first of them."""
    traffic, now, came = Traffic(), 0.0, list[tuple[float, int]]()
    for passed, asked, looks in said:
        now += passed
        if came and now - came[-1][0] < MERGE_S:
            came[-1] = came[-1][0], came[-1][1] + asked
        elif asked:
            came.append((now, asked))
        traffic.note(now, asked, 0, inside=0, running=0, busy=0.0)
        if looks:
            counts = [sum(n for at, n in came if now - at < window) for window in WINDOWS_S]
            rates = [(n - n**0.5) / window for n, window in zip(counts, WINDOWS_S, strict=True)]
            assert traffic.arrivals(now).rate == max(*rates[:-1], counts[-1] / WINDOWS_S[-1])
