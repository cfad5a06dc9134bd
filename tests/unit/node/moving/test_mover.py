"""Movers over real TCP: relays, wrong bytes, dying sources, revisions, dropping."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node.checkpoints.packing import Digest, digest
from services.node.core.pulling import FIRST_WINDOW, runs_of
from services.node.core.residency import PlanId
from services.node.memory.arena import Arena, ModelSpace
from services.node.moving.events import Arrival, PullFailure
from services.node.moving.mover import Mover
from services.node.moving.run_digests import RunDigests
from services.node.transport.base import NoListener, OnReceived, ReadResult
from services.node.transport.memory import MemoryNetwork, MemoryTransport
from services.node.transport.tcp import TcpTransport
from shared.errors import (
    BadInput,
    Conflict,
    DigestMismatch,
    NotFound,
    PeerLost,
    RegionUnknown,
)
from shared.ids import EventId, ModelId, NodeId
from shared.layout import BlockSpec, Manifest
from shared.messages.scaling import Pull
from tests.support.listeners import Hears

MODEL = ModelId("m")
EVENT = EventId("ev-1")
CHUNK = 64 * 1024
SIZES = (5 * CHUNK, 3 * CHUNK + 100, 4 * CHUNK)
CONTENT = [random.Random(index).randbytes(size) for index, size in enumerate(SIZES)]


def manifest_of(content: Sequence[bytes], chunk: int) -> Manifest:
    return Manifest(
        architecture="LlamaForCausalLM",
        config={},
        chunk_bytes=chunk,
        blocks=tuple(
            BlockSpec(
                index=index,
                first_unit=index,
                last_unit=index,
                nbytes=len(block),
                tensors=(),
                digests=tuple(
                    digest(block[start : start + chunk]) for start in range(0, len(block), chunk)
                ),
            )
            for index, block in enumerate(content)
        ),
    )


MANIFEST = manifest_of(CONTENT, CHUNK)
ALL = range(len(SIZES))


class Node:
    def __init__(
        self,
        name: str,
        rate: int = 0,
        *,
        host: str = "127.0.0.1",
        content: Sequence[bytes] = CONTENT,
        chunk: int = CHUNK,
        read_bytes: int = CHUNK,
    ) -> None:
        self.id = NodeId(name)
        self.right = content
        self.manifest = manifest_of(content, chunk)
        self.transport = TcpTransport(
            host,
            0,
            link_bytes_per_s=rate,
            listener=Hears(lost=lambda address, _: self._lost(address)),
        )
        self.lost: list[str] = []
        """Peers' addresses."""
        self.arrivals: list[Arrival] = []
        self.failures: list[PullFailure] = []
        self.changed = asyncio.Event()
        self.mover = Mover(
            self.transport,
            on_arrived=self._arrived,
            on_failed=self._failed,
            read_bytes=read_bytes,
        )
        self.arena = Arena(ModelSpace.size(self.manifest))
        self.span = self.arena.allocate(ModelSpace.size(self.manifest))
        self.space = ModelSpace(self.manifest, self.span)

    def _arrived(self, arrival: Arrival) -> None:
        self.arrivals.append(arrival)
        self.changed.set()

    def _failed(self, failure: PullFailure) -> None:
        self.failures.append(failure)
        self.changed.set()

    def _lost(self, address: str) -> None:
        self.lost.append(address)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def complete(self) -> None:
        await self.until(lambda: len({a.block for a in self.arrivals}) == len(self.right))

    def hold(self, blocks: Sequence[int]) -> None:
        """Hosts the model with these blocks' bytes in place."""
        for index in blocks:
            self.space.block(index)[:] = self.right[index]
        self.mover.host(MODEL, self.manifest, self.space, blocks)

    def pull(
        self, sources: "Sequence[Node]", *pulls: tuple[int, int, "Node"], revision: int = 1
    ) -> None:
        self.mover.apply(
            MODEL,
            PlanId(EVENT, revision),
            [Pull(step, block, source.id) for step, block, source in pulls],
            {source.id: source.transport.address for source in sources},
        )

    def content(self) -> list[bytes]:
        return [bytes(self.space.block(index)) for index in range(len(self.right))]


class Nodes:
    def __init__(self) -> None:
        self.running: dict[NodeId, AsyncExitStack] = {}

    async def start(self, name: str, rate: int = 0, *, read_bytes: int = CHUNK) -> Node:
        node = Node(name, rate, read_bytes=read_bytes)
        stack = AsyncExitStack()
        await stack.enter_async_context(node.transport)
        stack.push_async_callback(node.mover.close)
        self.running[node.id] = stack
        return node

    async def kill(self, node: Node) -> None:
        """Its connections break; no mover is closed in good order."""
        await node.transport.__aexit__(None, None, None)
        self.running.pop(node.id).pop_all()


