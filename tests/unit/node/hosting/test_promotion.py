"""A cold start from disk streams: chunks go on to peers, blocks are run, while others are read."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.local.demo_model import make_checkpoint
from services.node.checkpoints import reading
from services.node.checkpoints.reading import Reading, Wanted
from services.node.execution.worker import Worker
from services.node.moving.data_plane import DataPlane
from shared.errors import CapacityExceeded, ModelError
from shared.ids import ModelId
from shared.messages.pool import Tier
from tests.support.models import WIDE
from tests.unit.node.cluster import ALL, BLOCKS, Nodes, nodes
from tests.unit.node.gates import Gate
from tests.unit.node.hosting.test_hosting import Delivered

CHUNKS = 2
"""How many chunks of block 1 pass before the gate closes."""


@pytest.fixture
async def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Nodes]:
    """Nodes `a`, with a model on its disk, and `b`; blocks have several chunks, and every chunk is
    a request."""
    make_checkpoint(tmp_path / "wide", replace(WIDE, layers=4))
    monkeypatch.setattr(reading, "REQUEST", 1)
    settings = {"arena_bytes": 16 << 20}
    async with nodes(tmp_path, tmp_path / "wide", "a", "b", settings=settings) as running:
        yield running


@contextmanager
def held_in_block_1(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Gate, Counter[int]]]:
    """A gate before all chunks of block 1 but the first ones; which of it were asked for."""
    gate, asked = Gate(), Counter[int]()
    read = Reading._read

    def gated(self: Reading, wanted: Wanted, chunks: range, spare: memoryview) -> None:
        if wanted.block == 1:
            asked.update(chunks)
            if chunks[0] >= CHUNKS:
                gate()
        read(self, wanted, chunks, spare)

    with monkeypatch.context() as patch:
        patch.setattr(Reading, "_read", gated)
        try:
            yield gate, asked
        finally:
            gate.open()


async def first_chunks(up: Nodes) -> bytes:
    """Those of block 1 that come before the gate, as `b` reads them from `a`."""
    manifest = await up.services["a"]._library.manifest(up.record.model_id)
    _, length = manifest.chunk_range(1, 0)
    into = memoryview(bytearray(CHUNKS * length))
    data, region = up.services["b"]._data, f"{up.record.model_id}/1"
    assert isinstance(data, DataPlane)
    read = data._transport.read(up.info("a").address, region, 0, into, priority=1)
    async with asyncio.timeout(20):
        await data._await(read)
    return bytes(into)


async def test_chunks_are_readable_while_the_rest_of_their_block_is_read(
    up: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_in_block_1(monkeypatch) as (gate, _):
        await up.apply("a", promote=ALL)
        read = await first_chunks(up)
        assert read == (up.stored("a") / "block-001.bin").read_bytes()[: len(read)]
        await gate.wait()
        assert 1 not in {m.block for m in up.arrived("a")}
        gate.open()
        await up.until_arrived("a", ALL)
    assert await up.generate("a")


async def test_a_block_runs_while_another_is_read(
    up: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_in_block_1(monkeypatch):
        await up.apply("a", promote=(1, 2, 0))
        await up.until_arrived("a", (2, 0))
        await up.until_holds("a", {Tier.GPU: (0, 2), Tier.DISK: ALL})


async def test_a_block_runs_before_peers_can_read_its_end(
    up: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their reads wait for it."""
    may, mark_held = asyncio.Event(), DataPlane.mark_held

    async def late(self: DataPlane, model: ModelId, block: int, chunks: Any = None) -> None:
        await may.wait()
        await mark_held(self, model, block, chunks)

    with monkeypatch.context() as patch:
        patch.setattr(reading, "REQUEST", 64 << 20)  # each block is one request
        patch.setattr(DataPlane, "mark_held", late)
        await up.apply("a", promote=ALL[:1])
        await up.until_arrived("a", ALL[:1])
        await up.apply("b", {0: "a"})
        assert up.arrived("b") == []
        may.set()
        await up.until_arrived("b", ALL[:1])


