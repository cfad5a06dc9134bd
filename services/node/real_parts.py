"""The parts of a node on a real machine: threads, torch, transports, a disk."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from services.node.checkpoints.store import Store
from services.node.engine.budget import kv_budget
from services.node.engine.devices import torch_device
from services.node.engine.engine import TorchEngine
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
from services.node.moving.kv_room import room_beside
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

    def store(self) -> Store:
        return Store(Path(self._config.data_dir) / "store", self._config.disk_bytes_per_s)

    def device(self, memory: Memory) -> DeviceArena | None:
        device = torch_device(self._config.device)
        return None if device.type == "cpu" else DeviceArena(memory, device)

    def worker(
        self, memory: Memory, device: DeviceArena | None, shelf: Shelf, listener: WorkerListener
    ) -> Worker:
        config = self._config
        degrees = self._degrees(device)
        ranks = Ranks(degrees, memory) if degrees else None
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
            kv_mover=lambda: listener.kv,
            worth=listener.worth,
            broken=lambda: ranks.broken if ranks else "",
        )
        if ranks is not None:
            ranks.on_loss = worker.regroup
        return worker

    def _degrees(self, device: DeviceArena | None) -> tuple[int, ...]:
        """For how many processes there are teams of ranks."""
        config, degree = self._config, self._config.tensor_parallel
        devices = config.team_devices
        if devices > 1 and (degree != "auto" or device is not None or not config.threads):
            raise ConfigError(
                f"node.team_devices is {devices}, which takes node.device = cpu, "
                f"node.tensor_parallel = auto, and node.threads for this node alone"
            )
        if degree == "auto" and device is None:
            return tried(config.threads, config.cpu_weights, devices)
        if degree == "auto":
            return ()
        if degree > 1 and device is not None:
            raise ConfigError(
                f"node.tensor_parallel is {degree}, and on {config.device} it can only be 1 or auto"
            )
        return (degree,) if degree > 1 else ()

    def data_plane(
        self, memories: Sequence[Memory], device: DeviceArena | None, listener: PlaneListener
    ) -> DataPlane:
        config = self._config
        signers = load_signers(config.signers_file)
        kv_room = room_beside(config.arena_bytes)
        memories = [*memories, *kv_room.memories]
        return DataPlane(
            config.host,
            config.port,
            config.link_bytes_per_s,
            self._ways(memories, device.landing if device and config.device_direct else None),
            tls.load(config.tls_certificate, config.tls_key, config.tls_authority),
            secret.load(config.secret_file),
            None if signers is None else CapabilityGate(signers),
            listener=listener,
            overwrites=device.overwrites if device else lambda buffer: None,
            kv_room=kv_room,
        )

    def _ways(self, memories: Sequence[Memory], landing: Landing | None) -> list[Direct]:
        """The ways to read from peers besides TCP, best first. `landing`: where bytes may land on
        the device."""
        config = self._config
        here: list[Direct] = []
        if landing is not None and (exported := landing.exported()):
            here.append(
                CudaIpcDirect(
                    memories,
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
