"""What the engine of rank 0, the node's process, asks of the other ranks, of teams of them, and of
decoders that they run together. On a CPU: `ranks.py`. On several GPUs: `device_ranks.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

from services.node.checkpoints.config import ModelConfig
from services.node.engine import kernels
from services.node.engine.adapters import Adapter
from services.node.engine.decoder import Decoder
from services.node.engine.kv_memory import KvMemory
from services.node.engine.linear import Form
from services.node.engine.orders import AttachBlock, DropCache, Order
from services.node.engine.rank_processes import RankProcesses
from services.node.engine.share import Share
from shared.errors import LambdaScaleError
from shared.ids import ModelId
from shared.layout import Manifest


class LedDecoder(Decoder, ABC):
    """A decoder whose other shares are at other ranks."""

    _model: ModelId
    _manifest: Manifest
    _lead: "Leads"

    @property
    def share(self) -> Share:
        return self._lead.share

    @property
    def lost(self) -> bool:
        """Whether its team is."""
        return self._lead.lost

    @contextmanager
    def attaching(self, block: int, weights: object) -> Iterator[None]:
        """All ranks attach the block, this one in the context. CapacityExceeded: one has no memory
        left. EngineFailed: one has ended."""
        offset = self._lead.ranks.offset(weights)
        self._lead.tell(AttachBlock(self._model, block, offset))
        try:
            yield
        finally:
            errors = self._lead.hear()
        self._lead.check()
        if errors:
            raise errors[0]

    @abstractmethod
    def warm_up(self) -> Iterator[None]:
        """See `warmup.warm_up`. All ranks do each piece."""

    @abstractmethod
    def make_adapter(self, manifest: Manifest, weights: memoryview) -> Adapter:
        """This rank's share, with the bytes for the others. UnsupportedModel: the team takes
        none."""


class Leads(Protocol):
    """Rank 0's view of a team."""

    @property
    def share(self) -> Share: ...

    @property
    def ranks(self) -> RankProcesses: ...

    @property
    def lost(self) -> bool:
        """Whether the node goes on without this team."""

    def threads(self, devices: int = 1) -> int:
        """How many threads each rank has for a model that the threads of `devices` devices run."""

    def tell(self, order: Order) -> None: ...

    def hear(self) -> list[LambdaScaleError]: ...

    def check(self) -> None:
        """EngineFailed: the team is lost, and what it has just done is worth nothing."""

    def check_divides(self, config: ModelConfig, dtype: torch.dtype) -> None:
        """UnsupportedModel: it cannot run the model."""

    def decoder(
        self,
        model: ModelId,
        manifest: Manifest,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        longest: int,
        *,
        fused: bool,
        compiled: kernels.Kernels | None,
        adapters: Mapping[ModelId, Adapter],
        devices: int,
    ) -> LedDecoder:
        """`check_divides` has seen the model. `devices`: how many devices give their threads to
        it. The rest: see Decoder."""


class EngineRanks(RankProcesses, ABC):
    """All processes of a node that run models with this one."""

    teams: Mapping[int, Leads]
    """By degree. Empty before the start. Those that are lost are among them until `settle`."""
    kv_ranks = 1
    """Among how many ranks the KV heads of a model are divided. 1: all ranks share its KV."""

    @abstractmethod
    def start(self, *, threads: int, form: Form, kept_bytes: int, spare: bool = False) -> None:
        """Starts the other ranks' processes, and waits until they are there. `threads`: of the
        node, which all ranks of a team share. `form` and `kept_bytes`: see TorchEngine. `spare`:
        the node can do without any of the teams. ConfigError: they cannot run here. EngineFailed: a
        rank has ended, and is not spare."""

    @property
    @abstractmethod
    def degrees(self) -> tuple[int, ...]:
        """Those of the teams that are not lost; all, if they are not spare."""

    @abstractmethod
    def settle(self) -> None:
        """Once this returns, nobody does anything for a team that is lost."""

    @abstractmethod
    def kv(self, device: torch.device) -> KvMemory:
        """Where the KV of all models lies. `device`: this rank's."""

    def check_results(self) -> None:
        """EngineFailed: a rank was lost while what has just come from the device was computed, and
        nobody waited for it, so that it is worth nothing."""

    def drop_cache(self) -> None:
        """No model needs the memory for KV any more."""
        self.tell(DropCache())

    def use_adapter(self, name: ModelId, adapter: Adapter) -> Adapter:
        """The ranks of its base take it. Returns what this rank keeps of it."""
        return adapter
