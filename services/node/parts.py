"""What a node's shell is put together from: its worker, its data plane and its disk.

The shell (`service`, `hosting`) knows them by these protocols only, so that the same shell runs
over a machine's own (`services.node.real_parts`) and over modelled ones in virtual time
(`simulation`).
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from services.node.checkpoints.reading import Outcome, Wanted
from services.node.checkpoints.store import Imported
from services.node.core.kv import KvMover
from services.node.core.load import WorkerLoad
from services.node.core.residency import PlanId
from services.node.core.watchdog import Pulse
from services.node.memory.arena import ModelSpace
from services.node.memory.device import DeviceArena
from services.node.memory.shelf import Shelf
from services.node.memory.views import Memory
from services.node.moving.events import PlaneListener
from services.node.transport.base import Buffer, Permit
from shared.errors import LambdaScaleError, TransportError
from shared.ids import GatewayId, ModelId, NodeId
from shared.layout import Manifest
from shared.messages.scaling import Pull
from shared.messages.serving import Cancel, Submit, Tokens
from shared.parts import Part
from shared.story import Transition

MakeAdapter = Callable[[memoryview], Any]
"""See `services.node.engine.base`, which this does not import, as it takes torch."""


class AnyWorker(Protocol):
    """Runs blocks. `services.node.execution.worker.Worker` says what each call does."""

    @property
    def staging(self) -> str: ...
    @property
    def portion(self) -> int: ...
    def start(self) -> None: ...
    async def ready(self) -> None: ...
    async def wait(self) -> None: ...
    async def stop(self) -> None: ...
    async def open_model(
        self, model_id: ModelId, manifest: Manifest, part: Part | None = None, devices: int = 1
    ) -> None: ...
    def use_tokenizer(self, model_id: ModelId, tokenizer_json: bytes) -> None: ...
    def lift(self, model_id: ModelId, block: int, buffer: memoryview) -> None: ...
    async def attach(
        self, model_id: ModelId, blocks: Mapping[int, memoryview]
    ) -> Mapping[int, BaseException]: ...
    async def prepare(
        self, model_id: ModelId, manifest: Manifest, block: int, buffer: memoryview
    ) -> bool: ...
    async def close_model(self, model_id: ModelId, *, asleep: bool = False) -> None: ...
    async def expect_adapter(self, manifest: Manifest) -> MakeAdapter: ...
    async def adapt(self, name: ModelId, make: MakeAdapter, buffer: memoryview) -> None: ...
    async def drop_adapter(self, name: ModelId) -> None: ...
    async def submit(self, submit: Submit) -> None: ...
    async def story(self, subject: str) -> tuple[Transition, ...]: ...
    def cancel(self, cancel: Cancel) -> None: ...
    def on_message(self, sender: str, header: memoryview, payload: memoryview) -> None: ...
    def on_peer_lost(self, address: str, error: TransportError) -> None: ...
    def load(self) -> WorkerLoad: ...
    def pulse(self) -> Pulse: ...
    def give_up(self, error: LambdaScaleError) -> None: ...


class WorkerListener(Protocol):
    """Who takes what a worker has to say. Called on the engine's thread; must not block."""

    def send(self, address: str, header: bytes, payload: Sequence[Buffer]) -> None:
        """A message to a peer's worker."""

    def emit(self, gateway: GatewayId, tokens: Tokens) -> None: ...

    @property
    def kv(self) -> KvMover | None:
        """Moves KV to and from other nodes; None: KV is computed everywhere."""

    def worth(self, model: ModelId, positions: int, nbytes: int) -> bool:
        """Whether to copy KV takes less time than to compute it."""

    def token_s(self, model: ModelId) -> float:
        """Seconds of prefill for a token, as measured. 0: not known."""

    def ran(self, model: ModelId, share: float, tokens: float, seconds: float) -> None:
        """A sweep is over: the share of the model's blocks that it ran, the mean of the tokens in
        them, and how long that took."""


class AnyDataPlane(Protocol):
    """Moves blocks and stage messages. `services.node.moving.data_plane.DataPlane` says how."""

    address: str

    @property
    def kv(self) -> KvMover | None: ...

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    async def wait(self) -> None: ...
    async def host(
        self, model: ModelId, manifest: Manifest, space: ModelSpace, held: Iterable[int] = ()
    ) -> None: ...
    async def take_over(
        self, model: ModelId, blocks: Sequence[int]
    ) -> Mapping[int, frozenset[int]]: ...
    async def mark_held(
        self, model: ModelId, block: int, chunks: Sequence[int] | None = None
    ) -> None: ...
    async def apply(
        self,
        model: ModelId,
        plan: PlanId,
        pulls: Sequence[Pull],
        addresses: Mapping[NodeId, str],
        space: ModelSpace | None = None,
        *,
        capability: bytes = b"",
    ) -> None: ...
    async def drop(self, model: ModelId) -> None: ...
    async def fetch(
        self,
        address: str,
        region: str,
        offset: int,
        into: memoryview,
        *,
        permit: Permit | None = None,
        within: float,
    ) -> None: ...
    async def connect(self, address: str) -> None: ...
    def send(self, address: str, header: bytes, payload: Sequence[Buffer]) -> None: ...


class AnyDraft(Protocol):
    """A model that comes to a tier in pieces, such as `services.node.checkpoints.draft.Draft`."""

    @property
    def model_id(self) -> ModelId: ...
    @property
    def manifest(self) -> Manifest: ...
    @property
    def missing(self) -> list[int]: ...
    @property
    def done(self) -> int: ...
    def write(self, block: int, chunks: range, data: memoryview) -> None: ...


class AnyStore(Protocol):
    """Packed models on a disk. `services.node.checkpoints.store.Store` says what each call does."""

    def manifests(self) -> dict[ModelId, Manifest]: ...
    def read(self, name: ModelId, wanted: Sequence[Wanted]) -> AsyncGenerator[Outcome, None]: ...
    def import_checkpoint(self, path: Path, *, blocks: int) -> Imported: ...
    def import_adapter(self, path: Path, base: ModelId, manifest: Manifest) -> Imported: ...
    def remove(self, name: ModelId) -> None: ...
    async def piece(self, name: ModelId, block: int, chunks: range) -> memoryview: ...
    def room(self) -> tuple[int, int]: ...
    def draft(self, name: ModelId, manifest: Manifest) -> AnyDraft: ...
    def drafts(self) -> Sequence[AnyDraft]: ...
    def discard(self, name: ModelId) -> None: ...
    def adopt(self, name: ModelId, manifest: Manifest, files: Mapping[str, bytes]) -> None: ...


class Parts(Protocol):
    """Makes the parts of one node; the shell opens and closes them."""

    def store(self) -> AnyStore: ...

    def device(self, memory: Memory) -> DeviceArena | None:
        """For an engine that does not compute in host memory. `memory`: the arena."""

    def worker(
        self, memory: Memory, device: DeviceArena | None, shelf: Shelf, listener: WorkerListener
    ) -> AnyWorker:
        """`memory`: the arena. `shelf`: for what the engine makes of blocks."""

    def data_plane(
        self, memories: Sequence[Memory], device: DeviceArena | None, listener: PlaneListener
    ) -> AnyDataPlane:
        """`memories`: what blocks of models lie in."""
        ...
