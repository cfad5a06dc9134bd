"""Loads add up over the gateways that speak; silence of the whole bus is no news."""

import msgspec
import pytest

from services.planner.core.demand import Demand
from services.planner.core.load_reports import BLIND_S, FRESH_S, Asked, LoadReports
from services.planner.core.tickets import Moment
from shared.ids import GatewayId, InstanceId, ModelName
from shared.messages.load import GatewayLoad, ModelLoad

LLAMA = ModelName("llama")
ON = InstanceId("replica-a")


def load(gateway: str, queued: int = 0, on: int = 0, model: str = LLAMA) -> GatewayLoad:
    of_model = ModelLoad(
        model=ModelName(model),
        queued_requests=queued,
        queued_tokens=queued * 10,
        running_requests=on,
        running_tokens=on * 5,
        instance_requests={ON: on},
    )
    return GatewayLoad(gateway=GatewayId(gateway), models=(of_model,))


def asked(gateway: str, requests: int) -> GatewayLoad:
    (of_model,) = load(gateway).models
    counted = msgspec.structs.replace(of_model, asked_requests=requests, asked_tokens=7 * requests)
    return GatewayLoad(gateway=GatewayId(gateway), models=(counted,))


def test_what_gateways_were_asked_for_is_counted_once_and_never_backwards() -> None:
    found = LoadReports()
    found.on_load(asked("one", 100), now=0.0)
    assert found.asked(LLAMA) == Asked(), "before this planner heard of it"
    found.on_load(asked("one", 103), now=0.1)
    found.on_load(asked("one", 103), now=0.2)
    found.on_load(asked("two", 9), now=0.2)
    found.on_load(asked("two", 10), now=0.3)
    assert found.asked(LLAMA) == Asked(4, 28)
    found.on_load(asked("one", 2), now=0.4)
    assert found.asked(LLAMA) == Asked(6, 42), "the gateway began anew"
    gone = GatewayLoad(gateway=GatewayId("one"), models=())
    found.on_load(gone, now=0.5)
    assert found.asked(LLAMA) == Asked(6, 42)
    found.on_load(asked("one", 4), now=0.6)
    assert found.asked(LLAMA) == Asked(8, 56), "what it counted is remembered while it has no load"
    found.forget(set())
    assert found.asked(LLAMA) == Asked(), "a model that was removed is forgotten"


@pytest.mark.parametrize("wrong_s", [-86400, 0, 86400])
def test_since_when_requests_wait_is_known_whatever_the_gateways_clock_shows(wrong_s: int) -> None:
    """The planner is at 50 s when its clock shows 1,000,050 s; a request has waited for 2 s."""
    found, wrong_ns = LoadReports(), wrong_s * 10**9
    (of_model,) = load("one", queued=1).models
    waits = msgspec.structs.replace(of_model, waiting_since_ns=1_000_048 * 10**9 + wrong_ns)
    sent_ns = 1_000_050 * 10**9 + wrong_ns
    said = GatewayLoad(gateway=GatewayId("one"), models=(waits,), sent_ns=sent_ns)
    found.on_load(said, now=50.0)
    now = Moment(51.0, 1_000_051 * 10**9)
    assert found.waiting_since_ns(LLAMA, now) == 1_000_048 * 10**9
    jumped = Moment(51.0, 2_000_051 * 10**9)
    assert found.waiting_since_ns(LLAMA, jumped) == 2_000_048 * 10**9


def test_the_clock_of_a_gateway_that_does_not_say_what_it_shows_is_taken_to_be_right() -> None:
    found = LoadReports()
    (of_model,) = load("one", queued=1).models
    waits = msgspec.structs.replace(of_model, waiting_since_ns=7 * 10**9)
    found.on_load(GatewayLoad(gateway=GatewayId("one"), models=(waits,)), now=1.0)
    assert found.waiting_since_ns(LLAMA, Moment(2.0, 9 * 10**9)) == 7 * 10**9
    assert found.waiting_since_ns(ModelName("other"), Moment(2.0, 9 * 10**9)) == 0


def test_loads_add_up_and_gateways_that_fall_silent_are_forgotten() -> None:
    found = LoadReports()
    found.on_load(load("one", queued=1, on=2), now=0.0)
    found.on_load(load("two", queued=3, on=4), now=0.5)
    found.on_load(load("two", queued=5, on=4), now=1.0)
    assert found.demand(LLAMA) == Demand(6, 60, 6, 30)
    assert found.requests_on(LLAMA, ON) == 6
    found.on_load(load("two", queued=5, on=4), now=FRESH_S + 0.1)
    assert found.demand(LLAMA) == Demand(5, 50, 4, 20)
    assert found.demand(ModelName("other")).idle


@pytest.mark.parametrize("silence", [0.5, BLIND_S, BLIND_S + 0.1, 100.0])
def test_when_nobody_was_heard_silence_is_no_news_of_gateways(silence: float) -> None:
    found = LoadReports()
    found.on_load(load("one", on=2), now=1.0)
    back = 1.0 + silence
    assert found.blind(back) == (silence > BLIND_S)
    assert found.requests_on(LLAMA, ON) == 2
    found.on_sign_of_life(back)
    assert not found.blind(back)
    found.on_sign_of_life(back + 0.1)
    assert found.requests_on(LLAMA, ON) == 2
    found.on_sign_of_life(back + 1.1)
    found.on_sign_of_life(back + 2.1)
    assert found.requests_on(LLAMA, ON) == 0


def test_reports_are_later_than_a_moment_when_those_of_all_gateways_are() -> None:
    found = LoadReports()
    assert not found.reported_since(0.0)
    found.on_sign_of_life(0.1)
    assert found.reported_since(0.0), "there is no gateway"
    found.on_load(load("one"), now=1.0)
    found.on_load(load("two"), now=1.2)
    assert found.reported_since(0.9)
    assert not found.reported_since(1.1)
    found.on_load(load("two"), now=2.2)
    assert not found.reported_since(1.1)
    found.on_load(load("two"), now=1.1 + FRESH_S)
    assert found.reported_since(1.1), "the first has been forgotten"


def test_a_silence_brings_no_forgotten_gateway_back() -> None:
    found = LoadReports()
    found.on_load(load("one", queued=1), now=1.0)
    for seq in range(2, 6):
        found.on_sign_of_life(float(seq))
    assert found.demand(LLAMA).idle
    found.on_sign_of_life(100.0)
    assert found.demand(LLAMA).idle


def test_after_a_silence_reports_are_as_old_as_they_are() -> None:
    found = LoadReports()
    found.on_load(load("one"), now=1.0)
    found.on_sign_of_life(10.0)
    assert not found.reported_since(2.0)
    found.on_load(load("one"), now=10.1)
    assert found.reported_since(2.0)


def test_a_planner_that_has_heard_nothing_is_blind() -> None:
    assert LoadReports().blind(0.0)
