"""The parts of a node on a real machine: threads, torch, transports, a disk."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from services.node.checkpoints.store import Store
from services.node.engine.budget import kv_budget
from services.node.engine.device_ranks import DeviceRanks
from services.node.engine.devices import devices_of_ranks, torch_device
from services.node.engine.engine import TorchEngine
from services.node.engine.leading import EngineRanks
from services.node.engine.ranks import Ranks
from services.node.engine.rehearsal import measure, tried
from services.node.execution.worker import Worker
from services.node.memory.device import DeviceArena
from services.node.memory.landing import Landing
from services.node.memory.shelf import Shelf
from services.node.memory.views import Memory
from services.node.moving.data_plane import DataPlane
from services.node.moving.events import PlaneListener
from services.node.moving.gate import CapabilityGate
from services.node.moving.kv_room import LEAST_BYTES, KvRoom, Twins, room_beside
from services.node.parts import WorkerListener
from services.node.transport import secret, tls
from services.node.transport.cuda_ipc import CudaIpcDirect
from services.node.transport.direct import Direct
from services.node.transport.rdma import RdmaDirect
from services.node.transport.shm import ShmDirect
from shared.capabilities import load_signers
from shared.config import NodeConfig
from shared.errors import ConfigError
from shared.ids import NodeId


class RealParts:
    """A thread for the engine (torch), one for the data plane, packed models on the disk."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._kv_twins: KvRoom | None = None
        """The host's places for KV that moves from device to device."""

    def store(self) -> Store:
        return Store(Path(self._config.data_dir) / "store", self._config.disk_bytes_per_s)

    def device(self, memory: Memory) -> DeviceArena | None:
        """None: blocks are computed with where they land, or ranks copy them to several GPUs."""
        config, device = self._config, torch_device(self._config.device)
        if device.type == "cpu" or self._gpus:
            return None
        if not config.device_direct or config.kv_moves == "never":
            return DeviceArena(memory, device)
        self._kv_twins = KvRoom(LEAST_BYTES)
        return DeviceArena(memory, device, beside=self._kv_twins.memories)

    def worker(
        self, memory: Memory, device: DeviceArena | None, shelf: Shelf, listener: WorkerListener
    ) -> Worker:
        config = self._config
        ranks = self._ranks(memory)
        worker = Worker(
            node=NodeId(config.id),
            make_engine=lambda: TorchEngine(
                config.device,
                kv_budget(config, torch_device(config.device)),
                config.threads,
                step_floor_s=config.step_floor_s,
                cpu_weights=config.cpu_weights,
                shelf=shelf,
                kept_bytes=config.arena_bytes,
                kv_host_bytes=config.kv_host_bytes,
                token_s=listener.token_s,
                ranks=ranks,
                measure=(
                    partial(measure, devices=config.team_devices)
                    if config.tensor_parallel == "auto"
                    else None
                ),
            ),
            device=device,
            slots=config.slots,
            step_tokens=config.step_tokens,
            speculation=config.speculation,
            send=listener.send,
            emit=listener.emit,
            ran=listener.ran,
            kv_mover=lambda: None if self._gpus else listener.kv,
            worth=listener.worth,
            broken=lambda: ranks.broken if ranks else "",
            staging=lambda: ranks.staging if ranks else "",
        )
        if ranks is not None:
            ranks.on_loss = worker.regroup
        return worker

    @property
    def _gpus(self) -> tuple[torch.device, ...]:
        """The devices of the ranks, where each has a GPU. Empty: this process is on one alone, or
        on a CPU."""
        config, degree = self._config, self._config.tensor_parallel
        if degree in (1, "auto") or torch_device(config.device).type == "cpu":
            return ()
        if config.kv_host_bytes:
            raise ConfigError(
                f"node.kv_host_bytes is {config.kv_host_bytes} and node.tensor_parallel is "
                f"{degree} on {config.device}: KV that several GPUs have does not go to host "
                f"memory: set node.kv_host_bytes to 0"
            )
        return devices_of_ranks(config.device, int(degree))

    def _ranks(self, memory: Memory) -> EngineRanks | None:
        if gpus := self._gpus:
            return DeviceRanks(gpus, memory)
        degrees = self._degrees(on_cpu=torch_device(self._config.device).type == "cpu")
        return Ranks(degrees, memory) if degrees else None

    def _degrees(self, *, on_cpu: bool) -> tuple[int, ...]:
        """For how many processes there are teams of ranks on a CPU."""
        config, degree = self._config, self._config.tensor_parallel
        devices = config.team_devices
        if devices > 1 and (degree != "auto" or not on_cpu or not config.threads):
            raise ConfigError(
                f"node.team_devices is {devices}, which takes node.device = cpu, "
                f"node.tensor_parallel = auto, and node.threads for this node alone"
            )
        if degree == "auto":
            return tried(config.threads, config.cpu_weights, devices) if on_cpu else ()
        return (degree,) if degree > 1 else ()

    def data_plane(
        self, memories: Sequence[Memory], device: DeviceArena | None, listener: PlaneListener
    ) -> DataPlane:
        config = self._config
        signers = load_signers(config.signers_file)
        kv_room, kv_twins = room_beside(config.arena_bytes), None
        memories = [*memories, *kv_room.memories]
        if device and device.has_twins and self._kv_twins:
            kv_twins = Twins(self._kv_twins, device)
        return DataPlane(
            config.host,
            config.port,
            config.link_bytes_per_s,
            self._ways(
                memories,
                device.landing if device and config.device_direct else None,
                kv_twins.room.memories if kv_twins else (),
            ),
            tls.load(config.tls_certificate, config.tls_key, config.tls_authority),
            secret.load(config.secret_file),
            None if signers is None else CapabilityGate(signers),
            listener=listener,
            overwrites=device.overwrites if device else lambda buffer: None,
            kv_room=kv_room,
            kv_twins=kv_twins,
        )

    def _ways(
        self, memories: Sequence[Memory], landing: Landing | None, twins: Sequence[Memory]
    ) -> list[Direct]:
        """The ways to read from peers besides TCP, best first. `landing`: where bytes may land on
        the device. `twins`: the places of what lies only there."""
        config = self._config
        here: list[Direct] = []
        if landing is not None and (exported := landing.exported()):
            here.append(
                CudaIpcDirect(
                    [*memories, *twins],
                    landing,
                    exported,
                    machine=config.machine,
                    bytes_per_s=config.local_bytes_per_s,
                )
            )
        here.append(
            ShmDirect(memories, machine=config.machine, bytes_per_s=config.local_bytes_per_s)
        )
        if not config.rdma_device:
            return here
        if config.tls_certificate:
            raise ConfigError(
                "RDMA is not encrypted: set node.rdma_device or node.tls_certificate, not both"
            )
        rdma = RdmaDirect(
            memories,
            config.rdma_device,
            config.rdma_gid_index,
            landing=landing,
            bytes_per_s=config.link_bytes_per_s,
        )
        return [*here, rdma]
