"""Mode switches: which requests move to replicas, and which stay on their path."""

import math
from dataclasses import replace

import pytest

from services.gateway.core.commands import Command, Switched
from services.gateway.core.routing import OURS, Switch
from shared.ids import RequestId
from shared.messages.instances import InstanceState
from shared.messages.serving import Token, Tokens
from tests.unit.gateway.dispatch.builders import Driver, sent
from tests.unit.gateway.support import path, replica


def streaming(driver: Driver, *, tokens: int, every_s: float, logprobs: int | None = None) -> None:
    """Request a, on its way on a path."""
    driver.admit("a", prompt=10, max_tokens=100, logprobs=logprobs)
    for index in range(tokens):
        driver.give("a", 1, index)
        driver.now += every_s


def switches(commands: list[Command]) -> list[Switched]:
    return [command for command in commands if isinstance(command, Switched)]


def costs(found: Switch | None) -> tuple[float, float]:
    assert found is not None
    return found.stay_s, found.move_s


def test_a_request_stays_where_recomputing_costs_more_and_that_is_told_once() -> None:
    driver = Driver(path(1, 2))
    streaming(driver, tokens=90, every_s=1.0)
    after = path(1, 2, state=InstanceState.MOVING), replica(2)
    commands = driver.publish(*after, step_s=0.2)
    assert sent(commands) == []
    (told,) = switches(commands)
    assert (told.moved, told.stayed, told.moved_costs) == ((), 1, None)
    assert costs(told.stayed_costs) == pytest.approx((10 * 1.0, (100 + 10) * 0.2))
    assert switches(driver.publish(*after, step_s=0.2)) == []
    assert sent(driver.later(0.1)) == []


def test_a_request_moves_where_recomputing_costs_less() -> None:
    driver = Driver(path(1, 2))
    streaming(driver, tokens=50, every_s=1.0)
    commands = driver.publish(path(1, 2, state=InstanceState.MOVING), replica(2), step_s=0.2)
    assert sent(commands) == [("a", "replica-2", 2)]
    (told,) = switches(commands)
    assert (told.moved, told.stayed, told.stayed_costs) == (("a",), 0, None)
    assert costs(told.moved_costs) == pytest.approx((50 * 1.0, (60 + 50) * 0.2))


def test_a_request_moves_with_its_kv_and_keeps_the_target_free_for_others() -> None:
    """KV moves in 1 s. Meanwhile a token comes on the path, which is computed once more."""
    driver = Driver(path(1, 2))
    streaming(driver, tokens=90, every_s=1.0)
    after = path(1, 2, state=InstanceState.MOVING), replica(2)
    commands = driver.publish(*after, step_s=0.2, kv_s=0.01)
    assert sent(commands) == [("a", "replica-2", 2)]
    (told,) = switches(commands)
    assert costs(told.moved_costs) == pytest.approx((10 * 1.0, 1 * 1.0 + 1 * 0.2 + 9 * 0.2))
    assert sent(driver.admit("b", prompt=1)) == [("b", "replica-2", 1)]


def test_kv_is_not_expected_to_move_with_log_probabilities() -> None:
    driver = Driver(path(1, 2))
    streaming(driver, tokens=90, every_s=1.0, logprobs=1)
    after = path(1, 2, state=InstanceState.MOVING), replica(2)
    assert sent(driver.publish(*after, step_s=0.2, kv_s=0.01)) == []


def test_a_request_stays_while_others_wait_for_their_first_token() -> None:
    """A move takes 3 s less, but each of the two others would wait 13 s longer."""
    driver = Driver(path(1, 2, slots=1), routing=replace(OURS, ahead_s=math.inf))
    streaming(driver, tokens=50, every_s=1.0)
    driver.admit("b", "c", prompt=1)
    after = path(1, 2, state=InstanceState.MOVING), replica(2)
    commands = driver.publish(*after, step_s=0.225)
    assert sent(commands) == [("b", "replica-2", 1), ("c", "replica-2", 1)]
    assert sent(driver.give("b", 1, 0)) == []
    assert sent(driver.give("c", 1, 0)) == [("a", "replica-2", 2)]


def test_a_free_slot_goes_to_those_that_wait_for_their_first_token() -> None:
    """To what waits on a path that moves, then to the queue. What has its token keeps its path."""
    driver = Driver(path(1, 2))
    streaming(driver, tokens=50, every_s=1.0)
    driver.admit("b", prompt=10)
    driver.publish(path(1, 2, state=InstanceState.MOVING))
    driver.admit("c", prompt=10)
    after = path(1, 2, state=InstanceState.MOVING), replica(3, slots=1)
    assert sent(driver.publish(*after)) == [("b", "replica-3", 2)]
    driver.take("b", 2)
    assert sent(driver.give("b", 2, 0, finish="length")) == [("c", "replica-3", 1)]
    assert sent(driver.give("c", 1, 0, finish="length")) == [("a", "replica-3", 2)]


