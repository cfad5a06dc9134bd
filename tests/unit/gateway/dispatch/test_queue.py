"""The queue of a model: who goes first, who waits, and who is refused."""

import pytest

from services.gateway.core.admission import MARGIN
from services.gateway.core.breaker import PAUSE_S
from services.gateway.core.commands import Emit, End
from services.gateway.core.fair_queue import Share
from services.gateway.core.routing import Routing
from shared.errors import CapacityExceeded, NotFound, NotReady
from shared.ids import RequestId
from shared.messages.instances import InstanceState
from shared.messages.serving import AttemptFailed, Tokens
from tests.unit.gateway.dispatch.builders import MODEL, NAME, QUEUE, QUEUE_S, Driver, ended, sent
from tests.unit.gateway.support import replica


def test_nobody_waits_for_a_model_that_its_operator_keeps_at_none() -> None:
    driver = Driver()
    driver.admit("waits")
    told_so = f"model {NAME!r} is kept at 0 instances by its operator"
    for commands in (driver.publish(fixed=0), driver.admit("late")):
        ((_, error),) = ended(commands)
        assert error.startswith(told_so)
    driver.publish(fixed=None)
    assert ended(driver.admit("again")) == []


def test_what_runs_goes_on_where_its_operator_wants_none() -> None:
    driver = Driver(replica(1))
    driver.admit("runs")
    assert ended(driver.publish(replica(1, state=InstanceState.DRAINING), fixed=0)) == []
    assert [c.request for c in driver.give("runs", 1, 0) if isinstance(c, Emit)] == ["runs"]


def test_requests_wait_in_order_for_a_slot() -> None:
    driver = Driver(replica(1, slots=2))
    assert [name for name, *_ in sent(driver.admit("a", "b", "c", "d"))] == ["a", "b"]
    assert sent(driver.give("b", 1, 0, "stop")) == [("c", "replica-1", 1)]
    assert [name for name, *_ in sent(driver.publish(replica(1, slots=3)))] == ["d"]


@pytest.mark.parametrize(("by_due_date", "first"), [(True, "short"), (False, "long")])
def test_a_prompt_lets_shorter_ones_go_first_that_come_a_little_later(
    by_due_date: bool, first: str
) -> None:
    driver = Driver(routing=Routing(by_due_date=by_due_date))
    driver.publish(replica(1, slots=1), step_s=0.01)
    driver.admit("runs")
    driver.admit("long", prompt=104)  # a second more than a short one
    driver.now += 0.9
    driver.admit("short")
    assert [name for name, *_ in sent(driver.give("runs", 1, 0, "stop"))] == [first]


def test_a_prompt_is_not_overtaken_by_what_comes_much_later() -> None:
    driver = Driver()
    driver.publish(replica(1, slots=1), step_s=0.01)
    driver.admit("runs")
    driver.admit("long", prompt=104)
    driver.now += 1.1
    driver.admit("short")
    assert [name for name, *_ in sent(driver.give("runs", 1, 0, "stop"))] == ["long"]


def test_who_is_refused_is_told_when_the_queue_will_have_moved() -> None:
    driver = Driver(replica(1, slots=1))
    driver.admit("first")
    assert refused_for(driver) == driver.now, "it did not wait"
    for number in range(10):  # one request every 2 s
        driver.admit(f"r{number}")
        driver.now += 2.0
        driver.give("first" if number == 0 else f"r{number - 1}", 1, 0, "stop")
    driver.admit(*(f"w{number}" for number in range(QUEUE)))
    assert refused_for(driver) == pytest.approx(2.0 * (QUEUE + 1))
    driver.now += 20.0
    assert refused_for(driver) == pytest.approx(4.0 * (QUEUE + 1)), "it stands still"


def full(driver: Driver, within_s: float = 3.0) -> None:
    """The planner can add no replica, and the model has an objective."""
    driver.publish(replica(1, slots=2), step_s=0.1, within_s=within_s)


def test_who_would_miss_the_objective_is_refused_at_once_while_nothing_can_be_added() -> None:
    driver = Driver(replica(1, slots=2))
    driver.admit("a", "b")
    driver.now += 2.0
    driver.give("a", 1, 0, "stop")
    driver.give("b", 1, 0, "stop")  # so a request stays 2 s, and one begins each second
    driver.admit("c", "d")
    full(driver, within_s=2.5 / MARGIN)
    assert ended(driver.admit("e", "f")) == []  # 2 s and 5 passes of 0.1 s
    with pytest.raises(CapacityExceeded, match=r"would wait 3\.0 s, .* is 3\.125 s") as caught:
        driver.admit("g")
    assert caught.value.retry_after_s == pytest.approx(1.0)
    driver.publish(replica(1, slots=2), step_s=0.1)  # now replicas can be added
    assert ended(driver.admit("g")) == []


