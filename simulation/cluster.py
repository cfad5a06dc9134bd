"""A cluster in virtual time: the real services over a modelled bus, network and accelerators."""

import asyncio
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Self

import msgspec

from services.gateway.service import GatewayService
from services.node.checkpoints.packing import partition
from services.node.core.rows import Row, request_of
from services.node.engine.budget import KvBudget
from services.node.execution.steps import Steps
from services.node.hosting import host_cache
from services.node.hosting.hosting import Hosting
from services.node.memory.device import DeviceArena
from services.node.memory.shelf import Shelf
from services.node.memory.views import Memory
from services.node.moving.events import PlaneListener
from services.node.moving.mover import Mover
from services.node.parts import WorkerListener
from services.node.service import NodeService
from services.planner.service import PlannerService
from services.registry.service import RegistryService
from shared import subjects
from shared.bus.base import Bus
from shared.bus.memory import MemoryBus
from shared.clock import wall_ns
from shared.config import GatewayConfig, NodeConfig, PlannerConfig, RegistryConfig
from shared.errors import ConfigError
from shared.ids import ModelId, ModelName, NodeId, RequestId
from shared.layout import ALIGN, Manifest, encode_manifest, model_id
from shared.messages import Ok
from shared.messages.instances import Instance, InstanceState
from shared.messages.pool import ModelAdd
from shared.messages.scaling import PlannerQuery, PlannerState
from shared.service import Service
from simulation import checked
from simulation.bus import SimBroker
from simulation.checked import (
    CheckedBatcher,
    CheckedBook,
    CheckedGateway,
    CheckedMover,
    CheckedPlanner,
    CheckedRegistry,
    CheckedResidency,
)
from simulation.data_plane import ModelledDataPlane
from simulation.engine import ModelledEngine
from simulation.hardware import Channel, Hardware
from simulation.locality import CheckedLocality, LocalityRegistry
from simulation.loop import WallClock
from simulation.models import Model, model_record, modelled_manifest
from simulation.network import Network
from simulation.store import HostCache, ModelledStore
from simulation.supervisor import Process
from simulation.systems import Cache, KvMoves, System
from simulation.transport import Ends
from simulation.worker import ModelledWorker

USABLE = 0.9
"""The share of an accelerator's memory for weights and KV; the rest is for activations and
workspace."""
WEIGHTS = 0.6
"""The weights' share of that. It is more if one copy of the largest model takes more."""
LEAST_KV = 0.05
"""A model that leaves less than this share for KV does not fit."""
QUEUE = 1 << 20
QUEUE_TIMEOUT_S = 600.0
"""Long, because a simulation measures how long requests wait, and turns none away."""
LEAST_UNIT = 4096
ROUNDED = 1.1
"""How much more room nodes have, because blocks are aligned and whole bytes."""
DISK_SPREAD = 0.1
REAL_BYTES = 1 << 30
"""The most memory of this machine that the arenas of a cluster take, roughly."""
LATENCY_S = 10e-6
"""Seconds that a byte takes between two nodes, besides the rate."""
REGISTRY, PLANNER, GATEWAY, NODE = "registry", "planner", "gateway", "node-"
"""Names of processes. A node's name begins with NODE."""


class CheckedSteps(Steps):
    batcher_type = CheckedBatcher


class CheckedCache(host_cache.HostCache):
    book_type = CheckedBook


class CheckedHosting(Hosting):
    residency_type = CheckedResidency
    cache_type = CheckedCache


class CheckedNode(NodeService):
    hosting_type = CheckedHosting


