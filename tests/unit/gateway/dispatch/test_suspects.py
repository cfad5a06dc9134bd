"""Requests that ran where a node died: who goes on alone, who is cleared, and who is refused."""

import pytest

from services.gateway.core.breaker import PAUSE_S
from services.gateway.core.commands import AskWhoDied, Command, Send
from services.gateway.core.routes import FAST_S, MOST_UNHEARD, PAST
from services.gateway.core.suspects import TOLD_S
from shared.errors import BusTimeout, CapacityExceeded, NoResponders
from shared.ids import GatewayId, RequestId
from shared.messages.instances import InstanceState
from shared.messages.load import GatewayLoad, ModelLoad
from shared.messages.serving import AttemptFailed, Tokens
from tests.unit.gateway.dispatch.builders import NAME, Driver, ended, sent
from tests.unit.gateway.dispatch.deaths import alone, asked, dies, judge, refused, suspects
from tests.unit.gateway.support import path, replica


def fails(driver: Driver, name: str, attempt: int, code: str) -> list[Command]:
    failed = AttemptFailed(RequestId(name), attempt, code, "it raised")
    return driver.dispatch.on_tokens(
        Tokens(node=replica(1).leader, tokens=(), failed=(failed,)), driver.now
    )


def test_a_request_that_kills_its_node_twice_is_refused() -> None:
    driver = Driver()
    suspects(driver, "a")
    (send,) = driver.publish(replica(2), replica(3))
    assert isinstance(send, Send)
    assert send.submit.alone_until == 4 + PAST
    driver.take("a", 2)
    (ask,) = asked(driver.publish(replica(3)))
    assert (ask.request, ask.attempt, ask.nodes) == ("a", 2, (replica(2).leader,))
    assert not sent(driver.later(1.0)), "it waits until its node has answered, or nobody has"
    assert refused(judge(driver, ask, dead=True)) == ["a"]
    driver.dispatch.validate()


@pytest.mark.parametrize(("silent_s", "unheard"), [(0.1, 5), (10.0, MOST_UNHEARD)])
def test_tokens_may_have_been_lost_before_the_pace_is_known(silent_s: float, unheard: int) -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    driver.take("a", 1)
    driver.later(silent_s)
    (send,) = (each for each in driver.publish(replica(2)) if isinstance(each, Send))
    assert FAST_S == 0.02
    assert send.submit.alone_until == 4 + PAST + unheard


def test_a_node_that_had_not_taken_it_convicts_nobody() -> None:
    """Something else may have killed the node while the request was on its way."""
    driver = Driver()
    suspects(driver, "a")
    driver.publish(replica(2), replica(3))
    commands = dies(driver, 2)
    assert not refused(commands)
    assert sent(commands) == [("a", "replica-3", 3)]
    driver.dispatch.validate()


def test_a_node_that_lives_convicts_nobody() -> None:
    driver = Driver()
    suspects(driver, "a")
    driver.publish(replica(2), replica(3))
    driver.take("a", 2)
    (ask,) = asked(dies(driver, 2))
    (send,) = judge(driver, ask, dead=False)
    assert isinstance(send, Send)
    assert (send.submit.instance, send.submit.alone_until) == ("replica-3", 4 + PAST)
    assert judge(driver, ask, dead=True) == [], "it was answered before"


@pytest.mark.parametrize("dead", [False, True])
def test_a_replica_that_ends_before_it_takes_a_request_may_have_ended_in_good_order(
    *, dead: bool
) -> None:
    """A gateway that was cut off sends a request to what was released meanwhile, and hears of that.
    Whether the node lives is asked, and the request does not wait for the answer."""
    driver = Driver(replica(1))
    driver.admit("a")
    (ask,) = [each for each in driver.publish() if isinstance(each, AskWhoDied)]
    assert ask.nodes == (replica(1).leader,)
    assert alone(driver.publish(replica(2), replica(3))) == {"a": True}
    found = ask.nodes if dead else ()
    driver.dispatch.on_found_dead(ask.model_id, found, driver.now)
    driver.take("a", 2)
    (asks,) = asked(dies(driver, 2))
    assert refused(judge(driver, asks, dead=True)) == (["a"] if dead else [])
    driver.dispatch.validate()


