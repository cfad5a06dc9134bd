"""Schedules: what is in a window, what is refused, and why."""

import calendar
from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BadInput
from shared.schedule import DAY_S, DAYS, WEEK_S, least, parse


def ns(day: int, hour: int, minute: int = 0, second: int = 0) -> int:
    """23 November 2026 was a Monday."""
    return calendar.timegm((2026, 11, 23 + day, hour, minute, second)) * 10**9


def kept(schedule: str, at_ns: int, min_instances: int = 0, warm: int = 0) -> tuple[int, int]:
    return least(schedule, min_instances, warm, [at_ns])


@pytest.mark.parametrize(
    ("at_ns", "expected"),
    [
        (ns(0, 7, 59, 59), 0),
        (ns(0, 8), 2),
        (ns(4, 17, 59, 59), 2),
        (ns(4, 18), 0),
        (ns(5, 12), 0),
        (ns(6, 12), 0),
    ],
)
def test_a_window_holds_from_its_begin_to_before_its_end(at_ns: int, expected: int) -> None:
    assert kept("mon-fri 08:00-18:00 min=2", at_ns) == (expected, 0)


def test_a_window_past_midnight_belongs_to_the_day_on_which_it_begins() -> None:
    late = "sun 22:00-06:00 min=1"
    assert [kept(late, ns(day, 5))[0] for day in (-1, 0, 1)] == [0, 1, 0]
    assert [kept(late, ns(day, 23))[0] for day in (-1, 0, 6)] == [1, 0, 1]


def test_a_windows_numbers_stand_in_place_of_the_models_own() -> None:
    night = "daily 00:00-06:00 min=0 warm=1"
    assert kept(night, ns(2, 3), min_instances=4) == (0, 1)
    assert kept(night, ns(2, 7), min_instances=4) == (4, 0)
    assert kept("daily 00:00-24:00 warm=3", ns(3, 3), min_instances=4) == (4, 3)


def test_the_larger_number_counts_where_windows_overlap() -> None:
    both = "daily 00:00-24:00 min=1; mon 08:00-09:00 min=3 warm=2"
    assert kept(both, ns(0, 8, 30)) == (3, 2)
    assert kept(both, ns(0, 9)) == (1, 0)
    assert least(both, 0, 0, [ns(0, 9), ns(0, 8, 59)]) == (3, 2), "the most at any of the times"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mon", "is no window"),
        ("monday 08:00-09:00 min=1", "'monday' is no day"),
        ("mon-fry 08:00-09:00 min=1", "'mon-fry' is no day"),
        ("mon 8:00-09:00 min=1", "are no times"),
        ("mon 08:00-25:00 min=1", "are no times of a day"),
        ("mon 08:60-09:00 min=1", "are no times of a day"),
        ("mon 08:00-08:00 min=1", "is empty; a whole day is 00:00-24:00"),
        ("mon 08:00-09:00 max=1", "'max=1' is no setting"),
        ("mon 08:00-09:00 min=-1", "'min=-1' is no setting"),
        ("mon 08:00-09:00 min=9999999", "more than"),
        ("mon 08:00-09:00 min=1 min=2", "the same number twice"),
        ("mon 08:00-09:00 min=1;", "is no window"),
        (";".join(["mon 08:00-09:00 min=1"] * 51), "51 windows"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        parse(text)


@given(st.text(alphabet="monfriday0123456789:-;,=w ", max_size=40))
def test_any_text_is_a_schedule_or_bad_input(text: str) -> None:
    with suppress(BadInput):
        parse(text)


days = st.lists(st.sampled_from(DAYS), min_size=1, max_size=4, unique=True)


@given(days, st.integers(0, 1439), st.integers(1, 1440), st.integers(0, WEEK_S - 1))
def test_windows_are_what_a_calendar_says(
    names: Sequence[str], begin: int, lasts: int, second: int
) -> None:
    """Against a plain count of the seconds since each window began."""
    end = (begin + lasts) % 1440 or 1440
    if lasts == 1440:
        begin, end = 0, 1440
    times = f"{begin // 60:02}:{begin % 60:02}-{end // 60:02}:{end % 60:02}"
    if begin == end:
        return
    at_ns = ns(0, 0) + second * 10**9
    day, of_day = divmod(second, DAY_S)
    inside = False
    for back in (0, 1):
        since = of_day + back * DAY_S - begin * 60
        span = (end - begin) * 60 if end > begin else (end - begin) * 60 + DAY_S
        inside |= DAYS[(day - back) % 7] in names and 0 <= since < span
    assert kept(f"{','.join(names)} {times} min=1", at_ns) == (int(inside), 0)