@dataclass(frozen=True)
class ClusterSpec:
    system: System
    hardware: Hardware
    models: tuple[Model, ...]
    nodes: int
    devices: int = 1
    """How many nodes are the devices of one machine, which reach each other at the hardware's
    NVLink. A model that fits no device is served by groups of so many."""
    racks: int = 1
    trunk_bytes_per_s: float = 0.0
    """The rate of each rack's trunk in each direction. 0: no limit."""
    blocks: int = 16
    chunks: int = 1
    """Chunks of the largest block. A relay forwards chunks before it has the block."""
    slots: int = 16
    kv_moves: KvMoves | None = None
    """Whether requests that move bring their KV along. None: `System.kv_moves` says it."""
    step_tokens: int = 2048
    standbys: int = 0
    """How many processes stand by for the planner's role, and for the registry's."""
    gateways: int = 1
    min_instances: int = 1
    prefill_share: float = 0.0
    """The share of each model's replicas that only prefill."""
    objectives: tuple[tuple[str, float, float], ...] = ()
    """(name of a model, its objective for TTFT, for TPOT), in seconds; 0: none."""
    priorities: tuple[tuple[str, int], ...] = ()
    """(name of a model, its priority). The others have 0."""
    idle_s: float = 2.0
    target: float = 1.0
    """The share of a replica that the load is meant to fill."""
    anticipate: bool = True
    """Whether the planner goes by models' histories."""
    disk_copies: int = 0
    """On how many nodes' disks each model is at the beginning: model i on node i and those after
    it. Where that is fewer than the registry keeps, it has the model copied. 0: on every disk."""
    host_bytes: int = 0
    """Modelled bytes of each node's host cache. Copying in memory takes no time."""
    checked: bool = True
    """Whether all cores are validated after every event, which takes about a third of the time."""
    seed: int = 0
    """Disks differ by up to DISK_SPREAD in ways that the seed decides. 0: all are alike."""

    def on_disk(self, node: int, model: int) -> bool:
        """Whether the node has the model on its disk at the beginning."""
        return (node - model) % self.nodes < (self.disk_copies or self.nodes)

    def disk_speed(self, index: int) -> float:
        """The rate of a node's disk, as a multiple of the hardware's."""
        if not self.seed:
            return 1.0
        chance = random.Random(f"disk {index} of {self.seed}")
        return chance.uniform(1 - DISK_SPREAD, 1 + DISK_SPREAD)

    def rack(self, index: int) -> str:
        return f"rack-{index * self.racks // self.nodes}" if self.racks > 1 else ""

    def machine(self, index: int) -> str:
        return node_name(index) if self.devices == 1 else f"machine-{index // self.devices}"

    @cached_property
    def arena_bytes(self) -> int:
        """Modelled bytes for weights on a node. ConfigError if a model does not fit."""
        usable = USABLE * self.hardware.memory_bytes
        largest = max(self.models, key=lambda model: model.nbytes)
        most = (1 - LEAST_KV) * usable
        sizes = largest.unit_bytes
        block = max(sum(sizes[a : b + 1]) for a, b in partition(sizes, self.blocks))
        part = math.ceil(self.blocks / self.devices) * (block + ALIGN * LEAST_UNIT)
        if largest.nbytes > most and (self.devices == 1 or part > most):
            raise ConfigError(
                f"{largest.name} takes {largest.nbytes / 1e9:.3g} GB, a {self.hardware.name} "
                f"has {usable / 1e9:.3g} GB for weights and KV: use other hardware"
            )
        if largest.nbytes > most:
            return math.ceil(part / ROUNDED)
        return math.ceil(max(WEIGHTS * usable, largest.nbytes * 1.01))

    @cached_property
    def unit(self) -> int:
        """The modelled bytes that one real byte stands for. It is chosen so that all arenas fit
        into REAL_BYTES."""
        unit = LEAST_UNIT
        while self.nodes * (self.arena_bytes + self.host_bytes) > REAL_BYTES * unit:
            unit *= 2
        return unit

    @property
    def local_bytes_per_s(self) -> float:
        """Between devices of one machine."""
        return self.hardware.nvlink_bytes_per_s if self.devices > 1 else 0.0

    @property
    def kv(self) -> KvBudget:
        """What models leave of a device's memory."""
        return KvBudget(int(USABLE * self.hardware.memory_bytes - self.arena_bytes))


