"""Requests go where KV is free for them, as far as nodes have said so."""

import msgspec

from services.gateway.core.model import MOST_CLAIMS
from services.gateway.core.routes import KV_TOLD_S
from shared.ids import RequestId
from shared.messages.instances import Instance
from shared.messages.serving import Tokens
from tests.unit.gateway.dispatch.builders import MODEL, Driver, sent
from tests.unit.gateway.support import path, replica


def say(driver: Driver, instance: Instance, free: int) -> list[tuple[str, str, int]]:
    message = Tokens(node=instance.leader, tokens=(), kv_free={MODEL: free})
    return sent(driver.dispatch.on_tokens(message, driver.now))


def group(*numbers: int) -> Instance:
    return msgspec.structs.replace(path(*numbers), group=True)


def instance_of(driver: Driver, name: str, prompt: int = 100) -> str:
    ((_, instance, _),) = sent(driver.admit(name, prompt=prompt))
    return instance


def occupied(*instances: Instance) -> Driver:
    """A request runs on each of them, and has its first token."""
    driver = Driver(*(msgspec.structs.replace(instance, slots=1) for instance in instances))
    for instance in instances:
        instance_of(driver, instance.id, prompt=1)
        driver.give(instance.id, 1, 0)
    driver.publish(*instances)
    return driver


def test_a_prompt_goes_where_its_kv_is_free_and_not_where_the_load_is_least() -> None:
    first, second = replica(1), replica(2)
    driver = Driver(first, second)
    busy = [instance_of(driver, name) for name in "abc"]
    assert busy == [first.id, second.id, first.id]
    driver.dispatch.cancel(RequestId("b"), driver.now)
    assert instance_of(driver, "d", prompt=1) == second.id
    say(driver, first, 300)
    say(driver, second, 100)
    assert instance_of(driver, "e") == first.id
    say(driver, second, 101)
    assert instance_of(driver, "f") == second.id


def test_prompts_that_were_sent_take_what_is_free() -> None:
    first, second = replica(1), replica(2)
    driver = Driver(first, second)
    say(driver, first, 1_000)
    say(driver, second, 150)
    assert [instance_of(driver, name) for name in "abc"] == [first.id, second.id, first.id]


def test_what_a_node_says_includes_the_requests_of_which_it_has_said_so() -> None:
    first = replica(1)
    driver = occupied(first)
    assert say(driver, first, 350) == []
    for name in "ab":
        assert instance_of(driver, name) == first.id
    driver.take("a", 1)
    assert say(driver, first, 199) == []  # besides a
    assert sent(driver.admit("c", prompt=100)) == []
    driver.take("b", 1)
    assert say(driver, first, 99) == []  # besides b
    assert say(driver, first, 100) == [("c", first.id, 1)]


def test_what_comes_free_within_two_steps_is_counted_as_free() -> None:
    first = replica(1)
    driver = occupied(first)
    for name in "ab":
        assert instance_of(driver, name, prompt=60) == first.id
    for index in range(10):
        driver.later(0.1)
        driver.give("a", 1, index, "stop" if index == 9 else "")
        driver.give("b", 1, index)
    # Requests stay 1 s, and a step takes 0.1 s. What is there has 2 and 70 tokens.
    driver.later(0.1)
    assert say(driver, first, 45) == []
    assert sent(driver.admit("c", prompt=60)) == []
    assert say(driver, first, 46) == [("c", first.id, 1)]


def test_a_prompt_waits_in_the_gateway_until_its_kv_is_free_anywhere() -> None:
    first, second = replica(1), replica(2)
    driver = occupied(first, second)
    assert say(driver, first, 50) == say(driver, second, 60) == []
    assert sent(driver.admit("a", prompt=100)) == []
    assert say(driver, first, 99) == []
    assert [load.queued_requests for load in driver.dispatch.loads(0)] == [1]
    assert say(driver, second, 100) == [("a", second.id, 1)]


def test_shorter_prompts_begin_elsewhere_and_not_where_a_longer_one_waits_for_kv() -> None:
    instances = [replica(number) for number in range(3)]
    driver = occupied(*instances)
    for instance, free in zip(instances, (60, 50, 10), strict=True):
        say(driver, instance, free)
    assert sent(driver.admit("long", prompt=100)) == []
    assert sent(driver.admit("short", prompt=40)) == [("short", instances[1].id, 1)]
    assert sent(driver.admit("next", prompt=40)) == []
    assert say(driver, instances[0], 99) == []
    assert say(driver, instances[0], 100) == [("long", instances[0].id, 1)]
    assert say(driver, instances[2], 40) == [("next", instances[2].id, 1)]


def test_no_more_requests_wait_for_kv_at_once_than_some() -> None:
    instances = [replica(number) for number in range(MOST_CLAIMS + 1)]
    driver = occupied(*instances)
    for instance in instances:
        say(driver, instance, 50)
    for number in range(MOST_CLAIMS - 1):
        assert sent(driver.admit(f"long {number}", prompt=100)) == []
    assert len(sent(driver.admit("short", prompt=10))) == 1
    assert sent(driver.admit("one more", prompt=100)) == []
    assert sent(driver.admit("another", prompt=10)) == []


def test_an_instance_on_which_nothing_runs_takes_any_prompt() -> None:
    driver = Driver(replica(1))
    say(driver, replica(1), 10)
    assert instance_of(driver, "a") == replica(1).id
    assert sent(driver.admit("b", prompt=100)) == []
    assert sent(driver.give("a", 1, 0, "stop")) == [("b", replica(1).id, 1)]


def test_what_was_said_counts_for_a_while() -> None:
    first, second = replica(1), replica(2)
    driver = occupied(first, second)
    say(driver, first, 0)
    say(driver, second, 0)
    assert sent(driver.admit("c", prompt=100)) == []
    assert sent(driver.later(KV_TOLD_S - 0.1)) == []
    assert [name for name, *_ in sent(driver.later(0.2))] == ["c"]


def test_a_path_is_taken_to_have_enough() -> None:
    first, second = replica(1), path(2, 3)
    driver = Driver(first, second)
    instance_of(driver, "a")
    say(driver, first, 0)
    say(driver, replica(2), 0)  # no replica of this gateway's
    assert instance_of(driver, "b") == second.id


def test_the_leader_of_a_group_speaks_for_it() -> None:
    first, second = group(1, 2), group(3, 4)
    driver = Driver(first, second)
    instance_of(driver, "a")
    say(driver, first, 0)
    assert instance_of(driver, "b") == second.id
