"""Events that meet trouble: every one ends well or says why not, and leaves nothing behind."""

import asyncio
from typing import Any

import msgspec
import pytest

from services.planner.core import lateness
from services.planner.core.multicast.strategies import lower_bound
from services.planner.core.orders import EARLY_S
from services.planner.core.replicas import RETRY_S
from shared import subjects
from shared.errors import CapacityExceeded, CutOff, LambdaScaleError, NoResponders, NotFound
from shared.ids import EventId, NodeId
from shared.messages.scaling import ApplyPlan, EventState
from shared.messages.story import StoryQuery, Told
from tests.unit.planner.cluster import CONFIG, Cluster
from tests.unit.planner.scripted import BLOCKS, MODEL, SLOTS, ScriptedNode, record

pytestmark = pytest.mark.virtual_time


async def loading(cluster: Cluster, targets: int, step: int) -> list[ScriptedNode]:
    """An event from n0 to `targets` others, held up after `step`; returns all nodes."""
    nodes = await cluster.serve(nodes=targets + 1)
    cluster.world.open_to(step)
    gateway = await cluster.add_gateway()
    await gateway.offer((targets + 1) * SLOTS)
    await cluster.until_event(EventState.TRANSFERRING)
    await cluster.until(lambda: all(node.plans for node in nodes))
    return nodes


async def test_a_target_that_dies_is_planned_around(cluster: Cluster) -> None:
    _, n1, n2, n3 = await loading(cluster, targets=3, step=2)
    await cluster.until(lambda: n1.gpu[MODEL])
    await n1.die()
    cluster.world.open_to(1000)
    done = await cluster.until_event(EventState.COMPLETE)
    assert set(done.targets) == {"n2", "n3"}
    assert done.revision >= 1
    assert all("n1" not in (t.src, t.dst) for t in done.transfers)
    await cluster.until_replicas("n0", "n2", "n3")
    for node in (n2, n3):
        assert node.plans[-1].revision == done.revision
        assert not node.releases


async def test_the_source_may_die_once_its_blocks_are_out(cluster: Cluster) -> None:
    n0, n1, n2 = await loading(cluster, targets=2, step=lower_bound(3, BLOCKS, 1) - 1)
    await cluster.until(lambda: n1.gpu[MODEL] | n2.gpu[MODEL] == set(range(BLOCKS)))
    assert min(len(n1.gpu[MODEL]), len(n2.gpu[MODEL])) < BLOCKS
    await n0.die()
    cluster.world.open_to(1000)
    done = await cluster.until_event(EventState.COMPLETE)
    assert set(done.targets) == {"n1", "n2"}
    await cluster.until_replicas("n1", "n2")


async def test_without_any_holder_the_event_fails_and_is_tried_again_when_one_is_back(
    cluster: Cluster,
) -> None:
    n0, n1, _ = await loading(cluster, targets=2, step=1)
    await n0.die()
    failed = await cluster.until_event(EventState.FAILED)
    assert "node n0 is gone" in failed.error
    assert "no node that may send holds blocks" in failed.error
    await cluster.until(lambda: n1.releases and not n1.gpu)
    await cluster.until(lambda: not cluster.instances)
    await cluster.until_unreserved()
    await asyncio.sleep(RETRY_S)
    query = StoryQuery(subject=MODEL)
    told = await cluster.ask(subjects.PLANNER_STORY, query, Told)
    assert "no node that is up has a whole copy" in told.steps[-1].text
    assert len(cluster.events(EventState.FAILED)) == 1
    cluster.world.open_to(1000)
    back = ScriptedNode(cluster.world, "n0", disk=True)
    cluster.nodes[back.id] = back
    await back.start()
    await cluster.until_event(EventState.COMPLETE)
    await cluster.until(lambda: "n0" in cluster.replicas())


async def test_what_the_operator_fixed_is_told_and_taken_back(cluster: Cluster) -> None:
    await cluster.serve(nodes=2)
    assert cluster.sets[-1].fixed is None
    await cluster.scale(0)
    await cluster.until(lambda: cluster.sets[-1].fixed == 0 and not cluster.sets[-1].instances)
    await cluster.scale(None)
    await cluster.until(lambda: cluster.sets[-1].fixed is None)


async def test_a_source_that_does_not_deliver_is_replaced_by_another(cluster: Cluster) -> None:
    n0, _, n2 = await cluster.serve(nodes=3)
    await cluster.scale(2)
    await cluster.until_replicas("n0", "n1")
    await cluster.until_event(EventState.COMPLETE)
    n2.broken = {n0.id}
    await cluster.scale(3)
    done = await cluster.until_event(EventState.COMPLETE, count=2)
    assert done.targets == ("n2",)
    assert done.revision == 1
    assert {t.src for t in done.transfers} == {"n1"}
    assert {pull.source for pull in n2.plans[-1].pulls} == {"n1"}
    await cluster.until_replicas("n0", "n1", "n2")