def test_a_death_that_is_told_twice_counts_once() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    (ask,) = asked(fails(driver, "a", 1, BusTimeout.code))
    judge(driver, ask, dead=False)
    driver.publish(replica(2), replica(3))
    driver.take("a", 2)
    (ask,) = asked(driver.publish(replica(3)))
    dies(driver, 2)  # so says the registry
    assert not refused(judge(driver, ask, dead=True))
    driver.dispatch.validate()


def test_a_node_that_lived_and_dies_later_counts_for_nothing() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    (who,) = [each for each in driver.publish() if isinstance(each, AskWhoDied)]
    driver.dispatch.on_found_dead(who.model_id, (), driver.now)
    driver.publish(replica(2), replica(3))
    driver.take("a", 2)
    dies(driver, 1)
    (ask,) = asked(dies(driver, 2))
    assert not refused(judge(driver, ask, dead=True))
    driver.dispatch.validate()


def test_a_replica_that_has_taken_a_request_and_is_gone_has_died() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    driver.take("a", 1)
    assert not any(isinstance(each, AskWhoDied) for each in driver.publish())
    driver.publish(replica(2), replica(3))
    driver.take("a", 2)
    (ask,) = asked(dies(driver, 2))
    assert refused(judge(driver, ask, dead=True)) == ["a"]


def test_silence_and_then_a_death_are_one_death() -> None:
    """A gateway that was stopped, say, finds its nodes silent when it goes on. They live."""
    driver = Driver()
    driver.publish(replica(1))
    driver.admit("a")
    (ask,) = asked(fails(driver, "a", 1, BusTimeout.code))
    judge(driver, ask, dead=False)
    driver.publish(replica(2), replica(3), replica(4))
    for number, attempt in (2, 2), (3, 3):
        driver.take("a", attempt)
        (ask,) = asked(dies(driver, number))
        convicted = judge(driver, ask, dead=True)
        assert refused(convicted) == (["a"] if number == 3 else [])
    driver.dispatch.validate()


def test_suspects_are_tried_one_by_one_where_nothing_else_begins() -> None:
    driver = Driver()
    suspects(driver, "a", "b")
    assert sent(driver.publish(replica(2))) == [("a", "replica-2", 2)]
    assert sent(driver.admit("new")) == []
    driver.dispatch.validate()
    for index in range(PAST):
        assert sent(driver.later(0.1)) == []
        commands = driver.give("a", 2, index)
    assert sent(commands) == [("b", "replica-2", 2)], "a is cleared"
    driver.dispatch.validate()
    commands = [each for index in range(PAST) for each in driver.give("b", 2, index)]
    assert sent(commands) == [("new", "replica-2", 1)]
    assert sent(driver.admit("newer")) == [("newer", "replica-2", 1)]
    assert not asked(dies(driver, 2)), "both were cleared: they are suspects for the first time"


def test_a_suspect_that_ends_makes_room_for_the_next() -> None:
    driver = Driver()
    suspects(driver, "a", "b")
    driver.publish(replica(2))
    assert sent(driver.give("a", 2, 0, "stop")) == [("b", "replica-2", 2)]
    assert sent(driver.dispatch.cancel(RequestId("b"), driver.now)) == []
    assert sent(driver.admit("c")) == [("c", "replica-2", 1)]
    driver.dispatch.validate()


