"""A wall clock that jumps, and what is told of it."""

from services.planner.core.steady import DRIFT_NS, SteadyClock
from services.planner.core.tickets import Moment

S = 10**9
HOUR = 3600 * S


def moment(at: float, ahead_ns: int) -> Moment:
    return Moment(at, round(at * S) + ahead_ns)


def test_a_jump_is_followed_once_nothing_holds_the_clock() -> None:
    clock = SteadyClock()
    assert clock.tell(moment(1.0, HOUR), lambda: True) == moment(1.0, HOUR), "the first"
    for ahead in (0, 2 * HOUR):
        assert clock.tell(moment(2.0, ahead), lambda: True) == moment(2.0, HOUR)
    assert clock.tell(moment(3.0, 0), lambda: False) == moment(3.0, 0)
    assert clock.tell(moment(4.0, HOUR), lambda: True) == moment(4.0, 0)


def test_a_clock_that_is_slewed_is_followed_at_any_time() -> None:
    clock = SteadyClock()
    for n in range(5):
        slewed = moment(1.0 + n, n * DRIFT_NS)
        assert clock.tell(slewed, lambda: True) == slewed