async def test_failures_of_an_older_revision_are_ignored_and_several_make_one_new_one(
    cluster: Cluster,
) -> None:
    _, n1, n2 = await loading(cluster, targets=2, step=0)
    first = {node: node.plans[0] for node in (n1, n2)}
    for node, plan in first.items():
        for pull in plan.pulls:
            await node.fail(plan, pull.block, pull.source)
    await cluster.until(lambda: n1.plans[-1].revision == n2.plans[-1].revision == 1)
    for node, plan in first.items():
        await node.fail(plan, plan.pulls[0].block, plan.pulls[0].source)
    await cluster.until_more_sets(2)
    cluster.world.open_to(1000)
    done = await cluster.until_event(EventState.COMPLETE)
    assert done.revision == 1
    assert [plan.revision for plan in n1.plans] == [0, 1]


async def test_a_node_that_takes_no_plan_is_left_out_and_asked_again_later(
    cluster: Cluster,
) -> None:
    _, n1, _ = await cluster.serve(nodes=3)
    n1.refuse = CapacityExceeded("the arena is in pieces")
    await cluster.scale(3)
    done = await cluster.until_event(EventState.COMPLETE)
    assert done.targets == ("n2",)
    assert done.revision == 1
    await cluster.until(lambda: n1.releases)
    failed = await cluster.until_event(EventState.FAILED)
    assert "no node has room" in failed.error
    n1.refuse = None
    await cluster.until_replicas("n0", "n1", "n2")


async def test_a_node_that_does_not_know_the_model_yet_is_waited_for(cluster: Cluster) -> None:
    _, n1 = await cluster.serve(nodes=2)
    n1.refuse = NotFound("the manifest has not reached this node yet")
    event = await cluster.scale(2)
    await cluster.until_event(EventState.TRANSFERRING)
    n1.refuse = None
    done = await cluster.until_event(EventState.COMPLETE)
    assert (done.id, done.revision) == (event, 0)