def test_a_comparison_of_systems_refuses_nobody() -> None:
    driver = Driver(replica(1, slots=2), routing=Routing(refuses=False))
    driver.admit("a", "b")
    driver.now += 2.0
    driver.give("a", 1, 0, "stop")
    driver.give("b", 1, 0, "stop")
    driver.admit("c", "d")
    full(driver, within_s=0.001)
    assert ended(driver.admit("e", "f", "g")) == []


def test_who_can_begin_at_once_is_never_refused() -> None:
    driver = Driver(replica(1, slots=2))
    driver.admit("a")
    driver.now += 60.0
    driver.give("a", 1, 0, "stop")
    full(driver, within_s=0.001)
    assert [name for name, *_ in sent(driver.admit("b"))] == ["b"]


def refused_for(driver: Driver) -> float | None:
    with pytest.raises(CapacityExceeded) as caught:
        driver.admit(*(f"x{number}" for number in range(QUEUE + 1)))
    return caught.value.retry_after_s


def test_a_resumed_request_goes_first() -> None:
    driver = Driver(replica(1, slots=1))
    driver.admit("a", "b")
    assert not sent(driver.refuse("a", 1))
    assert sent(driver.publish(replica(2, slots=1))) == [("a", "replica-2", 2)]


def test_those_of_a_lost_instance_go_first_in_their_order() -> None:
    driver = Driver(replica(1, slots=3))
    driver.admit("a", "b", "c", "d")
    driver.publish()
    starts = sent(driver.publish(*(replica(n) for n in (2, 3, 4, 5))))
    assert [name for name, *_ in starts] == ["a", "b", "c", "d"]


def test_who_is_refused_lets_others_go_first() -> None:
    """It may ask for more than the instance has, which must not hold up the rest."""
    driver = Driver(replica(1, slots=1))
    driver.admit("large", "small")
    assert not sent(driver.refuse("large", 1))
    assert sent(driver.later(PAUSE_S)) == [("small", "replica-1", 1)]
    assert sent(driver.give("small", 1, 0, "stop")) == []
    assert sent(driver.later(PAUSE_S)) == [("large", "replica-1", 2)]


def test_who_needs_what_is_not_there_yet_waits_alone() -> None:
    """The instance serves the others, and another one perhaps the request."""
    driver = Driver(replica(1))
    driver.admit("a")
    error = NotReady("no tokenizer")
    assert not sent(driver.dispatch.on_not_taken(RequestId("a"), 1, error, driver.now))
    assert sent(driver.admit("b")) == [("b", "replica-1", 1)]
    assert sent(driver.publish(replica(1), replica(2))) == [("a", "replica-2", 2)]
    node = replica(2).leader
    failed = AttemptFailed(RequestId("a"), 2, error.code, "no tokenizer")
    driver.dispatch.on_tokens(Tokens(node=node, tokens=(), failed=(failed,)), driver.now)
    starts = [start for _ in range(20) for start in sent(driver.later(PAUSE_S))]
    assert starts[0] == ("a", "replica-1", 3)


def test_who_was_refused_for_too_long_is_told_why() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    ends: list[End] = []
    attempt = 0
    while not ends:
        attempt += 1
        error = NotReady("no tokenizer here")
        driver.dispatch.on_not_taken(RequestId("a"), attempt, error, driver.now)
        ends = [c for c in driver.later(2.0) if isinstance(c, End)]
    assert "for 60 s (the last one said: no tokenizer here): try again" in str(ends[0].error)
    assert attempt == QUEUE_S / 2


def test_unlisted_models_take_nothing() -> None:
    driver = Driver(replica(1))
    driver.dispatch.remove_model(MODEL, driver.now)
    with pytest.raises(NotFound):
        driver.admit("a")
    assert driver.dispatch.loads(0) == ()


def test_nothing_stays_of_a_model_that_is_over() -> None:
    """Once it was removed, its requests have ended and its instances are gone."""
    driver = Driver(replica(1))
    driver.admit("a")
    driver.dispatch.remove_model(MODEL, driver.now)
    driver.later(1)
    assert MODEL in driver.dispatch._models
    driver.give("a", 1, 0, "stop")
    driver.publish()
    driver.later(1)
    assert MODEL not in driver.dispatch._models


FLOOD, OTHER = Share("flood"), Share("other")


def first_slots(driver: Driver, last: str, count: int) -> list[str]:
    """Who begins, each time that a request has ended."""
    order = []
    for _ in range(count):
        ((last, _, attempt),) = sent(driver.give(last, 1, 0, "stop"))
        assert attempt == 1
        order.append(last)
    return order


