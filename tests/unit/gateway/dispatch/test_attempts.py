"""Single steps of an attempt that the property test leaves open: tokens, failures, silence."""

import pytest

from services.gateway.core.breaker import PAUSE_S
from services.gateway.core.commands import Emit, End, Opened, Resumed, Send, Withdraw
from services.gateway.core.model import SILENCE_S
from services.gateway.core.requests import Request, State
from services.gateway.core.streams import Verdict, judge
from shared.errors import BadInput, BusTimeout, CapacityExceeded, IllegalTransition, StaleEpoch
from shared.ids import RequestId
from shared.messages.instances import InstanceState
from shared.messages.serving import Sampling, Token
from tests.unit.gateway.dispatch.builders import MODEL, QUEUE_S, STALL_S, Driver, sent
from tests.unit.gateway.support import path, replica


@pytest.mark.parametrize(
    ("attempt", "index", "verdict"),
    [
        (2, 3, Verdict.NEXT),
        (2, 2, Verdict.DUPLICATE),
        (2, 0, Verdict.DUPLICATE),
        (2, 4, Verdict.GAP),
        (1, 3, Verdict.STALE),
        (3, 3, Verdict.STALE),
    ],
)
def test_tokens_are_judged_by_attempt_and_index(attempt: int, index: int, verdict: Verdict) -> None:
    request = Request(RequestId("a"), MODEL, (1,), 9, (), Sampling(), 0.0)
    request.attempt, request.tokens, request.instance = 2, [7, 7, 7], replica(1).id
    assert judge(request, Token(request.id, attempt, index, 7)) is verdict
    request.instance = None
    assert judge(request, Token(request.id, attempt, index, 7)) is Verdict.STALE


def test_a_story_names_the_cause_of_each_step() -> None:
    driver = Driver(replica(1, slots=1))
    first, *_ = driver.admit("a", "b")
    driver.give("a", 1, 0)
    assert isinstance(first, Send)
    assert first.submit.cause == "a"
    second = [c for c in driver.give("a", 1, 1, "stop") if isinstance(c, Send)]
    assert [c.submit.cause for c in second] == ["a"], "whose slot it gets"
    moves = driver.dispatch.on_node_gone(replica(1).leader, driver.now)
    assert [c.cancel.cause for c in moves if isinstance(c, Withdraw)] == [replica(1).leader]
    steps = [(told.cause, told.text.split()[0]) for told in driver.dispatch.story("b")]
    assert steps == [("a", "submitted"), (replica(1).leader, "queued")]
    on_instance = [told.subjects[0] for told in driver.dispatch.story("replica-1")]
    assert on_instance[:3] == ["a", "a", "b"]


@pytest.mark.parametrize("corrupt", ["lost", "twice", "tokens", "prompts", "node", "state"])
def test_a_state_that_contradicts_itself_is_found(corrupt: str) -> None:
    driver = Driver(replica(1, slots=1))
    driver.admit("a", "b")
    driver.dispatch.validate()
    (model,) = driver.dispatch._models.values()
    (route,) = model.table.routes.values()
    match corrupt:
        case "lost":
            model.queue.remove(next(iter(model.queue)))
        case "twice":
            model.queue.put_back([route.requests[RequestId("a")]])
        case "tokens":
            route.tokens += 1
        case "prompts":
            route.prompts += 1
        case "node":
            route.places[0].node.account.alone += 1
        case "state":
            route.requests[RequestId("a")].state = State.QUEUED
    with pytest.raises(IllegalTransition):
        driver.dispatch.validate()


def test_a_gap_ends_the_attempt_at_once() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    driver.give("a", 1, 0)
    commands = driver.give("a", 1, 2)
    assert [type(command) for command in commands] == [Opened, Withdraw, Resumed]
    (send,) = [command for command in driver.later(PAUSE_S * 2) if isinstance(command, Send)]
    assert send.submit.tokens == (0, 1, 2, 3, 7)


def test_a_lost_last_token_is_noticed() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    driver.give("a", 1, 0)
    assert not driver.later(SILENCE_S - 0.5)
    assert sent(driver.later(0.5)) == [("a", "replica-1", 1)]  # does it go on?
    assert not driver.later(STALL_S - 1), "asked once in a while only"
    over = driver.dispatch.on_not_taken(RequestId("a"), 1, StaleEpoch("over"), driver.now)
    assert [c.reason for c in over if isinstance(c, Resumed)] == ["refused"]
    again = driver.later(0.1)
    (send,) = [command for command in again if isinstance(command, Send)]
    assert send.submit.tokens == (0, 1, 2, 3, 7)
    assert (send.submit.prompt_tokens, send.submit.attempt) == (4, 2)