def test_of_those_beside_a_suspect_nobody_is_refused_or_suspected() -> None:
    driver = Driver(replica(2))
    driver.admit("beside")
    driver.publish(replica(2), replica(1, capacity=1e9))
    driver.admit("a")
    (send,) = [each for each in dies(driver, 1) if isinstance(each, Send)]
    assert send.submit.instance == "replica-2"
    driver.take("a", 2)
    (ask,) = asked(dies(driver, 2))
    assert ask.request == "a"
    judge(driver, ask, dead=True)
    (send,) = [each for each in driver.publish(replica(3)) if isinstance(each, Send)]
    assert (send.submit.request, send.submit.alone_until) == ("beside", 0)


def convicted(driver: Driver, name: str, number: int) -> list[Command]:
    """The suspect's second attempt, on this replica, kills it."""
    driver.take(name, 2)
    (ask,) = asked(dies(driver, number))
    assert ask.request == name
    commands = judge(driver, ask, dead=True)
    driver.dispatch.validate()
    return commands


def test_when_it_is_known_who_did_it_the_others_go_on_together() -> None:
    driver = Driver()
    suspects(driver, "a", "b", "c", "d")
    driver.publish(replica(2), replica(3))  # b is tried on replica 3 meanwhile
    commands = convicted(driver, "a", 2)
    assert refused(commands) == ["a"]
    assert alone(commands) == {"c": False, "d": False}
    assert alone(driver.admit("new")) == {"new": False}, "nor is b a suspect any more"
    driver.dispatch.validate()


def test_who_did_it_says_nothing_of_another_death() -> None:
    driver = Driver()
    suspects(driver, "a")
    driver.publish(replica(2), replica(5))  # a is tried on replica 2
    driver.admit("b")
    assert alone(driver.publish(replica(2))) == {}, "b's node left the set"
    driver.publish(replica(2))
    commands = convicted(driver, "a", 2) + driver.publish(replica(3))
    assert (refused(commands), alone(commands)) == (["a"], {"b": True})


def test_who_is_asked_about_has_to_be_answered_first() -> None:
    """Request b ran beside a, and then something else killed the node where b was tried."""
    driver = Driver()
    suspects(driver, "a", "b")
    driver.publish(replica(2), replica(3))
    driver.take("b", 2)
    (ask,) = asked(dies(driver, 3))
    assert refused(convicted(driver, "a", 2)) == ["a"]
    assert refused(judge(driver, ask, dead=True)) == ["b"]


def test_a_node_that_is_back_may_die_of_something_else() -> None:
    driver = Driver()
    suspects(driver, "a")
    driver.publish(replica(2), replica(3))
    convicted(driver, "a", 2)
    driver.publish(replica(2))
    driver.admit("b")
    dies(driver, 2)
    assert alone(driver.publish(replica(3))) == {"b": True}


def test_what_was_running_on_the_dead_node_is_heard_of_late() -> None:
    """Replica 2 is found dead before its path leaves the set."""
    driver = Driver()
    suspects(driver, "a")
    driver.publish(replica(2), path(2, 3))
    convicted(driver, "a", 2)
    assert alone(driver.admit("b")) == {}
    assert alone(driver.publish(replica(3))) == {"b": False}


def test_the_request_that_came_last_is_tried_first() -> None:
    driver = Driver(replica(1))
    names = [f"stream-{number}" for number in range(5)]
    driver.admit(*names)
    for number, name in enumerate(names):
        for index in range(5 - number):
            driver.give(name, 1, index)
    driver.admit("new", "newer")
    dies(driver, 1)
    order = [sent(driver.publish(*map(replica, range(2, upto))))[0][0] for upto in range(3, 10)]
    assert order == ["new", "newer", *reversed(names)]


def test_few_streams_do_not_wait_for_many_requests_without_a_token() -> None:
    driver = Driver(replica(1))
    driver.admit("stream", "new-0", "new-1")
    driver.give("stream", 1, 0)
    dies(driver, 1)
    order = [sent(driver.publish(*map(replica, range(2, upto))))[0][0] for upto in range(3, 6)]
    assert order == ["stream", "new-0", "new-1"]


