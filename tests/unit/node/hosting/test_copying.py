"""Durable copies over real nodes: where their bytes come from, and what ends or delays them."""

import asyncio
import errno
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import pytest

from services.node.checkpoints.draft import Draft
from services.node.checkpoints.store import Store
from shared import subjects
from shared.errors import BadInput, CapacityExceeded, StaleEpoch
from shared.ids import Generation, ModelId, NodeId
from shared.layout import Manifest
from shared.messages.copies import KeepCopy
from shared.messages.pool import CopyProgress, ModelRemove, NodeStatus, Source, Tier
from tests.unit.node.cluster import ALL, BLOCKS, NAME, WAIT_S, Nodes, nodes

FAST = 1 << 40


def order(
    up: Nodes, name: str, *sources: str, bytes_per_s: int = FAST, generation: int | None = None
) -> KeepCopy:
    return KeepCopy(
        node=NodeId(name),
        generation=Generation(generation or up.info(name).generation),
        model_id=up.record.model_id,
        sources=tuple(Source(up.info(s), Tier.DISK, ALL, complete=True) for s in sources),
        bytes_per_s=bytes_per_s,
    )


async def keep(up: Nodes, name: str, *sources: str, bytes_per_s: int = FAST) -> None:
    message = order(up, name, *sources, bytes_per_s=bytes_per_s)
    await up.request(subjects.node_keep(NodeId(name)), message)


def last(up: Nodes, name: str) -> NodeStatus:
    said = [m for m in up.statuses.messages if isinstance(m, NodeStatus) and m.node == name]
    return said[-1]


def progress(up: Nodes, name: str) -> CopyProgress | None:
    return next(iter(last(up, name).copying), None)


def on_disk(up: Nodes, name: str) -> Iterable[int]:
    held = [h for h in last(up, name).holdings if h.tier is Tier.DISK]
    return held[0].blocks if held else ()


async def copied(up: Nodes, name: str) -> None:
    await up.statuses.until(lambda: on_disk(up, name) == ALL and not last(up, name).copying)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


async def test_a_copy_is_the_same_as_what_was_imported_and_runs(
    tmp_path: Path, checkpoint: Path
) -> None:
    """From a disk; the node that had the model is gone when the copy runs."""
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        await up.promoted("a")
        tokens = await up.generate("a")
        await up.release("a")
        await keep(up, "b", "a")
        await copied(up, "b")
        assert content(up.stored("b")) == content(up.stored("a"))
        assert not list(up.stored("b").parent.glob(".copy-*"))
        told = [(t.cause, t.text) for t in await up.services["b"].story(up.record.model_id)]
        assert [text.split(" at ")[0] for _, text in told] == [
            "copy on disk: comes from a",
            "copy on disk: whole",
        ]
        assert {cause for cause, _ in told} == {"keep_copy"}
        await up.stop("a")
        shutil.rmtree(up.stored("a"))
        await up.promoted("b")
        assert await up.generate("b", request="r2") == tokens


async def test_pieces_come_from_memory_where_a_source_has_them_there(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_disk(*_: object) -> memoryview:
        raise AssertionError("the disk was read")

    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        await up.promoted("a")
        monkeypatch.setattr(Store, "piece", no_disk)
        await keep(up, "b", "a")
        await copied(up, "b")
        assert content(up.stored("b")) == content(up.stored("a"))


async def test_a_source_that_has_gone_is_left_out(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b", "c") as up:
        await keep(up, "c", "a")
        await copied(up, "c")
        message = order(up, "b", "a", "c")
        await up.stop("a")
        await up.request(subjects.node_keep(NodeId("b")), message)
        await copied(up, "b")


async def test_a_restart_goes_on_with_the_blocks_that_are_whole(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = Draft.write

    def until_two(self: Draft, block: int, chunks: range, data: memoryview) -> None:
        if block >= 2:
            raise CapacityExceeded("the process ends here")
        write(self, block, chunks, data)

    def noted(self: Draft, block: int, chunks: range, data: memoryview) -> None:
        written.append(block)
        write(self, block, chunks, data)

    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        monkeypatch.setattr(Draft, "write", until_two)
        await keep(up, "b", "a")
        await up.statuses.until(lambda: bool((p := progress(up, "b")) and p.error))
        await up.stop("b")
        monkeypatch.setattr(Draft, "write", noted)
        await up.start("b")
        await up.statuses.until(lambda: bool((p := progress(up, "b")) and not p.error))
        found = cast(CopyProgress, progress(up, "b"))
        assert (found.running, found.done) == (False, sum(up.record.block_bytes[:2]))
        await keep(up, "b", "a")
        await copied(up, "b")
        assert set(written) == set(range(2, BLOCKS))


async def test_a_full_disk_is_said_and_leaves_the_node_as_it_was(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        usage = shutil.disk_usage(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
            with pytest.raises(CapacityExceeded, match="no room for a model"):
                await keep(up, "b", "a")
        await keep(up, "b", "a")
        await copied(up, "b")


async def test_a_disk_that_fills_up_ends_the_copy_with_an_error(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        monkeypatch.setattr(Path, "rename", full)
        await keep(up, "b", "a")
        await up.statuses.until(lambda: bool((p := progress(up, "b")) and p.error))


async def test_the_removal_of_a_model_ends_its_copy(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        await keep(up, "b", "a", bytes_per_s=1)  # for ever
        await up.statuses.until(lambda: progress(up, "b") is not None)
        await up.request(subjects.REGISTRY_MODEL_REMOVE, ModelRemove(name=NAME))
        await up.statuses.until(lambda: progress(up, "b") is None)
        await up.nothing_leaked("b")
        await up.stop("b")
        assert not list(up.stored("b").parent.glob(".copy-*"))


async def test_a_model_that_is_removed_while_its_copy_becomes_whole_leaves_the_disk(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    adopt = Store.adopt

    def held(self: Store, name: ModelId, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        entered.set()
        go_on.wait(WAIT_S)
        adopt(self, name, manifest, files)

    monkeypatch.setattr(Store, "adopt", held)
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        await keep(up, "b", "a")
        assert await asyncio.to_thread(entered.wait, WAIT_S)
        await up.request(subjects.REGISTRY_MODEL_REMOVE, ModelRemove(name=NAME))
        await up.statuses.until(lambda: progress(up, "b") is None)
        go_on.set()
        await up.stop("b")
        left = [each.name for each in up.stored("b").parent.iterdir()]
        assert left == [".lock"]


async def test_orders_that_make_no_sense_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b") as up:
        subject = subjects.node_keep(NodeId("b"))
        with pytest.raises(StaleEpoch):
            await up.request(subject, order(up, "b", "a", generation=99))
        with pytest.raises(BadInput, match="bytes/s"):
            await up.request(subject, order(up, "b", "a", bytes_per_s=0))
