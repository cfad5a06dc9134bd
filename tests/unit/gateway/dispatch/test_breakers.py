"""Instances that refuse, fail or are slow: what is sent to them, and what is recorded."""

import msgspec
import pytest

from services.gateway.core.breaker import PAUSE_S, REFUSED_S, State
from services.gateway.core.commands import Command, Opened
from services.gateway.core.reporting import Reporting
from services.gateway.core.speed import LOOK_S, LOOKS, compare, slowness
from shared.errors import BadInput, BusTimeout, CapacityExceeded, LambdaScaleError
from shared.ids import GatewayId, InstanceId, RequestId
from shared.messages.instances import Role
from shared.messages.load import ModelLoad
from shared.messages.serving import AttemptFailed, Token, Tokens
from tests.unit.gateway.dispatch.builders import MODEL, NAME, QUEUE, Driver, moving, sent
from tests.unit.gateway.support import replica
from tests.unit.gateway.test_routing import table_of


def opened(commands: list[Command]) -> list[str]:
    return [command.why for command in commands if isinstance(command, Opened)]


def fails(driver: Driver, name: str, attempt: int, error: LambdaScaleError) -> list[Command]:
    commands = driver.dispatch.on_not_taken(RequestId(name), attempt, error, driver.now)
    driver.dispatch.validate()
    return commands


def states(driver: Driver) -> dict[State, int]:
    return {state: n for state, n in driver.dispatch.breakers()[NAME].items() if n}


def test_after_a_refusal_one_request_is_tried_and_the_rest_follow_its_acceptance() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    assert opened(driver.refuse("a", 1)) == ["refused"]
    driver.admit("b", "c")
    tried = sent(driver.later(PAUSE_S))
    assert [name for name, *_ in tried] == ["b"], "a keeps away for longer"
    assert states(driver) == {State.HALF_OPEN: 1}
    assert [name for name, *_ in sent(driver.take("b", 1))] == ["c"]
    assert states(driver) == {State.CLOSED: 1}


def test_after_a_failure_the_first_token_is_waited_for() -> None:
    driver = Driver(replica(1))
    driver.admit("a", "b")
    driver.give("b", 1, 0)
    commands = driver.dispatch.on_tokens(
        Tokens(
            node=replica(1).leader,
            tokens=(),
            failed=(AttemptFailed(RequestId("a"), 1, "transport", "cut off"),),
        ),
        driver.now,
    )
    assert opened(commands) == ["failed"]
    driver.admit("c", "d")
    (tried,) = {name for name, *_ in sent(driver.later(PAUSE_S))}
    assert not sent(driver.take(tried, 1))
    assert not sent(driver.give("b", 1, 1)), "it began before"
    assert sent(driver.give(tried, 1, 0))
    story = [step.text for step in driver.dispatch.story(replica(1).id)]
    assert any("failed, left alone for 0.05 s: cut off" in text for text in story), story
    assert any("is well again" in text for text in story)


@pytest.mark.parametrize("error", [BadInput("too long"), None])
def test_what_a_client_did_says_nothing_of_the_instance(error: BadInput | None) -> None:
    driver = Driver(replica(1))
    for number in range(20):
        driver.admit(f"a{number}")
        if error is None:
            driver.dispatch.cancel(RequestId(f"a{number}"), driver.now)
        else:
            assert not opened(fails(driver, f"a{number}", 1, error))
    assert states(driver) == {State.CLOSED: 1}
    assert sent(driver.admit("b"))


def test_nor_does_a_target_that_finds_the_request_wrong() -> None:
    driver = moving(0)
    assert not opened(fails(driver, "a", 2, BadInput("too long")))
    assert states(driver) == {State.CLOSED: 2}


def test_a_trial_that_its_client_cancels_is_followed_by_another() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    driver.refuse("a", 1)
    driver.admit("b", "c")
    driver.later(PAUSE_S)
    commands = driver.dispatch.cancel(RequestId("b"), driver.now)
    assert [name for name, *_ in sent(commands)] == ["c"]


def test_where_all_fail_requests_wait_and_are_refused_and_all_are_tried_on() -> None:
    """None is left alone for longer than refusals would, beyond the share that may be."""
    driver = Driver(*(replica(i) for i in range(6)))
    for _ in range(60):
        names = [f"r{driver.now:.2f}"]
        if len(driver.dispatch._models[MODEL].queue) < QUEUE:
            driver.admit(*names)
        for name in list(driver.dispatch._ledger.requests):
            request = driver.dispatch._ledger.requests.get(name)
            if request is not None and request.running:
                request.failures = 0
                fails(driver, name, request.attempt, BusTimeout("no answer"))
        driver.later(REFUSED_S)
    table = driver.dispatch._models[MODEL].table
    pauses = sorted(route.breaker.pause_s for route in table.routes.values())
    assert max(pauses[:4]) <= REFUSED_S
    while len(driver.dispatch._models[MODEL].queue) < QUEUE:
        driver.admit(f"q{len(driver.dispatch._models[MODEL].queue)}-{driver.now}")
    with pytest.raises(CapacityExceeded) as caught:
        driver.admit("more")
    assert caught.value.retry_after_s is not None


# --- slow instances ----------------------------------------------------------------


def give_each(driver: Driver, names: list[str], index: int) -> list[Command]:
    tokens = tuple(Token(RequestId(name), 1, index, 7) for name in names)
    return driver.dispatch.on_tokens(Tokens(node=replica(1).leader, tokens=tokens), driver.now)


