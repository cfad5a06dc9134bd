"""History: a daily rhythm is expected on the third day, chance and what has ceased are not."""

import random
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner.core.rhythm import (
    DAY_S,
    GRACE_S,
    KEPT_DAYS,
    SLOT_S,
    SLOTS,
    WEEK,
    Expected,
    History,
    Rhythm,
)

NINE = 9 * 3600
MONDAY = 20_780
"""A day that is a Monday; tests count days from it."""
LEAD_S = 5.0


def at(day: int, second: float = 0.0) -> float:
    return (MONDAY + day) * DAY_S + second


def burst(
    rhythm: Rhythm, day: int, need: float, begin_s: float = NINE, lasts_s: float = 60
) -> None:
    """A load of `need` replicas from that second of the day on, as a planner sees it."""
    rhythm.note(at(day, begin_s) - 1, 0.0)
    for second in range(int(lasts_s)):
        rhythm.note(at(day, begin_s + second), need)
    for second in range(0, SLOT_S + 60, 10):
        rhythm.note(at(day, begin_s + lasts_s + second), 0.0)


def known(days: Iterable[int], need: float = 3.0, begin_s: float = NINE) -> Rhythm:
    rhythm = Rhythm()
    rhythm.note(at(0), 0.0)
    for day in days:
        burst(rhythm, day, need, begin_s)
    return rhythm


def slot(day: int, second: float = NINE) -> int:
    return int(at(day, second) // SLOT_S)


def replicas(rhythm: Rhythm, day: int, second: float = NINE) -> int:
    expected = rhythm.expected(slot(day, second))
    return expected.replicas if expected is not None else 0


def test_a_daily_rhythm_is_expected_on_the_third_day() -> None:
    rhythm = known([0])
    assert replicas(rhythm, 1) == 0
    burst(rhythm, 1, 3.0)
    assert replicas(rhythm, 2) == 3
    assert replicas(rhythm, 2, NINE + SLOT_S) == 0
    assert replicas(rhythm, 2, NINE - SLOT_S) == 0


def test_it_is_loaded_ahead_and_stays_until_it_has_come() -> None:
    rhythm = known([0, 1])
    nine = at(2, NINE)
    assert rhythm.ahead(nine - LEAD_S - 2, LEAD_S) is None
    ahead = rhythm.ahead(nine - LEAD_S + 3, LEAD_S)
    assert ahead is not None
    assert ahead.replicas == 3
    rhythm.note(nine - 1, 0.0)
    for second in range(30):
        rhythm.note(nine + second, 3.0)
    assert rhythm.ahead(nine + 30, LEAD_S) is None, "it has come: what is there decides"


def test_what_does_not_come_is_waited_for_only_so_long() -> None:
    rhythm = known([0, 1], begin_s=NINE + 60)
    rhythm.note(at(2, NINE + 50), 0.0)
    assert rhythm.ahead(at(2, NINE + 70), LEAD_S) is not None
    assert rhythm.ahead(at(2, NINE + 60 + GRACE_S + 15), LEAD_S) is None


def test_the_smaller_of_two_days_and_both_times_count() -> None:
    rhythm = known([0], need=5.0, begin_s=NINE + 100)
    burst(rhythm, 1, 2.0, NINE + 30)
    expected = rhythm.expected(slot(2))
    assert expected is not None
    assert expected.replicas == 2
    assert 25 <= expected.earliest_s <= 40
    assert 95 <= expected.latest_s <= 110


def test_what_has_ceased_is_forgotten_after_a_day() -> None:
    assert replicas(known([0, 1]), 3) == 0
    assert replicas(known(range(20)), 21) == 3, "but not what is so on this weekday"
    assert replicas(known(range(20)), 35) == 0


def test_a_weekly_rhythm_is_expected_in_the_third_week_and_on_no_other_day() -> None:
    mondays = known([0, 7])
    assert replicas(mondays, 14) == 3
    assert [replicas(mondays, day) for day in (13, 15, 16)] == [0, 0, 0]
    expected = mondays.expected(slot(14))
    assert expected is not None
    assert expected.weekly


def test_weekends_are_free_once_two_of_them_were() -> None:
    working = [day for day in range(21) if day % WEEK < 5]
    rhythm = known([day for day in working if day < 4])
    burst(rhythm, 4, 3.0)
    assert replicas(rhythm, 5) == 3, "the first Saturday cannot be known"
    third = known([day for day in working if day < 19])
    assert [replicas(third, day) for day in range(19, 22)] == [0, 0, 3]


def test_short_blips_are_nothing() -> None:
    rhythm = Rhythm()
    for day in range(3):
        burst(rhythm, day, 1.0, lasts_s=1)
    assert replicas(rhythm, 3) == 0


def test_noise_causes_next_to_no_replicas() -> None:
    """Ten bursts a day at random times, for three weeks: what is held for them in vain."""
    draw, rhythm, held_s = random.Random(1), Rhythm(), 0.0
    for day in range(21):
        begins = sorted(draw.sample(range(0, DAY_S - 1000, 700), 10))
        for begin in begins:
            burst(rhythm, day, 2.0, begin)
        for slot_ in range(SLOTS):
            expected = rhythm.expected(slot(day + 1, slot_ * SLOT_S))
            if expected is not None:
                held = expected.latest_s - expected.earliest_s + GRACE_S + LEAD_S
                held_s += expected.replicas * held
    bursts_s = 21 * 10 * 2 * 60.0
    assert held_s < 0.1 * bursts_s


def test_it_is_stored_small_and_read_back() -> None:
    rhythm = known(range(30))
    history = rhythm.history
    assert len(history.days) <= KEPT_DAYS + 1
    assert sum(len(kept) for kept in history.days.values()) <= 9_000
    again = Rhythm(history)
    assert again.history == history
    assert again.expected(slot(30)) == rhythm.expected(slot(30))
    assert replicas(again, 30) == 3


loads = st.lists(st.tuples(st.floats(0, 2 * DAY_S), st.floats(0, 1000)), max_size=60)


@settings(deadline=None)
@given(loads, st.floats(0, 100))
def test_never_negative_never_more_than_was_and_bounded(
    said: list[tuple[float, float]], lead_s: float
) -> None:
    rhythm, now, most = Rhythm(), at(0), 0.0
    for passed, need in said:
        now, most = now + passed, max(most, need)
        rhythm.note(now, need)
        ahead = rhythm.ahead(now, lead_s)
        if ahead is not None:
            assert 0 < ahead.replicas <= most + 1
            assert 0 <= ahead.earliest_s <= ahead.latest_s <= SLOT_S
        assert len(rhythm.history.days) <= KEPT_DAYS + 1


@given(st.integers(0, SLOTS - 1), st.integers(1, 200), st.integers(1, 200))
def test_a_perfect_rhythm_is_expected_whatever_its_time_and_size(
    index: int, first: int, second: int
) -> None:
    days = {}
    for day, need in ((0, first), (1, second)):
        kept = bytearray(2 * SLOTS)
        kept[2 * index] = need
        days[MONDAY + day] = bytes(kept)
    expected = Rhythm(History(MONDAY, days)).expected((MONDAY + 2) * SLOTS + index)
    assert expected == Expected(min(first, second), 0.0, 0.0, weekly=False)
