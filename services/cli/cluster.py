"""A whole cluster on this machine: nats-server, registry, planner, gateway and nodes."""

import asyncio
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from services.cli import processes
from services.cli.nats_server import NatsServer
from services.cli.processes import ClusterState, ProcessRecord, StartFailed
from shared import subjects
from shared.bus.base import Bus
from shared.bus.nats import NatsBus
from shared.config import BusConfig
from shared.errors import BusError
from shared.ids import NodeId
from shared.messages import Message
from shared.messages.load import GatewayLoad
from shared.messages.pool import PoolQuery, PoolState
from shared.messages.scaling import PlannerQuery, PlannerState

READY_S = 60.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    directory: Path
    nodes: int
    config: Path | None = None
    gateway_port: int = 8000
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment for every process, for example LAMBDASCALE_NODE_LINK_BYTES_PER_S."""


def bus_config(state: ClusterState) -> BusConfig:
    """How to reach the cluster's bus: its own URL, the configured user."""
    return BusConfig(url=state.nats_url)


def node_id(number: int) -> NodeId:
    return NodeId(f"node-{number}")


class Cluster:
    """Starts a cluster in `start`; `stop` ends it. What runs is written down at every step."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.state = ClusterState(nats_url="")
        self._nats: NatsServer | None = None
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Returns when every service answers. StartFailed names the one that does not, and why."""
        directory = self.spec.directory
        directory.mkdir(parents=True, exist_ok=True)
        processes.check_free(directory)
        try:
            await self._start_all(say)
        except BaseException:
            await self.stop()
            raise

    async def _start_all(self, say: Callable[[str], None]) -> None:
        say("starting nats-server")
        self._nats = NatsServer(
            self.spec.directory / "nats",
            detached=True,
            environment=processes.environment(self.spec.directory, {}),
        )
        url = await self._nats.start()
        self.state = ClusterState(nats_url=url)
        self._note(processes.record("nats", "nats", self._nats.pid))
        say(f"starting registry, planner, gateway and {self.spec.nodes} nodes")
        for role in ("registry", "planner", "gateway"):
            self.start_service(role)
        for number in range(self.spec.nodes):
            self.start_node(number)
        await self._wait_until_ready()

    def start_service(self, role: str) -> None:
        """Starts (again) the registry, the planner or the gateway."""
        port = {"LAMBDASCALE_GATEWAY_PORT": str(self.spec.gateway_port)}
        self._spawn(role, role, port if role == "gateway" else {})

    def start_node(self, number: int) -> None:
        """Starts (again) a node; what its disk holds is there again."""
        name = node_id(number)
        settings = {
            "LAMBDASCALE_NODE_ID": name,
            "LAMBDASCALE_NODE_DATA_DIR": str(self.spec.directory / "nodes" / name),
        }
        self._spawn(name, "node", settings)

    def _spawn(self, name: str, role: str, settings: Mapping[str, str]) -> None:
        if name in self._children:
            self._children[name].wait(processes.STOP_S)  # the one before must be gone
        arguments = ["--config", str(self.spec.config)] if self.spec.config else []
        merged = {
            **self.spec.settings,
            "LAMBDASCALE_BUS_URL": self.state.nats_url,
            "LAMBDASCALE_TELEMETRY_TRACE_DIR": str(self.spec.directory / "traces"),
            **settings,
        }
        entry, child = processes.spawn(self.spec.directory, name, role, arguments, merged)
        self._children[name] = child
        self._note(entry)

    def _note(self, entry: ProcessRecord) -> None:
        kept = tuple(p for p in self.state.processes if p.name != entry.name)
        self.state = msgspec.structs.replace(self.state, processes=(*kept, entry))
        processes.write_state(self.spec.directory, self.state)

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        async with NatsBus(bus_config(self.state), "up") as bus:
            url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

            async def hear(message: Message) -> None:
                if isinstance(message, GatewayLoad) and message.url and not url.done():
                    url.set_result(message.url)

            await bus.subscribe(subjects.LOAD_GATEWAY, hear)
            waiting = "the registry"
            while time.monotonic() < deadline:
                self._check_children()
                waiting = await self._missing(bus) or ("" if url.done() else "the gateway")
                if not waiting:
                    self.state = msgspec.structs.replace(self.state, gateway_url=url.result())
                    processes.write_state(self.spec.directory, self.state)
                    return
                await asyncio.sleep(POLL_S)
        raise StartFailed(f"{waiting} did not get ready within {READY_S:.0f} s")

    async def _missing(self, bus: Bus) -> str:
        """What does not answer yet."""
        try:
            pool = await bus.request(subjects.REGISTRY_POOL, PoolQuery(), PoolState, timeout=1.0)
        except BusError:
            return "the registry"
        if len(pool.nodes) < self.spec.nodes:
            return f"{self.spec.nodes - len(pool.nodes)} of the nodes"
        try:
            query = PlannerQuery(events=0)
            await bus.request(subjects.PLANNER_STATE, query, PlannerState, timeout=1.0)
        except BusError:
            return "the planner"
        return ""

    def _check_children(self) -> None:
        for name, child in self._children.items():
            code = child.poll()
            if code is not None:
                lines = processes.last_lines(self.spec.directory, name)
                raise StartFailed(f"{name} ended with {code} while starting:\n{lines}")

    def ended(self) -> dict[str, int]:
        """Children that are no more, with their exit codes; each is told once."""
        codes = {name: child.poll() for name, child in self._children.items()}
        over = {name: code for name, code in codes.items() if code is not None}
        self._children = {n: child for n, child in self._children.items() if n not in over}
        return over

    async def stop(self) -> None:
        await asyncio.to_thread(processes.end_all, self.spec.directory)
        for child in self._children.values():
            await asyncio.to_thread(child.wait)
        if self._nats is not None:
            await self._nats.stop()
