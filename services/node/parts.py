"""What a node's shell is put together from, and how a real machine's parts are made.

The shell (`service`, `hosting`, `library`) knows its worker, its data plane and its disk by these
protocols only, so that the same shell runs over modelled ones in virtual time (`simulation`).
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from services.node.checkpoints.reading import Outcome, Wanted
from services.node.checkpoints.store import Imported, Store
from services.node.engine.budget import kv_budget
from services.node.engine.engine import TorchEngine, torch_device
from services.node.execution.steps import EmitTo, Ran, SendTo, WorkerLoad
from services.node.execution.worker import Worker
from services.node.memory.arena import ModelSpace
from services.node.memory.device import DeviceArena
from services.node.memory.landing import Landing
from services.node.memory.views import Memory
from services.node.moving.data_plane import DataPlane
from services.node.moving.mover import Arrival, Failure
from services.node.transport import tls
from services.node.transport.base import Buffer, OnMessage, OnPeerLost
from services.node.transport.cuda_ipc import CudaIpcDirect
from services.node.transport.direct import Direct
from services.node.transport.rdma import RdmaDirect
from services.node.transport.reads import OnSent
from services.node.transport.shm import ShmDirect
from services.node.transport.tcp import OnConnected
from shared.config import NodeConfig
from shared.errors import ConfigError, TransportError
from shared.ids import EventId, ModelId, NodeId
from shared.layout import Manifest
from shared.messages.scaling import Pull
from shared.messages.serving import Cancel, Submit


class AnyWorker(Protocol):
    """Runs blocks. `services.node.execution.worker.Worker` says what each call does."""

    @property
    def staging(self) -> str: ...
    def start(self) -> None: ...
    async def ready(self) -> None: ...
    async def wait(self) -> None: ...
    async def stop(self) -> None: ...
    async def open_model(self, model_id: ModelId, manifest: Manifest) -> None: ...
    def use_tokenizer(self, model_id: ModelId, tokenizer_json: bytes) -> None: ...
    async def attach(self, model_id: ModelId, block: int, buffer: memoryview) -> None: ...
    async def close_model(self, model_id: ModelId) -> None: ...
    async def submit(self, submit: Submit) -> None: ...
    def cancel(self, cancel: Cancel) -> None: ...
    def on_message(self, sender: str, header: memoryview, payload: memoryview) -> None: ...
    def on_peer_lost(self, address: str, error: TransportError) -> None: ...
    def load(self) -> WorkerLoad: ...


class AnyDataPlane(Protocol):
    """Moves blocks and stage messages. `services.node.moving.data_plane.DataPlane` says how."""

    address: str

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    async def wait(self) -> None: ...
    async def host(self, model: ModelId, manifest: Manifest, space: ModelSpace) -> None: ...
    async def take_over(self, model: ModelId, block: int) -> frozenset[int]: ...
    async def mark_held(
        self, model: ModelId, block: int, chunks: Sequence[int] | None = None
    ) -> None: ...
    async def apply(
        self,
        model: ModelId,
        event: EventId,
        revision: int,
        pulls: Sequence[Pull],
        addresses: Mapping[NodeId, str],
    ) -> None: ...
    async def drop(self, model: ModelId) -> None: ...
    async def connect(self, address: str) -> None: ...
    def send(self, address: str, header: bytes, payload: Sequence[Buffer]) -> None: ...


class AnyStore(Protocol):
    """Packed models on a disk. `services.node.checkpoints.store.Store` says what each call does."""

    def manifests(self) -> dict[ModelId, Manifest]: ...
    def read(self, name: ModelId, wanted: Sequence[Wanted]) -> AsyncGenerator[Outcome, None]: ...
    def import_checkpoint(self, path: Path, *, blocks: int) -> Imported: ...
    def remove(self, name: ModelId) -> None: ...


class Parts(Protocol):
    """Makes the parts of one node; the shell opens and closes them."""

    def store(self) -> AnyStore: ...

    def device(self, memory: Memory) -> DeviceArena | None:
        """For an engine that does not compute in host memory. `memory`: the arena."""

    def worker(
        self, device: DeviceArena | None, *, send: SendTo, emit: EmitTo, ran: Ran
    ) -> AnyWorker: ...

    def data_plane(
        self,
        memory: Memory,
        device: DeviceArena | None,
        *,
        on_message: OnMessage,
        on_peer_lost: OnPeerLost,
        on_connected: OnConnected,
        on_sent: OnSent,
        on_arrived: Callable[[Arrival], None],
        on_failed: Callable[[Failure], None],
    ) -> AnyDataPlane: ...


class RealParts:
    """A thread for the engine (torch), one for the data plane, packed models on the disk."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config

    def store(self) -> Store:
        return Store(Path(self._config.data_dir) / "store")

    def device(self, memory: Memory) -> DeviceArena | None:
        device = torch_device(self._config.device)
        return None if device.type == "cpu" else DeviceArena(memory, device)

    def worker(self, device: DeviceArena | None, *, send: SendTo, emit: EmitTo, ran: Ran) -> Worker:
        config = self._config
        return Worker(
            node=NodeId(config.id),
            make_engine=lambda: TorchEngine(
                config.device,
                kv_budget(config, torch_device(config.device)),
                config.threads,
                step_floor_s=config.step_floor_s,
                cpu_weights=config.cpu_weights,
            ),
            device=device,
            slots=config.slots,
            step_tokens=config.step_tokens,
            speculation=config.speculation,
            send=send,
            emit=emit,
            ran=ran,
        )

    def data_plane(
        self,
        memory: Memory,
        device: DeviceArena | None,
        *,
        on_message: OnMessage,
        on_peer_lost: OnPeerLost,
        on_connected: OnConnected,
        on_sent: OnSent,
        on_arrived: Callable[[Arrival], None],
        on_failed: Callable[[Failure], None],
    ) -> DataPlane:
        config = self._config
        return DataPlane(
            config.host,
            config.port,
            config.link_bytes_per_s,
            self._ways(memory, device.landing if device and config.device_direct else None),
            tls.load(config.tls_certificate, config.tls_key, config.tls_authority),
            on_message=on_message,
            on_peer_lost=on_peer_lost,
            on_connected=on_connected,
            on_sent=on_sent,
            on_arrived=on_arrived,
            on_failed=on_failed,
            overwrites=device.overwrites if device else lambda buffer: None,
        )

    def _ways(self, memory: Memory, landing: Landing | None) -> list[Direct]:
        """Best first. `landing`: of the device."""
        config = self._config
        here: list[Direct] = []
        if landing is not None and (exported := landing.exported()):
            here.append(
                CudaIpcDirect(
                    memory,
                    landing,
                    exported,
                    machine=config.machine,
                    bytes_per_s=config.local_bytes_per_s,
                )
            )
        here.append(
            ShmDirect([memory], machine=config.machine, bytes_per_s=config.local_bytes_per_s)
        )
        if not config.rdma_device:
            return here
        if config.tls_certificate:
            raise ConfigError(
                "RDMA is not encrypted: set node.rdma_device or node.tls_certificate, not both"
            )
        rdma = RdmaDirect(
            [memory],
            config.rdma_device,
            config.rdma_gid_index,
            landing=landing,
            bytes_per_s=config.link_bytes_per_s,
        )
        return [*here, rdma]
