"""What a node measures is never more than it can do, and is that once it has done it."""

from dataclasses import dataclass
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node.core.profile import APART, FEW, PERIODS, EngineTimes, Latency, Throughput

BETA = 1e9


@dataclass(frozen=True)
class Moved:
    nbytes: int
    pace: float
    """Share of the port's rate that the source keeps up with."""
    gap: float
    """Seconds before it in which the port is idle."""
    early: float
    """How long before its turn at the port its first byte comes, s."""


MOVES = st.builds(
    Moved,
    nbytes=st.integers(1, 1 << 28),
    pace=st.floats(0.05, 1.0),
    gap=st.sampled_from([0.0, 0.0, 0.1, 3.0]),
    early=st.sampled_from([0.0, 0.001, 0.5]),
)


def intervals(moves: list[Moved]) -> list[tuple[float, float, int]]:
    """The port takes one after the other."""
    found, at = [], 0.0
    for move in moves:
        begins = at + move.gap
        at = begins + move.nbytes / (BETA * move.pace)
        found.append((begins - move.early, at, move.nbytes))
    return found


@given(moves=st.lists(MOVES, max_size=30))
def test_a_port_is_never_said_to_be_faster_than_it_is(moves: list[Moved]) -> None:
    port = Throughput()
    for interval in intervals(moves):
        port.add(*interval)
        assert port.bytes_per_s <= BETA * (1 + 1e-6)


@given(before=st.lists(MOVES, max_size=PERIODS - 2), after=st.lists(MOVES, max_size=10))
def test_periods_at_full_rate_show_it_whatever_comes_between(
    before: list[Moved], after: list[Moved]
) -> None:
    """Two of them: one may have been an accident."""
    full = [Moved(1 << 28, 1.0, 3.0, 0.0)] + [Moved(1 << 28, 1.0, 0.0, 0.0)] * 3
    idle = [m for m in after if not m.gap]
    port = Throughput()
    for interval in intervals([*before, *full, *full, *idle]):
        port.add(*interval)
    assert port.bytes_per_s >= BETA * (1 - 1e-6)


@given(rates=st.lists(st.floats(1e6, 1e9), min_size=3, max_size=PERIODS), wild=st.integers(0, 9))
def test_one_wild_period_is_not_believed(rates: list[float], wild: int) -> None:
    port = Throughput()
    for number, rate in enumerate(rates):
        factor = 1e6 if number == wild else 1.0
        port.add(10.0 * number, 10.0 * number + 1.0, int(rate * factor))
    assert port.bytes_per_s <= max(rates) * (1 + 1e-6)


@given(waits=st.lists(st.floats(0.001, 9.0), min_size=1), wild=st.booleans())
def test_the_fixed_time_is_the_least_that_was_seen(waits: list[float], wild: bool) -> None:
    latency = Latency()
    for wait in waits:
        latency.add(wait)
    assert min(waits) <= latency.seconds <= sorted(waits)[min(1, len(waits) - 1)]
    if len(waits) > 1 and wild:
        latency.add(1e-9)
        assert latency.seconds >= min(waits)


PASSES = st.lists(st.tuples(st.integers(1, 2048), st.floats(-0.01, 0.01)), min_size=2, max_size=40)


@given(passes=PASSES, one=st.floats(0.001, 0.1), more=st.floats(1e-6, 1e-4))
def test_the_engine_line_is_found_again(
    passes: list[tuple[int, float]], one: float, more: float
) -> None:
    exact, noisy = EngineTimes(), EngineTimes()
    for tokens, noise in passes:
        seconds = one + more * (tokens - 1)
        exact.add(tokens, seconds)
        noisy.add(tokens, seconds * (1 + noise))
    counts = [tokens for tokens, _ in passes]
    if min(counts) <= FEW and max(counts) >= APART * min(counts):
        assert exact.line() == pytest.approx((one, more), rel=1e-6)
    assert all(value >= 0 for value in noisy.line())


@given(order=st.permutations(list(range(12))))
def test_wild_passes_do_not_move_the_engine_line(order: list[int]) -> None:
    times = EngineTimes()
    sizes = list(accumulate([1, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 100]))
    for place in order:
        wild = 20.0 if sizes[place] in (32, 128) else 1.0
        times.add(sizes[place], (0.02 + 1e-5 * (sizes[place] - 1)) * wild)
    one, more = times.line()
    assert one == pytest.approx(0.02, rel=0.05)
    assert more == pytest.approx(1e-5, rel=0.05)
