"""Requests that left the node that died: they moved away, or had to begin anew."""

import pytest

from services.gateway.core.commands import AskWhoDied, Command, Resumed, Send
from services.gateway.core.model import SILENCE_S
from services.gateway.core.routes import PAST
from shared.errors import CutOff
from shared.ids import GatewayId, RequestId
from shared.messages.instances import Instance, InstanceState
from tests.unit.gateway.dispatch.builders import Driver, sent
from tests.unit.gateway.dispatch.deaths import alone, asked, dies, judge, refused, suspects
from tests.unit.gateway.support import path, replica


def left(driver: Driver) -> None:
    """A request has just moved from a path over node 1 to replica 3, which gave no token yet."""
    driver.publish(path(1, 2))
    driver.admit("a")
    driver.give("a", 1, 0)
    driver.publish(path(1, 2, state=InstanceState.MOVING), replica(3), replica(4))
    driver.take("a", 2)


def cut_off(driver: Driver, attempt: int) -> list[Command]:
    """Its instance has the attempt, and is to be asked whether it goes on, but NATS is away."""
    driver.take("a", attempt)
    driver.later(SILENCE_S)
    commands = driver.dispatch.on_not_taken(RequestId("a"), attempt, CutOff("away"), driver.now)
    driver.dispatch.validate()
    return commands


def takes_over(driver: Driver, *instances: Instance) -> AskWhoDied:
    """Another planner names these instances. The gateway asks about those of the one before."""
    driver.epoch += 1
    commands = driver.publish(*instances)
    driver.dispatch.validate()
    (ask,) = [each for each in commands if isinstance(each, AskWhoDied)]
    return ask


@pytest.mark.parametrize("instance", [replica(1), path(1, 2)])
def test_another_planner_s_instances_make_no_suspects(instance: Instance) -> None:
    """A planner that takes over names paths anew, and no node has died."""
    driver = Driver(instance)
    driver.admit("a")
    driver.epoch += 1
    (send,) = [c for c in driver.publish(replica(3)) if isinstance(c, Send)]
    assert send.submit.alone_until == 0


@pytest.mark.parametrize("waits", [True, False])
def test_a_node_that_died_while_there_was_no_planner_counts(waits: bool) -> None:
    driver = Driver(path(1, 2))
    driver.admit("a")
    ask = takes_over(driver, *([] if waits else [replica(3)]))
    assert ask.nodes == (replica(1).leader, replica(2).leader)
    commands = driver.dispatch.on_found_dead(ask.model_id, [replica(2).leader], driver.now)
    driver.dispatch.validate()
    commands += driver.publish(replica(3), replica(4))
    (send,) = [each for each in commands if isinstance(each, Send)]
    assert send.submit.alone_until == 4 + PAST
    driver.take("a", send.submit.attempt)
    (ask_again,) = asked(driver.publish(replica(4 if send.submit.instance == "replica-3" else 3)))
    assert refused(judge(driver, ask_again, dead=True)) == ["a"]


@pytest.mark.parametrize("dead", [True, False])
def test_a_trial_that_ends_with_another_planner_counts_if_its_node_died(dead: bool) -> None:
    driver = Driver()
    suspects(driver, "a")
    driver.publish(replica(2))
    driver.take("a", 2)
    driver.epoch += 1
    commands = driver.publish(replica(3))
    (ask,) = asked(commands)
    assert sent(commands) == []
    commands = judge(driver, ask, dead=dead)
    assert refused(commands) == (["a"] if dead else [])
    assert alone(commands) == ({} if dead else {"a": True})
    driver.dispatch.validate()


def test_a_gateway_that_takes_another_id_has_its_suspects_trial_judged_first() -> None:
    driver = Driver()
    suspects(driver, "a")
    driver.publish(replica(2), replica(3))
    driver.take("a", 2)
    commands = driver.dispatch.take_id(GatewayId("g-2"), driver.now)
    (ask,) = asked(commands)
    assert sent(commands) == []
    assert refused(judge(driver, ask, dead=True)) == ["a"]


