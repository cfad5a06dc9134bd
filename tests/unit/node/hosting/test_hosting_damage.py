"""Models that are removed, blocks that are damaged, and what was missed: the rest goes on."""

from pathlib import Path

import pytest

from services.node.execution.worker import Worker
from shared import subjects
from shared.errors import DigestMismatch, LambdaScaleError, NotFound
from shared.messages.pool import ModelRemove, Tier
from tests.unit.node.cluster import ALL, BLOCKS, NAME, Nodes, nodes
from tests.unit.node.gates import reading

FROM_A = dict.fromkeys(ALL, "a")


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 0xFF]))


# --- removal ------------------------------------------------------------------------


async def remove(up: Nodes) -> None:
    await up.request(subjects.REGISTRY_MODEL_REMOVE, ModelRemove(name=NAME))


async def test_a_removed_model_is_forgotten_in_every_tier(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a while it is promoted, on b while it is pulled."""
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        with reading(monkeypatch, after=1) as gate:
            await up.apply("a", promote=ALL)
            await up.apply("b", FROM_A)
            await gate.wait()
            await up.until_arrived("b", (0,))
            await remove(up)
            await up.until_holds("b", {})
        await up.until_holds("a", {})
        await up.nothing_leaked("a")
        await up.nothing_leaked("b")
        await up.stop("a")  # what was begun ends first
        assert not up.is_stored("a")
        with pytest.raises(NotFound, match="not published"):
            await up.apply("b", FROM_A, event="ev-2")


async def test_what_is_imported_after_a_removal_stays(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal's work on the disk waits for a promotion; the import does not wait for it."""
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        with reading(monkeypatch) as gate:
            await up.apply("a", promote=ALL)
            await gate.wait()
            await remove(up)
            await up.until_holds("a", {Tier.GPU: ()})
            await up.import_model("a")
        await up.until_holds("a", {Tier.DISK: ALL})
        assert up.is_stored("a")
        await up.promoted("a")
        await up.apply("b", FROM_A, event="ev-2")
        await up.until_arrived("b", ALL)


# --- damage -------------------------------------------------------------------------


async def test_a_damaged_block_on_disk_is_reported_and_not_offered_again(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b", "c") as up:
        await up.stop("b")
        up.has_on_disk("b")
        damage(up.stored("a") / "block-002.bin")
        await up.start("b")
        await up.apply("a", promote=ALL, revision=4)
        await up.until_arrived("a", (0, 1, 3, 4, 5))
        (failure,) = await up.until_failed("a")
        assert (failure.block, failure.source, failure.revision) == (2, "a", 4)
        assert failure.code == DigestMismatch.code
        await up.until_holds("a", {Tier.GPU: (0, 1, 3, 4, 5), Tier.DISK: (0, 1, 3, 4, 5)})
        await up.promoted("b")
        await up.apply("a", {2: "b"}, revision=5)
        await up.until_arrived("a", ALL)
        assert await up.generate("a", request="on a") == await up.generate("b", request="on b")
        await up.import_model("a")  # repairs it
        await up.until_holds("a", {Tier.GPU: ALL, Tier.DISK: ALL})


async def test_a_disk_that_fails_is_a_failed_block_not_a_failed_node(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        path = up.stored("a") / "block-000.bin"
        path.unlink()
        path.mkdir()  # reading it is an OSError
        await up.apply("a", promote=(0, 1))
        (failure,) = await up.until_failed("a")
        assert failure.code == "model"
        await up.until_arrived("a", (1,))


async def test_a_source_with_wrong_bytes_is_named(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b", "c") as up:
        await up.promoted("a")
        hosted = up.services["a"]._hosting._hosted[up.record.model_id]
        hosted.space.block(3)[0] ^= 0xFF
        await up.apply("b", FROM_A)
        await up.apply("c", dict.fromkeys(ALL, "b"))
        (failure,) = await up.until_failed("b")
        told = [step.text for step in await up.services["b"].story("a")]
        assert any(text.startswith("block 3 does not come from a: ") for text in told)
        assert (failure.block, failure.source, failure.code) == (3, "a", DigestMismatch.code)
        hosted.space.block(3)[0] ^= 0xFF
        await up.apply("b", FROM_A, revision=1)
        await up.until_arrived("c", ALL)  # from b, which passed nothing wrong on
        assert up.failed("c") == []


async def test_a_damaged_disk_does_not_spoil_what_a_peer_sent(
    tmp_path: Path, checkpoint: Path
) -> None:
    """The first chunks of a block came from a peer, and others may have read them already."""
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        await up.stop("b")
        damage(up.has_on_disk("b") / "block-001.bin")
        await up.start("b")
        await up.promoted("a")
        await up.apply("b", FROM_A)
        await up.until_arrived("b", ALL)
        hosting = up.services["b"]._hosting
        hosted = hosting._hosted[up.record.model_id]
        before = bytes(hosted.space.block(1))
        assert hosted.residency.plan is not None
        hosting._promote(hosted.residency.plan, hosted, [1])  # every chunk is there: none is read
        assert hosted.promotion is not None
        await hosted.promotion._task
        assert bytes(hosted.space.block(1)) == before
        await up.until_holds("b", {Tier.GPU: ALL, Tier.DISK: ALL})


# --- what others see of it ----------------------------------------------------------


async def test_a_missed_announcement_is_made_up_for(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        await up.promoted("a")
        library = up.services["b"]._library
        library._manifests.clear()
        library._known.clear()
        await up.apply("b", FROM_A)
        await up.until_arrived("b", ALL)


async def test_an_engine_that_cannot_attach_a_block_fails_the_block(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise LambdaScaleError("no memory on the device")

    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        await up.promoted("a")
        with monkeypatch.context() as patch:
            patch.setattr(Worker, "attach", refuse)
            await up.apply("b", FROM_A)
            failures = await up.until_failed("b", BLOCKS)
        assert {(f.source, f.code) for f in failures} == {("b", "error")}
        await up.until_holds("b", {Tier.GPU: (), Tier.HOST: ALL})
        await up.apply("b", FROM_A, revision=1)  # the bytes are there
        assert {m.transport for m in await up.until_arrived("b", ALL)} == {"held"}
