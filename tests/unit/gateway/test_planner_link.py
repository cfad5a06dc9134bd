"""How a gateway keeps to the instances that the planner says, by what has changed of them."""

import pytest

from services.gateway.core.dispatch import Dispatch
from shared import subjects
from shared.errors import NotReady
from shared.ids import InstanceId
from shared.messages import Message
from shared.messages.changes import change_of
from shared.messages.instances import Instance, InstanceSet, InstancesQuery
from tests.unit.gateway.support import NAME, Cluster, replica, running


async def change(cluster: Cluster, *instances: Instance, lost: bool = False) -> None:
    """The planner says what has changed. `lost`: on the way."""
    (before,) = cluster.sets
    for instance in instances:
        await cluster.node(int(instance.leader.removeprefix("node-")))
    cluster._revision += 1
    now = InstanceSet(
        name=before.name,
        model_id=before.model_id,
        epoch=before.epoch,
        revision=cluster._revision,
        instances=instances,
    )
    cluster.sets = (now,)
    if not lost:
        await cluster.bus.publish(subjects.INSTANCES, change_of(before, now))


def known(cluster: Cluster) -> set[InstanceId]:
    return cluster._routes(NAME)


def queries(monkeypatch: pytest.MonkeyPatch) -> list[InstancesQuery]:
    """What the gateway asks the planner from now on."""
    asked: list[InstancesQuery] = []
    answer = Cluster._instances

    async def heard(self: Cluster, query: InstancesQuery) -> Message:
        asked.append(query)
        return await answer(self, query)

    monkeypatch.setattr(Cluster, "_instances", heard)
    return asked


async def test_changes_are_taken_in_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = queries(monkeypatch)
    async with running(replica(1)) as cluster:
        await change(cluster, replica(1), replica(2))
        await cluster.until(lambda: known(cluster) == {"replica-1", "replica-2"})
        await change(cluster, replica(2))
        await cluster.until(lambda: known(cluster) == {"replica-2"})
        assert [query.names for query in asked] == [()]


async def test_a_gateway_that_missed_a_change_asks_for_that_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = queries(monkeypatch)
    async with running(replica(1)) as cluster:
        await change(cluster, replica(1), replica(2), lost=True)
        await change(cluster, replica(1), replica(2), replica(3))
        await cluster.until(lambda: len(known(cluster)) == 3)
        assert [query.names for query in asked] == [(), (NAME,)]


async def test_it_asks_until_the_planner_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.planner_link.RETRY_S", 0.01)
    failures = 3
    answer = Cluster._instances

    async def fails(self: Cluster, query: InstancesQuery) -> Message:
        nonlocal failures
        if query.names and failures:
            failures -= 1
            raise NotReady("injected")
        return await answer(self, query)

    monkeypatch.setattr(Cluster, "_instances", fails)
    async with running(replica(1)) as cluster:
        await change(cluster, replica(2), lost=True)
        await change(cluster, replica(2), replica(3))
        await cluster.until(lambda: known(cluster) == {"replica-2", "replica-3"})
        assert failures == 0


async def test_a_change_after_another_planner_has_taken_over_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = queries(monkeypatch)
    async with running(replica(1)) as cluster:
        (before,) = cluster.sets
        later = InstanceSet(
            name=before.name,
            model_id=before.model_id,
            epoch=before.epoch + 1,
            revision=1,
            instances=before.instances,
        )
        cluster.sets = (later,)
        await cluster.bus.publish(subjects.INSTANCES, change_of(later, later))
        await cluster.until(lambda: len(asked) == 2)
        dispatch: Dispatch = cluster.service._dispatch
        await cluster.until(lambda: dispatch._sets[before.model_id] == later)
