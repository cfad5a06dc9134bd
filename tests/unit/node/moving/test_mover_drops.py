"""Models that are dropped, and sources that change, while reads are under way."""

import asyncio

import pytest

from shared.errors import Conflict, NotFound, RegionUnknown
from tests.unit.node.moving.movers import (
    ALL,
    CHUNK,
    CONTENT,
    MODEL,
    SIZES,
    Nodes,
    changing_sources,
    probe,
)


async def test_dropping_in_the_middle_leaves_the_space_alone(nodes: Nodes) -> None:
    source, target = await nodes.start("s", rate=5_000_000), await nodes.start("t")
    last = await nodes.start("l")
    source.hold(ALL)
    target.hold([])
    target.pull([source], *((1, block, source) for block in ALL))
    assert await probe(last, target, 0, CHUNK) == CONTENT[0][:CHUNK]
    with pytest.raises(Conflict, match="still held"):
        target.arena.free(target.span)
    await target.mover.drop(MODEL)
    target.arena.free(target.span)
    space = target.span.memory
    space[:] = bytes(len(space))
    with pytest.raises(RegionUnknown):
        await probe(last, target, 0, 1)
    # The connection to the source still drains what was on its way; none of it comes here.
    assert await probe(target, source, 2, SIZES[2]) == CONTENT[2]
    assert not any(space)
    assert not target.failures
    await target.mover.drop(MODEL)
    target.arena.allocate(len(space))
    target.hold([])


async def test_another_source_waits_for_the_reads_of_the_first() -> None:
    async with changing_sources() as (transport, _, _):
        transport.let_go.set()
        assert await transport.asked.get() == "memory://u"


async def test_a_drop_waits_for_cancelled_reads() -> None:
    async with changing_sources() as (transport, mover, space):
        dropping = asyncio.ensure_future(mover.drop(MODEL))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not dropping.done()
        with pytest.raises(NotFound):
            mover.mark_held(MODEL, 0)
        transport.let_go.set()
        await dropping
        assert transport.asked.empty()
        assert not space.span.users
