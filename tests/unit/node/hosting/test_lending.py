"""A node's disk feeds peers, whatever the node's arena holds."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from services.local.demo_model import make_checkpoint
from services.node.checkpoints.store import Store
from services.node.hosting import lending
from shared.errors import BadInput, NotFound, RegionUnknown
from shared.ids import ModelId
from shared.messages.pool import Tier
from tests.support.models import WIDE
from tests.unit.node.cluster import ALL, WAIT_S, nodes
from tests.unit.node.gates import Gate

FROM_A = dict.fromkeys(ALL, "a")


async def test_a_disk_feeds_a_relay_and_takes_no_room_in_the_arena(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b", "c") as up:
        await up.apply("b", FROM_A)  # before anybody asks it for blocks
        await up.apply("c", dict.fromkeys(ALL, "b"))
        arrivals = await up.until_arrived("b", ALL)
        assert {(m.source, m.transport) for m in arrivals} == {("a", "tcp")}
        await up.until_arrived("c", ALL)
        await up.nothing_leaked("a")
        tokens = await up.generate("c", request="on c")
        await up.promoted("a")
        assert await up.generate("a", request="on a") == tokens


async def test_a_target_loads_one_part_from_its_disk_and_pulls_the_other_from_another_disk(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        for name in ("b", "c"):
            up.has_on_disk(name)
            await up.start(name)
        await up.apply("b", dict.fromkeys((1, 3, 5), "c"), promote=(0, 2, 4))
        await up.apply("c", dict.fromkeys((0, 2, 4), "b"), promote=(1, 3, 5))
        for name, other in (("b", "c"), ("c", "b")):
            arrivals = await up.until_arrived(name, ALL)
            assert {m.source for m in arrivals if m.block % 2 == (name == "c")} == {name}
            assert {m.source for m in arrivals if m.block % 2 != (name == "c")} == {other}
        assert await up.generate("b", request="b") == await up.generate("c", request="c")


async def test_a_damaged_block_fails_its_pulls_and_is_not_offered_again(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        block = up.stored("a") / "block-002.bin"
        data = bytearray(block.read_bytes())
        data[-1] ^= 1
        block.write_bytes(data)
        await up.apply("b", FROM_A)
        failed = await up.until_failed("b")
        assert [(m.block, m.source, m.code) for m in failed] == [(2, "a", RegionUnknown.code)]
        await up.until_arrived("b", (0, 1, 3, 4, 5))
        await up.until_holds("a", {Tier.DISK: (0, 1, 3, 4, 5)})


async def test_the_end_of_a_disk_is_known_at_once(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        gate, piece = Gate(), Store._piece

        def held(self: Store, name: ModelId, block: int, chunks: range) -> memoryview:
            gate()
            return piece(self, name, block, chunks)

        monkeypatch.setattr(Store, "_piece", held)
        await up.apply("b", FROM_A)
        await gate.wait()
        stopping = asyncio.create_task(up.stop("a"))
        failed = await up.until_failed("b", len(ALL))
        gate.open()
        await stopping
        assert {m.source for m in failed} == {"a"}


async def test_only_whole_chunks_that_are_stored_are_lent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "wide", replace(WIDE, layers=4))
    async with nodes(tmp_path, tmp_path / "wide", "a") as up:
        lent, model = up.services["a"]._lending, up.record.model_id
        manifest = await up.services["a"]._library.manifest(model)
        chunk, whole = manifest.chunk_bytes, manifest.blocks[1].nbytes
        assert manifest.n_chunks(1) > 1
        piece = await lent.piece(model, 1, 0, whole)
        assert bytes(piece) == (up.stored("a") / "block-001.bin").read_bytes()
        for offset, nbytes in ((1, chunk), (0, chunk - 1), (0, whole + chunk), (whole, chunk)):
            with pytest.raises(BadInput, match="no whole chunks"):
                await lent.piece(model, 1, offset, nbytes)
        for name, block in ((model, 6), (model, -1), (ModelId("other"), 0)):
            with pytest.raises(NotFound):
                await lent.piece(name, block, 0, chunk)
        monkeypatch.setattr(lending, "PIECE_BYTES", chunk)
        with pytest.raises(BadInput, match="at most"):
            await lent.piece(model, 1, 0, whole)


@pytest.mark.parametrize("region", ["", "other", "other/0", "other/-1", "/1"])
async def test_a_name_that_means_no_block_of_the_disk_is_refused(
    tmp_path: Path, checkpoint: Path, region: str
) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        data, into = up.services["b"]._data, memoryview(bytearray(1))
        with pytest.raises(RegionUnknown):
            await data.fetch(up.info("a").address, region, 0, into, within=WAIT_S)
