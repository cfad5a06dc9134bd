"""A planner that starts again, on what the last one left; and one whose bus fails it."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from services.planner.core.events import TERMINAL
from shared import subjects
from shared.bus.base import On
from shared.bus.memory import MemoryBroker, MemoryBus, MemorySubscription
from shared.errors import StaleEpoch
from shared.messages import Message, Ok
from shared.messages.base import Term
from shared.messages.pool import NodeGone, NodeJoined, Tier
from shared.messages.scaling import EventRecord, EventState, ReleaseModel
from tests.unit.planner.cluster import Cluster
from tests.unit.planner.scripted import BLOCK_BYTES, BLOCKS, MODEL, SLOTS, record
from tests.unit.registry.cluster import FailingBus

pytestmark = pytest.mark.virtual_time


async def in_the_store(cluster: Cluster) -> Mapping[str, EventRecord]:
    bucket = await cluster.bus.kv(subjects.KV_EVENTS)
    return {
        entry.key: msgspec.msgpack.decode(entry.value, type=EventRecord)
        for entry in await bucket.entries()
    }


async def crashed_while_loading(cluster: Cluster) -> None:
    """n0 serves, n1 holds a part, when the planner is gone."""
    await cluster.serve(nodes=2)
    cluster.world.open_to(2)
    await cluster.scale(2)
    await cluster.until(lambda: cluster.node(1).gpu.get(MODEL) == {0, 1})
    await cluster.until_event(EventState.SERVING)
    await cluster.ask_until_stored(cluster.event)
    await cluster.crash_planner()


async def test_replicas_are_found_again_and_published_as_of_a_newer_planner(
    cluster: Cluster,
) -> None:
    await cluster.serve(nodes=2)
    before = cluster.sets[-1]
    await cluster.crash_planner()
    cluster.sets.clear()
    await cluster.start_planner()
    await cluster.until_replicas("n0")
    assert cluster.sets[-1].epoch > before.epoch
    assert not cluster.changes


async def test_a_node_that_the_next_planner_has_told_nothing_takes_no_release_of_the_last(
    cluster: Cluster,
) -> None:
    """The last one was cut off, and what it said comes when its connection is there again."""
    n0, *_ = await cluster.add_nodes(1)
    last = await cluster.start_planner()
    await cluster.publish_model(record(min_instances=1))
    await cluster.until_replicas("n0")
    await cluster.until_unreserved()
    await cluster.crash_planner()
    cluster.sets.clear()
    await cluster.start_planner()
    await cluster.until_replicas("n0")
    late = ReleaseModel(
        node=n0.id,
        generation=n0.generation,
        epoch=last.term,
        model_id=MODEL,
        keep=None,
        term=Term("planner", last.term),
    )
    with pytest.raises(StaleEpoch):
        await cluster.bus.request(subjects.node_release(n0.id), late, Ok, timeout=1.0)
    assert n0.gpu[MODEL] == set(range(BLOCKS))


async def test_an_event_goes_on_under_the_next_planner(cluster: Cluster) -> None:
    """No node is told anything anew, and nothing moves twice."""
    await crashed_while_loading(cluster)
    begun = cluster.event
    assert [view.reserved_by for view in (await cluster.pool()).nodes] == [None, begun.id]
    await cluster.start_planner()
    await cluster.until(lambda: cluster.paths)
    cluster.world.open_to(1000)
    done = await cluster.until_event(EventState.COMPLETE)
    assert (done.id, done.revision) == (begun.id, begun.revision)
    assert done.bytes_moved == BLOCKS * BLOCK_BYTES
    assert done.actual.all_complete_s is not None
    assert len(cluster.node(1).plans) == 1
    await cluster.until_replicas("n0", "n1")
    await cluster.until_unreserved()
    await cluster.ask_until_stored(done)
    assert all(event.state in TERMINAL for event in (await in_the_store(cluster)).values())


async def test_an_event_that_nobody_had_planned_yet_has_failed(cluster: Cluster) -> None:
    await crashed_while_loading(cluster)
    begun = cluster.event
    bucket = await cluster.bus.kv(subjects.KV_EVENTS)
    undecided = msgspec.structs.replace(
        begun, state=EventState.DECIDED, targets=(), transfers=(), history=begun.history[:1]
    )
    await bucket.put(begun.id, msgspec.msgpack.encode(undecided))
    await cluster.scale_in_store(None)
    await cluster.start_planner()
    await cluster.until_unreserved()
    found = {event.id: event for event in await cluster.stored()}[begun.id]
    assert (found.state, found.error) == (EventState.FAILED, "the planner was restarted")
    await cluster.ask_until_stored(found)


async def test_an_event_whose_target_went_meanwhile_goes_on_without_it(cluster: Cluster) -> None:
    await cluster.serve(nodes=3)
    cluster.world.open_to(2)
    await cluster.scale(3)
    await cluster.until_event(EventState.SERVING)
    begun = cluster.event
    await cluster.ask_until_stored(begun)
    await cluster.crash_planner()
    await cluster.node(2).die()
    cluster.world.open_to(1000)
    await cluster.start_planner()
    done = await cluster.until_event(EventState.COMPLETE)
    assert (done.id, done.targets) == (begun.id, (cluster.node(1).id,))
    await cluster.until_replicas("n0", "n1")


async def test_a_copy_that_grew_without_a_planner_becomes_a_replica(cluster: Cluster) -> None:
    await crashed_while_loading(cluster)
    begun = cluster.event
    cluster.changes.clear()
    cluster.world.open_to(1000)
    await cluster.until(lambda: len(cluster.node(1).gpu[MODEL]) == BLOCKS)
    await cluster.start_planner()
    await cluster.until_replicas("n0", "n1")
    assert [(e.id, e.state) for e in cluster.changes] == [(begun.id, EventState.COMPLETE)]
    assert not cluster.node(1).releases


async def test_an_event_that_has_stalled_is_planned_again_by_the_next_planner(
    cluster: Cluster,
) -> None:
    await crashed_while_loading(cluster)
    cluster.world.open_to(0)
    await cluster.start_planner()
    await cluster.until(lambda: len(cluster.node(1).plans) == 2)
    assert {pull.block for pull in cluster.node(1).plans[1].pulls} == {2, 3}
    await cluster.until(lambda: cluster.paths)
    cluster.world.open_to(1000)
    done = await cluster.until_event(EventState.COMPLETE)
    assert done.bytes_moved == BLOCKS * BLOCK_BYTES
    assert done.actual.first_path_s is not None
    assert done.predicted.all_complete_s is not None
    await cluster.until_replicas("n0", "n1")


async def test_a_copy_that_was_left_and_is_not_needed_is_given_back(cluster: Cluster) -> None:
    await crashed_while_loading(cluster)
    await cluster.scale_in_store(None)
    await cluster.start_planner()
    n1 = cluster.node(1)
    await cluster.until(lambda: n1.releases and not n1.gpu)
    await cluster.until_replicas("n0")


async def test_a_host_copy_outlives_the_planner(cluster: Cluster) -> None:
    (n0,) = await cluster.serve(nodes=1)
    await cluster.scale(0)
    await cluster.until(lambda: n0.host)
    await cluster.crash_planner()
    await cluster.start_planner()
    await cluster.until_more_sets(3)
    assert not cluster.instances, "the operator's word outlives the planner too"
    await cluster.scale(None)
    await cluster.until_replicas("n0")
    assert [release.keep for release in n0.releases] == [Tier.HOST]


# --- a bus that fails ---


class DeafBus(MemoryBus):
    """Misses broadcasts of the kinds in `missed`."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker, "planner")
        self.missed: tuple[type[Message], ...] = ()

    async def subscribe(self, subject: str, *handlers: On[Any]) -> MemorySubscription:
        async def miss(message: Message) -> None: ...

        missed = (On(kind, miss) for kind in self.missed)
        return await super().subscribe(subject, *missed, *handlers)


