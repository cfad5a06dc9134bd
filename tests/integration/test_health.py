"""A service's own word on its health, as a container's check asks for it."""

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
from shared.health import WELL
from tests.support import commands

LIMIT_S = 200.0
POLL_S = 0.05


async def ask(environment: Mapping[str, str]) -> tuple[int | None, str]:
    check = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.health", stdout=PIPE, env=environment
    )
    out, _ = await check.communicate()
    return check.returncode, out.decode().strip()


async def until(environment: Mapping[str, str], code: int, answer: str) -> None:
    """Looks from this process, which costs less than a process for each look. At the end a real
    check says the same."""
    path = environment[health.VARIABLE]
    async with asyncio.timeout(LIMIT_S):
        while await asyncio.to_thread(health.ask, path) != answer:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
    assert await ask(environment) == (code, answer)


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


@pytest.mark.parametrize("role", ["registry", "gateway", "node"])
async def test_a_service_is_well_while_it_is_ready_and_has_its_bus(
    role: str, tmp_path: Path, nats_server: NatsServer
) -> None:
    path = tmp_path / "health"
    environment = {
        **os.environ,
        health.VARIABLE: str(path),
        "LAMBDASCALE_BUS_URL": nats_server.url,
        "LAMBDASCALE_GATEWAY_PORT": "0",
        "LAMBDASCALE_NODE_ARENA_BYTES": str(1 << 20),
        "LAMBDASCALE_NODE_KEEP_WEIGHTS_S": "0",
    }
    code, answer = await ask(environment)
    assert (code, answer.startswith(f"no answer at {path}: ")) == (1, True)
    async with service(role, environment, tmp_path) as process:
        await until(environment, 0, WELL)
        await nats_server.kill()
        await until(environment, 1, "not connected to NATS")
        process.send_signal(signal.SIGSTOP)
        code, answer = await ask(environment)
        assert (code, answer) == (1, f"no answer at {path}: timed out")


async def test_a_health_socket_that_cannot_be_is_one_clear_line(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    environment = {
        **os.environ,
        health.VARIABLE: str(tmp_path / "nowhere" / "health"),
        "LAMBDASCALE_BUS_URL": nats_server.url,
    }
    process = await commands.start("registry", cwd=tmp_path, environment=environment)
    _, err = await process.communicate()
    assert process.returncode == 2
    assert "telemetry.health_socket" in err.decode().splitlines()[-1]


async def test_a_check_imports_little() -> None:
    code = "import services.health, sys; print(*sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=PIPE)
    out, _ = await process.communicate()
    assert not {"asyncio", "msgspec", "shared", "services.cli"} & set(out.decode().split())
    assert health.WELL == WELL
