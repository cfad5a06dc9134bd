"""When a queued request will probably begin."""

import pytest

from services.gateway.core.pace import UNKNOWN_S, Pace
from shared.messages.instances import Coming


def test_nothing_is_known_at_first() -> None:
    pace = Pace()
    assert pace.turn_s(3, 2, 0.0) is None
    assert pace.guess_s(3, 2, 0.0) == UNKNOWN_S


def test_it_follows_from_how_long_requests_stay_until_one_had_to_wait() -> None:
    pace = Pace()
    pace.end(4.0)
    pace.start(0.0, 10.0)
    assert pace.turn_s(3, 2, 10.0) == pytest.approx(6.0)
    assert pace.turn_s(3, 0, 10.0) is None
    for second in range(11, 15):
        pace.start(1.0, second)
    assert pace.turn_s(3, 2, 14.0) == pytest.approx(3.0)
    assert pace.turn_s(3, 2, 18.0) == pytest.approx(6.0), "the queue stands still"


def test_idle_time_is_no_pace() -> None:
    pace = Pace()
    pace.end(4.0)
    for second in range(5):
        pace.start(1.0, second)
    pace.start(0.0, 1000.0)
    assert pace.turn_s(1, 4, 1000.0) == pytest.approx(1.0)


def coming(first_s: float | None, complete_s: float | None, replicas: int = 3) -> Coming:
    return Coming(share=0.5, first_s=first_s, complete_s=complete_s, replicas=replicas)


def test_where_nothing_serves_a_request_begins_when_the_first_instance_is_there() -> None:
    pace = Pace()
    assert pace.told_s(5, 0, 0, 0.0, coming(2.5, 9.0)) == 2.5
    assert pace.told_s(5, 0, 0, 0.0, coming(None, None)) == UNKNOWN_S
    assert pace.told_s(5, 0, 0, 0.0, None) == UNKNOWN_S


def test_the_queue_moves_faster_once_more_instances_are_there() -> None:
    pace = Pace()
    for second in range(5):
        pace.start(1.0, float(second))
    alone = pace.guess_s(40, 8, 4.0)
    assert alone == 40.0
    assert pace.told_s(40, 8, 1, 4.0, coming(1.0, 10.0)) == 10.0 + 30.0 / 4
    assert pace.told_s(40, 8, 1, 4.0, coming(1.0, 50.0)) == alone
    assert pace.told_s(40, 8, 1, 4.0, coming(1.0, None)) == alone
