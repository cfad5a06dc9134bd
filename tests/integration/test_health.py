"""A service's own word on its health, as probes and a container's check ask for it."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services import health
from services.local.nats_server import NatsServer
from services.local.nats_servers import free_ports
from shared.monitor import WELL
from tests.support import commands

LIMIT_S = 200.0
POLL_S = 0.05


async def check(url: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.health", url, stdout=PIPE
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode().strip()


async def until(url: str, well: bool, answer: str) -> None:
    """Looks from this process, which costs less than a process for each look. At the end a real
    check says the same. (A registry that starts is well for a moment, while it stands by.)"""
    async with asyncio.timeout(LIMIT_S):
        while True:
            if await asyncio.to_thread(health.ask, url) != (well, answer):
                await asyncio.sleep(POLL_S)
            elif await check(url) == (0 if well else 1, answer):
                return


@asynccontextmanager
async def service(
    role: str, environment: Mapping[str, str], directory: Path
) -> AsyncIterator[Process]:
    process = await commands.start(role, cwd=directory, environment=environment)
    try:
        yield process
    finally:
        process.kill()
        _, err = await process.communicate()
        print(err.decode())  # why it failed, if it did


@pytest.mark.parametrize("role", ["registry", "node"])
async def test_a_service_is_ready_while_it_is_open_and_has_its_bus(
    role: str, tmp_path: Path, nats_server: NatsServer
) -> None:
    (port,) = free_ports(1)
    environment = {
        **os.environ,
        "LAMBDASCALE_BUS_URL": nats_server.url,
        f"LAMBDASCALE_{role.upper()}_METRICS_PORT": str(port),
        "LAMBDASCALE_NODE_ARENA_BYTES": str(1 << 20),
        "LAMBDASCALE_NODE_KEEP_WEIGHTS_S": "0",
    }
    url = f"http://127.0.0.1:{port}/ready"
    code, answer = await check(url)
    assert (code, answer.startswith(f"no answer at {url}: ")) == (1, True)
    async with service(role, environment, tmp_path) as process:
        await until(url, True, WELL)
        _, page = await asyncio.to_thread(health.ask, url.replace("ready", "metrics"))
        assert f'role="{role}"' in page
        assert "lambdascale_bus_connected 1.0" in page.splitlines()
        await nats_server.kill()
        await until(url, False, "not connected to NATS")
        assert (await check(url.replace("ready", "live")))[0] == 0
        process.send_signal(signal.SIGSTOP)
        code, answer = await check(url)
        assert (code, answer) == (1, f"no answer at {url}: timed out")


async def test_an_endpoint_that_cannot_be_is_one_clear_line(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    environment = {
        **os.environ,
        "LAMBDASCALE_BUS_URL": nats_server.url,
        "LAMBDASCALE_REGISTRY_METRICS_PORT": "9100",
        "LAMBDASCALE_TELEMETRY_METRICS_HOST": "192.0.2.1",
    }
    process = await commands.start("registry", cwd=tmp_path, environment=environment)
    _, err = await process.communicate()
    assert process.returncode == 2
    assert "telemetry.metrics_host" in err.decode().splitlines()[-1]


@pytest.mark.parametrize("url", ["https://h:1/ready", "http://h/ready", "ready", "http://h:x/"])
async def test_what_is_no_url_of_an_endpoint_is_refused(url: str) -> None:
    assert health.ask(url) == (False, health.USAGE)


async def test_a_check_imports_little() -> None:
    code = "import services.health, sys; print(*sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=PIPE)
    out, _ = await process.communicate()
    assert not {"asyncio", "msgspec", "shared", "services.cli"} & set(out.decode().split())
