"""What the planner remembers for people who look later: what events did, and numbers over time."""

import msgspec
import pytest

from services.planner.core import chronicle
from services.planner.core.chronicle import Chronicle
from shared import subjects
from shared.errors import NotFound
from shared.ids import EventId, Generation, InstanceId, ModelId, ModelName, NodeId
from shared.messages.chronicle import Chronicle as Told
from shared.messages.chronicle import ChronicleQuery, Count, EventPast, EventQuery
from shared.messages.instances import InstanceSet
from shared.messages.pool import NodeStatus
from shared.messages.scaling import BlockArrived, EventState, FirstPartialToken
from tests.unit.planner.cluster import Cluster
from tests.unit.planner.scripted import NAME, SLOTS

NAMED = ModelName("m")


def arrival(event: str, block: int, node: str = "node-1") -> BlockArrived:
    return BlockArrived(
        event=EventId(event), revision=0, node=NodeId(node), generation=Generation(1),
        model_id=ModelId("id"),
        block=block, source=NodeId("node-0"), transport="tcp", nbytes=10, started_ns=1,
        first_byte_ns=2, finished_ns=3, ready_ns=4,
    )  # fmt: skip


def hear(known: Chronicle, message: BlockArrived) -> None:
    known.on_blocks(message.event, message.node, [message])


def counted(at_ns: int, *, queued: int = 0, wanted: int = 1) -> Count:
    return Count(at_ns, queued, running=0, serving=1, granted=1, wanted=wanted)


def status(tokens: int, *, generation: int = 1, node: str = "node-0") -> NodeStatus:
    return NodeStatus(
        node=NodeId(node), generation=Generation(generation), seq=1, arena_free=0, holdings=(),
        tokens_out=tokens,
    )  # fmt: skip


@pytest.mark.virtual_time
async def test_an_event_that_is_over_is_told_with_every_block_and_path(cluster: Cluster) -> None:
    await cluster.serve(nodes=3)
    gateway = await cluster.add_gateway()
    await gateway.offer(3 * SLOTS)
    done = await cluster.until_event(EventState.COMPLETE)
    await cluster.until_replica_count(3)
    query = EventQuery(event=done.id)
    past = await cluster.ask(subjects.PLANNER_EVENT, query, EventPast)
    assert past.record == msgspec.structs.replace(done, transfers=())
    assert past.arrived == len(past.arrivals)
    came = {(arrival.node, arrival.block) for arrival in past.arrivals}
    assert came == {(node, block) for node in done.targets for block in range(done.n_blocks)}
    alone = [served for served in past.served if len(served.stages) == 1]
    assert {served.stages[0][0] for served in alone} == set(done.targets)
    assert all(not served.ended_ns for served in alone)
    rest = await cluster.ask(
        subjects.PLANNER_EVENT, EventQuery(event=done.id, after=past.arrived - 1), EventPast
    )
    assert rest.arrivals == past.arrivals[-1:]
    unknown = EventQuery(event=EventId("ev-unknown"))
    with pytest.raises(NotFound, match="lambdascale events"):
        await cluster.ask(subjects.PLANNER_EVENT, unknown, EventPast)


@pytest.mark.virtual_time
async def test_replicas_wanted_granted_and_serving_are_told_with_the_decisions(
    cluster: Cluster,
) -> None:
    await cluster.serve(nodes=2)
    gateway = await cluster.add_gateway()
    await gateway.offer(2 * SLOTS)
    done = await cluster.until_event(EventState.COMPLETE)
    await cluster.until_replica_count(2)
    told = await cluster.ask(subjects.PLANNER_CHRONICLE, ChronicleQuery(), Told)
    assert done.id in [record.id for record in told.events]
    assert all(not record.transfers for record in told.events)
    (model,) = told.models
    assert model.name == NAME
    assert (1, 2, 2) in [(c.serving, c.granted, c.wanted) for c in model.counts]
    assert max(count.queued for count in model.counts) > 0
    assert done.id in [decided.event for decided in model.decisions]
    gateway.end_all()
    await cluster.until_replica_count(1)
    await cluster.until_replica_count(1)
    later = await cluster.ask(subjects.PLANNER_CHRONICLE, ChronicleQuery(last_s=0.001), Told)
    assert later.events == ()


