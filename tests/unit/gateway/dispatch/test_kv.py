"""Requests go where KV is free for them, as far as nodes have said so."""

import msgspec

from services.gateway.core import routing
from services.gateway.core.moves import RELIEVED, SHORT_S
from services.gateway.core.requests import Request
from services.gateway.core.routes import KV_TOLD_S, Route
from services.gateway.core.routing import Draw, Routing
from services.gateway.core.table import Table
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


def sent_ahead(first: Instance, second: Instance) -> Driver:
    """Neither has KV for request a, and it was sent to the first."""
    driver = occupied(first, second)
    say(driver, first, 20)
    say(driver, second, 10)
    assert instance_of(driver, "a") == first.id
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
    assert say(driver, first, 99) == []  # besides a
    assert sent(driver.admit("c", prompt=100)) == []
    driver.take("b", 1)
    assert say(driver, first, -1) == []  # besides b
    assert say(driver, first, 0) == [("c", first.id, 1)]


def test_where_none_has_enough_one_waits_inside_the_node_with_the_most() -> None:
    """The others stay in the queue, in their order."""
    first, second, third = instances = [replica(number) for number in range(3)]
    driver = occupied(*instances)
    for instance, free in ((first, 10), (second, 30), (third, 20)):
        say(driver, instance, free)
    for name, instance in (("a", second), ("b", third), ("c", first)):
        assert instance_of(driver, name) == instance.id
    assert sent(driver.admit("d", prompt=100)) == sent(driver.admit("short", prompt=5)) == []
    assert [load.queued_requests for load in driver.dispatch.loads(0)] == [2]
    driver.take("c", 1)
    assert say(driver, first, -1) == []  # c waits
    assert say(driver, first, 0) == [("d", first.id, 1)]
    assert say(driver, second, 105) == [("short", second.id, 1)]  # a is still on its way


def test_an_instance_on_which_nothing_runs_lets_any_prompt_wait() -> None:
    driver = Driver(replica(1))
    say(driver, replica(1), -10)
    assert instance_of(driver, "a") == replica(1).id
    assert sent(driver.admit("b", prompt=100)) == []
    assert sent(driver.give("a", 1, 0, "stop")) == [("b", replica(1).id, 1)]


def test_who_waits_long_inside_a_node_goes_where_its_kv_is_free() -> None:
    first, second = replica(1), replica(2)
    driver = sent_ahead(first, second)
    assert say(driver, second, 100) == []  # nothing says that it waits
    driver.take("a", 1)
    assert say(driver, first, -80) == say(driver, second, 101) == []  # it has not waited for long
    say(driver, second, 99)
    assert sent(driver.later(SHORT_S)) == []
    say(driver, second, 100)
    assert sent(driver.later(0.0)) == [("a", second.id, 2)]
    driver.take("a", 2)
    assert sent(driver.later(SHORT_S)) == say(driver, first, 20) == []
    assert driver.dispatch._ledger.requests[RequestId("a")].instance == second.id


def test_who_waits_inside_a_node_that_has_fallen_silent_stays() -> None:
    first, second = replica(1), replica(2)
    driver = sent_ahead(first, second)
    driver.take("a", 1)
    say(driver, first, -80)
    driver.later(KV_TOLD_S + 0.1)
    say(driver, second, 100)
    assert sent(driver.later(0.0)) == []
    say(driver, first, -80)
    assert sent(driver.later(0.0)) == [("a", second.id, 2)]


def test_few_that_wait_are_looked_at_at_a_time() -> None:
    short = [replica(number) for number in range(RELIEVED + 1)]
    target = msgspec.structs.replace(replica(RELIEVED + 1), slots=2 * RELIEVED)
    driver = occupied(*short, target)
    for instance in (*short, target):
        say(driver, instance, 20 if instance is not target else -1)
    for instance in short:
        name = f"on {len(driver.dispatch._ledger.requests)}"
        say(driver, instance, 21)
        assert instance_of(driver, name) == instance.id
        driver.take(name, 1)
        say(driver, instance, -80)
    driver.later(SHORT_S)
    say(driver, target, 10_000)
    assert len(sent(driver.later(0.0))) == RELIEVED
    assert len(sent(driver.later(0.0))) == 1


def test_who_has_its_kv_by_then_does_not_go() -> None:
    first, second = replica(1), replica(2)
    driver = sent_ahead(first, second)
    driver.take("a", 1)
    say(driver, first, -80)
    say(driver, first, 0)
    driver.later(SHORT_S)
    say(driver, second, 100)
    assert sent(driver.later(0.0)) == []


def test_while_all_who_are_free_lack_kv_only_the_first_in_the_queue_is_looked_at() -> None:
    asked = list[str]()

    def choose(table: Table, request: Request, now: float, draw: Draw) -> Route | None:
        asked.append(request.id)
        return routing.choose(table, request, now, draw)

    first = replica(1)
    driver = Driver(first, routing=Routing(choose=choose))
    driver.admit("a")
    say(driver, first, -1)
    assert sent(driver.admit("b", "c")) == []
    assert asked == ["a", "b"]


def test_who_has_begun_does_not_go() -> None:
    first, second = replica(1), replica(2)
    driver = sent_ahead(first, second)
    driver.take("a", 1)
    say(driver, first, -80)
    driver.later(SHORT_S)
    driver.give("a", 1, 0)
    say(driver, second, 100)
    assert sent(driver.later(0.0)) == []


def test_what_was_said_counts_for_a_while() -> None:
    first, second = replica(1), replica(2)
    driver = occupied(first, second)
    say(driver, first, -1)
    say(driver, second, -1)
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
