"""A node without a compiler, on a bus where another node has what it needs."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from subprocess import Popen

import pytest

from services.local.nats_server import NatsServer
from shared import subjects
from shared.bus.nats import NatsBus
from shared.config import BusConfig
from tests.support.cluster import LIMIT_S

USER, PASSWORD = "nodes", "a password"


@asynccontextmanager
async def served(directory: Path, *, password: bool = True) -> AsyncIterator[BusConfig]:
    user, secret = (USER, PASSWORD) if password else ("", "")
    async with NatsServer(directory / "nats", user=user, password=secret) as server:
        yield BusConfig(url=server.url, user=user, password=secret)


@contextmanager
def node(directory: Path, name: str, bus: BusConfig, **changes: str) -> Iterator[Path]:
    """A node's process with a cache folder of its own. Yields the folder."""
    cache = directory / name / "cache"
    settings = {
        "XDG_CACHE_HOME": str(cache),
        "LAMBDASCALE_BUS_URL": bus.url,
        "LAMBDASCALE_BUS_USER": bus.user,
        "LAMBDASCALE_BUS_PASSWORD": bus.password,
        "LAMBDASCALE_NODE_ID": name,
        "LAMBDASCALE_NODE_DATA_DIR": str(directory / name),
        "LAMBDASCALE_NODE_ARENA_BYTES": str(1 << 20),
        "LAMBDASCALE_NODE_KV_BYTES": str(1 << 20),
        "LAMBDASCALE_NODE_THREADS": "1",
        "LAMBDASCALE_NODE_SHARE_COMPILED": "true",
        "LAMBDASCALE_NODE_KEEP_WEIGHTS_S": "0",
        **changes,
    }
    command = [sys.executable, "-m", "services.cli", "node"]
    (directory / name).mkdir(exist_ok=True)
    with (directory / f"{name}.log").open("w") as log:
        process = Popen(command, env={**os.environ, **settings}, stderr=log)
        try:
            yield cache / "lambdascale"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(LIMIT_S)


async def joined(bus: BusConfig, name: str) -> None:
    """Waits until the node has its lease, which is after all of its parts have started."""
    async with asyncio.timeout(LIMIT_S), NatsBus(bus, "test") as client:
        leases = await client.kv(subjects.KV_LEASES)
        async for entry in leases.watch():
            if entry is not None and entry.key == name:
                return


def libraries(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.glob("*.so")}


@pytest.mark.parametrize("changed", [{}, {"LAMBDASCALE_NODE_SHARE_COMPILED": "false"}])
async def test_a_new_node_compiles_nothing_unless_sharing_is_off(
    tmp_path: Path, changed: dict[str, str]
) -> None:
    nothing = tmp_path / "no-compiler"
    nothing.mkdir()
    async with served(tmp_path) as bus:
        with node(tmp_path, "first", bus) as first:
            await joined(bus, "first")
            compiled = libraries(first)
            assert {name.split("-")[0] for name in compiled} == {"kernels", "relay"}
            with node(tmp_path, "second", bus, PATH=str(nothing), **changed) as second:
                await joined(bus, "second")
                assert libraries(second) == ({} if changed else compiled)
    log = (tmp_path / "second.log").read_text()
    assert ("no C compiler" in log) is bool(changed)


async def test_nothing_is_shared_over_a_bus_that_asks_for_no_password(tmp_path: Path) -> None:
    nothing = tmp_path / "no-compiler"
    nothing.mkdir()
    async with served(tmp_path, password=False) as bus:
        with node(tmp_path, "first", bus):
            await joined(bus, "first")
            with node(tmp_path, "second", bus, PATH=str(nothing)) as second:
                await joined(bus, "second")
                assert libraries(second) == {}