@pytest.mark.parametrize("how", ["asked", "registry"])
def test_who_ran_on_a_path_is_blamed_only_for_the_node_of_it_that_died(how: str) -> None:
    """Two paths over a node that one suspect kills, and the gateway of another request."""
    driver, other = Driver(), Driver()
    suspects(driver, "a")
    driver.publish(path(2, 3))  # a is tried there
    other.publish(path(4, 3))
    other.admit("b")
    (ask,) = [each for each in other.publish() if isinstance(each, AskWhoDied)]
    assert set(ask.nodes) == {replica(3).leader, replica(4).leader}
    convicted(driver, "a", 3)
    (load,) = driver.dispatch.loads(0)
    said = GatewayLoad(gateway=GatewayId("one"), models=(load,))
    assert alone(other.publish(replica(5))) == {"b": True}
    if how == "asked":
        other.dispatch.on_found_dead(ask.model_id, [replica(3).leader], other.now)
    else:
        dies(other, 3)
    other.dispatch.on_load(said, other.now)
    assert alone(other.admit("new")) == {"new": False}, "nor is b a suspect any more"
    other.dispatch.validate()


def test_who_died_is_asked_once() -> None:
    """Something else than the death of a node ended the path of b, as it seems."""
    driver = Driver(path(2, 3), path(4, 5))
    driver.admit("a", "b")
    (ask,) = [each for each in driver.publish() if isinstance(each, AskWhoDied)]
    commands = driver.dispatch.on_found_dead(ask.model_id, [replica(3).leader], driver.now)
    assert not [each for each in commands if isinstance(each, AskWhoDied)]


def test_gateways_tell_each_other_who_did_it() -> None:
    driver, other = Driver(), Driver()
    suspects(driver, "a")
    suspects(other, "b", "c")
    for each in driver, other:
        each.publish(replica(2), replica(3))
    (load,) = driver.dispatch.loads(0)
    assert load.explained == ()
    convicted(driver, "a", 2)
    (load,) = driver.dispatch.loads(0)
    assert set(load.explained) == {replica(1).leader, replica(2).leader}
    said = GatewayLoad(gateway=GatewayId("one"), models=(load,))
    other.dispatch.on_load(said, other.now)
    assert alone(other.admit("new")) == {"new": False}, "where b was tried"
    assert not asked(dies(other, 3)), "nobody was a suspect"
    other.dispatch.validate()
    driver.later(TOLD_S + 1)
    (load,) = driver.dispatch.loads(0)
    assert load.explained == ()


def test_a_node_that_tries_another_gateway_s_suspect_is_asked_again_soon() -> None:
    """Refusals of suspects make no longer pauses, and each suspect has its turn."""
    driver = Driver()
    suspects(driver, "a", "b", "c")
    starts = sent(driver.publish(replica(2)))
    for _ in range(8):
        ((name, _, attempt),) = starts[-1:]
        starts += sent(driver.refuse(name, attempt)) + sent(driver.later(PAUSE_S))
    assert [name for name, *_ in starts] == [*"abc"] * 3


@pytest.mark.parametrize("by_another", [False, True])
def test_a_suspect_goes_where_nothing_runs(by_another: bool) -> None:
    """Even if that is a path; and a replica is better than a path."""
    driver = Driver()
    suspects(driver, "a")
    if by_another:
        load = ModelLoad(model=NAME, running_requests=1, instance_requests={replica(2).id: 1})
        driver.dispatch.on_load(GatewayLoad(gateway=GatewayId("other"), models=(load,)), driver.now)
        assert sent(driver.publish(replica(2), path(3, 4))) == [("a", "path-3-4", 2)]
    else:
        assert sent(driver.publish(path(3, 4), replica(2))) == [("a", "replica-2", 2)]


def test_what_shares_a_node_with_a_suspect_is_closed() -> None:
    driver = Driver()
    suspects(driver, "a")
    assert sent(driver.publish(path(2, 3), path(3, 4))) == [("a", "path-2-3", 2)]
    assert sent(driver.admit("b")) == []
    driver.dispatch.validate()