def test_who_died_is_not_asked_again_because_another_node_died() -> None:
    driver = Driver(path(1, 2))
    driver.admit("a")
    takes_over(driver, path(3, 4))
    (ask,) = [each for each in driver.publish(replica(5)) if isinstance(each, AskWhoDied)]
    assert ask.nodes == (replica(3).leader, replica(4).leader)
    driver.dispatch.on_found_dead(ask.model_id, (), driver.now)
    commands = dies(driver, 1)
    assert not [each for each in commands if isinstance(each, AskWhoDied)]
    driver.dispatch.validate()


def test_nobody_is_asked_about_nodes_that_ran_nothing() -> None:
    driver = Driver(path(1, 2))
    driver.epoch += 1
    assert driver.publish(replica(3)) == []


def test_who_went_past_where_its_node_died_is_no_suspect() -> None:
    driver = Driver(path(1, 2))
    driver.admit("a")
    ask = takes_over(driver, replica(3))
    for index in range(PAST):
        driver.give("a", 2, index)
    assert sent(driver.dispatch.on_found_dead(ask.model_id, ask.nodes, driver.now)) == []
    assert sent(driver.admit("b")) == [("b", "replica-3", 1)]


def test_who_killed_the_node_that_it_left_too_explains_all_deaths() -> None:
    """It had just moved, and both nodes died at once."""
    driver = Driver()
    left(driver)
    dies(driver, 3)
    dies(driver, 1)
    driver.take("a", 3)
    (ask,) = asked(dies(driver, 4))
    assert refused(judge(driver, ask, dead=True)) == ["a"]
    (load,) = driver.dispatch.loads(0)
    assert set(load.explained) == {replica(number).leader for number in (1, 3, 4)}


def test_a_request_that_has_just_left_the_node_is_a_suspect() -> None:
    driver = Driver()
    left(driver)
    (send,) = [each for each in dies(driver, 1) if isinstance(each, Send)]
    assert send.submit.alone_until == 4 + 1 + PAST
    driver.dispatch.validate()
    driver.take("a", 3)
    (ask,) = asked(dies(driver, 3))
    assert refused(judge(driver, ask, dead=True)) == ["a"]


def test_a_request_that_got_past_what_it_left_is_no_suspect() -> None:
    driver = Driver()
    left(driver)
    for index in range(1, 1 + PAST):
        driver.give("a", 2, index)
    assert sent(dies(driver, 1)) == []


def test_a_path_that_nothing_runs_on_makes_no_suspects_when_it_goes() -> None:
    driver = Driver()
    left(driver)
    assert sent(driver.publish(replica(3), replica(4))) == []


def test_a_gateway_that_was_cut_off_takes_no_node_for_dead() -> None:
    driver = Driver(replica(1), replica(2))
    driver.admit("a")
    commands = cut_off(driver, 1)
    assert [each.reason for each in commands if isinstance(each, Resumed)] == ["refused"]
    assert alone(commands) == {"a": False}
    driver.take("a", 2)
    commands = dies(driver, 2)
    assert not asked(commands), "it is the first death"
    assert alone(driver.later(1.0)) == {"a": True}


def test_a_node_that_died_while_its_gateway_was_cut_off_counts() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    cut_off(driver, 1)
    dies(driver, 1)
    assert alone(driver.publish(replica(2), replica(3))) == {"a": True}
    driver.take("a", 2)
    (ask,) = asked(dies(driver, 2))
    assert refused(judge(driver, ask, dead=True)) == ["a"]


@pytest.mark.parametrize("dead", [True, False])
def test_a_trial_that_ends_because_its_gateway_was_cut_off_counts_if_its_node_died(
    dead: bool,
) -> None:
    driver = Driver()
    suspects(driver, "a")
    driver.publish(replica(2), replica(3))
    (ask,) = asked(cut_off(driver, 2))
    assert refused(judge(driver, ask, dead=dead)) == (["a"] if dead else [])
    driver.dispatch.validate()
