"""Operators, removal, memory that must not leak, suspects, several gateways."""

import msgspec
import pytest

from shared.errors import BadInput, Conflict, NotFound
from shared.ids import ModelId
from shared.messages.instances import InstanceState
from shared.messages.pool import Tier
from shared.messages.scaling import EventState
from tests.unit.planner.cluster import Cluster
from tests.unit.planner.scripted import BLOCKS, MODEL, SLOTS, record

pytestmark = pytest.mark.virtual_time
DRAINING = InstanceState.DRAINING


# --- the operator ---


async def test_the_operator_scales_up_down_and_to_nothing(cluster: Cluster) -> None:
    nodes = await cluster.serve(nodes=3)
    event = await cluster.scale(3)
    done = await cluster.until_event(EventState.COMPLETE)
    assert done.id == event
    assert done.cause == "operator asked for 3 replicas, 1 there"
    await cluster.until_replica_count(3)
    assert await cluster.scale(1) is None
    await cluster.until_replica_count(1)
    assert await cluster.scale(0) is None
    await cluster.until_replica_count(0)
    await cluster.until(lambda: sum(bool(node.host) for node in nodes) == 1)
    assert not any(node.gpu for node in nodes)


@pytest.mark.parametrize(("warm", "asleep"), [(0, 1), (2, 2), (5, 3)])
async def test_warm_copies_stay_in_memory_when_their_replicas_go(
    cluster: Cluster, warm: int, asleep: int
) -> None:
    nodes = await cluster.serve(nodes=3, warm=warm)
    await cluster.scale(3)
    await cluster.until_replica_count(3)
    await cluster.until_event(EventState.COMPLETE)
    await cluster.scale(0)
    await cluster.until_replica_count(0)
    await cluster.until(lambda: not any(node.gpu for node in nodes))
    assert sum(bool(node.host) for node in nodes) == asleep


async def test_where_nodes_load_by_themselves_no_copy_is_put_by(cluster: Cluster) -> None:
    cluster.config = msgspec.structs.replace(cluster.config, strategy="local")
    (node,) = await cluster.serve(nodes=1)
    await cluster.scale(0)
    await cluster.until(lambda: bool(node.releases))
    assert node.releases[0].keep is None


async def test_the_operators_number_holds_whatever_the_load_until_it_is_taken_back(
    cluster: Cluster,
) -> None:
    await cluster.serve(nodes=3)
    await cluster.scale(1)
    gateway = await cluster.add_gateway()
    await gateway.offer(3 * SLOTS)
    await cluster.until(lambda: gateway.on)
    assert not cluster.changes
    await cluster.scale(None)
    await cluster.until_replica_count(3)
    await cluster.scale(3)
    gateway.end_all()
    await cluster.until_more_sets(3)
    assert len(cluster.replicas()) == 3


async def test_what_the_operator_cannot_have(cluster: Cluster) -> None:
    await cluster.add_nodes(2)
    await cluster.start_planner()
    with pytest.raises(NotFound, match="not published"):
        await cluster.scale(1)
    await cluster.publish_model(record(max_instances=1))
    with pytest.raises(BadInput, match="2 nodes are there"):
        await cluster.scale(3)
    with pytest.raises(BadInput, match="max_instances of the model is 1"):
        await cluster.scale(2)
    with pytest.raises(BadInput, match="-1 instances"):
        await cluster.scale(-1)


async def test_no_new_number_while_an_event_runs(cluster: Cluster) -> None:
    await cluster.serve(nodes=2)
    cluster.world.open_to(0)
    await cluster.scale(2)
    with pytest.raises(Conflict, match="wait for its end"):
        await cluster.scale(1)
    cluster.world.open_to(1000)
    await cluster.until_replica_count(2)
    await cluster.scale(1)
    await cluster.until_replica_count(1)


# --- removal ---


async def test_a_model_that_is_removed_serves_no_more(cluster: Cluster) -> None:
    await cluster.serve(nodes=2)
    await cluster.remove_model()
    await cluster.until(lambda: cluster.instances == ())
    last = cluster.sets[-1].revision
    await cluster.publish_model(record(min_instances=1))
    await cluster.until_replicas("n0")
    assert cluster.sets[-1].revision > last, "gateways go by it"


async def test_removal_cancels_the_event_and_nothing_is_published_again(
    cluster: Cluster,
) -> None:
    nodes = await cluster.serve(nodes=3)
    cluster.world.open_to(1)
    await cluster.scale(3)
    await cluster.until(lambda: cluster.paths)
    await cluster.remove_model()
    ended = await cluster.until_event(EventState.CANCELLED)
    assert ended.error == "the model was removed"
    sets = len(cluster.sets)
    assert cluster.instances == ()
    cluster.world.open_to(1000)
    await cluster.until(lambda: all(len(node.gpu.get(MODEL, ())) == BLOCKS for node in nodes))
    await cluster.until_unreserved()
    # Their nodes have missed the removal: the copies are found to belong to nobody.
    await cluster.until(lambda: not any(node.gpu for node in nodes))
    assert len(cluster.sets) == sets
    assert not cluster.events(EventState.COMPLETE)
    assert not cluster.events(EventState.FAILED)


