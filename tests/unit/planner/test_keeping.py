"""What is kept that is not needed: by number, for the time that would have cost least."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.keeping import ENOUGH, NOT_NEEDED, Gaps, Idle


def after(*steps: tuple[float, int], there: int = 0) -> Idle:
    """The load has needed so many since these times."""
    idle = NOT_NEEDED
    for now, need in steps:
        idle = idle.after(need, now, there)
    return idle


def test_each_number_has_its_own_gaps() -> None:
    idle = after((0.0, 4), (1.0, 2), (3.0, 1))
    assert idle.since[1:] == (3.0, 1.0, 1.0)
    later = idle.after(3, 5.0, 0)
    assert list(idle.ended(later, 5.0)) == [(2, 2.0), (3, 4.0)]
    assert list(later.ended(later.after(4, 6.0, 0), 6.0)) == [(4, 5.0)]


def test_what_nobody_asked_for_counts_as_needed_until_it_was_found() -> None:
    asked = NOT_NEEDED.after(3, 0.0, 3).after(1, 2.0, 3)
    assert asked.kept(3, 2.9, lambda _: 1.0) == 3
    assert asked.after(1, 5.0, 3).kept(3, 5.0, lambda _: 1.0) == 1, "it was long on its way"
    assert asked.after(1, 4.0, 1).after(1, 6.0, 2).kept(2, 6.9, lambda _: 1.0) == 2
    idle = after((7.0, 1), there=3)
    assert idle.kept(3, 7.9, lambda _: 1.0) == 3
    assert idle.ends(3, lambda _: 1.0) == 8.0
    assert idle.kept(3, 8.0, lambda _: 1.0) == 1
    assert idle.ends(1, lambda _: 1.0) is None
    assert idle.kept(2, 7.5, lambda _: 1.0) == 2


def test_a_number_that_is_kept_keeps_those_below_it() -> None:
    idle = after((0.0, 3), (1.0, 1))
    assert idle.kept(9, 2.0, lambda number: 5.0 if number == 3 else 0.0) == 3


def learnt(lengths: Sequence[float], number: int = 1) -> Gaps:
    gaps = Gaps()
    for seconds in lengths:
        gaps.note(number, seconds)
    return gaps


def test_few_gaps_say_nothing() -> None:
    gaps = learnt([1.0] * (int(ENOUGH) - 1))
    assert str(gaps.keep(1, 2.0)) == "2 s"
    assert gaps.keep(2, 3.0).seconds == 3.0
    assert gaps.keep(1, 2.0).gaps == 0


def test_what_comes_back_soon_is_kept_and_what_comes_back_late_goes_at_once() -> None:
    assert learnt([3.5] * 30).keep(1, 2.0).seconds == 0.0, "3.5 s cost more than the price"
    assert learnt([3.5] * 30).keep(1, 6.0).seconds == 4.0
    mixed = learnt([0.9, 0.9, 0.9, 300.0] * 10).keep(1, 2.0)
    assert (mixed.seconds, str(mixed)) == (1.0, "1.0 s: 22 of its last 30 gaps were no longer")


def test_the_other_numbers_and_what_is_long_past_do_not_count() -> None:
    gaps = learnt([0.5] * 200)
    for _ in range(300):
        gaps.note(1, 100.0)
        gaps.note(2, 0.5)
    assert gaps.keep(1, 2.0).seconds == 0.0
    assert gaps.keep(2, 2.0).seconds == 0.5


def cost(lengths: Sequence[float], kept_s: float, price_s: float) -> float:
    return sum(min(gap, kept_s) + (gap > kept_s) * price_s for gap in lengths)


@given(
    st.lists(st.floats(0.01, 1000.0), min_size=10, max_size=40),
    st.sampled_from((0.5, 2.0, 15.0, 200.0)),
)
def test_it_costs_about_the_least_that_one_time_can_cost_and_never_runs_away(
    lengths: list[float], price_s: float
) -> None:
    kept_s = learnt(lengths).keep(1, price_s).seconds
    assert 0 <= kept_s <= price_s * (len(lengths) + 1)
    best = min(cost(lengths, each, price_s) for each in (0.0, price_s, *lengths))
    # Lengths are known to within a factor of root 2, older ones count less, and there is one more.
    assert cost(lengths, kept_s, price_s) <= 2.1 * best + 2 * price_s


@pytest.mark.parametrize("price_s", [1.0, 4.0])
def test_dearer_reloads_keep_longer(price_s: float) -> None:
    gaps = learnt([0.5, 1.0, 2.0, 4.0, 8.0, 16.0] * 6)
    assert gaps.keep(1, price_s).seconds <= gaps.keep(1, 2 * price_s).seconds
