"""Movers over real TCP: relays, the order of reads, revisions."""

import asyncio

import pytest

from services.node.core.pulling import FIRST_WINDOW
from services.node.core.residency import PlanId
from shared.errors import BadInput, Conflict, NotFound, RegionUnknown
from tests.unit.node.moving.movers import (
    ALL,
    CHUNK,
    CONTENT,
    EVENT,
    MANIFEST,
    MODEL,
    SIZES,
    Nodes,
    probe,
)


async def test_a_relay_plan_over_five_nodes(nodes: Nodes) -> None:
    """The source feeds two, they feed the others: every node ends with the same bytes."""
    source, one, two, three, four = [await nodes.start(f"n{i}") for i in range(5)]
    everyone = [source, one, two, three, four]
    source.hold(ALL)
    for node in everyone[1:]:
        node.hold([])
    # Leaves first: their relays don't even have a plan yet.
    four.pull(everyone, (2, 0, two), (3, 1, one), (4, 2, three))
    three.pull(everyone, (2, 0, one), (3, 1, two), (3, 2, two))
    two.pull(everyone, (1, 0, one), (2, 1, source), (3, 2, source))
    one.pull(everyone, (1, 0, source), (2, 1, two), (3, 2, source))
    for node in everyone[1:]:
        await node.complete()
        assert node.content() == CONTENT
        assert not node.failures
    first = next(a for a in one.arrivals if a.block == 0)
    assert (first.source, first.nbytes, first.transport) == (source.id, SIZES[0], "tcp")
    assert (first.plan, first.model_id) == (PlanId(EVENT, 1), MODEL)
    assert 0 < first.started_ns <= first.first_byte_ns <= first.finished_ns


async def test_pulls_from_a_source_arrive_in_step_order(nodes: Nodes) -> None:
    source, target = await nodes.start("s", rate=50_000_000), await nodes.start("t")
    source.hold(ALL)
    target.hold([])
    target.pull([source], (3, 0, source), (1, 2, source), (2, 1, source))
    await target.complete()
    assert [arrival.block for arrival in target.arrivals] == [2, 1, 0]


async def test_a_block_that_is_late_does_not_hold_back_the_next(nodes: Nodes) -> None:
    source, target = await nodes.start("s"), await nodes.start("t")
    source.hold([1])
    target.hold([])
    target.pull([source], (1, 0, source), (2, 1, source))
    await target.until(lambda: len(target.arrivals) == 1)
    assert target.arrivals[0].block == 1
    source.space.block(0)[:] = CONTENT[0]
    source.mover.mark_held(MODEL, 0)
    await target.until(lambda: len(target.arrivals) == 2)
    assert target.content()[:2] == CONTENT[:2]


async def test_a_source_may_learn_of_the_model_later(nodes: Nodes) -> None:
    source, target = await nodes.start("s"), await nodes.start("t")
    target.hold([])
    target.pull([source], *((1, block, source) for block in ALL))
    with pytest.raises(RegionUnknown):
        await probe(target, source, 0, 1)
    source.hold(ALL)
    await target.complete()
    assert not target.failures


async def test_a_source_that_has_nothing_yet_is_asked_for_little(nodes: Nodes) -> None:
    source, target = await nodes.start("s"), await nodes.start("t")
    source.hold([])
    target.hold([])
    target.pull([source], *((step, block, source) for step, block in enumerate(ALL, 1)))
    pulls = target.mover._models[MODEL].pulls.live
    assert [len(pulls[block].reading) for block in ALL] == [FIRST_WINDOW] * len(ALL)
    first = source.space.block(0)
    first[:CHUNK] = CONTENT[0][:CHUNK]
    source.transport.advance(f"{MODEL}/0", CHUNK)
    assert await probe(source, target, 0, CHUNK) == CONTENT[0][:CHUNK]
    async with asyncio.timeout(10):
        while len(pulls[0].reading) <= FIRST_WINDOW:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_new_revision_keeps_what_is_unchanged(nodes: Nodes) -> None:
    stuck, good, target = [await nodes.start(name) for name in "sgt"]
    stuck.hold([])
    good.hold([1])
    target.hold([])
    target.pull([stuck, good], (1, 0, stuck), (2, 2, good))
    await probe(target, good, 1, 1)
    before = dict(target.mover._models[MODEL].pulls.live)
    target.pull([stuck, good], (1, 0, good), (2, 1, good), (3, 2, good), revision=2)
    after = target.mover._models[MODEL].pulls.live
    assert after[2] is before[2]
    assert after[0] is not before[0]
    good.space.block(0)[:] = CONTENT[0]
    good.space.block(2)[:] = CONTENT[2]
    good.mover.mark_held(MODEL, 0)
    good.mover.mark_held(MODEL, 2)
    await target.complete()
    assert target.content() == CONTENT
    assert {(a.source, a.plan.revision) for a in target.arrivals} == {(good.id, 2)}
    assert not target.failures


async def test_plans_that_are_refused(nodes: Nodes) -> None:
    source, target = await nodes.start("s"), await nodes.start("t")
    with pytest.raises(NotFound):
        target.pull([source], (1, 0, source))
    target.hold([])
    with pytest.raises(Conflict):
        target.mover.host(MODEL, MANIFEST, target.space, [])
    target.pull([source], (1, 0, source), revision=3)
    with pytest.raises(BadInput, match="no block 7"):
        target.pull([source], (1, 7, source), revision=4)
    with pytest.raises(BadInput, match="no address"):
        target.pull([], (1, 1, source), revision=4)
    with pytest.raises(BadInput, match="twice"):
        target.pull([source], (1, 1, source), (2, 1, source), revision=4)


async def test_chunks_of_one_read_are_forwarded_as_they_come(nodes: Nodes) -> None:
    source, relay, last = [await nodes.start(n, read_bytes=4 * CHUNK) for n in "srl"]
    source.hold([])
    relay.hold([])
    last.hold([])
    relay.pull([source], (1, 2, source))
    last.pull([relay], (1, 2, relay))
    into, out = source.space.block(2), last.space.block(2)
    for chunk in range(3):
        part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        into[part] = CONTENT[2][part]
        source.transport.advance(f"{MODEL}/2", part.stop)
        assert await probe(source, relay, 2, part.stop) == CONTENT[2][: part.stop]
        assert await probe(source, last, 2, part.stop) == CONTENT[2][: part.stop]
        assert out[part] == CONTENT[2][part]
    (read,) = relay.mover._models[MODEL].blocks[2].writers
    assert not read.done()
    into[3 * CHUNK :] = CONTENT[2][3 * CHUNK :]
    source.mover.mark_held(MODEL, 2)
    await last.until(lambda: len(last.arrivals) == 1)
    assert last.content()[2] == CONTENT[2]