def test_an_engine_that_fails_twice_convicts_at_once() -> None:
    driver = Driver(replica(1), replica(2))
    driver.admit("a")
    (ask,) = asked(fails(driver, "a", 1, "engine_failed"))
    assert sent(judge(driver, ask, dead=False)) == [("a", "replica-2", 2)]
    assert refused(fails(driver, "a", 2, "engine_failed")) == ["a"]


def test_a_death_counts_once() -> None:
    """Node 2 is dead, and neither planner nor registry have noticed: what leads over it is left."""
    driver = Driver(path(1, 2))
    driver.admit("a", "b")
    driver.publish(path(1, 2), path(3, 2), path(3, 4))
    commands = fails(driver, "a", 1, "peer_lost")
    assert sent(commands) == []
    (ask,) = asked(commands)
    assert not ask.surely
    (first, *_) = sent(driver.dispatch.on_judged(ask.request, 1, [replica(2).leader], driver.now))
    assert first == ("b", "path-3-4", 2)
    driver.dispatch.validate()


def test_a_node_that_had_not_begun_it_says_nothing_about_it() -> None:
    driver = Driver()
    suspects(driver, "a")
    driver.publish(replica(2), replica(3))
    error = NoResponders("nobody")
    commands = driver.dispatch.on_not_taken(RequestId("a"), 2, error, driver.now)
    assert not asked(commands)
    assert sent(commands) == [("a", "replica-3", 3)]


def test_a_node_that_is_silent_is_asked_about() -> None:
    driver = Driver()
    suspects(driver, "a")
    driver.publish(replica(2), replica(3))
    error = BusTimeout("silence")
    assert asked(driver.dispatch.on_not_taken(RequestId("a"), 2, error, driver.now))


def test_a_request_that_was_refused_is_no_suspect() -> None:
    driver = Driver(replica(1), replica(2))
    driver.admit("a")
    error = CapacityExceeded("full")
    commands = driver.dispatch.on_not_taken(RequestId("a"), 1, error, driver.now)
    (send,) = [c for c in commands if isinstance(c, Send)]
    assert send.submit.alone_until == 0


def test_silence_of_a_node_that_had_not_begun_a_suspect_clears_it_of_nothing() -> None:
    driver = Driver()
    suspects(driver, "a")
    driver.publish(replica(2), replica(3))
    silence = BusTimeout("silence")
    (ask,) = asked(driver.dispatch.on_not_taken(RequestId("a"), 2, silence, driver.now))
    assert sent(judge(driver, ask, dead=False)) == [("a", "replica-3", 3)]
    driver.take("a", 3)
    (ask,) = asked(dies(driver, 3))
    assert refused(judge(driver, ask, dead=True)) == ["a"]


def test_a_suspect_is_cleared_while_its_prompt_is_scored() -> None:
    driver = Driver(replica(1))
    driver.admit("a", prompt=9, score_from=1)
    dies(driver, 1)
    driver.publish(replica(2))
    driver.score("a", 2, -8, *[-1.0] * PAST)
    assert sent(driver.admit("b")) == [("b", "replica-2", 1)]
    driver.dispatch.validate()


def test_a_suspect_moves_nowhere_until_it_is_cleared() -> None:
    driver = Driver()
    suspects(driver, "a")
    driver.publish(path(2, 3))
    moving = path(2, 3, state=InstanceState.MOVING)
    assert sent(driver.publish(moving, replica(4))) == []
    given = [sent(driver.give("a", 2, index)) for index in range(PAST)]
    assert given == [[], [], [("a", "replica-4", 3)]]


def test_requests_end_in_their_order() -> None:
    driver = Driver()
    suspects(driver, "a", "b", "c")
    driver.publish(replica(2), replica(3), replica(4))
    driver.take("b", 2)
    (ask,) = asked(dies(driver, 3))
    assert ask.request == "b"
    assert ended(judge(driver, ask, dead=True))[0][0] == "b"
