"""Several gateways over the same instances: what the others have running counts."""

from services.gateway.core.commands import Command, TellOfGone
from services.gateway.core.others import SILENT_S
from shared.ids import GatewayId, InstanceId
from shared.messages.load import GatewayLoad, ModelLoad
from tests.unit.gateway.dispatch.builders import NAME, Driver, sent
from tests.unit.gateway.support import path, replica


def said(
    gateway: str, on: dict[InstanceId, int], tokens_each: int = 10, model: str = NAME
) -> GatewayLoad:
    of_model = ModelLoad(
        model=type(NAME)(model),
        queued_requests=0,
        queued_tokens=0,
        running_requests=sum(on.values()),
        running_tokens=tokens_each * sum(on.values()),
        instance_requests=on,
    )
    return GatewayLoad(gateway=GatewayId(gateway), models=(of_model,))


def names(commands: list[Command]) -> list[str]:
    """The requests that are sent."""
    return [request for request, _, _ in sent(commands)]


def hear(driver: Driver, load: GatewayLoad) -> list[str]:
    """The requests that are sent because of it."""
    found = driver.dispatch.on_load(load, driver.now)
    driver.dispatch.validate()
    return names(found)


def test_slots_that_others_have_filled_are_not_filled_again() -> None:
    first, second = replica(1, slots=2), replica(2, slots=2)
    driver = Driver(first, second)
    hear(driver, said("other", {first.id: 2, second.id: 1}))
    assert sent(driver.admit("a", "b")) == [("a", second.id, 1)]
    assert hear(driver, said("other", {first.id: 1, second.id: 1})) == ["b"]


def test_what_others_have_running_weighs_in_the_choice() -> None:
    first, second = replica(1, slots=8), replica(2, slots=8)
    for busy, idle in ((first, second), (second, first)):
        driver = Driver(first, second)
        hear(driver, said("other", {busy.id: 3}, tokens_each=100))
        assert sent(driver.admit("a")) == [("a", idle.id, 1)]


def test_several_others_count_together_and_each_report_replaces_the_last() -> None:
    only = replica(1, slots=4)
    driver = Driver(only)
    hear(driver, said("one", {only.id: 3}))
    hear(driver, said("two", {only.id: 1}))
    assert not sent(driver.admit("a", "b"))
    assert not hear(driver, said("one", {only.id: 3}))
    assert hear(driver, said("one", {only.id: 2})) == ["a"]
    assert hear(driver, said("two", {})) == ["b"]


def test_the_own_report_changes_nothing() -> None:
    only = replica(1, slots=1)
    driver = Driver(only)
    hear(driver, said("g", {only.id: 1}))
    assert sent(driver.admit("a"))


def test_a_gateway_that_is_silent_is_forgotten() -> None:
    only = replica(1, slots=1)
    driver = Driver(only)
    hear(driver, said("other", {only.id: 1}))
    assert not sent(driver.admit("a"))
    driver.now += SILENT_S + 0.1
    commands = driver.dispatch.on_tick(driver.now)
    assert names(commands) == ["a"]
    gone = [each.gateway for each in commands if isinstance(each, TellOfGone)]
    assert gone == ["other"], "nodes hear of it"
    assert not driver.dispatch.on_tick(driver.now)
    driver.dispatch.validate()


def test_what_was_said_before_an_instance_was_known_counts() -> None:
    only = replica(1, slots=1)
    driver = Driver()
    hear(driver, said("other", {only.id: 1}))
    driver.admit("a")
    assert not sent(driver.publish(only))
    driver.dispatch.validate()
    driver.publish()
    driver.dispatch.validate()


def test_paths_share_their_nodes_slots_with_what_others_run_there() -> None:
    over = path(1, 2, slots=1000)
    driver = Driver()
    driver.publish(over, node_slots=1)
    free = len(sent(driver.admit(*(f"r{n}" for n in range(40)))))
    assert 0 < free < 40
    again = Driver()
    again.publish(over, node_slots=1)
    hear(again, said("other", {over.id: free - 1}))
    assert len(sent(again.admit(*(f"r{n}" for n in range(40))))) == 1


def test_another_models_load_changes_nothing() -> None:
    only = replica(1, slots=1)
    driver = Driver(only)
    hear(driver, said("other", {only.id: 1}, model="another"))
    assert sent(driver.admit("a"))
