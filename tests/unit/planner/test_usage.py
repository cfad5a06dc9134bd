"""What one model has had of the devices, and whether it waits in vain."""

import math

import pytest

from services.planner.core.arbiter import TURN_S
from services.planner.core.usage import ONE_USE_S, PATIENCE_S, USED_S, Usage


def test_a_model_is_starved_from_a_long_wait_until_its_replica_has_served_a_turn() -> None:
    usage = Usage()
    usage.note(0.0, 0, asked=True, serves=False)
    usage.note(PATIENCE_S - 1, 0, asked=True, serves=False)
    assert not usage.starved(PATIENCE_S - 1)
    assert usage.starved(PATIENCE_S)
    served_at = PATIENCE_S + 5
    usage.note(served_at, 1, asked=True, serves=True)
    assert usage.starved(served_at + TURN_S - 1)
    usage.note(served_at + TURN_S, 1, asked=True, serves=True)
    assert not usage.starved(served_at + TURN_S)


def test_a_wait_begins_anew_when_a_replica_serves_or_nothing_is_asked_for() -> None:
    for asked, serves in ((True, True), (False, False)):
        usage = Usage()
        usage.note(0.0, 0, asked=True, serves=False)
        usage.note(PATIENCE_S - 1, 1, asked=asked, serves=serves)
        usage.note(PATIENCE_S, 0, asked=True, serves=False)
        assert not usage.starved(PATIENCE_S + 1)


def used(*uses: tuple[float, float, float]) -> Usage:
    """`uses`: when requests came, when a replica served them, and when the last had ended."""
    usage = Usage()
    for asked_at, served_at, ended_at in uses:
        usage.note(asked_at, 1, asked=True, serves=False)
        usage.note(served_at, 1, asked=True, serves=True)
        usage.note(ended_at, 1, asked=False, serves=True)
    return usage


def test_a_model_is_used_as_often_as_requests_begin_to_come_however_long_they_wait() -> None:
    prompt, late = used((0.0, 0.1, 0.5)), used((0.0, 4.0, 4.4))
    often = used(*((at, at + 0.1, at + 0.5) for at in (0.0, 1.0, 2.0)))
    assert late.uses_per_minute(5.0) == pytest.approx(prompt.uses_per_minute(5.0), rel=0.02)
    assert often.uses_per_minute(5.0) == pytest.approx(3 * prompt.uses_per_minute(5.0), rel=0.02)
    assert prompt.uses_per_minute(5.0) == pytest.approx(60 / USED_S, rel=0.1)


def test_requests_that_keep_coming_count_as_a_use_now_and_then() -> None:
    assert used((0.0, 0.1, 1e5)).uses_per_minute(1e5) == pytest.approx(60 / ONE_USE_S)


def test_what_is_long_past_counts_less_and_less() -> None:
    once = used((0.0, 0.1, 0.5))
    later = once.uses_per_minute(USED_S)
    assert later == pytest.approx(once.uses_per_minute(0.0) / math.e, rel=0.01)
    assert Usage().uses_per_minute(0.0) == 0.0
