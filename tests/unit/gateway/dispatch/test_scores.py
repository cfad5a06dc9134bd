"""Scores of prompts, which come from one attempt or several."""

import pytest

from services.gateway.core.breaker import PAUSE_S
from services.gateway.core.commands import Emit, Opened, Resumed, Send, Withdraw
from tests.unit.gateway.dispatch.builders import MOVING, Driver, emitted, sent, told
from tests.unit.gateway.support import path, replica


def test_each_score_is_taken_once_and_the_rest_asked_for_elsewhere() -> None:
    driver = Driver(replica(1))
    (send,) = driver.admit("a", prompt=6, score_from=1)
    assert isinstance(send, Send)
    assert send.submit.score_from == 1
    assert told(driver.score("a", 1, -5, 0.1, 0.2)) == [0.1, 0.2]
    assert driver.score("a", 1, -5, 0.1, 0.2) == []
    driver.publish(replica(2))
    assert told(driver.score("a", 1, -3, 0.3)) == []
    driver.epoch += 1
    (send,) = driver.publish(replica(1))[-1:]
    assert isinstance(send, Send)
    assert send.submit.score_from == 3
    attempt = send.submit.attempt
    assert told(driver.score("a", attempt, -3, 0.3, 0.4, 0.5)) == [0.3, 0.4, 0.5]
    (emit,) = driver.give("a", attempt, 0)[-1:]
    assert isinstance(emit, Emit)
    (send,) = driver.publish(replica(2))[-1:]
    assert isinstance(send, Send)
    assert send.submit.score_from == 6


def test_of_scores_that_overlap_at_a_move_each_counts_once() -> None:
    driver = Driver(path(1, 2))
    driver.admit("a", prompt=6, score_from=1)
    (send,) = sent(driver.publish(MOVING, replica(3)))
    assert send == ("a", "replica-3", 2)
    assert told(driver.score("a", 1, -5, 0.1, 0.2)) == [0.1, 0.2], "the source goes on meanwhile"
    assert told(driver.score("a", 2, -5, 0.1, 0.2, 0.3, 0.4)) == [0.3, 0.4]
    assert told(driver.score("a", 2, -4, 0.2, 0.3, 0.4)) == []
    assert told(driver.score("a", 2, -1, 0.5)) == [0.5]
    assert emitted(driver.give("a", 2, 0))


@pytest.mark.parametrize("lost", ["score", "all"])
def test_a_score_that_is_lost_ends_the_attempt(lost: str) -> None:
    driver = Driver(replica(1))
    driver.admit("a", prompt=6, score_from=1)
    driver.score("a", 1, -5, 0.1, 0.2)
    commands = driver.score("a", 1, -2, 0.4) if lost == "score" else driver.give("a", 1, 0)
    assert [type(command) for command in commands] == [Opened, Withdraw, Resumed]
    (send,) = [command for command in driver.later(PAUSE_S * 2) if isinstance(command, Send)]
    assert send.submit.score_from == 3
