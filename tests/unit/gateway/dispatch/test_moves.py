"""Requests that move: source and target accept, refuse, fail and go."""

from itertools import pairwise

import pytest

from services.gateway.core.breaker import PAUSE_S
from services.gateway.core.commands import Send
from services.gateway.core.routes import PAST
from shared.errors import BusTimeout, CapacityExceeded, NoResponders, NotReady, SourceLost
from shared.ids import RequestId
from shared.messages.serving import AttemptFailed, Tokens
from tests.unit.gateway.dispatch.builders import MOVING, Driver, emitted, moving, sent, withdrawn
from tests.unit.gateway.support import replica


def on_instances(driver: Driver) -> dict[str, int]:
    (load,) = driver.dispatch.loads(0)
    assert load.running_requests + load.queued_requests == 1
    return {key: count for key, count in load.instance_requests.items() if count}


@pytest.mark.parametrize("tokens", [(), (0, 1)])
def test_the_source_lets_go_when_the_target_has_accepted(tokens: tuple[int, ...]) -> None:
    driver = moving(*tokens)
    assert on_instances(driver) == {"path-1-2": 1, "replica-3": 1}
    assert emitted(driver.give("a", 1, len(tokens))), "the source goes on"
    taken = driver.dispatch.on_taken(RequestId("a"), 2, driver.now)
    assert withdrawn(taken) == [("node-1", 1)]
    assert on_instances(driver) == {"replica-3": 1}
    assert not emitted(driver.give("a", 2, len(tokens))), "seen before"
    assert emitted(driver.give("a", 2, len(tokens) + 1))
    assert withdrawn(driver.give("a", 1, len(tokens) + 2)) == [("node-1", 1)], "late"


@pytest.mark.parametrize("tokens", [(), (0, 1)])
@pytest.mark.parametrize("error", [CapacityExceeded("full"), BusTimeout("silent")])
def test_a_move_that_is_refused_costs_nothing(
    tokens: tuple[int, ...], error: CapacityExceeded | BusTimeout
) -> None:
    driver = moving(*tokens)
    commands = driver.dispatch.on_not_taken(RequestId("a"), 2, error, driver.now)
    assert sent(commands) == []
    assert withdrawn(commands) == [("node-3", 2)]
    assert on_instances(driver) == {"path-1-2": 1}
    assert emitted(driver.give("a", 1, len(tokens)))
    assert sent(driver.later(2 * PAUSE_S)) == [("a", "replica-3", 3)], "and is tried again"


def test_a_target_that_refused_one_request_takes_others() -> None:
    driver = moving(0)
    driver.refuse("a", 2)
    driver.later(PAUSE_S)
    assert sent(driver.admit("b")) == [("b", "replica-3", 1)]
    assert sent(driver.take("b", 1)) == [], "it keeps away twice as long"
    assert sent(driver.later(PAUSE_S)) == [("a", "replica-3", 3)]


def test_a_request_that_one_replica_refuses_moves_to_another() -> None:
    driver = moving(0)
    driver.publish(MOVING, replica(3), replica(4))
    error = NotReady("no tokenizer here")
    commands = driver.dispatch.on_not_taken(RequestId("a"), 2, error, driver.now)
    assert sent(commands) == [("a", "replica-4", 3)]


def test_a_move_to_a_node_that_is_not_ready_is_tried_ever_more_rarely() -> None:
    """Although the request gets tokens where it is."""
    driver, at, attempt = moving(0), [0.0], 2
    for index in range(1, 100):
        error = NotReady("no tokenizer yet")
        commands = driver.dispatch.on_not_taken(RequestId("a"), attempt, error, driver.now)
        commands += driver.give("a", 1, index)
        commands += driver.later(PAUSE_S / 5)
        for _, _, number in sent(commands):
            attempt = number
            at.append(driver.now)
    pauses = [after - before for before, after in pairwise(at)]
    assert pauses == sorted(pauses)
    assert min(pauses) >= 2 * PAUSE_S
    assert len(pauses) < 6


def test_refusals_of_one_burst_count_once() -> None:
    driver = Driver(replica(1))
    driver.admit("a", "b", "c", "d", "e")
    for name in "abcde":
        driver.refuse(name, 1)
    ((tried, _, attempt),) = sent(driver.later(2 * PAUSE_S))
    assert len(sent(driver.take(tried, attempt))) == 4


def test_a_token_of_the_target_says_that_it_has_accepted() -> None:
    driver = moving(0)
    commands = driver.give("a", 2, 1)
    assert withdrawn(commands) == [("node-1", 1)]
    assert [emit.begun.id for emit in emitted(commands) if emit.begun] == ["replica-3"]
    assert on_instances(driver) == {"replica-3": 1}


def test_a_request_whose_source_fails_moves_alone() -> None:
    """It may be what killed the source, so nobody else may be in danger."""
    driver = moving(0)
    failed = AttemptFailed(RequestId("a"), 1, "peer_lost", "gone")
    message = Tokens(node=replica(1).leader, tokens=(), failed=(failed,))
    driver.dispatch.on_tokens(message, driver.now)
    assert on_instances(driver) == {}
    commands = driver.dispatch.on_judged(RequestId("a"), 1, (), driver.now)
    assert sent(commands) == [("a", "replica-3", 3)]
    driver = moving(0)
    assert sent(driver.publish(replica(3))) == [("a", "replica-3", 3)]


def test_what_a_target_cannot_take_over_is_asked_about_where_it_is() -> None:
    """The target has lost the source's node, which may live."""
    driver = moving(0)
    error = SourceLost("node-1 does not answer")
    commands = driver.dispatch.on_not_taken(RequestId("a"), 2, error, driver.now)
    assert sent(commands) == [("a", "path-1-2", 1)]
    assert on_instances(driver) == {"path-1-2": 1}
    driver.take("a", 1)
    assert emitted(driver.give("a", 1, 1))
    assert sent(driver.admit("b")) == [("b", "replica-3", 1)], "the target is not at fault"


def test_what_a_target_cannot_take_over_may_have_killed_the_source() -> None:
    driver = moving(0)
    failed = AttemptFailed(RequestId("a"), 2, SourceLost.code, "node-1 died")
    message = Tokens(node=replica(3).leader, tokens=(), failed=(failed,))
    assert sent(driver.dispatch.on_tokens(message, driver.now)) == [("a", "path-1-2", 1)]
    driver.publish(MOVING, replica(3), replica(4))
    nobody = NoResponders("no process")
    (send,) = [
        each
        for each in driver.dispatch.on_not_taken(RequestId("a"), 1, nobody, driver.now)
        if isinstance(each, Send)
    ]
    assert isinstance(send, Send)
    assert (send.submit.instance, send.submit.alone_until) == ("replica-4", 4 + 1 + PAST)


def test_a_target_that_goes_leaves_its_request_where_it_is() -> None:
    driver = moving(0)
    driver.publish(MOVING)
    assert on_instances(driver) == {"path-1-2": 1}
    assert emitted(driver.give("a", 1, 1))


def test_what_ends_while_it_moves_is_withdrawn_from_both() -> None:
    driver = moving(0)
    both = [("node-1", 1), ("node-3", 2)]
    assert withdrawn(driver.dispatch.cancel(RequestId("a"), driver.now)) == both
    driver = moving(0)
    assert withdrawn(driver.give("a", 1, 1, "stop")) == [("node-3", 2)]
    assert driver.dispatch.loads(0)[0].running_requests == 0
