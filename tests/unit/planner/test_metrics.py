"""What the planner shows at /metrics."""

import pytest

from shared.messages.instances import InstanceState
from shared.messages.scaling import EventState
from shared.metrics import Metrics
from tests.support.pages import page
from tests.unit.planner.cluster import Cluster
from tests.unit.planner.scripted import NAME, SLOTS, record

pytestmark = pytest.mark.virtual_time


async def test_replicas_wanted_and_there_and_events(cluster: Cluster) -> None:
    await cluster.add_nodes(3)
    planner = await cluster.start_planner()
    metrics = planner.metrics()
    assert page(metrics)['lambdascale_planner_nodes{duty="all"}'] == 3

    def shown(name: str) -> float:
        return page(metrics)[f'lambdascale_planner_{name}{{model="{NAME}"}}']

    await cluster.publish_model(record(1))
    await cluster.until_event(EventState.COMPLETE)
    await cluster.until_replicas("n0")
    assert [shown(f"{kind}_replicas") for kind in ("wanted", "complete", "loading")] == [1, 1, 0]
    gateway = await cluster.add_gateway()
    await gateway.offer(2 * SLOTS)
    await cluster.until_event(EventState.COMPLETE, 2)
    await cluster.until_replica_count(2)
    assert [shown(f"{kind}_replicas") for kind in ("wanted", "complete", "loading")] == [2, 2, 0]
    ended = f'lambdascale_planner_events_total{{end="complete",model="{NAME}"}}'
    assert page(metrics)[ended] == 2
    assert shown("event_seconds_count") == 2
    assert shown("running_events") == 0
    assert page(metrics)["lambdascale_planner_wanted_nodes"] == 2
    await cluster.remove_model()
    await cluster.until(lambda: NAME not in "".join(page(metrics)))


async def test_what_loads_drains_and_finds_no_room(cluster: Cluster) -> None:
    await cluster.add_nodes(2)
    planner = await cluster.start_planner()
    metrics = planner.metrics()

    def shown() -> list[float]:
        names = (*(f"{kind}_replicas" for kind in ("wanted", "complete", "loading")),)
        names += ("running_events", "waits_for_room")
        found = page(metrics)
        return [found[f'lambdascale_planner_{name}{{model="{NAME}"}}'] for name in names]

    await cluster.publish_model(record(1))
    await cluster.until_event(EventState.COMPLETE)
    await cluster.until_replicas("n0")
    await cluster.scale(2)
    await cluster.until_event(EventState.TRANSFERRING, 2)
    assert shown() == [2, 1, 1, 1, 0]
    await cluster.until_replica_count(2)
    await cluster.until_event(EventState.COMPLETE, 2)
    assert shown() == [2, 2, 0, 0, 0]
    await cluster.scale(None)
    gateway = await cluster.add_gateway()
    await gateway.offer(3 * SLOTS)
    await cluster.until(lambda: shown()[4])
    assert shown() == [3, 2, 0, 0, 1]
    await cluster.scale(1)
    await cluster.until(lambda: cluster.replicas(InstanceState.DRAINING))
    assert shown()[1:] == [1, 0, 0, 0]


async def test_a_planner_that_stands_by_shows_none_of_it(cluster: Cluster) -> None:
    planner = await cluster.start_planner()
    metrics = planner.metrics()
    planner.ready = False
    assert page(metrics) == {}


async def wanted_nodes(cluster: Cluster, metrics: Metrics, count: int) -> None:
    while page(metrics)["lambdascale_planner_wanted_nodes"] != count:
        await cluster.until_more_sets(1)


async def test_nodes_are_wanted_beyond_those_that_are_there(cluster: Cluster) -> None:
    """Or nobody would ever start the first one, or another for a model that fills all."""
    planner = await cluster.start_planner()
    metrics = planner.metrics()
    await cluster.publish_model(record())
    gateway = await cluster.add_gateway()
    await gateway.offer(1)
    await wanted_nodes(cluster, metrics, 1)
    await cluster.add_nodes(2)
    await cluster.until_replicas("n0")
    await gateway.offer(5 * SLOTS)
    await cluster.until_replica_count(2)
    await wanted_nodes(cluster, metrics, 6)
    found = page(metrics)
    assert found[f'lambdascale_planner_wanted_replicas{{model="{NAME}"}}'] == 6
    assert found[f'lambdascale_planner_waits_for_room{{model="{NAME}"}}'] == 1
    gateway.end_all()
    await gateway.reported()
    await wanted_nodes(cluster, metrics, 0)