async def test_the_operators_number_goes_with_its_model(cluster: Cluster) -> None:
    await cluster.serve(nodes=2)
    await cluster.scale(2)
    await cluster.until_replica_count(2)
    await cluster.remove_model()
    await cluster.until(lambda: not cluster.instances)
    for node in cluster.nodes.values():
        node.gpu.clear()
        await node.report()
    await cluster.publish_model(record(min_instances=1))
    await cluster.until_replicas("n0")


# --- memory ---


@pytest.mark.parametrize("tier", [Tier.GPU, Tier.HOST])
@pytest.mark.parametrize("held", [set[int](), {0, 1}])
async def test_a_partial_copy_of_nobodys_is_given_back(
    cluster: Cluster, tier: Tier, held: set[int]
) -> None:
    _, n1 = await cluster.serve(nodes=2)
    (n1.gpu if tier is Tier.GPU else n1.host)[MODEL] = held
    await cluster.until(lambda: n1.releases)
    await cluster.until(lambda: not n1.gpu and not n1.host)
    assert cluster.replicas() == {"n0"}


async def test_a_copy_put_by_that_is_not_the_last_is_given_back(cluster: Cluster) -> None:
    """As of a node that was taken for dead, and came back with it."""
    _, n1, n2 = await cluster.serve(nodes=3)
    await cluster.scale(0)
    await cluster.until(lambda: cluster.node(0).host)
    for node in (n1, n2):
        node.host[MODEL] = set(range(BLOCKS))
        await node.report()
    await cluster.until(lambda: sum(bool(node.host) for node in cluster.nodes.values()) == 1)
    (last,) = [node for node in cluster.nodes.values() if node.host]
    await cluster.scale(1)
    await cluster.until_replicas(last.id)


async def test_memory_of_a_model_that_nobody_published_is_given_back(cluster: Cluster) -> None:
    _, n1 = await cluster.serve(nodes=2)
    n1.host[ModelId("long-gone")] = set(range(BLOCKS))
    await n1.report()
    await cluster.until(lambda: n1.releases)
    assert (n1.releases[0].model_id, n1.releases[0].keep) == ("long-gone", None)


async def test_a_node_that_is_being_released_is_neither_source_nor_target_nor_copy(
    cluster: Cluster,
) -> None:
    nodes = await cluster.serve(nodes=2)
    await cluster.scale(2)
    await cluster.until_replica_count(2)
    for node in nodes:
        node.release_gate.clear()
    await cluster.scale(0)
    await cluster.until(lambda: all(node.releases for node in nodes))
    first, other = sorted(nodes, key=lambda node: node.releases[0].keep is None)
    assert [first.releases[0].keep, other.releases[0].keep] == [Tier.HOST, None]
    await first.report()  # still says that it holds the model
    await cluster.until_more_sets(3)
    assert not cluster.replicas(DRAINING) | cluster.replicas()
    first.release_gate.set()
    other.release_gate.set()
    await cluster.until(lambda: first.host and not other.gpu)


async def test_memory_is_free_when_the_node_says_so_not_when_it_says_it_will_be(
    cluster: Cluster,
) -> None:
    nodes = await cluster.serve(nodes=2)
    await cluster.scale(2)
    await cluster.until_replica_count(2)
    for node in nodes:
        node.release_gate.clear()
    await cluster.scale(1)
    await cluster.until(lambda: any(node.releases for node in nodes))
    (gone,) = (node for node in nodes if node.releases)
    plans = len(gone.plans)
    gone.mute = True
    gone.release_gate.set()
    await cluster.until(lambda: not gone.gpu)
    await cluster.scale(2)
    await cluster.until_more_sets(3)
    assert len(gone.plans) == plans, "by its last report it still has a copy"
    gone.mute = False
    await gone.report()
    await cluster.until_replica_count(2)
    assert len(gone.plans) == plans + 1


async def test_a_request_that_comes_while_the_last_copy_is_put_by_waits_for_it(
    cluster: Cluster,
) -> None:
    (n0,) = await cluster.serve(nodes=1)
    await cluster.publish_model(record(min_instances=0))
    gateway = await cluster.add_gateway()
    n0.release_gate.clear()
    await cluster.until(lambda: n0.releases)
    await gateway.offer(1)
    for _ in range(5):
        await gateway.reported()
    n0.release_gate.set()
    await cluster.until(lambda: gateway.on)
    assert not cluster.events(EventState.FAILED)


