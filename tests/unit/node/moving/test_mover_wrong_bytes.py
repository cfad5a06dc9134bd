"""Wrong bytes, and sources that die: what was verified stays, and nothing wrong is forwarded."""

from typing import Any

import pytest

from services.node.moving.run_digests import RunDigests
from services.node.transport.base import ReadResult
from shared.errors import DigestMismatch, PeerLost
from tests.unit.node.moving.movers import ALL, CHUNK, CONTENT, MODEL, Nodes, probe


async def test_wrong_bytes_go_no_further(nodes: Nodes) -> None:
    """The relay shows the chunks before the bad one, reports the block, and goes on with others."""
    source, relay, last = [await nodes.start(name) for name in "srl"]
    source.hold(ALL)
    source.space.block(0)[2 * CHUNK + 5] ^= 1
    relay.hold([])
    last.hold([])
    last.pull([relay], (1, 0, relay))
    relay.pull([source], *((1, block, source) for block in ALL))
    await relay.until(lambda: len(relay.failures) == 1 and len(relay.arrivals) == 2)
    failure = relay.failures[0]
    assert (failure.block, failure.source, failure.plan.revision) == (0, source.id, 1)
    assert isinstance(failure.error, DigestMismatch)
    assert await probe(last, relay, 0, 2 * CHUNK) == CONTENT[0][: 2 * CHUNK]
    assert not last.arrivals
    # Another revision mends it, from where it was.
    source.space.block(0)[:] = CONTENT[0]
    relay.pull([source], (1, 0, source), revision=2)
    await last.until(lambda: len(last.arrivals) == 1)
    assert bytes(last.space.block(0)) == CONTENT[0]
    assert relay.arrivals[-1].plan.revision == 2


async def test_a_passing_corruption_is_read_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = await nodes.start("s"), await nodes.start("t")
    source.hold(ALL)
    target.hold([])
    source.space.block(0)[0] ^= 1
    wrong = 0

    found = RunDigests.found

    def mending(digests: RunDigests, count: int, *, right: bool) -> None:
        nonlocal wrong
        if not right:
            wrong += count
            source.space.block(0)[:] = CONTENT[0]
        found(digests, count, right=right)

    monkeypatch.setattr(RunDigests, "found", mending)
    target.pull([source], (1, 0, source))
    await target.until(lambda: len(target.arrivals) == 1)
    assert wrong == 1
    assert target.content()[0] == CONTENT[0]


async def test_a_source_that_dies_and_another_that_goes_on(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Block 0 fills the window: nothing of block 1 has been asked for when the source dies.
    monkeypatch.setattr("services.node.core.pulling.BLOCKS_AHEAD", 1)
    monkeypatch.setattr("services.node.core.pulling.BLOCK_WINDOW", 3)
    first, second, target, last = [await nodes.start(name) for name in "abtl"]
    second.hold(ALL)
    target.hold([])
    last.hold([])
    # The first source has two chunks of block 0, and no other block.
    first.space.block(0)[: 2 * CHUNK] = CONTENT[0][: 2 * CHUNK]
    first.transport.register(f"{MODEL}/0", first.space.block(0), ready=2 * CHUNK)
    first.transport.register(f"{MODEL}/1", first.space.block(1))
    target.pull([first], (1, 0, first), (2, 1, first))
    assert await probe(last, target, 0, 2 * CHUNK) == CONTENT[0][: 2 * CHUNK]
    await nodes.kill(first)
    await target.until(lambda: len(target.failures) == 2)
    assert {(f.block, f.source, type(f.error)) for f in target.failures} == {
        (0, first.id, PeerLost),
        (1, first.id, PeerLost),
    }
    # What was verified is not read again: the second source's copy of it is wrong.
    second.space.block(0)[:CHUNK] = bytes(CHUNK)
    target.pull([second], *((1, block, second) for block in ALL), revision=2)
    await target.complete()
    assert target.content() == CONTENT
    assert {a.source for a in target.arrivals} == {second.id}
    assert len(target.failures) == 2


async def test_of_a_read_only_the_wrong_chunk_is_read_again(nodes: Nodes) -> None:
    source, target = await nodes.start("s"), await nodes.start("t", read_bytes=4 * CHUNK)
    source.hold(ALL)
    target.hold([])
    source.space.block(2)[CHUNK] ^= 1  # of the second chunk
    asked: list[tuple[int, int]] = []
    read = target.transport.read

    async def noting(
        address: str, region: str, offset: int, into: memoryview, **options: Any
    ) -> ReadResult:
        asked.append((offset, len(into)))
        if len(asked) == 2:
            source.space.block(2)[:] = CONTENT[2]
        return await read(address, region, offset, into, **options)

    target.transport.read = noting  # type: ignore[method-assign]
    target.pull([source], (1, 2, source))
    await target.until(lambda: len(target.arrivals) == 1)
    assert target.content()[2] == CONTENT[2]
    assert asked[0] == (0, 2 * CHUNK)  # FIRST_WINDOW chunks
    assert asked[1:].count((CHUNK, CHUNK)) == 1


async def test_a_chunk_that_stays_wrong_fails_the_block_and_goes_no_further(nodes: Nodes) -> None:
    source, target = await nodes.start("s"), await nodes.start("t", read_bytes=4 * CHUNK)
    source.hold(ALL)
    target.hold([])
    source.space.block(2)[CHUNK] ^= 1
    target.pull([source], (1, 2, source))
    await target.until(lambda: len(target.failures) == 1)
    assert isinstance(target.failures[0].error, DigestMismatch)
    assert "chunk 1" in str(target.failures[0].error)
    assert target.mover._models[MODEL].pulls.blocks[2].verified[:2] == [True, False]
    assert await probe(source, target, 2, CHUNK) == CONTENT[2][:CHUNK]