class NodeParts:
    """The parts of one node, as `services.node.parts.Parts` asks for them."""

    def __init__(self, cluster: "Cluster", index: int, disk: Iterable[Manifest]) -> None:
        """`disk`: the models on it."""
        spec = cluster.spec
        self.name = node_name(index)
        self.config = NodeConfig(
            id=self.name,
            host=spec.machine(index),
            machine=spec.machine(index),
            local_bytes_per_s=round(spec.local_bytes_per_s / spec.unit),
            device="modelled",
            arena_bytes=math.ceil(ROUNDED * spec.arena_bytes / spec.unit),
            host_bytes=math.ceil(ROUNDED * spec.host_bytes / spec.unit),
            slots=spec.slots,
            step_tokens=spec.step_tokens,
            link_bytes_per_s=round(spec.hardware.link_bytes_per_s / spec.unit),
            kv_moves=spec.kv_moves or spec.system.kv_moves,
            rack=spec.rack(index),
            trunk_bytes_per_s=round(spec.trunk_bytes_per_s / spec.unit),
        )
        self._cluster = cluster
        hardware, cache = spec.hardware, spec.system.cache
        self._pcie = Channel(math.inf if cache is Cache.INSTANT else hardware.pcie_bytes_per_s)
        self._host = HostCache(hardware.host_bytes, spec.system.keep_alive_s)
        self._store = ModelledStore(
            disk,
            cache,
            ssd=Channel(hardware.ssd_bytes_per_s * spec.disk_speed(index)),
            pcie=self._pcie,
            host=self._host,
        )

    @property
    def host_cache_bytes(self) -> float:
        """Modelled bytes of models in the store's cache."""
        return self._store.host_bytes

    def cached(self, model: ModelId) -> int:
        """How many blocks of the model are in the store's cache."""
        return self._store.cached(model)

    def store(self) -> ModelledStore:
        return self._store

    def device(self, memory: Memory) -> None:
        """Returns None: the modelled worker has its own device."""

    def worker(
        self, memory: Memory, device: DeviceArena | None, shelf: Shelf, listener: WorkerListener
    ) -> ModelledWorker:
        spec, config = self._cluster.spec, self.config
        return ModelledWorker(
            node=NodeId(self.name),
            engine=ModelledEngine(
                spec.hardware,
                spec.kv,
                partial(self._cluster.aboard, self),
                by_block=bool(spec.prefill_share),
            ),
            pcie=self._pcie,
            host=self._host,
            slots=config.slots,
            step_tokens=config.step_tokens,
            send=listener.send,
            emit=listener.emit,
            ran=listener.ran,
            kv_mover=lambda: listener.kv,
            worth=lambda model, positions, nbytes: listener.worth(
                model, positions, -(-nbytes // spec.unit)
            ),
            unit=spec.unit,
            steps_type=CheckedSteps if spec.checked else Steps,
        )

    def data_plane(
        self, memories: Sequence[Memory], device: DeviceArena | None, listener: PlaneListener
    ) -> ModelledDataPlane:
        mover = CheckedMover if self._cluster.spec.checked else Mover
        return ModelledDataPlane(self._cluster.ends, self.name, listener, mover)


class Cluster:
    """Every service, each on a bus of its own, as if on a machine of its own."""

    def __init__(self, spec: ClusterSpec, broker: SimBroker | None = None) -> None:
        self.spec = spec
        self.broker = broker or SimBroker()
        self.network = Network(
            latency_s=LATENCY_S,
            trunks={spec.rack(i): spec.trunk_bytes_per_s for i in range(spec.nodes)}
            if spec.trunk_bytes_per_s
            else {},
            local_bytes_per_s=spec.local_bytes_per_s,
        )
        self.ends = Ends(self.network, unit=spec.unit)
        self.manifests: tuple[Manifest, ...] = tuple(
            modelled_manifest(model, blocks=spec.blocks, unit=spec.unit, chunks=spec.chunks)
            for model in spec.models
        )
        self.model_ids: dict[str, ModelId] = {
            model.name: model_id(manifest)
            for model, manifest in zip(spec.models, self.manifests, strict=True)
        }
        self.bus = MemoryBus(self.broker, "observer")
        """A bus for observers."""
        self.processes: dict[str, Process[Any]] = {}
        """The processes by name. One that has ended stays until another begins under its name."""
        self.parts: dict[str, NodeParts] = {}
        self.poison: dict[RequestId, int] = {}
        """Requests that kill every node that runs them past this many positions."""
        self.poisoned: Callable[[str, RequestId], None] = lambda name, request: self.crash(name)
        """What happens to a node that does."""
        self.clocks: dict[str, WallClock] = defaultdict(WallClock)
        """The wall clock of each process's host."""
        self._stack = AsyncExitStack()
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        checked.found.clear()
        await self._stack.enter_async_context(self.bus)
        await self._stack.enter_async_context(self._group)
        self._stack.push_async_exit(self._stop)
        nodes = map(node_name, range(self.spec.nodes))
        registries, planners = self.candidates(REGISTRY), self.candidates(PLANNER)
        for name in (*registries, *planners, *self.candidates(GATEWAY), *nodes):
            await self.begin(name)
        await self._publish_models()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(exc_type, exc, traceback)
        checked.raise_found()

    async def _stop(self, _: object, exc: BaseException | None, __: object) -> None:
        """Stops all in order, the last one first. After an error the group cancels them."""
        if exc is None:
            for process in reversed(self.processes.values()):
                await process.stop()

    @property
    def gateway(self) -> GatewayService:
        """The first gateway."""
        gateway: GatewayService = self.processes[GATEWAY].running
        return gateway

    @property
    def gateways(self) -> dict[str, GatewayService]:
        """The gateways that are up and take requests."""
        there = {name: self.processes[name] for name in self.candidates(GATEWAY)}
        return {n: p.service for n, p in there.items() if p.service is not None and not p.ending}

    def candidates(self, role: str) -> list[str]:
        """The names of the processes that are active or stand by in a role; of all gateways."""
        more = self.spec.gateways - 1 if role == GATEWAY else self.spec.standbys
        return [role, *(f"{role}-{n + 2}" for n in range(more))]

    def active(self, role: str) -> str:
        """The name of the process that has a role, as far as it is up; of the first gateway that
        is."""
        up = {name: self.processes[name].service for name in self.candidates(role)}
        return max(up, key=lambda name: service.term if (service := up[name]) else -1)

    @property
    def nodes(self) -> dict[str, NodeService]:
        """The nodes that are up."""
        services = {name: process.service for name, process in self.processes.items()}
        return {n: service for n, service in services.items() if isinstance(service, NodeService)}

    @property
    def planner_config(self) -> PlannerConfig:
        spec = self.spec
        return PlannerConfig(
            strategy=spec.system.transfer,
            serving=spec.system.serving,
            fill=spec.target,
            idle_s=spec.idle_s,
            anticipate=spec.anticipate,
            step_overhead_s=spec.hardware.alpha_s,
            disk_bytes_per_s=round(PlannerConfig().disk_bytes_per_s / spec.unit),
        )

    # --- processes ---

    async def begin(self, name: str) -> None:
        """Begins a process of this name, the first or the next. Returns once it is up."""
        clock = self.clocks[name]
        process: Process[Any] = Process(self.broker, name, self._maker(name), clock)
        self.processes[name] = process
        await process.begin(self._group)

    async def stop(self, name: str, left_s: float | None = None) -> None:
        """Ends a process as SIGTERM does, or a node as a notice does that its machine is there for
        `left_s` more."""
        if left_s is not None and name in self.nodes:
            self.nodes[name].expect_end(left_s)
        await self.processes[name].stop()
        if name in self.network:
            self.network.kill(name)

    def crash(self, name: str) -> None:
        """Ends a process as SIGKILL does. If it is a node, its machine's links go down, too."""
        self.processes[name].kill()
        if name in self.network:
            self.network.kill(name)

    def aboard(self, parts: NodeParts, rows: Sequence[Row]) -> None:
        """A node runs these rows. The engine of a process that was killed goes on unseen, and does
        no harm to the node's next process."""
        for row in rows if self.parts[parts.name] is parts else ():
            request = RequestId(request_of(row.sequence))
            if row.position + row.count > self.poison.get(request, sys.maxsize):
                asyncio.get_running_loop().call_soon(self.poisoned, parts.name, request)

    def _maker(self, name: str) -> Callable[[Bus], Service]:
        system = self.spec.system
        registry = CheckedRegistry if self.spec.checked else RegistryService
        planner = CheckedPlanner if self.spec.checked else PlannerService
        gateway = CheckedGateway if self.spec.checked else GatewayService
        roles = REGISTRY, PLANNER, GATEWAY
        name = next((role for role in roles if name in self.candidates(role)), name)
        if name == REGISTRY and system.cache is Cache.KEEP_ALIVE:
            local = CheckedLocality if self.spec.checked else LocalityRegistry
            return lambda bus: local(bus, RegistryConfig(), self._cached)
        if name == REGISTRY:
            return lambda bus: registry(bus, RegistryConfig())
        if name == PLANNER:
            decide = system.scaling(self.spec.target)
            return lambda bus: planner(bus, self.planner_config, decide)
        if name == GATEWAY:
            config = GatewayConfig(max_queue=QUEUE, queue_timeout_s=QUEUE_TIMEOUT_S, check_s=0.0)
            return lambda bus: gateway(bus, config, listen=False, routing=system.routing)
        return self._node(int(name.removeprefix(NODE)))

    def _node(self, index: int) -> Callable[[Bus], NodeService]:
        before = self.parts.get(node_name(index))
        disk = before.store().manifests().values() if before else self._on_disk(index)
        parts = NodeParts(self, index, disk)
        rate = self.spec.hardware.link_bytes_per_s
        self.network.add(
            parts.name,
            out=rate,
            into=rate,
            rack=self.spec.rack(index),
            host=self.spec.machine(index),
        )
        self.parts[parts.name] = parts
        node = CheckedNode if self.spec.checked else NodeService
        return lambda bus: node(bus, parts.config, parts)

    def _on_disk(self, index: int) -> Iterable[Manifest]:
        """What is on a node's disk at the beginning."""
        return [m for i, m in enumerate(self.manifests) if self.spec.on_disk(index, i)]

    def _cached(self, node: NodeId, model: ModelId) -> int:
        """How many blocks of a model lie in the cache of a node's store."""
        parts = self.parts.get(node)
        return parts.cached(model) if parts else 0

    async def serving(self, timeout_s: float = 600.0) -> None:
        """Waits until every model has at least its minimum of replicas."""
        wanted = dict.fromkeys(self.model_ids, self.spec.min_instances)
        async with asyncio.timeout(timeout_s):
            while True:
                state = await self.bus.request(
                    subjects.PLANNER_STATE, PlannerQuery(events=0), PlannerState, timeout=5.0
                )
                there = {
                    s.name: sum(i.lasts and i.state is InstanceState.SERVING for i in s.instances)
                    for s in state.sets
                }
                if all(there.get(ModelName(name), 0) >= n for name, n in wanted.items()):
                    return
                await asyncio.sleep(0.1)

    async def _publish_models(self) -> None:
        objects = await self.bus.objects()
        objectives = {name: (ttft_s, tpot_s) for name, ttft_s, tpot_s in self.spec.objectives}
        priorities = dict(self.spec.priorities)
        for manifest in self.manifests:
            record = model_record(
                manifest,
                stored=await objects.put(encode_manifest(manifest)),
                created_ns=wall_ns(),
                min_instances=self.spec.min_instances,
            )
            ttft_s, tpot_s = objectives.get(record.name, (0.0, 0.0))
            priority = priorities.get(record.name, 0)
            record = msgspec.structs.replace(
                record,
                ttft_s=ttft_s,
                tpot_s=tpot_s,
                priority=priority,
                prefill_share=self.spec.prefill_share,
            )
            await self.bus.request(
                subjects.REGISTRY_MODEL_ADD, ModelAdd(record=record), Ok, timeout=5.0
            )


def node_name(index: int) -> str:
    return f"{NODE}{index}"


def serves_alone(instance: Instance) -> bool:
    return instance.lasts and instance.state is InstanceState.SERVING
