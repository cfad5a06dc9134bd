"""Disks that fail, with real processes: the kernel answers reads with EIO, or a disk is full."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from services.local.demo_model import make_checkpoint
from services.local.publishing import import_model
from shared import subjects
from shared.bus.base import On
from shared.errors import CapacityExceeded
from shared.ids import ModelName, NodeId
from shared.messages.pool import NodeStatus, Tier
from shared.messages.scaling import ImportModel, ScaleAccepted, SetInstances
from tests.support.cluster import MODEL, Oracle, Running, prompts, running
from tests.support.models import TINY

FIRST, SECOND, THIRD = (NodeId(f"node-{number}") for number in range(3))
SETTINGS = {
    "LAMBDASCALE_REGISTRY_DURABLE_COPIES": "2",
    "LAMBDASCALE_REGISTRY_RESTORE_AFTER_S": "0.5",
}
BROKEN = Path("/proc/self/mem")
"""Reading it from its beginning fails with EIO, as a disk does that cannot read a sector."""


def stored(up: Running) -> dict[NodeId, int]:
    """How many blocks of the model each node says that its disk has."""
    return {
        status.node: len(holding.blocks)
        for status in up.statuses.values()
        for holding in status.holdings
        if holding.tier is Tier.DISK and holding.model_id == up.record.model_id
    }


def whole(up: Running) -> set[NodeId]:
    return {node for node, count in stored(up).items() if count == up.record.n_blocks}


def blocks(up: Running, node: NodeId) -> list[Path]:
    """The model's files on the node's disk."""
    root = up.cluster.spec.directory / "nodes" / node
    files = sorted(root.rglob(f"{up.record.model_id}/block-*.bin"))
    assert len(files) == up.record.n_blocks
    return files


def break_files(files: list[Path]) -> None:
    """From now on every read of them fails."""
    for file in files:
        file.unlink()
        file.symlink_to(BROKEN)


@contextmanager
def tiny_disk(directory: Path) -> Iterator[None]:
    """A file system of 64 KiB at the directory."""
    directory.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(directory)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


async def test_disks_that_cannot_be_read_are_reported_and_their_nodes_serve(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    """The model sleeps on two disks. Each cannot read one half of it, which the other can. Both
    nodes come to serve it, what is found to be unreadable does not count as stored any more, and no
    process ends."""
    async with running(tmp_path, checkpoint, nodes=2, settings=SETTINGS, min_instances=0) as up:
        await up.until(lambda: whole(up) == {FIRST, SECOND}, "two durable copies")
        half = up.record.n_blocks // 2
        break_files(blocks(up, FIRST)[:half])
        break_files(blocks(up, SECOND)[half:])
        generations = {node: status.generation for node, status in up.statuses.items()}
        lost = set[NodeId]()

        async def hear(_: NodeStatus) -> None:
            lost.update({FIRST, SECOND} - whole(up))

        await up.bus.subscribe(subjects.POOL_STATUS, On(NodeStatus, hear))
        request = SetInstances(name=MODEL, instances=2)
        await up.bus.request(subjects.PLANNER_SCALE, request, ScaleAccepted, timeout=10.0)
        await up.replicas(2)
        (prompt,) = prompts(1, TINY.vocab_size)
        (right,) = oracle.tokens([prompt], 12)
        for node in (FIRST, SECOND):
            assert await up.over_path(await up.path(node), prompt, 12) == right
        await up.until(lambda: bool(lost), "a disk that is reported")
        assert {node: up.statuses[node].generation for node in generations} == generations


async def test_a_full_disk_takes_no_copy_and_its_node_serves(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    """The disk of one node is smaller than the model, so that the second copy comes to the third
    node; an import to it is refused with the reason."""
    with tiny_disk(tmp_path / "nodes" / SECOND):
        async with running(tmp_path, checkpoint, nodes=3, settings=SETTINGS, min_instances=0) as up:
            await up.until(lambda: len(whole(up)) == 2, "two durable copies")
            assert whole(up) == {FIRST, THIRD}
            request = SetInstances(name=MODEL, instances=3)
            await up.bus.request(subjects.PLANNER_SCALE, request, ScaleAccepted, timeout=10.0)
            await up.replicas(3)
            (prompt,) = prompts(1, TINY.vocab_size)
            (right,) = oracle.tokens([prompt], 12)
            assert await up.over_path(await up.path(SECOND), prompt, 12) == right
            make_checkpoint(tmp_path / "other", replace(TINY, seed=1))
            wanted = ImportModel(path=str(tmp_path / "other"), name=ModelName("other"))
            with pytest.raises(CapacityExceeded, match="no room"):
                await import_model(up.bus, wanted, node=SECOND, say=lambda _: None)
            assert await up.over_path(await up.path(SECOND), prompt, 12) == right
            assert not up.statuses[SECOND].unfit
