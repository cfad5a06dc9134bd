"""A whole cluster on this machine: nats-servers, registry, planner, gateway and nodes."""

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from services.local import credentials, processes
from services.local.credentials import OPERATOR, User
from services.local.forking import PROGRAM, fork_server
from services.local.nats_servers import HERE, NatsServers, Place, free_ports
from services.local.private import private_directory
from services.local.processes import NATS, ClusterState, ProcessRecord
from shared import subjects
from shared.bus.base import Bus, On
from shared.bus.nats import NatsBus
from shared.config import BusConfig, load
from shared.counters import last_number
from shared.errors import BusError, StartFailed
from shared.forking import Forked, ForkServer, Order
from shared.ids import NodeId
from shared.messages.load import GatewayLoad
from shared.messages.scaling import PlannerQuery, PlannerState
from shared.permissions import Role
from shared.pool_pages import read_pool
from shared.wording import counted

READY_S = 60.0
READY_PER_NODE_S = 3.0
"""Seconds for each node to start: all share the machine's cores."""
POLL_S = 0.05
GATEWAY = "gateway"
SERVICES = ("registry", "planner", GATEWAY)
ELECTED = ("registry", "planner")
"""Roles that one process has at a time, while others stand by."""
THREADS = "LAMBDASCALE_NODE_THREADS"
PREFIX = "lambdascale: "
"""How the last line of a service that fails begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    directory: Path
    nodes: int
    config: Path | None = None
    gateway_port: int | None = None
    """0: any free port; None: the configured port. Further gateways have any free ports."""
    gateways: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for every process, for example LAMBDASCALE_NODE_LINK_BYTES_PER_S."""
    apart: bool = False
    """Whether each node names a machine of its own, so that nothing goes through shared memory."""
    standbys: int = 0
    """How many processes stand by for each of the roles `ELECTED`."""
    node_standbys: bool = False
    """Whether beside each node's process another one stands by, to go on with its weights."""
    nats_servers: int = 1
    """If several, they keep copies of each other's state."""
    places: Mapping[str, Place] = field(default_factory=dict)
    """Where processes run that do not run here, by their names."""
    ends_by_signal: bool = False
    """Whether this process ends the cluster when it gets a SIGTERM, so that `down` may send one."""


@dataclass(frozen=True, slots=True)
class Child:
    process: "Forked | subprocess.Popen[bytes]"
    log_from: int
    """The size of its log when it was started."""


CREDENTIALS = "credentials"
"""The directory with the credentials of the bus's users, in a cluster's directory."""


def bus_config(state: ClusterState, config: Path | None = None, user: User = OPERATOR) -> BusConfig:
    """How to reach the cluster's bus as one of its users."""
    if config is None and state.config:
        config = Path(state.config)
    bus = load(config).bus
    copies = state.nats_copies or bus.replicas
    bus = msgspec.structs.replace(bus, url=state.nats_url, replicas=copies)
    if not state.credentials:
        return bus
    own = str(Path(state.credentials) / user.directory)
    return msgspec.structs.replace(bus, credentials=own, tls_authority="")


def _port(url: str) -> int:
    """The port of a URL; 0 if it has none."""
    return urlsplit(url).port or 0


def node_id(number: int) -> NodeId:
    return NodeId(f"node-{number}")