def test_a_request_that_waits_on_its_node_stays_there() -> None:
    """However long, as long as its leader says that it goes on."""
    driver = Driver(replica(1))
    driver.admit("a")
    driver.give("a", 1, 0)
    for _ in range(20):
        assert sent(driver.later(STALL_S)) == [("a", "replica-1", 1)]
    (emit,) = driver.give("a", 1, 1)
    assert isinstance(emit, Emit)
    late = driver.dispatch.on_not_taken(RequestId("a"), 1, BusTimeout("late"), driver.now)
    assert late == []


def test_a_leader_that_does_not_answer_loses_its_requests() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    for attempt in range(1, 5):
        driver.give("a", attempt, attempt - 1)
        assert sent(driver.later(STALL_S)) == [("a", "replica-1", attempt)]
        error = BusTimeout("hung")
        commands = driver.dispatch.on_not_taken(RequestId("a"), attempt, error, driver.now)
        assert any(isinstance(c, Withdraw) for c in commands)
        driver.dispatch.on_judged(RequestId("a"), attempt, (), driver.now)
        driver.later(2.0)
    (end,) = [c for c in commands if isinstance(c, End)]
    assert "failed 4 times" in str(end.error)


def test_an_answer_about_an_instance_that_is_gone_changes_nothing() -> None:
    """Its leader was asked whether the attempt goes on, and its lease ended before it answered."""
    driver = Driver(replica(1))
    driver.admit("a")
    assert sent(driver.later(STALL_S)) == [("a", "replica-1", 1)]
    driver.dispatch.on_node_gone(replica(1).leader, driver.now)
    late = driver.dispatch.on_not_taken(RequestId("a"), 1, BusTimeout("silence"), driver.now)
    assert late == []
    assert sent(driver.publish(replica(2))) == [("a", "replica-2", 2)]


@pytest.mark.parametrize("token", [False, True])
def test_time_on_an_instance_is_no_wait_for_one(token: bool) -> None:
    """Nor what was before a token."""
    driver = Driver()
    driver.admit("a")
    driver.later(QUEUE_S / 2)
    driver.publish(replica(1))
    driver.later(QUEUE_S)
    if token:
        driver.give("a", 1, 0)
    driver.later(QUEUE_S)
    driver.publish()
    left = QUEUE_S if token else QUEUE_S / 2
    assert not driver.later(left - 1)
    (end,) = driver.later(1)
    assert isinstance(end, End)
    assert isinstance(end.error, CapacityExceeded)


def test_a_node_that_does_not_know_the_limit_is_cut_off() -> None:
    driver = Driver(replica(1))
    driver.admit("a", max_tokens=1)
    commands = driver.give("a", 1, 0)
    assert [c.finish for c in commands if isinstance(c, Emit)] == ["length"]
    assert any(isinstance(c, Withdraw) for c in commands)


def test_no_answer_counts_as_a_failure_and_is_withdrawn() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    for attempt in range(1, 5):
        commands = driver.dispatch.on_not_taken(
            RequestId("a"), attempt, BusTimeout("silence"), driver.now
        )
        assert any(isinstance(c, Withdraw) for c in commands)
        driver.dispatch.on_judged(RequestId("a"), attempt, (), driver.now)
        driver.later(2.0)
    (end,) = [c for c in commands if isinstance(c, End)]
    assert "failed 4 times" in str(end.error)


def test_an_answer_that_comes_after_tokens_changes_nothing() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    driver.give("a", 1, 0)
    assert driver.dispatch.on_not_taken(RequestId("a"), 1, BusTimeout("late"), 0.0) == []


def test_what_the_node_calls_wrong_is_not_tried_again() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    commands = driver.dispatch.on_not_taken(RequestId("a"), 1, BadInput("no"), 0.0)
    assert [type(command) for command in commands] == [End]


def test_moves_are_no_failures() -> None:
    driver = Driver(path(1, 2))
    driver.admit("a", max_tokens=500)
    for n in range(1, 21):
        commands = driver.publish(path(n, n + 1, state=InstanceState.MOVING), path(n + 1, n + 2))
        assert len(sent(commands)) == 1
        driver.dispatch.on_taken(RequestId("a"), n + 1, driver.now)
    driver.give("a", 21, 0)
    assert driver.dispatch.loads(0)[0].running_tokens == 499


def test_a_node_that_stops_as_it_was_told_fails_no_request() -> None:
    driver = Driver(*(replica(n) for n in range(9)))
    driver.admit("a")
    for _ in range(8):
        (busy,) = [key for key, n in driver.dispatch.loads(0)[0].instance_requests.items() if n]
        node = replica(int(busy.removeprefix("replica-"))).leader
        commands = driver.dispatch.on_node_gone(node, driver.now, graceful=True)
        assert len(sent(commands)) == 1
        assert not any(isinstance(command, End) for command in commands)
