"""Rates fitted to a cluster: the peak is what it should be, and shape and order stay."""

from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BadInput
from simulation.fit import PEAK_WINDOW_S, fitting_factor, peak, scale_rate
from simulation.traces import Row, Workload

GAPS = st.lists(st.floats(0, 30), min_size=1, max_size=200)
FACTORS = st.floats(0.01, 8)


def made(gaps: list[float]) -> Workload:
    """Models take turns; a request's prompt tells which it is."""
    arrivals = accumulate(gaps)
    rows = [Row(at, n + 1, 10, "ab"[n % 3 == 0]) for n, at in enumerate(arrivals)]
    return Workload("made", tuple(rows))


def test_peak_is_the_busiest_window() -> None:
    rows = [Row(at, 1, 1, "m") for at in (0, 1, 2, 50, 51, 52, 53, 59.9, 63, 200)]
    assert peak(rows, lambda row: 2.0) == 2.0 * 5 / PEAK_WINDOW_S
    assert peak(rows, lambda row: 2.0, window_s=2) == 2.0 * 2 / 2
    assert peak(rows, lambda row: 30.0 if row.arrival_s == 200 else 1) == 30 / PEAK_WINDOW_S


@given(GAPS)
def test_peak_is_that_of_all_windows(gaps: list[float]) -> None:
    rows = made(gaps).rows
    windows = [
        sum(row.prompt_tokens for row in rows if end - PEAK_WINDOW_S < row.arrival_s <= end)
        for end in (row.arrival_s for row in rows)
    ]
    found = peak(rows, lambda row: row.prompt_tokens)
    assert found == pytest.approx(max(windows) / PEAK_WINDOW_S)


def test_after_fitting_the_peak_just_fits() -> None:
    rows = [Row(n / 40, 1, 1, "m") for n in range(800)]
    workload = Workload("made", (*rows, *(Row(100.0 + n, 1, 1, "m") for n in range(200))))
    for capacity in (3.0, 17.0):
        factor = fitting_factor(workload.rows, lambda row: 0.3, capacity)
        assert factor == pytest.approx(capacity / 12, rel=0.01)
        fitted = scale_rate(workload, factor)
        assert peak(fitted.rows, lambda row: 0.3) == pytest.approx(capacity, rel=0.03)


@given(GAPS, FACTORS)
def test_every_stretch_keeps_its_share(gaps: list[float], factor: float) -> None:
    workload = made(gaps)
    try:
        scaled = scale_rate(workload, factor)
    except BadInput:
        assert factor * len(workload.rows) < 2
        return
    kept = Counter(row.prompt_tokens for row in scaled.rows)
    for model in workload.models:
        counts = [kept[row.prompt_tokens] for row in workload.rows if row.model == model]
        for first in range(len(counts)):
            for end in range(first, len(counts)):
                part = counts[first : end + 1]
                assert abs(sum(part) - factor * len(part)) < 1 + 0.01 * len(part)


@given(GAPS, FACTORS)
def test_order_lengths_and_time_stay(gaps: list[float], factor: float) -> None:
    workload = made(gaps)
    originals = {row.prompt_tokens: row for row in workload.rows}
    try:
        scaled = scale_rate(workload, factor).rows
    except BadInput:
        return
    arrivals = [row.arrival_s for row in scaled]
    assert arrivals == sorted(arrivals)
    for model in workload.models:
        mine = [row.prompt_tokens for row in scaled if row.model == model]
        assert mine == sorted(mine)
    for row in scaled:
        original = originals[row.prompt_tokens]
        assert row._replace(arrival_s=original.arrival_s) == original
        late = row.arrival_s - original.arrival_s
        assert 0 <= late < PEAK_WINDOW_S
        assert not late or factor > 1


def test_it_is_said() -> None:
    workload = made([1.0] * 100)
    assert scale_rate(workload, 1.001) is workload
    assert scale_rate(workload, 0.25, "as asked").notes == (
        "rate scaled by 0.25 (as asked): 26 requests of 100, in the same time, thinned evenly",
    )
    assert "200 requests of 100" in scale_rate(workload, 2).notes[0]


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan"), 0.001])
def test_bad_factors(factor: float) -> None:
    with pytest.raises(BadInput, match="leaves"):
        scale_rate(made([1.0] * 100), factor)
