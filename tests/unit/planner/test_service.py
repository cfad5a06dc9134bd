"""The planner among a real registry, scripted nodes and gateways: the life of events."""

import asyncio

import msgspec
import pytest

from services.planner.core.commands import Command
from services.planner.core.stimuli import Stimulus, Together
from services.planner.core.tickets import Moment
from shared import clock, subjects
from shared.clock import wall_ns
from shared.ids import NodeId
from shared.messages.instances import Instance, InstanceState
from shared.messages.pool import Tier
from shared.messages.scaling import EventState, PullFailed
from shared.messages.story import StoryQuery, Told
from tests.unit.planner.cluster import Cluster
from tests.unit.planner.scripted import (
    BLOCK_BYTES,
    BLOCKS,
    MODEL,
    SLOTS,
    ScriptedGateway,
    record,
)

pytestmark = pytest.mark.virtual_time
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
    await asyncio.sleep(0.1)  # of virtual time
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


async def test_the_planner_tells_the_story_of_an_event_a_node_and_a_model(
    cluster: Cluster,
) -> None:
    await cluster.serve(nodes=2)
    event = await cluster.scale(2)
    await cluster.until_event(EventState.COMPLETE)
    assert event is not None
    told = {}
    for subject in (event, "n1", MODEL, "nobody"):
        query = StoryQuery(subject=subject)
        told[subject] = (await cluster.ask(subjects.PLANNER_STORY, query, Told)).steps
    assert told[event][0].cause == "operator"
    assert told[event][-1].text == "complete"
    assert told[event][-1].at_ns <= wall_ns()
    assert "joined as generation" in told["n1"][0].text
    assert set(told[event]) <= set(told[MODEL])
    assert told["nobody"] == ()


async def test_a_planner_on_a_host_whose_clock_is_behind_is_the_newer_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.serve(nodes=1)
    before = cluster.sets[-1]
    await cluster.crash_planner()
    cluster.sets.clear()
    with monkeypatch.context() as patch:
        patch.setattr(clock, "wall_source", lambda: 1)
        await cluster.start_planner()
    await cluster.until(lambda: cluster.sets)
    assert cluster.sets[-1].epoch > before.epoch


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


def over(path: Instance) -> set[NodeId]:
    return {stage.node for stage in path.stages}


async def stay_on_a_path(cluster: Cluster, nodes: int) -> tuple[ScriptedGateway, Instance]:
    """All nodes are complete; a request ends on a path that was over the last and another."""
    cluster.config = msgspec.structs.replace(cluster.config, max_stages=2)
    await cluster.serve(nodes)
    cluster.world.open_to(2)
    gateway = await cluster.add_gateway()
    gateway.stays = True
    await cluster.scale(nodes)

    def found() -> list[Instance]:
        paths = [path for path in cluster.paths if path.state is SERVING]
        return [p for p in paths if len(p.stages) == 2 and f"n{nodes - 1}" in over(p)]

    await cluster.until(found)
    path = found()[0]
    gateway.on = {path.id: 1}
    cluster.world.open_to(1000)
    await cluster.until_event(EventState.COMPLETE)
    await cluster.until(lambda: any(i.id == path.id and i.state is MOVING for i in cluster.paths))
    await gateway.reported()
    await cluster.until_more_sets(1)
    return gateway, path


async def seen(cluster: Cluster, gateway: ScriptedGateway) -> None:
    """What was so has been reported, and answered with sets, several times over."""
    for _ in range(5):
        await gateway.reported()
        await cluster.until_more_sets(2)


async def test_a_path_whose_requests_stay_serves_them_to_their_end(cluster: Cluster) -> None:
    gateway, path = await stay_on_a_path(cluster, 2)
    await seen(cluster, gateway)
    assert [i.id for i in cluster.paths] == [path.id]
    assert gateway.on == {path.id: 1}
    gateway.end_on(path.id)
    await cluster.until_replicas("n0", "n1")


