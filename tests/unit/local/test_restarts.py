"""How long what keeps ending is left alone."""

from services.local.restarts import Backoff
from services.local.supervision import exit_words


def test_waits_double_up_to_half_a_minute() -> None:
    backoff = Backoff()
    assert [backoff.wait_s(0.5) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]


def test_a_process_that_lived_a_minute_was_well_and_is_started_again_at_once() -> None:
    backoff = Backoff()
    for _ in range(4):
        backoff.wait_s(59.9)
    assert [backoff.wait_s(lived) for lived in (59.9, 60.0, 1.0, 1.0, 3600.0)] == [
        16,
        0,
        1,
        2,
        0,
    ]


def test_ends_in_words() -> None:
    assert exit_words(0) == "ended with status 0"
    assert exit_words(2) == "ended with status 2"
    assert exit_words(-9) == "was killed by SIGKILL"
    assert exit_words(-40) == "was killed by signal 40"
