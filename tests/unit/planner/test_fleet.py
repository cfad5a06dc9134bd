"""What gateways are told of a model's instances."""

from services.planner.core.commands import Publish
from services.planner.core.fleet import REPUBLISH_S, WHOLE_S
from shared.ids import GatewayId, NodeId
from shared.messages.changes import whole_set
from shared.messages.instances import InstanceChange, InstanceSet
from shared.messages.load import GatewayLoad
from tests.unit.planner.driver import Driver


class Gateways:
    """Gateways that hear all that is published."""

    def __init__(self, driver: Driver) -> None:
        self.known: InstanceSet | None = None
        self._driver = driver
        self._heard = 0

    def report(self, **takes_changes: bool) -> None:
        for name, takes in takes_changes.items():
            gateway = GatewayId(name)
            load = GatewayLoad(gateway=gateway, seq=1, models=(), takes_changes=takes)
            self._driver.feed(load)

    def hear(self) -> list[InstanceSet | InstanceChange]:
        """What was published since the last call."""
        said, self._heard = self._driver.said[self._heard :], len(self._driver.said)
        found = [c.message for c in said if isinstance(c, Publish)]
        sets = [m for m in found if isinstance(m, InstanceSet | InstanceChange)]
        for each in sets:
            self.known = each if isinstance(each, InstanceSet) else whole_set(self.known, each)
        return sets

    def nodes(self) -> set[NodeId]:
        assert self.known is not None, "a change builds on a set that was not said"
        return {instance.leader for instance in self.known.instances}


def with_replicas(*nodes: str) -> tuple[Driver, Gateways]:
    driver = Driver()
    gateways = Gateways(driver)
    driver.join(*nodes)
    driver.publish()
    for node in nodes:
        driver.holds(node)
    driver.wait(0.5)
    assert all(isinstance(said, InstanceSet) for said in gateways.hear())
    return driver, gateways


def test_gateways_that_understand_changes_are_told_changes() -> None:
    driver, gateways = with_replicas("a", "b")
    gateways.report(one=True, two=True)
    driver.wait(REPUBLISH_S)
    said = gateways.hear()
    assert said
    assert all(isinstance(each, InstanceChange) and not each.now.instances for each in said)
    assert gateways.nodes() == {"a", "b"}
    gateways.report(one=True, two=True)
    driver.gone("b")
    driver.wait(0.1)
    (change,) = gateways.hear()
    assert isinstance(change, InstanceChange)
    assert change.gone == ("replica-b",)
    assert gateways.nodes() == {"a"}


def test_sets_are_whole_while_a_gateway_of_the_release_before_is_there() -> None:
    driver, gateways = with_replicas("a", "b")
    gateways.report(one=True, old=False)
    driver.gone("b")
    driver.wait(0.1)
    (whole,) = gateways.hear()
    assert isinstance(whole, InstanceSet)
    gateways.report(one=True, old=True)
    driver.wait(REPUBLISH_S)
    assert all(isinstance(said, InstanceChange) for said in gateways.hear())
    assert gateways.nodes() == {"a"}


def test_a_whole_set_is_said_now_and_then() -> None:
    driver, gateways = with_replicas("a")
    said: list[InstanceSet | InstanceChange] = []
    for _ in range(int(WHOLE_S / REPUBLISH_S) + 2):
        gateways.report(one=True)
        driver.wait(REPUBLISH_S)
        said += gateways.hear()
    assert [type(each) for each in said].count(InstanceSet) == 1
