"""What the planner shows at /metrics."""

import pytest

from shared.messages.scaling import EventState
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


async def test_a_planner_that_stands_by_shows_none_of_it(cluster: Cluster) -> None:
    planner = await cluster.start_planner()
    metrics = planner.metrics()
    planner.ready = False
    assert page(metrics) == {}
