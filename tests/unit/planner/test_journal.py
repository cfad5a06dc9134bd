"""Every decision about a model says why: more, fewer, waits, gives way, failures."""

import msgspec
import pytest

from services.planner.core.journal import KEPT, Journal
from shared import subjects
from shared.errors import NotFound
from shared.ids import EventId, ModelName, NodeId
from shared.messages.decisions import Decided, Decisions, DecisionsQuery, Verdict
from shared.messages.pool import Tier
from shared.messages.scaling import EventState
from tests.unit.planner.cluster import Cluster
from tests.unit.planner.driver import Driver, model
from tests.unit.planner.scripted import NAME, SLOTS
from tests.unit.planner.test_rooms import DISK, copy, holds, pool, sleeping


def about(driver: Driver, name: str) -> list[tuple[Verdict, str]]:
    found = driver.core.decisions(ModelName(name), 50)
    return [(decided.verdict, decided.why) for decided in reversed(found)]


@pytest.mark.virtual_time
async def test_more_and_fewer_say_for_what_load(cluster: Cluster) -> None:
    await cluster.serve(nodes=2)
    gateway = await cluster.add_gateway()
    await gateway.offer(2 * SLOTS)
    done = await cluster.until_event(EventState.COMPLETE)
    await cluster.until_replica_count(2)
    gateway.end_all()
    await cluster.until_replica_count(1)
    query = DecisionsQuery(name=ModelName(NAME))
    fewer, more, first = (await cluster.ask(subjects.PLANNER_DECISIONS, query, Decisions)).decisions
    assert first.why == "fewer than min_instances=1"
    assert (more.verdict, more.replicas, more.wanted) == (Verdict.MORE, 1, 2)
    assert (more.event, more.why) == (done.id, done.cause)
    assert (fewer.verdict, fewer.replicas, fewer.wanted) == (Verdict.FEWER, 2, 1)
    assert len(fewer.nodes) == 1
    assert fewer.why.startswith("2 replicas serve, 1 is enough for ")
    assert fewer.why.endswith(
        "0 requests queued and 0 running; 2 copies stay in memory, the last for 200 s"
    )
    newest = DecisionsQuery(name=ModelName(NAME), limit=1)
    one = await cluster.ask(subjects.PLANNER_DECISIONS, newest, Decisions)
    assert one.decisions == (fewer,)
    unknown = DecisionsQuery(name=ModelName("unknown"))
    with pytest.raises(NotFound, match="lambdascale model ls"):
        await cluster.ask(subjects.PLANNER_DECISIONS, unknown, Decisions)


def test_a_copy_that_gives_way_says_to_whom_and_what_it_costs() -> None:
    driver = sleeping()
    driver.load(1, name="three")
    gone = about(driver, "one") or about(driver, "two")
    ((verdict, why),) = gone
    assert verdict is Verdict.GIVES_WAY
    assert why.startswith("makes room for three: sleeps; its loss is expected to cost ")


def test_a_model_that_waits_for_memory_says_so_once() -> None:
    driver = pool(*(model(name) for name in DISK), disk=False)
    holds(driver, copy("one", Tier.HOST), copy("two", Tier.HOST), disk=("three",))
    driver.load(1, name="three")
    driver.wait(3.0)
    ((verdict, why),) = about(driver, "three")
    assert verdict is Verdict.WAITS
    assert "fair share" in why


def test_the_last_decisions_are_kept_each_once() -> None:
    journal = Journal()
    decided = Decided(at_ns=0, verdict=Verdict.MORE, replicas=0, wanted=0, why="load")
    for number in range(3 * KEPT):
        for at_ns in (2 * number, 2 * number + 1):
            journal.note(msgspec.structs.replace(decided, at_ns=at_ns, wanted=number))
    kept = journal.newest(10 * KEPT)
    assert [each.wanted for each in kept] == [3 * KEPT - 1 - i for i in range(KEPT)]
    assert journal.newest(2) == kept[:2]
    assert journal.newest(-1) == ()
    nodes = msgspec.structs.replace(decided, nodes=(NodeId("a"),), event=EventId("ev-1"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(nodes), type=Decided) == nodes
