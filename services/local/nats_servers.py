"""The nats-servers of a cluster on this machine: one, or several that keep copies of each other's
state."""

import asyncio
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from services.local import processes
from services.local.nats_server import Member, NatsServer
from services.local.processes import NATS
from shared.errors import BusError, Conflict

MOST_COPIES = 3
"""Copies of durable state, if there are as many servers."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process of a cluster runs."""

    address: str = "127.0.0.1"
    network: str = ""
    """The file of its network namespace; empty: this process's."""
    within: tuple[str, ...] = ()
    """The command that runs another command there, such as `env -C`; empty: here."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the process."""

    @property
    def command(self) -> tuple[str, ...]:
        """The command that runs another command there, in its network, too."""
        network = ("nsenter", f"--net={self.network}", "--") if self.network else ()
        return (*network, *self.within)


HERE = Place()


def names(count: int) -> tuple[str, ...]:
    return (NATS, *(f"{NATS}-{number + 2}" for number in range(count - 1)))


class NatsServers:
    """`start` starts all. Each comes back at its address with its store by `start_again`."""

    def __init__(
        self,
        directory: Path,
        count: int,
        *,
        settings: Mapping[str, object] | None = None,
        places: Mapping[str, Place],
    ) -> None:
        """`settings`: what else their configurations say, such as who may connect."""
        self._directory = directory
        self._settings = settings
        self._places = {name: places.get(name, HERE) for name in names(count)}
        self._members = self._form_cluster() if count > 1 else {}
        self._servers: dict[str, NatsServer] = {}
        self._urls: dict[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    @property
    def copies(self) -> int:
        """How many copies of durable state they keep."""
        return min(len(self._places), MOST_COPIES)

    @property
    def url(self) -> str:
        """Where clients find them: addresses with commas between them."""
        return ",".join(self._urls[name] for name in self._places)

    def pid(self, name: str) -> int:
        return self._servers[name].pid

    async def start(self) -> None:
        """Conflict if the directory holds the stores of another number of servers. BusError if one
        does not come up."""
        there = {path.parent.name for path in self._directory.glob(f"{NATS}*/store")}
        if there and there != set(self._places):
            raise Conflict(
                f"{self._directory} holds the state of a cluster with {len(there)} nats-servers: "
                f"start it with as many, or use another directory with --data"
            )
        await asyncio.gather(*(self.start_again(name) for name in self._places))

    async def start_again(self, name: str) -> None:
        """Starts one that does not run, at the address that it had. BusError if it fails."""
        place = self._places[name]
        server = NatsServer(
            self._directory / name,
            host=place.address,
            port=urlsplit(self._urls.get(name, "")).port or 0,
            settings=self._settings,
            environment=processes.environment(self._directory, place.settings),
            member=self._members.get(name),
            within=place.command,
        )
        self._urls[name] = await server.start()
        self._servers[name] = server

    async def ended(self, name: str) -> int:
        """Waits for the end of one, unless it has ended already. Returns its exit code."""
        if name not in self._servers:
            raise BusError(f"{name} was not started")
        return await self._servers[name].ended()

    async def stop(self) -> None:
        await asyncio.gather(*(server.stop() for server in self._servers.values()))

    def _form_cluster(self) -> dict[str, Member]:
        ports = free_ports(len(self._places))
        routes = tuple(
            f"{place.address}:{port}"
            for place, port in zip(self._places.values(), ports, strict=True)
        )
        secret = secrets.token_hex(16)
        return {
            name: Member(name, port, routes, secret)
            for name, port in zip(self._places, ports, strict=True)
        }


def free_ports(count: int) -> list[int]:
    """Different ports of loopback that are free, for processes whose addresses must be known before
    they run."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
