"""A node that was asked to free a model is asked again until its own report says that it has."""

from dataclasses import replace

from services.planner.core import commands
from services.planner.core.standing import HOLDS_STILL_S
from shared.messages import Ok
from tests.unit.planner.driver import EVERY, Driver, settings
from tests.unit.planner.scripted import record


def drained(driver: Driver) -> None:
    """Nodes a and b serve, where one is enough, and one of them is asked to free the model."""
    driver.join("a", "b")
    driver.publish(record(min_instances=1))
    driver.holds("a")
    driver.holds("b")
    for _ in range(30):
        driver.wait(0.2)
        driver.load()
        if driver.all_asked(commands.Release):
            return


def test_a_node_that_holds_a_copy_again_after_it_was_freed_is_asked_again() -> None:
    driver = Driver(replace(settings(), anticipate=False))
    drained(driver)
    release = driver.asked(commands.Release)
    node = release.message.node
    driver.answer(release, Ok())
    driver.holds(node, EVERY[:1])  # a plan that was on its way came after the release
    driver.wait(HOLDS_STILL_S - 0.1)
    assert not driver.all_asked(commands.Release)
    driver.holds(node, EVERY[:1])
    driver.wait(0.2)
    again = driver.asked(commands.Release)
    assert again.message.node == node
    driver.answer(again, Ok())
    driver.status(node)
    driver.wait(2 * HOLDS_STILL_S)
    assert [r.message.node for r in driver.all_asked(commands.Release)] == []


def test_a_node_that_says_it_is_free_is_not_asked_again() -> None:
    driver = Driver(replace(settings(), anticipate=False))
    drained(driver)
    release = driver.asked(commands.Release)
    driver.answer(release, Ok())
    driver.status(release.message.node)
    driver.wait(3 * HOLDS_STILL_S)
    assert release.message.node not in {r.message.node for r in driver.all_asked(commands.Release)}


def test_a_drain_is_recorded_once_however_often_the_node_is_asked() -> None:
    driver = Driver(replace(settings(), anticipate=False))
    drained(driver)
    release = driver.asked(commands.Release)
    for _ in range(3):
        driver.answer(driver.all_asked(commands.Release)[0], Ok())
        driver.holds(release.message.node, EVERY[:1])
        driver.wait(HOLDS_STILL_S + 0.1)
    drains = [c for c in driver.said if isinstance(c, commands.Span) and c.name == "drain"]
    assert len(drains) == 1
