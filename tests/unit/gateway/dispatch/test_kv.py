"""Requests go where KV is free for them, as far as nodes have said so."""

import msgspec

from services.gateway.core.routes import KV_TOLD_S
from shared.ids import RequestId
from shared.messages.instances import Instance
from shared.messages.serving import Token, Tokens
from tests.unit.gateway.dispatch.builders import MODEL, Driver, sent
from tests.unit.gateway.support import path, replica


def say(driver: Driver, instance: Instance, free: int, *tokens: Token) -> None:
    message = Tokens(node=instance.leader, tokens=tokens, kv_free={MODEL: free})
    driver.dispatch.on_tokens(message, driver.now)


def group(*numbers: int) -> Instance:
    return msgspec.structs.replace(path(*numbers), group=True)


def instance_of(driver: Driver, name: str, prompt: int = 100) -> str:
    ((_, instance, _),) = sent(driver.admit(name, prompt=prompt))
    return instance


def test_a_prompt_goes_where_its_kv_is_free_and_not_where_the_load_is_least() -> None:
    first, second = replica(1), replica(2)
    driver = Driver(first, second)
    busy = [instance_of(driver, name) for name in "ab"]
    assert busy == [first.id, second.id]
    driver.dispatch.cancel(RequestId("a"), driver.now)
    say(driver, first, 99)
    say(driver, second, 201)
    assert instance_of(driver, "c") == second.id
    say(driver, first, 100)
    assert instance_of(driver, "d") == first.id


def test_prompts_that_were_sent_take_what_is_free() -> None:
    first, second = replica(1), replica(2)
    driver = Driver(first, second)
    say(driver, first, 1_000)
    say(driver, second, 150)
    assert [instance_of(driver, name) for name in "abc"] == [first.id, second.id, first.id]


def test_where_none_has_enough_the_one_with_the_most_takes_it() -> None:
    first, second, third = replica(1), replica(2), replica(3)
    driver = Driver(first, second, third)
    for instance, free in ((first, 10), (second, 30), (third, 20)):
        say(driver, instance, free)
    assert instance_of(driver, "a") == second.id
    assert instance_of(driver, "b") == third.id


def test_what_was_said_counts_for_a_while() -> None:
    first, second = replica(1), replica(2)
    driver = Driver(first, second)
    say(driver, first, 0)
    assert instance_of(driver, "a") == second.id
    driver.later(KV_TOLD_S + 0.1)
    assert instance_of(driver, "b") == first.id


def test_a_node_that_has_said_nothing_is_taken_to_have_enough() -> None:
    first, second = replica(1), path(2, 3)
    driver = Driver(first, second)
    say(driver, first, 0)
    say(driver, replica(2), 0)  # no replica of this gateway's
    assert instance_of(driver, "a") == second.id


def test_the_leader_of_a_group_speaks_for_it() -> None:
    first, second = group(1, 2), group(3, 4)
    driver = Driver(first, second)
    say(driver, first, 0)
    assert instance_of(driver, "a") == second.id


def test_the_only_instance_takes_a_prompt_that_finds_no_kv_there() -> None:
    driver = Driver(replica(1))
    say(driver, replica(1), 0)
    assert instance_of(driver, "a") == replica(1).id