def test_what_finds_no_room_is_told_apart_from_what_stays() -> None:
    driver = Driver(path(1, 2), routing=replace(OURS, ahead_s=math.inf))
    streaming(driver, tokens=90, every_s=1.0)
    driver.admit("b", "c", prompt=10)
    after = path(1, 2, state=InstanceState.MOVING), replica(3, slots=1)
    (told,) = switches(driver.publish(*after, step_s=0.2))
    assert (told.moved, told.stayed, told.waiting) == (("b",), 0, 2)
    after = path(1, 2, state=InstanceState.MOVING), replica(3, slots=3)
    (told,) = switches(driver.publish(*after, step_s=0.2))
    assert (told.moved, told.stayed, told.waiting) == (("c",), 1, 0)


def test_a_request_without_kv_moves_whatever_it_costs() -> None:
    driver = Driver(path(1, 2))
    streaming(driver, tokens=99, every_s=1.0)
    driver.admit("b", prompt=1000, max_tokens=1)
    commands = driver.publish(path(1, 2, state=InstanceState.MOVING), replica(3), step_s=10.0)
    assert sent(commands) == [("b", "replica-3", 1 + 1)]


def test_a_prompt_stays_with_the_nodes_that_share_it() -> None:
    """The first two stages of a path take prompts from each other as they can."""
    driver = Driver(path(1, 2, 3))
    driver.admit("a", prompt=1000, max_tokens=9)
    moving = path(1, 2, 3, state=InstanceState.MOVING)
    assert sent(driver.publish(moving, replica(2))) == []
    assert sent(driver.publish(moving, replica(3))) == [("a", "replica-3", 2)]


def test_a_prompt_stays_with_two_nodes_of_which_one_is_complete() -> None:
    """Wherever else it went, it would be run anew."""
    driver = Driver(path(1, 2))
    driver.admit("a", prompt=1000, max_tokens=9)
    moving = path(1, 2, state=InstanceState.MOVING)
    assert sent(driver.publish(moving, replica(3), replica(2))) == []
    assert sent(driver.publish(moving, replica(3))) == [("a", "replica-3", 2)]


def running(driver: Driver) -> dict[str, int]:
    return {i.id: count for _, i, count in driver.dispatch.instances()}


def give_alone(driver: Driver, name: str, index: int) -> list[Command]:
    token = Token(RequestId(name), 1, index, 7, alone=True)
    return driver.dispatch.on_tokens(Tokens(node=replica(1).leader, tokens=(token,)), driver.now)


def test_what_its_leader_runs_alone_counts_there_and_need_not_move() -> None:
    driver = Driver(path(1, 2))
    driver.admit("a", prompt=10, max_tokens=3)
    driver.now += 1.0
    give_alone(driver, "a", 0)
    assert running(driver) == {"path-1-2": 1}, "its leader is no replica yet"
    moving = path(1, 2, state=InstanceState.MOVING)
    assert sent(driver.publish(moving, replica(1, slots=1))) == []
    assert sent(give_alone(driver, "a", 1)) == []
    assert running(driver) == {"path-1-2": 0, "replica-1": 1}
    assert sent(driver.admit("b")) == []
    assert sent(driver.publish(moving, replica(1, slots=1), replica(3, slots=1))) == [
        ("b", "replica-3", 1)
    ]
    assert sent(driver.publish(replica(1, slots=1), replica(3, slots=1))) == []
    give_alone(driver, "a", 2)
    assert running(driver) == {"replica-1": 0, "replica-3": 1}
    driver.dispatch.validate()


def test_what_moves_already_is_not_counted_elsewhere() -> None:
    driver = Driver(path(1, 2))
    streaming(driver, tokens=50, every_s=1.0)
    moving = path(1, 2, state=InstanceState.MOVING)
    assert sent(driver.publish(moving, replica(1))) == [("a", "replica-1", 2)]
    give_alone(driver, "a", 50)
    driver.take("a", 2)
    assert running(driver) == {"path-1-2": 0, "replica-1": 1}
    driver.dispatch.validate()


def test_without_measurements_requests_move() -> None:
    driver = Driver(path(1, 2))
    streaming(driver, tokens=99, every_s=1.0)
    commands = driver.publish(path(1, 2, state=InstanceState.MOVING), replica(2))
    assert sent(commands) == [("a", "replica-2", 2)]


def test_those_without_a_token_move_first_and_then_those_with_the_least_kv() -> None:
    driver = Driver(path(1, 2))
    driver.admit("long", prompt=50)
    driver.admit("short", prompt=5)
    driver.admit("none", prompt=500)
    driver.give("long", 1, 0)
    driver.give("short", 1, 0)
    moving = path(1, 2, state=InstanceState.MOVING)
    (first,) = sent(driver.publish(moving, replica(3, slots=1)))
    assert first[0] == "none"
    (second,) = sent(driver.publish(moving, replica(3, slots=1), replica(4, slots=1)))
    assert second[0] == "short"