class Cluster:
    """`start` starts a cluster and `stop` ends it. The running processes are written down at every
    step."""

    def __init__(self, spec: ClusterSpec, forks: ForkServer | None = None) -> None:
        """`forks`: forks the processes of other clusters of this process, too; None: the
        cluster has its own. Only those of its own are found by their marks (`processes.strays`)."""
        self.spec = spec
        self.state = ClusterState()
        self._lock: int | None = None
        self._nats: NatsServers | None = None
        self._shares = forks is not None
        self._fork_server = forks or fork_server(
            processes.log_of(spec.directory, "fork-server"),
            processes.environment(spec.directory, spec.settings),
        )
        self._children: dict[str, Child] = {}
        self._gateway_ports: dict[str, int | None] = {}
        """The port of each gateway, by its name; None: as configured."""

    async def start(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Returns when every service answers. StartFailed names the service that does not, and
        why."""
        if not self.spec.directory.exists():
            private_directory(self.spec.directory)
        holder = processes.record("up", "holder", os.getpid()) if self.spec.ends_by_signal else None
        self._lock = processes.claim(self.spec.directory, holder)
        try:
            await self._start_all(say)
        except BaseException:
            await self.stop()
            raise

    async def _start_all(self, say: Callable[[str], None]) -> None:
        config = str(self.spec.config.absolute()) if self.spec.config else ""
        self._write(ClusterState(config=config))
        count = self.spec.nats_servers
        say("starting nats-server" if count == 1 else f"starting {count} nats-servers")
        private_directory(processes.log_of(self.spec.directory, "fork-server").parent)
        self._fork_server.start()
        await self._start_nats(count)
        before = await self._last_generations()
        nodes = counted(self.spec.nodes, "node")
        say(f"starting registry, planner, gateway and {nodes}")
        ports = free_ports(self.spec.gateways - 1)
        self._gateway_ports[GATEWAY] = self.spec.gateway_port
        await self._fork_server.ready()
        for number, port in enumerate(ports):
            self._gateway_ports[f"{GATEWAY}-{number + 2}"] = port
        for name in self.services:
            self.start_service(name)
        for name in self.node_names:
            self.start_node(name)
        urls = await self._wait_until_ready(before)
        more = {_port(url): url for url in urls}
        further = [more.pop(port) for port in ports]
        (url,) = more.values()
        self._gateway_ports[GATEWAY] = _port(url)  # which it keeps when it is started again
        self._write(msgspec.structs.replace(self.state, gateway_urls=(url, *further)))

    async def _start_nats(self, count: int) -> None:
        directory = (self.spec.directory / CREDENTIALS).absolute()
        nodes = [node_id(number) for number in range(self.spec.nodes)]
        keys = credentials.make_users(directory, credentials.all_users(nodes))
        self._nats = NatsServers(
            self.spec.directory,
            count,
            settings={"authorization": credentials.authorization(keys)},
            places=self.spec.places,
        )
        await self._nats.start()
        self.state = msgspec.structs.replace(
            self.state,
            nats_url=self._nats.url,
            nats_copies=self._nats.copies,
            credentials=str(directory),
        )
        for name in self._nats.names:
            self._note(processes.record(name, NATS, self._nats.pid(name)))

    async def _last_generations(self) -> dict[NodeId, int]:
        """The last generations of nodes whose leases a crashed cluster may have left."""
        names = [node_id(number) for number in range(self.spec.nodes)]
        async with NatsBus(bus_config(self.state), "up") as bus:
            counters = await bus.kv(subjects.KV_COUNTERS)
            return {n: await last_number(counters, subjects.node_counter(n)) for n in names}

    @property
    def services(self) -> dict[str, str]:
        """The processes that are no nodes, with the role of each. `planner-2` is the second
        planner; who is active does not follow from the name."""
        counts = dict.fromkeys(ELECTED, self.spec.standbys + 1)
        counts[GATEWAY] = self.spec.gateways
        more = {f"{role}-{n}": role for role in SERVICES for n in range(2, counts[role] + 1)}
        return {role: role for role in SERVICES} | more

    def start_service(self, name: str) -> None:
        """Starts a process that is no node, possibly again."""
        settings: dict[str, str] = {}
        port = self._gateway_ports.get(name)
        if port is not None:
            settings["LAMBDASCALE_GATEWAY_PORT"] = str(port)
        role = self.services[name]
        if role in credentials.SIGN and not self._signs_otherwise:
            path = Path(self.state.credentials) / role / credentials.SIGNING_KEY
            settings[f"LAMBDASCALE_{role.upper()}_SIGNING_KEY_FILE"] = str(path)
        self._spawn(name, role, User(Role(role)), settings)

    @property
    def _signs_otherwise(self) -> bool:
        """Whether the configuration names keys for read capabilities."""
        configured = load(self.spec.config)
        return bool(
            configured.planner.signing_key_file
            or configured.registry.signing_key_file
            or configured.node.signers_file
        )

    @property
    def node_names(self) -> dict[str, NodeId]:
        """The nodes' processes, with the node of each. `node-0-standby` is the second process of
        node-0; which of the two is at work does not follow from the name."""
        nodes = [node_id(number) for number in range(self.spec.nodes)]
        standbys = nodes if self.spec.node_standbys else []
        return {node: node for node in nodes} | {f"{node}-standby": node for node in standbys}

    def start_node(self, name: str) -> None:
        """Starts a process of a node, possibly again. What its disk holds is still there, and what
        its keeper holds."""
        node = self.node_names[name]
        configured = load(self.spec.config).node
        settings = {
            "LAMBDASCALE_NODE_ID": node,
            "LAMBDASCALE_NODE_DATA_DIR": str(self.spec.directory / "nodes" / node),
            "LAMBDASCALE_NODE_KV_SHARE": str(configured.kv_share / self.spec.nodes),
        }
        if not configured.threads and THREADS not in self.spec.settings:
            # More threads than cores would wait for each other in every layer.
            cores = len(os.sched_getaffinity(0))
            settings[THREADS] = str(max(1, cores // self.spec.nodes))
        if configured.metrics_port:
            number = list(dict.fromkeys(self.node_names.values())).index(node)
            settings["LAMBDASCALE_NODE_METRICS_PORT"] = str(configured.metrics_port + number)
        own = Path(self.state.credentials) / User(Role.NODE, node).directory
        if not self._signs_otherwise:
            settings["LAMBDASCALE_NODE_SIGNERS_FILE"] = str(own / credentials.SIGNERS)
        if not configured.secret_file:
            settings["LAMBDASCALE_NODE_SECRET_FILE"] = str(own / credentials.NODES_SECRET)
        if self.spec.apart:
            settings["LAMBDASCALE_NODE_MACHINE"] = node
        self._spawn(name, "node", User(Role.NODE, NodeId(node)), settings)

    def _spawn(self, name: str, role: str, user: User, settings: Mapping[str, str]) -> None:
        if name in self._children:
            self._children[name].process.wait(processes.STOP_S)  # the process before must be gone
        directory = self.spec.directory
        private_directory(directory / "traces")
        log = processes.log_of(directory, name)
        private_directory(log.parent)
        log_from = log.stat().st_size if log.exists() else 0
        place = self.spec.places.get(name, HERE)
        merged = {
            **self._fork_server.environment,
            **self.spec.settings,
            **processes.marks(directory),
            "LAMBDASCALE_BUS_URL": self.state.nats_url,
            "LAMBDASCALE_BUS_CREDENTIALS": str(Path(self.state.credentials) / user.directory),
            "LAMBDASCALE_BUS_TLS_AUTHORITY": "",
            "LAMBDASCALE_BUS_REPLICAS": str(self._nats_there.copies),
            "LAMBDASCALE_TELEMETRY_TRACE_DIR": str(directory / "traces"),
            **settings,
            **place.settings,
        }
        words = (role, "--config", self.state.config) if self.state.config else (role,)
        process: Forked | subprocess.Popen[bytes]
        if place.within:
            process = processes.spawn(directory, name, words, merged, within=place.command)
        else:
            process = self._fork_server.fork(
                Order(name, PROGRAM, words, merged, str(log), place.network)
            )
        self._children[name] = Child(process, log_from)
        self._note(processes.record(name, role, process.pid))

    def _note(self, entry: ProcessRecord) -> None:
        """Writes down a process that was started."""
        if before := self._record(entry.name):
            entry = msgspec.structs.replace(
                entry, restarts=before.restarts + 1, last_exit=before.last_exit
            )
        self._put(entry)

    def note_end(self, name: str, why: str, wait_s: float) -> None:
        """Writes down that a process ended, and will be started again after `wait_s`."""
        if before := self._record(name):
            again_at = time.time() + wait_s
            self._put(msgspec.structs.replace(before, last_exit=why, again_at=again_at))

    def _record(self, name: str) -> ProcessRecord | None:
        return next((p for p in self.state.processes if p.name == name), None)

    def _put(self, entry: ProcessRecord) -> None:
        entries = {process.name: process for process in self.state.processes} | {entry.name: entry}
        self._write(msgspec.structs.replace(self.state, processes=tuple(entries.values())))

    def _write(self, state: ClusterState) -> None:
        self.state = state
        processes.write_state(self.spec.directory, state)

    async def _wait_until_ready(self, before: Mapping[NodeId, int]) -> set[str]:
        """Waits until every service answers. Returns the gateways' URLs."""
        limit_s = READY_S + READY_PER_NODE_S * self.spec.nodes
        deadline = time.monotonic() + limit_s
        async with NatsBus(bus_config(self.state), "up") as bus:
            urls: set[str] = set()

            async def hear(message: GatewayLoad) -> None:
                if message.url:
                    urls.add(message.url)

            await bus.subscribe(subjects.LOAD_GATEWAY, On(GatewayLoad, hear))
            missing = "the registry"
            while time.monotonic() < deadline:
                self._check_children()
                missing = await self._missing(bus, before)
                if not missing and len(urls) == self.spec.gateways:
                    return urls
                missing = missing or "the gateway"
                await asyncio.sleep(POLL_S)
        raise StartFailed(
            f"{missing} did not get ready within {limit_s:.0f} s; "
            f"logs are in {self.spec.directory / 'logs'}"
        )

    async def _missing(self, bus: Bus, before: Mapping[NodeId, int]) -> str:
        """What does not answer yet, in words."""
        try:
            pool = await read_pool(partial(bus.request, timeout=1.0))
        except BusError:
            return "the registry"
        there = {view.info.node: view.info.generation for view in pool.nodes}
        missing = [node for node, last in before.items() if there.get(node, 0) <= last]
        if missing:
            return ", ".join(missing)
        try:
            query = PlannerQuery(events=0)
            await bus.request(subjects.PLANNER_STATE, query, PlannerState, timeout=1.0)
        except BusError:
            return "the planner"
        return ""

    def _check_children(self) -> None:
        for name, child in self._children.items():
            code = child.process.poll()
            if code is not None:
                raise StartFailed(self._last_words(name, child, code))

    def _last_words(self, name: str, child: Child, code: int) -> str:
        """Why a process ended, from its log since it was started."""
        log = processes.log_of(self.spec.directory, name)
        lines = log.read_bytes()[child.log_from :].decode(errors="replace").splitlines()
        if lines and lines[-1].startswith(PREFIX):
            return f"{name}: {lines[-1].removeprefix(PREFIX)}"
        return "\n".join([f"{name} ended with {code} while starting; see {log}", *lines[-5:]])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the processes."""
        return (*self._nats_there.names, *self._children)

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to a process, unless it has ended."""
        entry = self._record(name)
        if entry and entry.state == "running":
            with contextlib.suppress(ProcessLookupError):
                os.kill(entry.pid, number)

    async def ended(self, name: str) -> int:
        """Waits for the end of a process, unless it has ended already. Returns its exit code."""
        if name in self._children:
            process = self._children[name].process
            if isinstance(process, Forked):
                return await process.ended()
            return await processes.ended(process)
        return await self._nats_there.ended(name)

    async def start_again(self, name: str) -> None:
        """Starts a process that ended, with the same ports. BusError: a nats-server does not come
        up. StartFailed: another process cannot be started."""
        if name in self._nats_there.names:
            await self._nats_there.start_again(name)
            self._note(processes.record(name, NATS, self._nats_there.pid(name)))
            return
        await self._fork_server.ready()
        if name in self.services:
            self.start_service(name)
        else:
            self.start_node(name)

    @property
    def _nats_there(self) -> NatsServers:
        if self._nats is None:
            raise BusError("nats-server was not started")
        return self._nats

    async def stop(self) -> None:
        """Ends whatever `start` began."""
        if self._lock is None:
            return
        await asyncio.to_thread(processes.end_all, self.spec.directory)
        children = [child.process for child in self._children.values()]
        left = [process.pid for process in children if process.poll() is None]
        await asyncio.to_thread(processes.end, left)
        for process in children:
            await asyncio.to_thread(process.wait)
        if not self._shares:
            self._fork_server.stop()
        if self._nats is not None:
            await self._nats.stop()
        os.close(self._lock)
        self._lock = None
