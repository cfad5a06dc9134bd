"""Blocks that come by other means than a pull, while pulls of them run."""

import asyncio

import pytest

from services.node.core import pulling
from tests.unit.node.moving.movers import CHUNK, CONTENT, MODEL, Nodes, changing_sources, probe


async def test_taking_over_waits_for_cancelled_reads() -> None:
    async with changing_sources() as (transport, owner, _):
        taking = asyncio.ensure_future(owner.take_over(MODEL, 1))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not taking.done()
        transport.let_go.set()
        assert await taking == frozenset()


async def test_chunks_that_peers_may_read_are_not_given_away(nodes: Nodes) -> None:
    source, target, reader = [await nodes.start(name) for name in "str"]
    source.transport.register(f"{MODEL}/0", memoryview(bytearray(CONTENT[0])), ready=2 * CHUNK + 5)
    target.hold([])
    target.pull([source], (1, 0, source))
    await probe(reader, target, 0, 2 * CHUNK)
    assert await target.mover.take_over(MODEL, 0) == {0, 1}
    target.space.block(0)[2 * CHUNK :] = CONTENT[0][2 * CHUNK :]
    target.mover.mark_held(MODEL, 0)
    assert await probe(reader, target, 0, len(CONTENT[0])) == CONTENT[0]
    assert target.arrivals == []
    assert target.failures == []


@pytest.mark.parametrize("by", ["mark_held", "take_over"])
async def test_the_place_of_an_ended_pull_goes_to_the_next_block(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(pulling, "BLOCKS_AHEAD", 1)  # only block 0, which never comes
    source, target = await nodes.start("s"), await nodes.start("t")
    source.hold([1])
    target.hold([])
    target.pull([source], (1, 0, source), (2, 1, source))
    if by == "take_over":
        await target.mover.take_over(MODEL, 0)
    else:
        target.mover.mark_held(MODEL, 0)
    await target.until(lambda: [a.block for a in target.arrivals] == [1])


async def test_who_keeps_a_copy_is_told_before_bytes_are_written(nodes: Nodes) -> None:
    source, target = await nodes.start("s"), await nodes.start("t")
    source.hold([0, 1])
    target.hold([])
    written: list[tuple[int, bytes]] = []
    """(how many bytes, what was there before) of every part that was written over."""
    target.mover._overwrites = lambda part: written.append((len(part), bytes(part)))
    target.pull([source], (1, 0, source))
    await target.until(lambda: [a.block for a in target.arrivals] == [0])
    assert sum(nbytes for nbytes, _ in written) == len(CONTENT[0])
    assert not any(b"".join(before for _, before in written))
    written.clear()
    await target.mover.take_over(MODEL, 1)
    assert sum(nbytes for nbytes, _ in written) == len(CONTENT[1])
    await target.mover.take_over(MODEL, 0)  # it is verified, and stays
    assert sum(nbytes for nbytes, _ in written) == len(CONTENT[1])


async def test_who_keeps_a_copy_is_told_of_the_blocks_that_others_may_fill(nodes: Nodes) -> None:
    target = await nodes.start("t")
    told: list[memoryview] = []
    target.mover._overwrites = told.append
    target.hold([1])
    others = [target.space.block(n) for n in target.space.part.blocks if n != 1]
    assert [len(each) for each in told] == [len(each) for each in others]
    target.space.block(0)[:1] = b"x"
    assert bytes(told[0][:1]) == b"x"
