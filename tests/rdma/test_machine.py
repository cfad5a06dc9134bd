"""RDMA for real, by Soft-RoCE in a virtual machine, which all these tests share.

It has two adapters at the two ends of one wire. Two nodes with an adapter each share its processor
and its kernel, as two machines would not; but their bytes take the wire.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.local.demo_model import make_checkpoint
from tests.rdma.guest.peer import NBYTES
from tests.rdma.guest.scale_out import NODES, node_settings
from tests.rdma.image import Image
from tests.rdma.machine import ADAPTERS, GID_INDEX, Machine
from tests.support.cluster import Oracle, prompts
from tests.support.models import TINY

JOB_S = 800.0
"""A bound only."""
TOKENS = 4
PRELOAD = (
    *("services.cli.run_service", "services.node.service", "services.node.real_parts"),
    *(f"services.{role}.service" for role in ("gateway", "planner", "registry")),
    *("services.node.transport.verbs", "tests.rdma.guest.reads"),
    *("pytest", "tests.rdma.guest.scale_out"),
)
PYTEST = (
    *("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider"),
    *("--confcutdir=tests/rdma/guest", "--tb=short", "--color=no", "-v", "-k", "rdma"),
)
"""Without the suite's fixtures, and without plugins that the guest would import for nothing."""
pytestmark = [pytest.mark.timeout(1000), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machine(image: Image, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Machine]:
    directory = tmp_path_factory.mktemp("machine")
    async with Machine(image, directory, preload=PRELOAD, memory_mib=3072) as machine:
        yield machine


async def test_with_one_adapter(machine: Machine) -> None:
    """What tests/rdma/guest says of RdmaDirect, and the contract of all transports over it."""
    tests = (
        "tests/rdma/guest",
        "tests/contract/test_transport.py",
        "tests/contract/test_kv_images.py",
    )
    few = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    async with machine.run("pytest", *PYTEST, *tests, environment=few) as job:
        assert await job.ended(timeout=JOB_S) == 0
        assert "test_ready_never_goes_back[rdma] PASSED" in job.output


async def test_scale_out_from_one_adapter_to_the_other(machine: Machine, tmp_path: Path) -> None:
    """Real services; the second node takes the model by RDMA and answers right."""
    checkpoint, expected = tmp_path / "tiny", tmp_path / "expected.json"
    make_checkpoint(checkpoint, TINY)
    asked = prompts(1, TINY.vocab_size)
    tokens = Oracle(checkpoint).tokens(asked, TOKENS)
    expected.write_text(json.dumps({"prompts": asked, "tokens": tokens}))
    nodes = [
        machine.run(
            "services.cli",
            "node",
            environment=node_settings(node, adapter.address, adapter.device, GID_INDEX),
        )
        for adapter, node in zip(ADAPTERS, NODES, strict=True)
    ]
    script = machine.run("tests.rdma.guest.scale_out", str(checkpoint), str(expected))
    async with nodes[0], nodes[1], script as job:
        await job.until("all tokens are right", timeout=JOB_S)


async def test_a_source_that_falls_silent_is_lost(machine: Machine) -> None:
    """As if its machine had died: nothing comes from it any more, not even that a connection has
    ended. Its reader has the bytes by RDMA, then PeerLost. Comes last: the wire stays dead."""
    source, target = ADAPTERS
    reads = "tests.rdma.guest.reads"
    async with (
        machine.run(reads, "serve", source.address, source.device),
        machine.run(reads, "read", target.address, target.device) as reader,
    ):
        line = await reader.until("read", timeout=JOB_S)
        assert line == f"read {NBYTES} bytes by rdma"
        async with machine.run("tests.rdma.guest.unplug", source.interface) as unplugging:
            assert await unplugging.ended(timeout=JOB_S) == 0
        await reader.until("lost", timeout=JOB_S)
        assert await reader.ended(timeout=JOB_S) == 0
