"""Requests begin where instances prefill, and go on where they decode."""

import msgspec

from services.gateway.core.commands import Command, Send
from services.gateway.core.moves import EARLY_S, LATE_S, WORTH_MOVING
from shared.ids import NodeId
from shared.messages.instances import Instance, Role
from shared.messages.serving import Sampling
from tests.unit.gateway.dispatch.builders import Driver, emitted, sent, withdrawn
from tests.unit.gateway.support import replica


def with_role(instance: Instance, role: Role) -> Instance:
    return msgspec.structs.replace(instance, role=role)


PREFILL = with_role(replica(1), Role.PREFILL)
DECODE = with_role(replica(2), Role.DECODE)


def test_a_request_begins_on_one_and_moves_to_the_other_with_its_first_token() -> None:
    driver = Driver(DECODE, PREFILL)
    assert sent(driver.admit("a")) == [("a", "replica-1", 1)]
    commands = driver.give("a", 1, 0)
    assert emitted(commands)
    assert sent(commands) == [("a", "replica-2", 2)]
    (submit,) = [command.submit for command in commands if isinstance(command, Send)]
    assert submit.kv_from == PREFILL.stages
    assert submit.takes_over == 1
    assert emitted(driver.give("a", 1, 1)), "it goes on meanwhile"
    assert withdrawn(driver.take("a", 2)) == [("node-1", 1)]
    assert sent(driver.give("a", 2, 2)) == [], "it stays there"


def early(commands: list[Command]) -> list[tuple[str, str, int]]:
    """What was sent to go on elsewhere, with its KV."""
    submits = [each.submit for each in commands if isinstance(each, Send) and each.submit.kv_from]
    return [(submit.request, submit.instance, submit.takes_over) for submit in submits]


def test_a_request_is_handed_over_once_its_prefill_is_about_to_run() -> None:
    """The node has to know it, and what is before it takes no longer than EARLY_S."""
    driver = Driver()
    driver.publish(PREFILL, DECODE, step_s=EARLY_S / 10)
    driver.admit("a", "b", "c", prompt=8)
    assert early(driver.take("b", 1)) == []
    assert early(driver.take("a", 1)) == [("a", "replica-2", 1), ("b", "replica-2", 1)]
    assert early(driver.take("c", 1)) == []
    assert early(driver.give("a", 1, 0)) == [("c", "replica-2", 1)]
    assert withdrawn(driver.take("a", 2)) == [("node-1", 1)]


def test_a_long_prefill_or_one_of_unknown_length_is_waited_for() -> None:
    driver = Driver()
    driver.publish(PREFILL, DECODE, step_s=LATE_S / 10)
    driver.admit("a", prompt=11)
    assert early(driver.take("a", 1)) == []
    driver.publish(PREFILL, DECODE)
    assert early(driver.admit("b", prompt=1) + driver.take("b", 1)) == []
    assert early(driver.give("a", 1, 0)) == [("a", "replica-2", 1)]


def test_a_request_whose_early_move_is_refused_goes_on_where_it_is() -> None:
    driver = Driver()
    driver.publish(PREFILL, DECODE, step_s=EARLY_S / 10)
    driver.admit("a", prompt=8)
    assert early(driver.take("a", 1)) == [("a", "replica-2", 1)]
    assert sent(driver.refuse("a", 2)) == []
    assert emitted(driver.give("a", 1, 0))


def test_nothing_begins_where_instances_only_decode() -> None:
    full = with_role(replica(1, slots=1), Role.PREFILL)
    driver = Driver(full, DECODE)
    assert sent(driver.admit("a", "b")) == [("a", "replica-1", 1)]
    assert sent(driver.give("a", 1, 0)) == [("a", "replica-2", 2)]
    assert sent(driver.take("a", 2)) == [("b", "replica-1", 1)], "its slot is free"


def test_while_nobody_that_decodes_has_room_requests_go_on_where_they_are() -> None:
    driver = Driver(PREFILL, with_role(replica(2, slots=1), Role.DECODE))
    driver.admit("a", "b")
    assert sent(driver.give("a", 1, 0)) == [("a", "replica-2", 2)]
    driver.take("a", 2)
    assert sent(driver.give("b", 1, 0)) == []
    assert emitted(driver.give("b", 1, 1))
    assert sent(driver.give("a", 2, 1, "stop")) == [("b", "replica-2", 2)]


def test_a_request_that_is_nearly_over_stays() -> None:
    driver = Driver(PREFILL, DECODE)
    driver.admit("a", max_tokens=WORTH_MOVING)
    assert sent(driver.give("a", 1, 0)) == []


def test_a_request_whose_kv_cannot_move_stays() -> None:
    driver = Driver(PREFILL, DECODE)
    driver.admit("a")
    (request,) = driver.dispatch._ledger.requests.values()
    request.sampling = Sampling(logprobs=0)
    assert sent(driver.give("a", 1, 0)) == []


def test_an_instance_that_turns_to_decode_keeps_its_requests() -> None:
    driver = Driver(PREFILL, with_role(replica(2, slots=0), Role.DECODE))
    driver.admit("a")
    driver.give("a", 1, 0)
    third = with_role(replica(3), Role.PREFILL)
    turned = with_role(PREFILL, Role.DECODE)
    assert sent(driver.publish(turned, DECODE, third)) == []
    assert sent(driver.admit("b")) == [("b", "replica-3", 1)]


def test_what_decoded_on_a_node_that_dies_begins_anew_and_moves_again() -> None:
    driver = Driver(PREFILL, DECODE, with_role(replica(3), Role.DECODE))
    driver.admit("a")
    driver.give("a", 1, 0)
    driver.take("a", 2)
    driver.give("a", 2, 1)
    commands = driver.dispatch.on_node_gone(NodeId("node-2"), driver.now, graceful=True)
    assert sent(commands) == [("a", "replica-1", 3)]
    assert sent(driver.give("a", 3, 2)) == [("a", "replica-3", 4)]
