"""What one model's machine raises reaches no other model, alarm, or operator."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from services.planner.core import commands
from services.planner.core.cluster import Cluster
from services.planner.core.event_machine import EventMachine
from services.planner.core.model import ModelMachine
from services.planner.core.pool_view import REFRESH_S, PoolView
from services.planner.core.stimuli import Asked
from shared.errors import LambdaScaleError
from shared.ids import ModelName
from shared.messages.pool import PoolState
from shared.messages.scaling import EventState, SetInstances
from tests.unit.planner.driver import Driver
from tests.unit.planner.scripted import NAME, record


def raising(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def raise_(machine: ModelMachine, *args: Any) -> Any:
        if machine.record.name == name:
            raise ZeroDivisionError(f"of {name}")
        return real(machine, *args)

    return raise_


@pytest.mark.parametrize("method", ["on_joined", "settle"])
def test_an_operator_is_answered_whatever_the_machine_raises(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(checked=False)
    driver.join("a", "b")
    driver.publish()
    driver.holds("a")
    driver.wait(1.0)
    monkeypatch.setattr(ModelMachine, method, raising(NAME, getattr(ModelMachine, method)))
    found = driver.feed(Asked(1, SetInstances(name=ModelName(NAME), instances=2)))
    (answer,) = (c for c in found if isinstance(c, commands.Answer))
    assert isinstance(answer.reply, LambdaScaleError)
    monkeypatch.undo()
    for _ in range(3):
        driver.wait(1.0)
        driver.holds("a")
    assert driver.event.cause.startswith("operator"), "the number holds once the machine is anew"
    stored = [c for c in driver.said if isinstance(c, commands.StoreFixed)]
    assert [s.count for s in stored] == [2]


def test_settings_that_change_while_a_machine_has_failed_hold_once_it_is_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(checked=False)
    driver.join("a", "b")
    driver.publish()
    with monkeypatch.context() as broken:
        broken.setattr(ModelMachine, "settle", raising(NAME, ModelMachine.settle))
        driver.holds("a")
        driver.publish(record(max_instances=1))
    driver.wait(2.0)
    found = driver.feed(Asked(1, SetInstances(name=ModelName(NAME), instances=2)))
    (answer,) = (c for c in found if isinstance(c, commands.Answer))
    assert "max_instances" in str(answer.reply)


def pool(driver: Driver, *names: str) -> None:
    """The registry's answer, which names these models."""
    driver.wait(REFRESH_S + 0.1)
    question = driver.asked(commands.ReadPool)
    driver.answer(question, PoolState(nodes=(), models=tuple(record(name=n) for n in names)))


def test_a_model_whose_machine_cannot_be_made_hinders_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(checked=False)
    make = ModelMachine.__init__

    def failing(machine: ModelMachine, desk: Any, rooms: Any, given: Any) -> None:
        if given.name == "one":
            raise ZeroDivisionError("of one")
        make(machine, desk, rooms, given)

    monkeypatch.setattr(ModelMachine, "__init__", failing)
    pool(driver, "one", "two")
    assert {s.name for s in driver.core.sets()} == {"two"}
    monkeypatch.undo()
    pool(driver, "one", "two")
    assert {s.name for s in driver.core.sets()} == {"one", "two"}


def test_a_model_that_cannot_be_removed_in_order_is_removed_and_hinders_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(checked=False)
    pool(driver, "one", "two")
    real = ModelMachine.remove
    monkeypatch.setattr(ModelMachine, "remove", raising("one", real))
    pool(driver)
    assert not driver.core.sets()


def test_alarms_that_are_due_together_do_not_lose_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(checked=False)
    driver.join("a")
    driver.publish()
    driver.holds("a")
    driver.wait(1.0)

    def failing(*args: Any) -> Any:
        raise ZeroDivisionError("injected")

    with monkeypatch.context() as broken:
        broken.setattr(PoolView, "refresh", failing)
        broken.setattr(Cluster, "in_arenas", failing)
        before = len(driver.sets)
        driver.wait(3 * REFRESH_S)
        assert len(driver.sets) > before, "the model's own alarm goes on"
    driver.wait(2 * REFRESH_S)
    assert driver.all_asked(commands.ReadPool), "the registry is asked again"


def test_an_event_that_cannot_be_ended_in_order_is_over_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(checked=False)
    driver.join("a", "b")
    driver.publish()
    driver.holds("a")
    driver.wait(1.0)
    driver.load(queued=20, a=4)
    driver.begin("b")

    def failing(*args: Any) -> Any:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(EventMachine, "fail", failing)
    monkeypatch.setattr(ModelMachine, "on_load", failing)
    driver.load(queued=21, a=4)
    assert driver.events[-1].state is EventState.FAILED
    assert "ZeroDivisionError" in driver.events[-1].error
    stored = [c.record for c in driver.said if isinstance(c, commands.StoreEvent)]
    assert stored[-1] is not None
    assert stored[-1].state is EventState.FAILED


def test_a_schedule_that_this_release_does_not_understand_is_left_out() -> None:
    driver = Driver()
    driver.join("a", "b")
    driver.publish(msgspec.structs.replace(record(), schedule="in spring min=2"))
    driver.holds("a")
    driver.wait(1.0)
    assert not driver.core._machines.broken
    logged = [c for c in driver.said if isinstance(c, commands.Log) and "schedule" in c.text]
    assert [c.text for c in logged] == ["schedule left out"]


@pytest.mark.parametrize("field", ["min_instances", "max_instances", "warm"])
def test_a_model_of_fewer_than_no_replicas_is_none(field: str) -> None:
    driver = Driver()
    driver.join("a", "b")
    driver.publish(msgspec.structs.replace(record(), **{field: -5}))
    driver.holds("a")
    driver.wait(1.0)
    assert not driver.core._machines.named
    assert not driver.core._machines.broken