async def test_release_is_asked_for_until_it_is_done(
    cluster: Cluster,
) -> None:
    (n0,) = await cluster.serve(nodes=1)
    n0.release_gate.clear()
    await cluster.scale(0)
    await cluster.until(lambda: len(n0.releases) >= 3)
    n0.release_gate.set()
    await cluster.until(lambda: n0.host)


async def test_a_member_that_lost_its_blocks_is_none(cluster: Cluster) -> None:
    (n0,) = await cluster.serve(nodes=1)
    (lost,) = cluster.instances
    del n0.gpu[MODEL]
    await n0.report()
    await cluster.until(lambda: all(i.event != lost.event for i in cluster.instances))
    await cluster.until_replicas("n0")
    assert cluster.instances[0].event != lost.event, "it was loaded anew"


async def test_a_model_gets_the_room_that_another_gives_up_at_once(
    cluster: Cluster,
) -> None:
    (n0,) = await cluster.add_nodes(1)
    models = [record(min_instances=1, name=name) for name in ("one", "two", "three")]
    n0.disk = {each.model_id for each in models}
    await n0.report()
    await cluster.start_planner()
    for each in models:
        await cluster.publish_model(each)
    await cluster.until_event(EventState.COMPLETE, count=2)
    loaded = next(each for each in models if each.model_id in n0.gpu)
    await cluster.remove_model(loaded.name)
    await cluster.until_event(EventState.COMPLETE, count=3)
    done = [event.name for event in cluster.events(EventState.COMPLETE)]
    assert sorted(done) == sorted(each.name for each in models)
    assert not cluster.events(EventState.FAILED)


# --- suspects ---


async def test_a_suspect_that_answers_stays(cluster: Cluster) -> None:
    n0, n1 = await cluster.serve(nodes=2)
    for _ in range(3):
        await n1.suspect(n0)
    heard = await cluster.until_more_sets(2)
    assert all(s.instances for s in cluster.sets[heard:])


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_suspect_that_does_not_answer_serves_no_more(cluster: Cluster, hangs: bool) -> None:
    n0, n1 = await cluster.serve(nodes=2)
    await cluster.scale(2)
    await cluster.until_replica_count(2)
    await (n1.freeze() if hangs else n1.vanish())
    await n0.suspect(n1)
    await cluster.until(lambda: cluster.replicas() == {"n0"})
    assert "n1" in {view.info.node for view in (await cluster.pool()).nodes}
    if hangs:
        await n1.thaw()
        await cluster.until(lambda: cluster.replicas() == {"n0", "n1"})


# --- gateways ---


async def test_loads_of_gateways_add_up_and_a_silent_one_is_forgotten(
    cluster: Cluster,
) -> None:
    await cluster.serve(nodes=3)
    one, two = await cluster.add_gateway("one"), await cluster.add_gateway("two")
    one.queued, two.queued = SLOTS + 1, SLOTS
    await cluster.until_replica_count(3)
    one.silent = two.silent = True
    await cluster.until_replica_count(3)
    await cluster.add_gateway("three")
    await cluster.until_replica_count(1)


async def test_a_planner_that_hears_nobody_lets_everything_be(
    cluster: Cluster,
) -> None:
    nodes = await cluster.serve(nodes=2)
    gateway = await cluster.add_gateway()
    await gateway.offer(2 * SLOTS)
    await cluster.until_replica_count(2)
    for node in nodes:
        node.mute = True
    gateway.silent = True
    await cluster.until_more_sets(5)
    assert len(cluster.replicas()) == 2
    gateway.silent = False
    await cluster.until_more_sets(2)
    assert len(cluster.replicas()) == 2


@pytest.mark.parametrize("reported_idle", [False, True])
async def test_nothing_is_released_on_the_word_of_gateways_that_cannot_be_heard(
    cluster: Cluster, reported_idle: bool
) -> None:
    nodes = await cluster.serve(nodes=2)
    gateway = await cluster.add_gateway()
    await gateway.offer(2 * SLOTS)
    await cluster.until_replica_count(2)
    await cluster.until(lambda: len(gateway.on) == 2)
    await gateway.reported()
    await cluster.scale(1)
    await cluster.until(lambda: cluster.replicas(DRAINING))
    (draining,) = cluster.replicas(DRAINING)
    if reported_idle:
        gateway.end_all()
        await gateway.reported()
    gateway.silent = True
    for node in nodes:
        node.mute = True
    await cluster.until_more_sets(6)
    assert cluster.replicas(DRAINING) == {draining}
    gateway.end_all()
    gateway.silent = False
    for node in nodes:
        node.mute = False
    await cluster.until_replica_count(1)
