"""How often a model's replicas are decided: at once when more waits, and else as seldom as may be.
Under a steady load some requests wait for their first token at any time."""

import itertools
from dataclasses import replace
from typing import Any

from services.planner.core.replicas import HURRY_S
from services.planner.core.scaling import Decision, Scaler, decide
from shared.ids import GatewayId, ModelName
from shared.messages.load import GatewayLoad, ModelLoad
from tests.unit.planner.driver import Driver, settings
from tests.unit.planner.scripted import NAME, record

TICK_S = settings().tick_s


def serving() -> tuple[Driver, list[float]]:
    """Node a serves the model, and a decision has just been made. The times of those to come."""
    times = list[float]()

    def noted(*given: Any, **named: Any) -> tuple[Scaler, Decision]:
        times.append(named["now"])
        return decide(*given, **named)

    driver = Driver(replace(settings(), decide=noted))
    driver.join("a")
    driver.publish(record(min_instances=1))
    driver.holds("a")
    say(driver, 50)
    driver.wait(TICK_S)
    times.clear()
    return driver, times


def say(driver: Driver, prompt_tokens: int, running: int = 1, gateway: str = "gateway-0") -> None:
    load = ModelLoad(model=ModelName(NAME), running_requests=running, prompt_tokens=prompt_tokens)
    driver.feed(GatewayLoad(gateway=GatewayId(gateway), models=(load,)))


def test_that_requests_wait_as_before_is_looked_at_now_and_then() -> None:
    driver, times = serving()
    for number in range(1, 100):
        driver.wait(TICK_S / 10)
        say(driver, 50, running=1 + number % 2)
    assert 9 <= len(times) <= 10


def test_that_more_requests_wait_is_looked_at_at_once() -> None:
    driver, times = serving()
    driver.wait(TICK_S / 10)
    say(driver, 51)
    assert times == [driver.at]


def test_ever_more_requests_are_looked_at_together() -> None:
    driver, times = serving()
    begin = driver.at
    for number in range(100):
        say(driver, 60, gateway=f"gateway-{number}")
        driver.wait(HURRY_S / 10)
    assert times[0] == begin
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert min(gaps) > 0.9 * HURRY_S
    assert max(gaps) < 1.3 * HURRY_S, "each is looked at soon"
    assert times[-1] > begin + 8 * HURRY_S


def test_the_more_models_have_load_the_more_seldom_each_is_looked_at() -> None:
    driver, times = serving()
    others = tuple(ModelLoad(model=ModelName(f"m{i}"), running_requests=1) for i in range(99))
    for number in range(1, 100):
        driver.wait(TICK_S / 10)
        driver.feed(GatewayLoad(gateway=GatewayId("other"), models=others))
        say(driver, 50, running=1 + number % 2)
    assert 4 <= len(times) <= 6
    say(driver, 51)
    assert times[-1] == driver.at, "that more waits is looked at at once"
