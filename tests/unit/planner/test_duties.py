"""Nodes that are given nothing new, and nodes whose place others take."""

import pytest

from services.planner.core import commands
from services.planner.core.events import TERMINAL
from shared.messages import Ok
from shared.messages.instances import InstanceState
from shared.messages.pool import Duty, Reserved, Tier
from shared.messages.scaling import EventState
from tests.unit.planner.driver import EVERY, WALL_NS, Driver, info, settings

LEAVING = pytest.mark.parametrize("duty", [Duty.DRAINING, Duty.ENDING], ids=lambda duty: duty.value)


def serving(driver: Driver) -> set[str]:
    """The nodes of replicas that take requests."""
    instances = driver.sets[-1].instances
    return {i.stages[0].node for i in instances if i.state is InstanceState.SERVING}


def go_on(driver: Driver, seconds: float, a: int = 0, b: int = 0) -> None:
    """Time passes, with requests on these nodes."""
    for _ in range(round(seconds / 0.2)):
        driver.load(a=a, b=b)
        driver.wait(0.2)


def busy(*nodes: str, on: str = "a") -> Driver:
    """A node serves, with requests that one replica can take, and others are there."""
    driver = Driver(settings(idle_s=1e6))
    driver.join(on, *nodes)
    driver.publish()
    for node in nodes:
        driver.status(node)
    driver.holds(on)
    driver.load(a=2)
    driver.wait(1.0)
    assert serving(driver) == {on}
    return driver


def take_over(driver: Driver, node: str) -> None:
    """The event that has begun loads the model on a node."""
    driver.begin(node)
    for block in EVERY:
        driver.arrived(node, block, "a", driver.event)
    driver.holds(node)
    driver.wait(0.2)


@LEAVING
def test_another_node_takes_over_before_a_node_leaves(duty: Duty) -> None:
    driver = busy("b")
    driver.duty("a", duty)
    driver.wait(0.2)
    assert serving(driver) == {"a"}, "it serves until another does"
    take_over(driver, "b")
    assert serving(driver) == {"b"}
    assert not driver.all_asked(commands.Release), "its requests still run"
    go_on(driver, 1.0, b=2)
    assert driver.asked(commands.Release).message.node == "a"


def test_a_node_that_nobody_can_replace_goes_on() -> None:
    driver = busy("b")
    driver.duty("b", Duty.CORDONED)
    driver.duty("a", Duty.DRAINING)
    go_on(driver, 30.0, a=2)
    assert serving(driver) == {"a"}
    assert not driver.all_asked(commands.Reserve)


def test_a_node_that_nobody_has_replaced_in_time_ends_what_it_serves() -> None:
    driver = busy()
    driver.duty("a", Duty.DRAINING, leave_by_ns=WALL_NS + int((driver.at + 5.0) * 1e9))
    go_on(driver, 4.0, a=2)
    assert serving(driver) == {"a"}
    go_on(driver, 2.0, a=2)
    assert serving(driver) == set()


def test_an_idle_replica_leaves_at_once() -> None:
    driver = busy("b")
    driver.load()
    driver.duty("a", Duty.DRAINING)
    go_on(driver, 2.0)
    assert serving(driver) == set()
    assert not driver.all_asked(commands.Reserve)


def test_a_cordoned_node_serves_on_and_is_given_nothing_new() -> None:
    driver = busy("b")
    driver.duty("a", Duty.CORDONED)
    driver.duty("b", Duty.CORDONED)
    for _ in range(10):
        driver.load(queued=40, a=4)
        driver.wait(0.5)
    assert serving(driver) == {"a"}
    assert not driver.all_asked(commands.Reserve)
    driver.duty("b", Duty.ALL)
    driver.load(queued=40, a=4)
    driver.wait(1.0)
    assert driver.asked(commands.Reserve)


def test_a_drain_that_is_called_off_changes_nothing() -> None:
    driver = busy()
    driver.duty("a", Duty.DRAINING)
    driver.wait(0.5)
    driver.duty("a", Duty.ALL)
    go_on(driver, 5.0)
    assert serving(driver) == {"a"}


def test_only_the_last_copy_of_a_model_stays_on_a_node_that_leaves() -> None:
    driver = busy("b")
    driver.load()
    driver.duty("a", Duty.DRAINING)
    go_on(driver, 2.0)
    assert driver.asked(commands.Release).message.keep is Tier.HOST


