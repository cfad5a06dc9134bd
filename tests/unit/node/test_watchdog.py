"""When an engine counts as hung."""

from services.node.core.watchdog import FAILURES, LOOK_S, TIMES, Pulse, Watchdog

PATIENCE_S = 30.0


def first_hung(watchdog: Watchdog, longest_s: float, until: float, began: float = 0.0) -> float:
    """Looks at an engine that has been at one piece of work since `began`. When it first counts as
    hung; infinity: not before `until`."""
    now = began
    while now < until:
        if watchdog.look(Pulse(now - began, longest_s), now):
            return now - began
        now += LOOK_S
    return float("inf")


def test_a_step_that_does_not_come_back_is_a_hang() -> None:
    hung = first_hung(Watchdog(PATIENCE_S), 0.02, 100.0)
    assert PATIENCE_S < hung <= PATIENCE_S + LOOK_S


def test_a_slow_engine_has_ten_times_as_long_as_ever() -> None:
    hung = first_hung(Watchdog(PATIENCE_S), 9.0, 200.0)
    assert TIMES * 9.0 < hung <= TIMES * 9.0 + LOOK_S


def test_an_engine_that_waits_for_work_never_hangs() -> None:
    watchdog = Watchdog(PATIENCE_S)
    assert not any(watchdog.look(Pulse(None, 0.1), LOOK_S * n) for n in range(1000))


def test_a_process_that_was_stopped_is_no_engine_that_hangs() -> None:
    watchdog = Watchdog(PATIENCE_S)
    watchdog.look(Pulse(0.1), 0.0)
    assert not watchdog.look(Pulse(100.1), 100.0), "it wakes"
    assert not watchdog.look(Pulse(100.6), 100.5)
    for n in range(60):
        assert not watchdog.look(Pulse(101.0 + n * LOOK_S), 100.0 + n * LOOK_S)
    assert watchdog.look(Pulse(131.0), 100.0 + PATIENCE_S + LOOK_S), "it hangs all the same"


def test_it_can_be_switched_off() -> None:
    assert first_hung(Watchdog(0.0), 0.0, 1000.0) == float("inf")


def test_it_says_what_it_saw() -> None:
    watchdog = Watchdog(1.0)
    for n in range(4):
        said = watchdog.look(Pulse(n * LOOK_S, 0.05), n * LOOK_S)
    assert said == "its engine has been at one step for 1.5 s; the longest before took 0.05 s"


def test_an_engine_that_fails_again_and_again_is_broken() -> None:
    watchdog = Watchdog(PATIENCE_S)
    assert not watchdog.look(Pulse(None, 0.1, FAILURES - 1), 0.0)
    said = watchdog.look(Pulse(None, 0.1, FAILURES), LOOK_S)
    assert said == "its engine has failed 5 times in a row: see its log"


def test_a_broken_engine_is_unfit_at_once() -> None:
    assert Watchdog(0).look(Pulse(broken="its rank 1 ended"), 0.0) == "its rank 1 ended"
