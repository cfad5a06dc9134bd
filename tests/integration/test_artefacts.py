"""A node without a compiler, on a bus where another node has what it needs."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from services.local.credentials import all_users, authorization, make_users
from services.local.nats_server import NatsServer
from shared import subjects
from shared.bus.nats import NatsBus
from shared.config import BusConfig
from shared.forking import Order
from shared.ids import NodeId
from tests.support import forks
from tests.support.cluster import LIMIT_S
from tests.support.compilers import quick_compiler

NODES = tuple(map(NodeId, ("compiler", "first", "second")))


@asynccontextmanager
async def served(directory: Path, *, credentials: bool = True) -> AsyncIterator[BusConfig]:
    """Yields the way of the registry to the bus, which sees the nodes join."""
    users = directory / "credentials"
    keys = make_users(users, all_users(NODES))
    settings = {"authorization": authorization(keys)} if credentials else {}
    async with NatsServer(directory / "nats", settings=settings) as server:
        yield BusConfig(url=server.url, credentials=str(users / "registry") if credentials else "")


@contextmanager
def node(directory: Path, name: str, bus: BusConfig, **changes: str) -> Iterator[Path]:
    """A node's process with a cache folder of its own. Yields the folder."""
    cache = directory / name / "cache"
    settings = {
        "XDG_CACHE_HOME": str(cache),
        "LAMBDASCALE_BUS_URL": bus.url,
        "LAMBDASCALE_BUS_CREDENTIALS": (
            str(directory / "credentials" / "nodes" / name) if bus.credentials else ""
        ),
        "LAMBDASCALE_NODE_ID": name,
        "LAMBDASCALE_NODE_DATA_DIR": str(directory / name),
        "LAMBDASCALE_NODE_ARENA_BYTES": str(1 << 20),
        "LAMBDASCALE_NODE_KV_BYTES": str(1 << 20),
        "LAMBDASCALE_NODE_THREADS": "1",
        "LAMBDASCALE_NODE_SHARE_COMPILED": "true",
        "LAMBDASCALE_NODE_KEEP_WEIGHTS_S": "0",
        **changes,
    }
    (directory / name).mkdir(exist_ok=True)
    log, environment = str(directory / f"{name}.log"), {**os.environ, **settings}
    process = forks.server().fork(Order(name, "services.cli.main", ("node",), environment, log))
    try:
        yield cache / "lambdascale"
    finally:
        os.kill(process.pid, signal.SIGTERM)
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


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder of a node that found it empty and had a compiler."""
    directory = tmp_path_factory.mktemp("compiled")
    path = quick_compiler(directory / "bin")

    async def compile_all() -> Path:
        async with served(directory) as bus:
            with node(directory, "compiler", bus, PATH=path) as cache:
                await joined(bus, "compiler")
                return cache

    return asyncio.run(compile_all())


@contextmanager
def node_that_has(compiled: Path, directory: Path, name: str, bus: BusConfig) -> Iterator[None]:
    """A node's process that finds those libraries in its own cache folder."""
    shutil.copytree(compiled, directory / name / "cache" / compiled.name)
    with node(directory, name, bus) as cache:
        yield
        assert libraries(cache) == libraries(compiled)


@pytest.mark.parametrize("changed", [{}, {"LAMBDASCALE_NODE_SHARE_COMPILED": "false"}])
async def test_a_new_node_compiles_nothing_unless_sharing_is_off(
    compiled: Path, tmp_path: Path, changed: dict[str, str]
) -> None:
    assert {name.split("-")[0] for name in libraries(compiled)} == {"kernels", "relay"}
    nothing = tmp_path / "no-compiler"
    nothing.mkdir()
    async with served(tmp_path) as bus:
        with node_that_has(compiled, tmp_path, "first", bus):
            await joined(bus, "first")
            with node(tmp_path, "second", bus, PATH=str(nothing), **changed) as second:
                await joined(bus, "second")
                assert libraries(second) == ({} if changed else libraries(compiled))
    log = (tmp_path / "second.log").read_text()
    assert ("no C compiler" in log) is bool(changed)


async def test_nothing_is_shared_over_a_bus_that_asks_for_no_credentials(
    compiled: Path, tmp_path: Path
) -> None:
    nothing = tmp_path / "no-compiler"
    nothing.mkdir()
    async with served(tmp_path, credentials=False) as bus:
        with node_that_has(compiled, tmp_path, "first", bus):
            await joined(bus, "first")
            with node(tmp_path, "second", bus, PATH=str(nothing)) as second:
                await joined(bus, "second")
                assert libraries(second) == {}