async def test_what_was_missed_is_learned_from_the_registry(
    cluster: Cluster,
) -> None:
    bus = DeafBus(cluster.world.broker)
    await cluster.add_nodes(2)
    await cluster.start_planner(bus)
    await cluster.publish_model(record(min_instances=2))
    await cluster.until_replicas("n0", "n1")
    bus.missed = (NodeGone, NodeJoined)
    await cluster.node(1).die()
    await cluster.until_replicas("n0")
    await cluster.add_nodes(1)
    await cluster.until_replicas("n0", "n2")
    bus.missed = (Message,)
    await cluster.remove_model()
    await cluster.until(lambda: not cluster.instances)


async def test_events_go_on_while_nothing_can_be_stored(
    cluster: Cluster,
) -> None:
    bus = FailingBus(cluster.world.broker)
    await cluster.add_nodes(2)
    await cluster.start_planner(bus)
    bus.outage.on = True
    await cluster.publish_model(record(min_instances=1))
    await cluster.until_replicas("n0")
    done = await cluster.until_event(EventState.COMPLETE)
    assert bus.outage.refused.is_set()
    assert not await in_the_store(cluster)
    bus.outage.on = False
    await cluster.ask_until_stored(done)


async def test_requests_still_run_while_nobody_can_be_released(cluster: Cluster) -> None:
    """The planner's view outlives a bus that is away: what it cannot ask it asks again."""
    n0, n1 = await cluster.serve(nodes=2)
    gateway = await cluster.add_gateway()
    await gateway.offer(SLOTS)
    await cluster.scale(2)
    await cluster.until_replicas("n0", "n1")
    await n1.freeze()
    await cluster.scale(1)
    await cluster.until_replicas("n0")
    await n1.thaw()
    await cluster.until(lambda: n1.releases and not n1.gpu)
    assert not n0.releases