async def test_a_node_drains_until_the_requests_on_its_paths_have_ended(cluster: Cluster) -> None:
    gateway, path = await stay_on_a_path(cluster, 2)
    await cluster.scale(1)
    await cluster.until(lambda: cluster.replicas(InstanceState.DRAINING))
    await seen(cluster, gateway)
    assert gateway.on == {path.id: 1}
    assert not any(node.releases for node in cluster.nodes.values())
    (drained,) = cluster.replicas(InstanceState.DRAINING)
    gateway.end_on(path.id)
    await cluster.until_replica_count(1)
    await cluster.until(lambda: cluster.nodes[NodeId(drained)].releases)


async def test_a_node_does_not_drain_for_ever(
    cluster: Cluster,
) -> None:
    gateway, _ = await stay_on_a_path(cluster, 2)
    await cluster.scale(1)
    await cluster.until(lambda: any(node.releases for node in cluster.nodes.values()))
    await cluster.until(lambda: not cluster.paths)
    assert gateway.queued + sum(gateway.on.values()) == 1, "the gateway has it run elsewhere"


async def test_the_node_that_drains_is_the_one_over_which_nothing_runs(cluster: Cluster) -> None:
    gateway, path = await stay_on_a_path(cluster, 3)
    (free,) = cluster.nodes.keys() - over(path)
    await cluster.scale(2)
    await cluster.until(lambda: any(node.releases for node in cluster.nodes.values()))
    assert cluster.nodes[free].releases
    assert cluster.replicas() == over(path)
    assert gateway.on == {path.id: 1}


async def test_idle_replicas_drain_down_to_the_least_and_sleep_where_bursts_needed_them(
    cluster: Cluster,
) -> None:
    await cluster.serve(nodes=4)
    gateway = await cluster.add_gateway()
    await gateway.offer(4 * SLOTS)
    await cluster.until_replicas("n0", "n1", "n2", "n3")
    gateway.end_all()
    await cluster.until_replica_count(1)
    (left,) = cluster.replicas()
    gone = [node for node in cluster.nodes.values() if node.id != left]
    await cluster.until(lambda: all(not node.gpu for node in gone))
    assert [release.keep for node in gone for release in node.releases] == [Tier.HOST] * 3


async def test_without_history_copies_that_are_not_needed_leave_memory(cluster: Cluster) -> None:
    cluster.config = msgspec.structs.replace(cluster.config, anticipate=False)
    await cluster.serve(nodes=2)
    gateway = await cluster.add_gateway()
    await gateway.offer(2 * SLOTS)
    await cluster.until_replicas("n0", "n1")
    gateway.end_all()
    await cluster.until_replica_count(1)
    (left,) = cluster.replicas()
    (gone,) = (node for node in cluster.nodes.values() if node.id != left)
    await cluster.until(lambda: not gone.gpu)
    assert [release.keep for release in gone.releases] == [None]
    assert not gone.host


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


async def test_reports_of_blocks_that_wait_are_taken_in_together_and_in_their_turn(
    cluster: Cluster,
) -> None:
    n0, n1 = await cluster.add_nodes(2)
    planner = await cluster.start_planner()
    await cluster.publish_model(record(min_instances=1))
    await cluster.until_replicas("n0")
    await cluster.until_event(EventState.COMPLETE)
    cluster.world.open_to(0)
    await cluster.scale(2)
    await cluster.until(lambda: n1.plans)
    core, heard = planner.core, list[Stimulus]()

    def handle(stimulus: Stimulus, now: Moment) -> list[Command]:
        heard.append(stimulus)
        return type(core).handle(core, stimulus, now)

    core.handle = handle  # type: ignore[method-assign]
    for block in range(BLOCKS - 1):
        await n1.arrived(n1.plans[0], block, n0.id, "tcp")
    await n1.fail(n1.plans[0], BLOCKS - 1, n0.id)
    await n1.arrived(n1.plans[0], BLOCKS - 1, n0.id, "tcp")
    await cluster.until_event(EventState.COMPLETE, count=2)
    news = [each for each in heard if isinstance(each, Together | PullFailed)]
    first, failed, last = news[:3]
    assert isinstance(first, Together)
    assert isinstance(failed, PullFailed)
    assert isinstance(last, Together)
    assert len(first.reports) == BLOCKS - 1
    assert len(last.reports) == 1
