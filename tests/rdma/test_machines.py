"""RDMA for real, by Soft-RoCE in virtual machines."""

import json
import sys
from pathlib import Path

import pytest

from services.local.demo_model import make_checkpoint
from tests.rdma.guest.peer import NBYTES
from tests.rdma.guest.scale_out import NODES, node_settings
from tests.rdma.image import Image
from tests.rdma.machine import DEVICE, GID_INDEX, Machine, Wire
from tests.support.cluster import Oracle, prompts
from tests.support.models import TINY

RDMA = {"LS_RDMA_DEVICE": DEVICE, "LS_RDMA_GID_INDEX": str(GID_INDEX)}
JOB_S = 800.0
"""Bounds only: an emulated processor takes 10 s to import asyncio and pytest, torch 40 s, and more
where it has no core for itself."""
TOKENS = 12
pytestmark = pytest.mark.timeout(1000)


def pytest_command(*arguments: str) -> list[str]:
    """Without the suite's fixtures, whose torch alone takes the guest most of a minute."""
    options = ("--confcutdir=tests/rdma/guest", "-p", "no:cacheprovider", "--tb=short")
    return [sys.executable, "-m", "pytest", *options, "--color=no", "-v", *arguments]


async def test_within_one_machine(image: Image, tmp_path: Path) -> None:
    """What tests/rdma/guest says of RdmaDirect, and the contract of all transports over it."""
    command = pytest_command("tests/rdma/guest", "tests/contract/test_transport.py", "-k", "rdma")
    async with Machine(image, tmp_path, command, environment=RDMA) as machine:
        assert await machine.ended(timeout=JOB_S) == 0
        assert "test_ready_never_goes_back[rdma] PASSED" in machine.output


async def test_a_machine_that_dies_is_lost(image: Image, tmp_path: Path) -> None:
    """Its reader has the bytes by RDMA, then PeerLost."""
    module = [sys.executable, "-m", "tests.rdma.guest.reads"]
    wire = Wire(tmp_path / "wire")
    one = Machine(image, tmp_path / "1", [*module, "serve"], plug=wire.first, environment=RDMA)
    two = Machine(image, tmp_path / "2", [*module, "read"], plug=wire.second, environment=RDMA)
    async with one as source, two as reader:
        line = await reader.until("read", timeout=JOB_S)
        assert line == f"read {NBYTES} bytes by rdma\n"
        await source.kill()
        await reader.until("lost", timeout=JOB_S)
        assert await reader.ended(timeout=JOB_S) == 0


async def test_scale_out_over_two_machines(image: Image, tmp_path: Path) -> None:
    """Real services; the second node takes the model by RDMA and answers right."""
    checkpoint, expected = tmp_path / "tiny", tmp_path / "expected.json"
    make_checkpoint(checkpoint, TINY)
    asked = prompts(3, TINY.vocab_size)
    tokens = Oracle(checkpoint).tokens(asked, TOKENS)
    expected.write_text(json.dumps({"prompts": asked, "tokens": tokens}))
    script = [sys.executable, "-m", "tests.rdma.guest.scale_out", str(checkpoint), str(expected)]
    node = [sys.executable, "-m", "services.cli", "node"]
    wire = Wire(tmp_path / "wire")
    settings = {**RDMA, **node_settings(NODES[1], wire.second.address, DEVICE, GID_INDEX)}
    one = Machine(image, tmp_path / "1", script, plug=wire.first, memory_mib=3072, environment=RDMA)
    two = Machine(
        image, tmp_path / "2", node, plug=wire.second, memory_mib=2048, environment=settings
    )
    async with one as first, two:
        await first.until("all tokens are right", timeout=JOB_S)
        assert await first.ended(timeout=JOB_S) == 0