@pytest.mark.parametrize("refuses", [False, True])
async def test_blocks_are_read_while_the_engine_opens_the_model(
    up: Nodes, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    opening, may_open = asyncio.Event(), asyncio.Event()
    open_model = Worker.open_model

    async def slowly(*args: Any) -> None:
        opening.set()
        await may_open.wait()
        if refuses:
            raise CapacityExceeded("no KV for it")
        await open_model(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "open_model", slowly)
        taking_up = asyncio.ensure_future(up.apply("a", promote=ALL))
        await opening.wait()
        await first_chunks(up)
        assert up.arrived("a") == []
        may_open.set()
        if refuses:
            with pytest.raises(CapacityExceeded, match="no KV"):
                await taking_up
            await up.nothing_leaked("a")
        else:
            await taking_up
            await up.until_arrived("a", ALL)
            assert await up.generate("a")


async def test_what_was_verified_is_not_read_again(
    up: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer plan takes over in the midst of a block."""
    with held_in_block_1(monkeypatch) as (gate, asked):
        await up.apply("a", promote=ALL)
        await first_chunks(up)
        newer = asyncio.create_task(up.apply("a", promote=ALL, revision=1))
        await gate.wait()
        gate.open()
        await newer
        arrivals = await up.until_arrived("a", ALL)
    assert {asked[chunk] for chunk in range(CHUNKS)} == {1}
    assert {m.revision for m in arrivals if m.block == 1} == {1}
    assert await up.generate("a")


async def test_a_peer_goes_on_where_the_disk_was_left(
    up: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await up.stop("b")
    up.has_on_disk("b")
    await up.start("b", arena_bytes=16 << 20)
    await up.promoted("b")
    with held_in_block_1(monkeypatch) as (gate, _):
        await up.apply("a", promote=(1,))
        await first_chunks(up)
        newer = asyncio.create_task(up.apply("a", dict.fromkeys(ALL, "b"), revision=1))
        await gate.wait()
        gate.open()
        await newer
        arrivals = await up.until_arrived("a", ALL)
    assert {(m.source, m.transport) for m in arrivals} == {("b", "tcp")}
    assert await up.generate("a", request="on a") == await up.generate("b", request="on b")


async def test_a_block_that_is_asked_for_again_before_it_is_attached_is_attached_once(
    up: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = Worker.attach
    attached: Counter[int] = Counter()
    entered, opened = asyncio.Event(), asyncio.Event()

    async def slow(
        self: Worker, model: ModelId, blocks: Mapping[int, memoryview]
    ) -> dict[int, BaseException]:
        attached.update([*blocks])
        entered.set()
        await opened.wait()
        return await attach(self, model, blocks)

    monkeypatch.setattr(Worker, "attach", slow)
    landed = Delivered(monkeypatch)
    await up.apply("a", promote=ALL)
    await entered.wait()
    await landed.until(BLOCKS)
    newer = asyncio.create_task(up.apply("a", promote=ALL, revision=1))
    await asyncio.sleep(0)
    opened.set()
    await newer
    await up.until_holds("a", {Tier.GPU: ALL, Tier.DISK: ALL})
    await up.apply("a", promote=ALL, revision=2)  # what landed twice was looked at before
    await up.arrivals.until(
        lambda: {m.block for m in up.arrived("a") if m.revision == 2} == set(ALL)
    )
    assert attached == Counter(ALL)


async def test_blocks_that_are_there_need_no_disk(up: Nodes) -> None:
    await up.promoted("a")
    await up.apply("b", dict.fromkeys(ALL, "a"))
    await up.until_arrived("b", ALL)
    hosting = up.services["b"]._hosting
    hosted = hosting._hosted[up.record.model_id]
    assert hosted.residency.plan is not None
    hosting._promote(hosted.residency.plan, hosted, ALL)
    assert hosted.promotion is not None
    await hosted.promotion._task
    assert up.failed("b") == []


async def test_a_disk_that_fails_ends_with_an_error_of_its_block_and_the_rest_goes_on(
    up: Nodes,
) -> None:
    other = await up.import_model("a", called="other", blocks=3)
    path = up.stored("a") / "block-001.bin"
    path.unlink()
    path.symlink_to("/proc/self/mem")  # where nothing is mapped: EIO
    await up.apply("a", promote=ALL, revision=4)
    (failure,) = await up.until_failed("a")
    assert (failure.block, failure.source, failure.revision) == (1, "a", 4)
    assert failure.code == ModelError.code
    assert failure.message == f"{path} cannot be read: Input/output error"
    rest = tuple(block for block in ALL if block != 1)
    await up.until_arrived("a", rest)
    up.record = other
    await up.apply("a", promote=(0, 1, 2), event="other")
    assert len(await up.until_arrived("a", (0, 1, 2), event="other")) == 3
    assert len(up.failed("a")) == 1