@pytest.fixture
async def nodes() -> AsyncIterator[Nodes]:
    nodes = Nodes()
    yield nodes
    for stack in list(nodes.running.values()):
        await stack.aclose()


async def probe(reader: Node, source: Node, block: int, nbytes: int) -> bytes:
    """The first bytes of a block, once the source shows them."""
    into = bytearray(nbytes)
    async with asyncio.timeout(10):
        await reader.transport.read(
            source.transport.address, f"{MODEL}/{block}", 0, memoryview(into), priority=0
        )
    return bytes(into)


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

    class Mending:
        def __init__(self) -> None:
            self._digest = Digest()
            self.update = self._digest.update

        def digest(self) -> bytes:
            nonlocal wrong
            found = self._digest.digest()
            if found not in MANIFEST.blocks[0].digests:
                wrong += 1
                source.space.block(0)[:] = CONTENT[0]
            return found

    monkeypatch.setattr("services.node.moving.run_digests.Digest", Mending)
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
    assert len(pulls[0].reading) > FIRST_WINDOW


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


class Lingering(MemoryTransport):
    """Its reads, once cancelled, have the buffer until they are let go: as with RDMA."""

    asked: asyncio.Queue[str]
    let_go: asyncio.Event

    async def read(
        self,
        address: str,
        region: str,
        offset: int,
        into: memoryview,
        *,
        priority: int,
        received: OnReceived | None = None,
    ) -> ReadResult:
        self.asked.put_nowait(address)
        try:
            return await super().read(
                address, region, offset, into, priority=priority, received=received
            )
        except asyncio.CancelledError:
            await self.let_go.wait()
            raise


@asynccontextmanager
async def changing_sources() -> AsyncIterator[tuple[Lingering, Mover, ModelSpace]]:
    """Block 1 was being read from one source (the node itself, which never has it); a second
    revision names another, and the first one's reads linger."""
    transport = Lingering(
        MemoryNetwork(),
        "memory://t",
        link_bytes_per_s=0,
        listener=NoListener(),
    )
    transport.asked, transport.let_go = asyncio.Queue(), asyncio.Event()
    nbytes = ModelSpace.size(MANIFEST)
    space = ModelSpace(MANIFEST, Arena(nbytes).allocate(nbytes))
    mover = Mover(transport, on_arrived=lambda _: None, on_failed=lambda _: None, read_bytes=CHUNK)
    one, other = NodeId("one"), NodeId("other")
    addresses = {one: "memory://t", other: "memory://u"}
    async with transport, asyncio.timeout(10):
        mover.host(MODEL, MANIFEST, space, [])
        mover.apply(MODEL, PlanId(EVENT, 1), [Pull(1, 1, one)], addresses)
        for _ in range(FIRST_WINDOW):
            assert await transport.asked.get() == "memory://t"
        mover.apply(MODEL, PlanId(EVENT, 2), [Pull(1, 1, other)], addresses)
        for _ in range(50):
            await asyncio.sleep(0)
        assert transport.asked.empty()
        yield transport, mover, space
        await mover.close()


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


# --- reads of several chunks ------------------------------------------------------------------


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


@given(
    chunks=st.lists(st.integers(0, 30), unique=True).map(sorted),
    most=st.integers(1, 6),
)
def test_runs_are_the_chunks_in_order(chunks: list[int], most: int) -> None:
    runs = list(runs_of(chunks, most))
    assert [chunk for run in runs for chunk in run] == chunks
    assert all(1 <= len(run) <= most for run in runs)
    # No two neighbours could be one.
    for one, other in pairwise(runs):
        assert one.stop < other.start or len(one) == most


@given(cuts=st.lists(st.integers(1, 200_000), max_size=8), wrong=st.sets(st.integers(0, 3)))
def test_digests_of_parts_cut_anywhere(cuts: list[int], wrong: set[int]) -> None:
    data = bytearray(CONTENT[1])
    for chunk in wrong:
        data[chunk * CHUNK] ^= 1
    right: list[int] = []
    check = RunDigests(MANIFEST, 1, range(4), right.append)
    left = memoryview(data)
    for cut in cuts:
        check.update(left[:cut])
        left = left[cut:]
    check.update(left)
    assert check.wrong == sorted(wrong)
    assert right == [chunk for chunk in range(4) if chunk not in wrong]