def run(driver: Driver, where: dict[str, str], slow: str, factor: int) -> list[Command]:
    """All requests get a token every 20 ms, those on `slow` in every `factor`th step only."""
    found: list[Command] = []
    done = dict.fromkeys(where, 0)
    for step in range(int(2 * LOOKS * LOOK_S / 0.02)):
        due = [n for n, place in where.items() if place != slow or step % factor == 0]
        for name in due:
            found += give_each(driver, [name], done[name])
            done[name] += 1
        found += driver.later(0.02)
    return found


@pytest.mark.parametrize(("factor", "expected"), [(1, []), (4, ["slow"])])
def test_who_is_slower_than_twice_the_median_is_left_alone(
    factor: int, expected: list[str]
) -> None:
    driver = Driver(*(replica(i) for i in range(4)))
    starts = sent(driver.admit("a", "b", "c", "d", max_tokens=10_000))
    while len({place for _, place, _ in starts}) < 4:
        starts += sent(driver.admit(f"x{len(starts)}", max_tokens=10_000))
    where = {name: place for name, place, _ in starts}
    commands = run(driver, where, "replica-2", factor)
    assert opened(commands) == expected
    table = driver.dispatch._models[MODEL].table
    breaker = table.routes[replica(2).id].breaker
    assert (breaker.state is State.OPEN) == bool(expected)
    if expected:
        story = [step.text for step in driver.dispatch.story(replica(2).id)]
        assert any("times as long as usual" in text for text in story)


def test_a_slow_one_that_is_fast_again_is_used_again() -> None:
    driver = Driver(*(replica(i) for i in range(4)))
    starts = sent(driver.admit("a", "b", "c", "d", max_tokens=10_000))
    while len({place for _, place, _ in starts}) < 4:
        starts += sent(driver.admit(f"x{len(starts)}", max_tokens=10_000))
    where = {name: place for name, place, _ in starts}
    table = driver.dispatch._models[MODEL].table
    route = table.routes[replica(2).id]
    route.breaker.slow(driver.now)
    driver.later(route.breaker.pause_s)
    assert route.takes(driver.now)
    name = ""
    while route.breaker.trial is None:
        name = f"y{len(where)}"
        where |= {n: place for n, place, _ in sent(driver.admit(name, max_tokens=10_000))}
    run(driver, where, "", 1)
    assert route.breaker.state is State.CLOSED


def test_speeds_are_compared_by_capacity_and_load() -> None:
    table = table_of(
        (replica(1), 1, 1), (replica(2, capacity=0.5), 1, 1), (replica(3), 1, 4), (replica(4), 1, 1)
    )
    one, half, busy, slow = table.routes.values()
    decode_s, row_s = 0.01, 0.01
    for route, token_s in ((one, 0.02), (half, 0.04), (busy, 0.05), (slow, 0.05)):
        for _ in range(20):
            route.measure(token_s)
    figures = [slowness(route, decode_s, row_s) for route in (one, half, busy, slow)]
    assert figures == pytest.approx([1.0, 1.0, 1.0, 2.5])
    usual, found = compare(table.routes.values(), decode_s, row_s)
    assert usual == pytest.approx(1.0)
    assert found == [slow]
    assert compare([one, slow], decode_s, row_s) == (0.0, []), "too few"


def test_who_only_prefills_is_not_compared_and_in_a_new_role_is_measured_anew() -> None:
    """Between the prompts of others the few tokens that it gives come late."""
    table = table_of(*((replica(i), 1, 1) for i in range(4)))
    prefills, *others = table.routes.values()
    as_prefiller = msgspec.structs.replace(prefills.instance, role=Role.PREFILL)
    for route, token_s in ((prefills, 0.05), *((other, 0.02) for other in others)):
        for _ in range(20):
            route.measure(token_s)
    assert compare(table.routes.values(), 0.01, 0.01)[1] == [prefills]
    prefills.become(as_prefiller)
    for _ in range(20):
        prefills.measure(0.05)
    assert not compare(table.routes.values(), 0.01, 0.01)[1]
    prefills.become(msgspec.structs.replace(as_prefiller, role=Role.BOTH))
    prefills.measure(0.02)
    assert slowness(prefills, 0.01, 0.01) == pytest.approx(1.0)


def test_load_reports_say_which_instances_are_left_alone_and_why() -> None:
    driver = Driver(replica(1))

    def kept_out() -> dict[InstanceId, str]:
        (load,) = driver.dispatch.loads(0)
        return load.kept_out

    driver.admit("a")
    driver.refuse("a", 1)
    assert not kept_out(), "it is full, which is no fault"
    (name, _, attempt) = sent(driver.later(10 * PAUSE_S))[0]
    fails(driver, name, attempt, BusTimeout("no answer"))
    assert kept_out() == {replica(1).id: "failed: no answer"}
    driver.later(10 * PAUSE_S)
    assert [name for name, *_ in sent(driver.admit("b"))] == ["b"]
    driver.give("b", 1, 0)
    assert not kept_out()


def test_an_instance_that_an_idle_gateway_leaves_alone_is_in_every_whole_report() -> None:
    reporting, why = Reporting(whole_s=0.5), {replica(1).id: "slow"}
    loads = (ModelLoad(model=NAME, kept_out=why),)
    for now in (0.0, 0.5):
        report = reporting.next(GatewayId("g"), "", loads, now)
        assert report is not None
        assert [load.kept_out for load in report.models] == [why]