def test_a_copy_that_is_elsewhere_too_does_not_stay() -> None:
    driver = busy("b")
    driver.holds("b", tier=Tier.DISK)
    driver.load()
    driver.duty("a", Duty.DRAINING)
    go_on(driver, 2.0)
    assert driver.asked(commands.Release).message.keep is None


def growing(*nodes: str) -> Driver:
    """An event loads the model on these nodes, from the node that serves."""
    driver = busy(*nodes)
    driver.load(queued=40, a=4)
    driver.wait(0.2)
    driver.begin(*nodes)
    assert driver.event.targets == nodes
    return driver


def test_a_node_that_leaves_while_it_loads_goes_when_nobody_needs_it() -> None:
    driver = growing("b", "c")
    assert {t.src for t in driver.event.transfers if t.dst == "c"} == {"b"}
    driver.duty("b", Duty.DRAINING)
    driver.load(queued=40, a=4)
    driver.wait(0.5)
    assert driver.event.targets == ("b", "c"), "c loads from it"
    driver.holds("b", EVERY[:-1])
    driver.wait(0.1)
    assert "b" not in serving(driver)
    driver.holds("c", EVERY)
    assert list(driver.event.targets) == ["c"]
    assert driver.event.state is EventState.COMPLETE
    assert driver.asked(commands.Release).message.node == "b"


def test_an_event_that_grows_loads_nothing_more_from_a_node_that_leaves() -> None:
    driver = growing("b")
    driver.holds("b", EVERY[:-1])
    driver.load_on({})
    for _ in range(3):
        driver.wait(0.1)
        driver.think()
    (path,) = [i for i in driver.sets[-1].instances if "b" in {s.node for s in i.stages}]
    driver.load_on({path.id: 1}, queued=40)
    driver.duty("b", Duty.DRAINING)
    driver.join("c", "d")
    driver.status("c")
    driver.status("d")
    driver.load_on({path.id: 1}, queued=40)
    driver.wait(0.2)
    newcomers = Reserved(targets=(info("c"), info("d")))
    driver.answer(driver.asked(commands.Reserve), newcomers)
    driver.think()
    assert not driver.all_asked(commands.Append), "the answer is taken"
    assert driver.event.targets == ("b", "c", "d")
    assert "b" not in {t.src for t in driver.event.transfers}


def test_requests_on_a_path_over_a_node_that_leaves_stay_on_it() -> None:
    driver = growing("b", "c")
    half = EVERY[: len(EVERY) // 2]
    driver.holds("b", half)
    driver.holds("c", half)
    for _ in range(3):
        driver.wait(0.1)
        driver.think()
    (path,) = [i for i in driver.sets[-1].instances if "b" in {s.node for s in i.stages}]
    driver.load_on({path.id: 2})
    driver.duty("b", Duty.DRAINING)
    driver.wait(0.5)
    (after,) = [i for i in driver.sets[-1].instances if "b" in {s.node for s in i.stages}]
    assert (after.id, after.state) == (path.id, InstanceState.DRAINING)


def test_a_time_that_is_over_ends_a_target_that_has_all_while_the_event_goes_on() -> None:
    driver = growing("b", "c")
    driver.duty("a", Duty.CORDONED)
    driver.holds("b")
    driver.duty("b", Duty.DRAINING, leave_by_ns=WALL_NS + int((driver.at + 1.0) * 1e9))
    go_on(driver, 1.2, a=4, b=4)  # nothing arrives at c, so its part is planned again meanwhile
    driver.think()
    for plan in driver.orders():
        driver.answer(plan, Ok())
    assert driver.event.targets == ("c",)
    assert driver.asked(commands.Release).message.node == "b"
    assert driver.event.state not in TERMINAL


def test_a_node_that_was_replaced_ends_its_requests_when_its_time_is_over() -> None:
    driver = busy("b")
    driver.duty("a", Duty.DRAINING, leave_by_ns=WALL_NS + int((driver.at + 5.0) * 1e9))
    driver.wait(0.2)
    take_over(driver, "b")
    go_on(driver, 4.0, a=2, b=1)
    assert not driver.all_asked(commands.Release), "its requests still run"
    go_on(driver, 1.5, a=2, b=1)
    assert driver.asked(commands.Release).message.node == "a"