def test_a_flood_of_one_tenant_does_not_go_before_others() -> None:
    driver = Driver(replica(1, slots=1))
    driver.admit("f0", share=FLOOD)
    driver.admit(*(f"f{number}" for number in range(1, 20)), share=FLOOD)
    driver.admit("o0", "o1", share=OTHER)
    assert first_slots(driver, "f0", 5) == ["f1", "o0", "f2", "o1", "f3"]


def test_a_weight_is_a_share_of_what_begins() -> None:
    driver = Driver(replica(1, slots=1))
    driver.admit("x")
    driver.admit(*(f"f{number}" for number in range(20)), share=FLOOD)
    driver.admit(*(f"h{number}" for number in range(20)), share=Share("heavy", 3.0))
    order = first_slots(driver, "x", 12)
    assert sum(name.startswith("h") for name in order) == 9


def test_who_asks_for_fewer_tokens_gets_more_requests() -> None:
    driver = Driver(replica(1, slots=1))
    driver.admit("x")
    driver.admit(*(f"f{number}" for number in range(20)), prompt=399, max_tokens=1, share=FLOOD)
    driver.admit(*(f"o{number}" for number in range(20)), prompt=99, max_tokens=1, share=OTHER)
    order = first_slots(driver, "x", 10)
    assert sum(name.startswith("o") for name in order) in (7, 8)


@pytest.mark.parametrize(("prompt", "max_tokens", "score_from"), [(2, 198, 0), (198, 2, 1)])
def test_tokens_with_log_probabilities_count_twice(
    prompt: int, max_tokens: int, score_from: int
) -> None:
    """Those that are generated, and those of a prompt that is scored."""
    driver = Driver(replica(1, slots=1))
    driver.admit("x")
    names = [f"f{number}" for number in range(20)]
    driver.admit(
        *names,
        prompt=prompt,
        max_tokens=max_tokens,
        score_from=score_from,
        logprobs=0,
        share=FLOOD,
    )
    driver.admit(*(f"o{number}" for number in range(20)), prompt=198, max_tokens=2, share=OTHER)
    rank = driver.dispatch._models[MODEL].queue._ranks[0]
    works = {name: {each.work for each in flow.waiting} for name, flow in rank.flows.items()}
    assert works[OTHER.tenant] == {200}
    (told_work,) = works[FLOOD.tenant]
    assert 390 <= told_work <= 400


@pytest.mark.parametrize(("max_tokens", "logprobs"), [(396, None), (198, 0)])
def test_what_a_request_did_not_use_is_not_counted(max_tokens: int, logprobs: int | None) -> None:
    driver = Driver(replica(1, slots=1))
    driver.admit("x")
    names = [f"f{number}" for number in range(20)]
    driver.admit(*names, max_tokens=max_tokens, logprobs=logprobs, share=FLOOD)
    driver.admit(*(f"o{number}" for number in range(20)), max_tokens=96, share=OTHER)
    order = first_slots(driver, "x", 10)
    assert sum(name.startswith("o") for name in order) == 5


def test_a_more_urgent_tier_goes_first() -> None:
    driver = Driver(replica(1, slots=1))
    driver.admit("x")
    driver.admit("flex", share=Share("a", rank=2))
    driver.admit("default", share=Share("b", rank=1))
    driver.admit("priority", share=Share("c", rank=0))
    assert first_slots(driver, "x", 3) == ["priority", "default", "flex"]


def test_a_request_that_is_resumed_goes_before_all_tenants() -> None:
    driver = Driver(replica(1, slots=1))
    driver.admit("f0", share=FLOOD)
    driver.admit("o0", share=OTHER)
    driver.give("f0", 1, 0)
    driver.publish()
    assert sent(driver.publish(replica(2, slots=1))) == [("f0", "replica-2", 2)]


def test_a_flood_cannot_fill_the_queue_for_others() -> None:
    driver = Driver(replica(1, slots=1))
    driver.admit("x")
    driver.admit(*(f"f{number}" for number in range(QUEUE)), share=FLOOD)
    with pytest.raises(CapacityExceeded, match="limit is"):
        driver.admit("late", share=FLOOD)
    commands = driver.admit("o0", "o1", share=OTHER)
    assert [name for name, _ in ended(commands)] == [f"f{QUEUE - 1}", f"f{QUEUE - 2}"]
    assert all("limit is" in why for _, why in ended(commands))
    half = QUEUE // 2
    for number in range(2, half):
        assert len(ended(driver.admit(f"o{number}", share=OTHER))) == 1
    with pytest.raises(CapacityExceeded):
        driver.admit("too many", share=OTHER)
    driver.dispatch.validate()
    assert first_slots(driver, "x", 4) == ["f0", "o0", "f1", "o1"]