async def scaling_while_cut_off(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> tuple[EventId | None, list[LambdaScaleError]]:
    """An event to all nodes but one, whose planner is cut off when it gives the orders. Returns the
    event, and what the planner's bus says to orders as long as the list is not empty."""
    await cluster.serve(nodes=nodes)
    errors: list[LambdaScaleError] = [CutOff("not connected to NATS")]
    bus = cluster.planner_bus
    assert bus is not None
    ask = bus.request

    async def request(subject: str, message: Any, reply: Any, *, timeout: float) -> Any:
        if errors and isinstance(message, ApplyPlan):
            raise errors[0]
        return await ask(subject, message, reply, timeout=timeout)

    monkeypatch.setattr(bus, "request", request)
    event = await cluster.scale(nodes)
    await cluster.until_event(EventState.TRANSFERRING)
    return event, errors


async def test_while_the_planner_is_cut_off_targets_are_asked_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    event, errors = await scaling_while_cut_off(cluster, monkeypatch, nodes=2)
    await asyncio.sleep(2 * EARLY_S)
    errors[:] = [NoResponders("the bus is back here, and not there yet")]
    await asyncio.sleep(EARLY_S / 2)
    errors.clear()
    done = await cluster.until_event(EventState.COMPLETE)
    assert (done.id, done.revision) == (event, 0)


async def test_targets_that_are_gone_after_the_bus_was_away_are_left_out(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, errors = await scaling_while_cut_off(cluster, monkeypatch, nodes=3)
    errors[:] = [NoResponders("nobody serves it")]
    failed = await cluster.until_event(EventState.FAILED)
    assert failed.error.startswith("no target is left: targets refused:")


async def test_arrivals_that_are_not_heard_of_are_seen_in_reports(cluster: Cluster) -> None:
    _, n1 = await cluster.serve(nodes=2)
    n1.lossy = True
    await cluster.scale(2)
    done = await cluster.until_event(EventState.COMPLETE)
    assert done.revision == 0
    await cluster.until_replicas("n0", "n1")


async def test_a_target_that_fails_with_senders_that_are_well_is_given_up(
    cluster: Cluster,
) -> None:
    n0, n1 = await cluster.serve(nodes=2)
    n1.broken = {n0.id}
    await cluster.scale(2)
    failed = await cluster.until_event(EventState.FAILED)
    assert failed.error.startswith("no target is left: n1 did not get block")
    await cluster.until(lambda: n1.releases and not n1.gpu)
    n1.broken.clear()
    await cluster.until_replicas("n0", "n1")


async def test_a_disk_that_cannot_be_read_fails_the_event(cluster: Cluster) -> None:
    (n0,) = await cluster.add_nodes(1)
    cluster.world.open_to(1)
    await cluster.start_planner()
    await cluster.publish_model(record(min_instances=1))
    await cluster.until(lambda: n0.gpu.get(MODEL))
    await n0.fail(n0.plans[0], 1, n0.id)
    failed = await cluster.until_event(EventState.FAILED)
    assert "n0 did not get block 1 from n0" in failed.error
    assert "no node that may send holds blocks [1]" in failed.error
    await cluster.until(lambda: n0.releases and not n0.gpu)


async def test_silence_makes_a_new_plan_and_in_the_end_a_failure(cluster: Cluster) -> None:
    _, n1, _ = await loading(cluster, targets=2, step=0)
    failed = await cluster.until_event(EventState.FAILED)
    assert "no block arrived" in failed.error
    assert failed.revision == 3
    await cluster.until(lambda: n1.releases and not n1.gpu)
    assert cluster.replicas() == {"n0"}


async def test_a_target_that_goes_silent_is_dropped_before_its_lease_ends(
    cluster: Cluster,
) -> None:
    _, n1, _ = await loading(cluster, targets=2, step=1)
    await n1.vanish()
    cluster.world.open_to(1000)
    done = await cluster.until_event(EventState.COMPLETE)
    assert done.targets == ("n2",)
    await cluster.until_replicas("n0", "n2")


async def test_arrivals_of_an_earlier_process_of_a_node_do_not_count(cluster: Cluster) -> None:
    _, n1 = await cluster.serve(nodes=2)
    cluster.world.open_to(0)
    await cluster.scale(2)
    await cluster.until(lambda: n1.plans)
    n1.generation, known = type(n1.generation)(7), n1.generation
    for block in range(BLOCKS):
        await n1.arrived(n1.plans[0], block, cluster.node(0).id, "tcp")
    n1.generation = known
    await n1.fail(n1.plans[0], 0, cluster.node(0).id)  # whatever came before it has been heard
    await cluster.until(lambda: n1.plans[-1].revision == 1)
    assert not cluster.events(EventState.COMPLETE)
    assert cluster.replicas() == {"n0"}


async def test_a_slow_sender_is_relieved_once_of_what_others_can_send(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    n0, _, n2 = await cluster.serve(nodes=3)
    await cluster.scale(2)
    await cluster.until_replicas("n0", "n1")
    await cluster.until_event(EventState.COMPLETE)
    n2.stuck = {n0.id}
    await cluster.scale(3)
    done = await cluster.until_event(EventState.COMPLETE, count=2)
    assert done.revision == 1
    assert {t.src for t in done.transfers} == {"n1"}
    await cluster.until_replicas("n0", "n1", "n2")


async def test_the_only_sender_is_not_replaced_however_slow(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = asyncio.Event()
    look = lateness.Pace.look

    def looking(pace: lateness.Pace, *args: Any) -> dict[NodeId, lateness.Late]:
        found = look(pace, *args)
        if found:
            looked.set()
        return found

    monkeypatch.setattr(lateness.Pace, "look", looking)
    await loading(cluster, targets=1, step=0)
    await asyncio.wait_for(looked.wait(), timeout=5)
    cluster.world.open_to(1000)
    done = await cluster.until_event(EventState.COMPLETE)
    assert done.revision == 0


async def test_what_is_chosen_is_recorded(cluster: Cluster) -> None:
    await cluster.serve(nodes=4)
    await cluster.scale(4)
    done = await cluster.until_event(EventState.COMPLETE)
    assert done.strategy == "binomial"
    assert done.predicted.all_complete_s is not None
    assert max(t.step for t in done.transfers) == lower_bound(4, BLOCKS, 1)


async def test_targets_with_the_model_on_disk_may_load_it_all_by_themselves() -> None:
    config = msgspec.structs.replace(CONFIG, strategy="local")
    async with Cluster(config) as cluster:
        await cluster.add_nodes(3, disk=3)
        await cluster.start_planner()
        await cluster.publish_model(record(min_instances=1))
        await cluster.until_event(EventState.COMPLETE)
        await cluster.until_unreserved()
        await cluster.scale(3)
        done = await cluster.until_event(EventState.COMPLETE, count=2)
        assert (done.strategy, done.transfers) == ("local", ())
        await cluster.until_replicas("n0", "n1", "n2")
        others = [node for node in cluster.nodes.values() if node.id in done.targets]
        assert all(node.plans[-1].promote == tuple(range(BLOCKS)) for node in others)


async def test_a_group_is_formed_before_anything_moves() -> None:
    config = msgspec.structs.replace(CONFIG, strategy="broadcast")
    async with Cluster(config) as cluster:
        await cluster.serve(nodes=2)
        await cluster.scale(2)
        done = await cluster.until_event(EventState.COMPLETE)
        assert done.strategy == "broadcast"
        assert done.actual.first_byte_s is not None
        assert done.predicted.first_byte_s is not None
        assert done.actual.first_byte_s >= done.predicted.first_byte_s - CONFIG.step_overhead_s
