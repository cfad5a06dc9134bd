"""RDMA for real, by Soft-RoCE in two virtual machines, which all these tests share."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.local.demo_model import make_checkpoint
from tests.rdma.guest.peer import NBYTES
from tests.rdma.guest.scale_out import NODES, node_settings
from tests.rdma.image import Image
from tests.rdma.machine import DEVICE, GID_INDEX, Machine, wire
from tests.support.cluster import Oracle, prompts
from tests.support.models import TINY

RDMA = {"LS_RDMA_DEVICE": DEVICE, "LS_RDMA_GID_INDEX": str(GID_INDEX)}
JOB_S = 800.0
"""A bound only."""
TOKENS = 12
NODE = ("services.cli.run_service", "services.node.service", "services.node.real_parts")
CONTROL = tuple(f"services.{role}.service" for role in ("gateway", "planner", "registry"))
JOBS = ("services.node.transport.verbs", "tests.rdma.guest.reads")
HERE = ("pytest", "tests.rdma.guest.scale_out")
PYTEST = (
    *("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider"),
    *("--confcutdir=tests/rdma/guest", "--tb=short", "--color=no", "-v", "-k", "rdma"),
)
"""Without the suite's fixtures, and without plugins that the guest would import for nothing."""
pytestmark = [pytest.mark.timeout(1000), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machines(
    image: Image, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Machine, Machine]]:
    """Both boot and import side by side; the first one is ready later."""
    directory = tmp_path_factory.mktemp("machines")
    plugs = wire()
    modules = ((*NODE, *CONTROL, *JOBS, *HERE), (*NODE, *JOBS))
    first, second = (
        Machine(
            image,
            directory / str(plug.number),
            plug=plug,
            preload=preload,
            memory_mib=memory_mib,
            environment=RDMA,
        )
        for plug, preload, memory_mib in zip(plugs, modules, (3072, 2048), strict=True)
    )
    async with first, second:
        yield first, second


async def test_within_one_machine(machines: tuple[Machine, Machine]) -> None:
    """What tests/rdma/guest says of RdmaDirect, and the contract of all transports over it."""
    first, _ = machines
    tests = (
        "tests/rdma/guest",
        "tests/contract/test_transport.py",
        "tests/contract/test_kv_images.py",
    )
    few = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    async with first.run("pytest", *PYTEST, *tests, environment=few) as job:
        assert await job.ended(timeout=JOB_S) == 0
        assert "test_ready_never_goes_back[rdma] PASSED" in job.output


async def test_scale_out_over_two_machines(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """Real services; the second node takes the model by RDMA and answers right."""
    checkpoint, expected = tmp_path / "tiny", tmp_path / "expected.json"
    make_checkpoint(checkpoint, TINY)
    asked = prompts(3, TINY.vocab_size)
    tokens = Oracle(checkpoint).tokens(asked, TOKENS)
    expected.write_text(json.dumps({"prompts": asked, "tokens": tokens}))
    first, _ = machines
    nodes = [
        machine.run(
            "services.cli",
            "node",
            environment=node_settings(node, machine.address, DEVICE, GID_INDEX),
        )
        for machine, node in zip(machines, NODES, strict=True)
    ]
    script = first.run("tests.rdma.guest.scale_out", str(checkpoint), str(expected))
    async with nodes[0], nodes[1], script as job:
        await job.until("all tokens are right", timeout=JOB_S)
        assert await job.ended(timeout=JOB_S) == 0


async def test_a_machine_that_dies_is_lost(machines: tuple[Machine, Machine]) -> None:
    """Its reader has the bytes by RDMA, then PeerLost. Comes last: no other test has both again."""
    first, second = machines
    module = "tests.rdma.guest.reads"
    async with first.run(module, "serve"), second.run(module, "read") as reader:
        line = await reader.until("read", timeout=JOB_S)
        assert line == f"read {NBYTES} bytes by rdma"
        await first.kill()
        await reader.until("lost", timeout=JOB_S)
        assert await reader.ended(timeout=JOB_S) == 0