def test_arrivals_are_bounded_and_the_oldest_event_loses_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chronicle, "ARRIVALS", 4)
    known = Chronicle()
    for event, blocks in (("a", 3), ("b", 6)):
        known.begin(EventId(event))
        for block in range(blocks):
            hear(known, arrival(event, block))
    first, second = known.trail(EventId("a")), known.trail(EventId("b"))
    assert (len(first.arrivals), first.forgotten) == (0, 3)
    assert ([a.block for a in second.arrivals], second.forgotten) == ([0, 1, 2, 3], 2)
    hear(known, arrival("unknown", 0))
    assert known.trail(EventId("unknown")).arrivals == []


def test_of_a_report_that_has_no_room_the_first_blocks_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chronicle, "ARRIVALS", 4)
    known = Chronicle()
    for event, blocks in (("a", 2), ("b", 1), ("c", 3), ("c", 2)):
        known.begin(EventId(event))
        reports = [arrival(event, block) for block in range(blocks)]
        known.on_blocks(EventId(event), NodeId("node-1"), reports)
    trails = [known.trail(EventId(event)) for event in "abc"]
    assert [trail.forgotten for trail in trails] == [2, 1, 1]
    assert [[each.block for each in trail.arrivals] for trail in trails] == [[], [], [0, 1, 2, 0]]


def test_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chronicle, "EVENTS", 2)
    monkeypatch.setattr(chronicle, "ARRIVALS", 2)
    known = Chronicle()
    for event in "abc":
        known.begin(EventId(event))
        hear(known, arrival(event, 0))
    kept = [len(known.trail(EventId(event)).arrivals) for event in "abc"]
    assert kept == [0, 1, 1]


def test_an_asker_that_knows_more_than_there_is_gets_all() -> None:
    known = Chronicle()
    known.begin(EventId("a"))
    hear(known, arrival("a", 0))
    assert len(known.trail(EventId("a")).after(1)) == 0
    assert len(known.trail(EventId("a")).after(2)) == 1


def test_the_first_token_of_an_instance_counts_once() -> None:
    known = Chronicle()
    known.begin(EventId("a"))
    empty = InstanceSet(name=NAMED, model_id=ModelId("id"), epoch=1, revision=1, instances=())
    known.on_instances(empty, 5)
    known.on_token(
        FirstPartialToken(event=EventId("a"), instance=InstanceId("in-1"), stages=1, at_ns=7)
    )
    assert known.trail(EventId("a")).served == {}


def test_counts_say_only_what_is_new() -> None:
    known = Chronicle()
    second = 1_000_000_000
    for at_ns, queued, wanted in (
        (0, 0, 1), (second, 0, 1), (2 * second, 3, 1), (2 * second + 1, 4, 1),
        (2 * second + 2, 4, 2), (2 * second + 3, 4, 5), (2 * second + 4, 4, 2), (3 * second, 4, 2),
    ):  # fmt: skip
        known.count(NAMED, counted(at_ns, queued=queued, wanted=wanted))
    assert [c.at_ns for c in known.counts(NAMED, 0)] == [0, 2 * second, 2 * second + 2]
    assert [c.at_ns for c in known.counts(NAMED, 2 * second)] == [2 * second, 2 * second + 2]
    known.forget(NAMED, ModelId("id"))
    assert known.counts(NAMED, 0) == ()


def test_counts_are_shared_by_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chronicle, "COUNTS", 10)
    known = Chronicle()
    for number in range(20):
        for name in ("one", "two"):
            known.count(ModelName(name), counted(number, wanted=number % 2 + 1))
    assert [c.at_ns for c in known.counts(ModelName("one"), 0)] == list(range(15, 20))


def test_tokens_of_a_node_that_began_anew_are_no_rate() -> None:
    known = Chronicle()
    second = 1_000_000_000
    known.on_status(status(100), second)
    known.on_status(status(150), 2 * second)
    known.on_status(status(10, generation=2), 3 * second)
    known.on_gone(NodeId("node-0"))
    known.on_status(status(500, generation=2), 4 * second)
    assert [rate.tokens_per_s for rate in known.rates(0)] == [0.0, 50.0, 0.0, 0.0]
