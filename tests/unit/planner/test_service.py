"""The planner among a real registry, scripted nodes and gateways: the life of events."""

import pytest

from services.planner import serving
from shared.messages.instances import InstanceState
from shared.messages.pool import Tier
from shared.messages.scaling import EventState
from tests.unit.planner.cluster import Cluster
from tests.unit.planner.scripted import BLOCK_BYTES, BLOCKS, MODEL, SLOTS, record

SERVING, MOVING = InstanceState.SERVING, InstanceState.MOVING


async def test_a_published_model_is_brought_up_on_the_node_that_has_it_on_disk(
    cluster: Cluster,
) -> None:
    n0, *_ = await cluster.add_nodes(3)
    await cluster.start_planner()
    await cluster.publish_model(record(min_instances=1))
    await cluster.until_replicas("n0")
    done = await cluster.until_event(EventState.COMPLETE)
    assert [state for state, _ in done.history] == [
        EventState.DECIDED,
        EventState.PLANNED,
        EventState.TRANSFERRING,
        EventState.COMPLETE,
    ]
    assert done.cause == "fewer than min_instances=1"
    assert done.sources == done.targets == ("n0",)
    assert done.bytes_moved == 0
    assert n0.plans[0].promote == tuple(range(BLOCKS))
    assert n0.plans[0].pulls == ()
    replica = cluster.instances[0]
    assert (replica.capacity, replica.slots, replica.event) == (1.0, SLOTS, done.id)
    assert cluster.sets[-1].trace == done.trace
    await cluster.until_unreserved()


async def test_load_makes_replicas_and_paths_serve_while_they_load(cluster: Cluster) -> None:
    await cluster.serve(nodes=3)
    cluster.world.open_to(0)
    gateway = await cluster.add_gateway()
    await gateway.offer(3 * SLOTS)
    event = await cluster.until_event(EventState.TRANSFERRING)
    assert event.sources == ("n0",)
    assert set(event.targets) == {"n1", "n2"}
    assert not cluster.paths
    cluster.world.open_to(1)
    await cluster.until(lambda: cluster.paths)
    path = cluster.paths[0]
    assert path.state is SERVING
    assert [s.start for s in path.stages] == [0, *(s.stop for s in path.stages[:-1])]
    assert path.stages[-1].stop == BLOCKS
    assert path.event == event.id
    assert path.slots >= 1
    assert {s.node for s in path.stages} & {"n1", "n2"}
    await cluster.until_event(EventState.SERVING)
    cluster.world.open_to(1000)
    done = await cluster.until_event(EventState.COMPLETE)
    await cluster.until_replicas("n0", "n1", "n2")
    assert [state for state, _ in done.history] == [
        EventState.DECIDED,
        EventState.PLANNED,
        EventState.TRANSFERRING,
        EventState.SERVING,
        EventState.COMPLETE,
    ]
    assert done.bytes_moved == 2 * BLOCKS * BLOCK_BYTES
    assert done.predicted.all_complete_s is not None
    assert done.physical_limit_s is not None
    actual = done.actual
    assert actual.first_byte_s is not None
    assert actual.first_path_s is not None
    assert actual.first_partial_token_s is not None
    assert actual.first_complete_s is not None
    assert actual.all_complete_s is not None
    assert 0 < actual.first_path_s < actual.all_complete_s
    assert actual.first_complete_s <= actual.all_complete_s
    assert len(cluster.events(EventState.DECIDED)) == 1, "the burst was answered once"
    await cluster.until_unreserved()


async def test_paths_move_once_replicas_are_complete_and_go_when_they_are_empty(
    cluster: Cluster,
) -> None:
    await cluster.serve(nodes=2)
    cluster.world.open_to(2)
    gateway = await cluster.add_gateway()
    await gateway.offer(3 * SLOTS)
    await cluster.until(lambda: cluster.paths)
    path = cluster.paths[0].id
    await cluster.until(lambda: gateway.on.get(path))
    cluster.world.open_to(1000)
    await cluster.until_event(EventState.COMPLETE)
    await cluster.until(lambda: any(i.id == path and i.state is MOVING for i in cluster.instances))
    await cluster.until_replicas("n0", "n1")
    assert not gateway.on.get(path)


async def test_a_path_whose_requests_stay_is_moving_no_longer_than_the_limit(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MOVE_LIMIT_S", 0.3)
    await cluster.serve(nodes=2)
    cluster.world.open_to(2)
    gateway = await cluster.add_gateway()
    await gateway.offer(3 * SLOTS)
    await cluster.until(lambda: cluster.paths and gateway.on.get(cluster.paths[0].id))
    stuck = cluster.paths[0].id
    cluster.world.open_to(1000)
    await cluster.until_event(EventState.COMPLETE)
    gateway.on[stuck] = 1
    await cluster.until(lambda: stuck not in {i.id for i in cluster.instances})
    await cluster.until_replicas("n0", "n1")


async def test_idle_replicas_drain_one_at_a_time_down_to_the_least(cluster: Cluster) -> None:
    await cluster.serve(nodes=4)
    gateway = await cluster.add_gateway()
    await gateway.offer(4 * SLOTS)
    await cluster.until_replicas("n0", "n1", "n2", "n3")
    gateway.end_all()
    await cluster.until_replica_count(1)
    draining = [sum(i.state is InstanceState.DRAINING for i in s.instances) for s in cluster.sets]
    assert max(draining) == 1
    (left,) = cluster.replicas()
    gone = [node for node in cluster.nodes.values() if node.id != left]
    await cluster.until(lambda: all(not node.gpu for node in gone))
    assert [release.keep for node in gone for release in node.releases] == [None] * 3
    assert not any(node.host for node in gone)


async def test_the_last_copy_stays_in_host_memory_and_serves_again(cluster: Cluster) -> None:
    await cluster.serve(nodes=2)
    await cluster.publish_model(record(min_instances=0))
    gateway = await cluster.add_gateway()
    await cluster.until_replica_count(0)
    n0 = cluster.node(0)
    await cluster.until(lambda: n0.host)
    assert [release.keep for release in n0.releases] == [Tier.HOST]
    await gateway.offer(1)
    done = await cluster.until_event(EventState.COMPLETE)
    await cluster.until_replicas("n0")
    assert done.sources == done.targets == ("n0",)
    assert done.bytes_moved == 0
    assert n0.gpu == {MODEL: set(range(BLOCKS))}


async def test_a_request_revives_a_draining_replica(cluster: Cluster) -> None:
    await cluster.serve(nodes=2)
    gateway = await cluster.add_gateway()
    await gateway.offer(1)
    await cluster.scale(0)
    await cluster.until(lambda: cluster.replicas(InstanceState.DRAINING) == {"n0"})
    await cluster.scale(None)
    await cluster.until_replicas("n0")
    assert not cluster.node(0).releases
    assert not cluster.changes, "no event was needed"
