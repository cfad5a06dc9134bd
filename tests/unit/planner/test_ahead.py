"""Replicas that are there before they are needed: by schedule, and by what history lets expect."""

from dataclasses import replace

import msgspec
import pytest

from services.planner.core import commands
from services.planner.core.archive import Archive
from services.planner.core.rhythm import DAY_S, SLOT_S, SLOTS, History
from shared.ids import ModelName
from shared.messages.pool import ModelRemoved
from tests.unit.planner.driver import WALL_NS, Driver, settings
from tests.unit.planner.scripted import MODEL, NAME, record

TEN_PAST = 400.0
"""By the driver's clock, when it is 22:20 on a Tuesday. A slot begins then."""
SLOT = round(WALL_NS / 1e9 + TEN_PAST) // SLOT_S


def history(replicas: int) -> History:
    """That many replicas were needed from 22:20 on, on Sunday and on Monday."""
    day, index = divmod(SLOT, SLOTS)
    kept = bytearray(2 * SLOTS)
    kept[2 * index] = replicas
    return History(day - 2, {day - 2: bytes(kept), day - 1: bytes(kept)})


def serving(known: History | None, *, schedule: str = "", anticipate: bool = True) -> Driver:
    """Node a serves the model at 22:18, with nodes b and c free."""
    archive = Archive(histories={MODEL: known} if known is not None else {})
    driver = Driver(replace(settings(), anticipate=anticipate), archive)
    driver.at = TEN_PAST - 120
    driver.join("a", "b", "c")
    driver.publish(msgspec.structs.replace(record(), min_instances=1, schedule=schedule))
    driver.holds("a")
    driver.status("b")
    driver.status("c")
    return driver


def pass_until(driver: Driver, at: float) -> None:
    """Nobody asks for the model; gateways say so."""
    while driver.at < at:
        driver.load(0)
        driver.wait(min(0.5, at - driver.at))


def reserved(driver: Driver) -> int:
    return sum(asked.message.count for asked in driver.all_asked(commands.Reserve))


def test_what_came_on_the_last_two_days_is_loaded_shortly_before() -> None:
    driver = serving(history(3))
    pass_until(driver, TEN_PAST - 60)
    assert reserved(driver) == 0
    pass_until(driver, TEN_PAST)
    assert reserved(driver) == 2
    (decided,) = driver.core.decisions(ModelName(NAME), 1)
    assert (decided.replicas, decided.wanted) == (1, 3)
    assert decided.why == (
        "load that filled 3 replicas came at this time on both of the last two days"
    )


@pytest.mark.parametrize(
    "driver", [serving(None), serving(history(3), anticipate=False), serving(history(1))]
)
def test_nothing_is_loaded_for_what_is_not_known_not_wanted_or_there(driver: Driver) -> None:
    pass_until(driver, TEN_PAST + 60)
    assert reserved(driver) == 0


def test_a_schedules_replicas_are_asked_for_before_its_window_begins() -> None:
    driver = serving(None, schedule="tue 22:20-23:00 min=2")
    pass_until(driver, TEN_PAST - 60)
    assert reserved(driver) == 0
    pass_until(driver, TEN_PAST)
    assert reserved(driver) == 1
    (decided,) = driver.core.decisions(ModelName(NAME), 1)
    assert decided.why == "the schedule keeps 2 replicas"


def test_what_is_learnt_is_stored_and_outlives_the_planner_and_not_the_model() -> None:
    driver = serving(None)
    pass_until(driver, TEN_PAST)
    for _ in range(60):
        driver.load(0, a=4)
        driver.wait(0.5)
    pass_until(driver, TEN_PAST + SLOT_S + 2)
    (stored,) = [c for c in driver.said if isinstance(c, commands.StoreHistory)]
    assert stored.history is not None
    ((day, kept),) = stored.history.days.items()
    assert day == SLOT // SLOTS
    assert kept[2 * (SLOT % SLOTS)] >= 1
    assert DAY_S == SLOTS * SLOT_S
    driver.feed(ModelRemoved(name=ModelName(NAME), model_id=MODEL))
    last = [c for c in driver.said if isinstance(c, commands.StoreHistory)][-1]
    assert (last.model, last.history) == (MODEL, None)
