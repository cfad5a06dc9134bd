"""Rank 0's side of tensor parallelism: it starts the other ranks, and has them run with it.

The node's process is rank 0. It alone has the scheduler, the sequences with their pages of KV, and
the sampling. The others (`rank.py`) do what it says in the order in which it says it, and tell it
only when a block is attached. Within a step nobody says anything: all ranks run the same layers in
the kernels, and meet in shared memory (`team.c`).

A rank that ends takes all teams with it that it was in, since its share of their weights is gone.
Where the degree is a fixed one, that ends the node. Where each model has its own, the node goes on
with the teams that are left (`Ranks.spare`). The ranks end with the node's process.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec
import torch

from services.node.checkpoints.config import ModelConfig
from services.node.engine import kernels
from services.node.engine.adapters import Adapter, read_adapter
from services.node.engine.attention import Span
from services.node.engine.base import Bell
from services.node.engine.kernel_step import KernelStep
from services.node.engine.kv_memory import KvMemory
from services.node.engine.leading import EngineRanks, LedDecoder
from services.node.engine.linear import Form
from services.node.engine.orders import (
    Head,
    Meet,
    OpenModel,
    Order,
    Plan,
    Run,
    UseAdapter,
    UseCache,
    UseRoom,
)
from services.node.engine.share import Share, check_divides
from services.node.engine.step import Step, plan_step
from services.node.engine.team import Shared, Team, head_room, prepare, write_share
from services.node.engine.weights import HeadUnit, LayerUnit
from services.node.memory.views import Memory
from shared.errors import ConfigError, EngineFailed, LambdaScaleError
from shared.ids import ModelId
from shared.layout import Manifest

RANK = "services.node.engine.rank"


class Ranks(EngineRanks):
    def __init__(self, degrees: Sequence[int], arena: Memory) -> None:
        """`degrees`: those of the teams. `arena`: what blocks lie in."""
        super().__init__(max(degrees), arena)
        self.teams: dict[int, Lead] = {}
        self._degrees = tuple(degrees)
        self._place = prepare(degrees)
        self._cache = torch.empty(0)

    def start(self, *, threads: int, form: Form, kept_bytes: int, spare: bool = False) -> None:
        self.spare = spare
        most = max(self._degrees)
        if form == "stored" or kernels.load() is None:
            raise ConfigError(
                f"node.tensor_parallel is {most}, which takes the kernels for CPUs: set "
                f"node.cpu_weights to packed or int8, and install a C compiler (apt install gcc)"
            )
        self.teams = {n: Lead(self, Share(0, n), self._place, threads) for n in self._degrees}
        arguments = ",".join(map(str, self._degrees)), threads, form, kept_bytes
        for _ in range(1, most):
            self._start(RANK, arguments, [self._place.descriptor])
        self._place.close()
        try:
            self.hear(most)
        except EngineFailed:
            if not self.spare:
                raise
            self.settle()

    def _release(self, rank: int) -> None:
        if self.spare:  # else the node ends, and so does whoever waits for this rank
            compiled = kernels.load()
            assert compiled is not None
            for degree, team in self.teams.items():
                if degree > rank:
                    compiled.lose(team.address)
            self.on_loss()

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(n for n in self._degrees if n <= self._left or not self.spare)

    def settle(self) -> None:
        while len(self._channels) >= (left := max(self.degrees, default=1)):
            self._end(left)
            if left > 1:  # the others may be at a step of such a team
                self.teams[left].tell(Meet(left))
                self.teams[left].meet()
        self.teams = {degree: self.teams[degree] for degree in self.degrees}

    # --- what they share ----------------------------------------------------

    def kv(self, device: torch.device) -> KvMemory:
        """All ranks read and write it."""
        return KvMemory(device, self._new_cache)

    def _new_cache(self, nbytes: int) -> torch.Tensor:
        """CapacityExceeded: there is none."""
        self._cache = self.share(nbytes, UseCache())
        return self._cache

    def drop_cache(self) -> None:
        self._cache = torch.empty(0)
        super().drop_cache()

    def use_adapter(self, name: ModelId, adapter: Adapter) -> Adapter:
        """It is kept without the bytes, unless another team may need them."""
        if adapter.others is None:
            return adapter
        order, shared = adapter.others
        named = msgspec.structs.replace(order, name=name)
        self.tell(named, shared.descriptor, degree=order.degree)
        return adapter if self.spare else replace(adapter, others=None)

    def place_of(self, kv: torch.Tensor) -> tuple[int, int]:
        """(where the layers begin in the memory for KV, how far each is from the next), in
        bytes."""
        return kv.data_ptr() - self._cache.data_ptr(), kv.stride(0) * kv.itemsize

    def share(self, nbytes: int, order: Order, *, degree: int = 0) -> torch.Tensor:
        """New memory, which goes with the order."""
        shared = Shared.new(nbytes)
        self.tell(order, shared.descriptor, degree=degree)
        return shared.bytes


class Lead(Team):
    """Rank 0's view of a team."""

    def __init__(self, ranks: Ranks, share: Share, place: Shared, threads: int) -> None:
        super().__init__(share, place, threads)
        self.ranks = ranks

    @property
    def lost(self) -> bool:
        return self.share.of not in self.ranks.degrees

    def tell(self, order: Order) -> None:
        self.ranks.tell(order, degree=self.share.of)

    def hear(self) -> list[LambdaScaleError]:
        return self.ranks.hear(self.share.of)

    def check(self) -> None:
        if self.lost:
            self.ranks.settle()
            raise self.ranks.failed()

    def check_divides(self, config: ModelConfig, dtype: torch.dtype) -> None:
        check_divides(self.share.of, config, dtype)

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
    ) -> "LeadDecoder":
        return LeadDecoder(
            model,
            manifest,
            self,
            config,
            dtype,
            device,
            longest,
            compiled=compiled,
            adapters=adapters,
            devices=devices,
        )

    def _grown(self, nbytes: int) -> torch.Tensor:
        degree = self.share.of
        return self.ranks.share(nbytes + nbytes // 2, UseRoom(degree), degree=degree)


class LeadDecoder(LedDecoder):
    def __init__(
        self,
        model: ModelId,
        manifest: Manifest,
        lead: Lead,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        longest: int,
        *,
        compiled: kernels.Kernels | None,
        adapters: Mapping[ModelId, Adapter],
        devices: int,
    ) -> None:
        """See `Leads.decoder`."""
        super().__init__(
            config, dtype, device, longest, compiled=compiled, adapters=adapters, team=lead
        )
        self._model, self._manifest = model, manifest
        self._lead = self._team = lead
        lead.tell(OpenModel(model, lead.share.of, manifest, longest, devices))

    def warm_up(self) -> Iterator[None]:
        """On a CPU there is nothing to do: see `TorchEngine.warm_up`."""
        return iter(())

    def make_adapter(self, manifest: Manifest, weights: memoryview) -> Adapter:
        share = self.share
        made = read_adapter(manifest, weights, self.config, self.device, compiled=True, share=share)
        order = UseAdapter(ModelId(""), share.of, manifest, self._manifest.config)
        shared = Shared.new(len(weights))
        shared.bytes.numpy().data[:] = weights
        return replace(made, others=(order, shared))

    def step(self, spans: Sequence[Span]) -> Step:
        plan = plan_step(spans, self.attention.group)
        step = self.planned(plan)
        self._team.tell(Plan(self._model, plan))
        return LeadStep(step, self._team)

    def head(self, unit: HeadUnit, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        x = self.states(unit, hidden, rows)
        given, logits = head_room(self._team, self.config, self.dtype, len(x))
        given.copy_(x)
        self._team.tell(Head(self._model, len(x)))
        write_share(unit, given, logits)
        self._team.meet()
        self._team.check()
        return logits.clone()


class LeadStep:
    """Implements services.node.engine.step.Step, with all ranks."""

    def __init__(self, step: KernelStep, lead: Lead) -> None:
        self._step = step
        self._lead = lead

    def run(
        self,
        block: int,
        blocks: Iterable[Sequence[LayerUnit]],
        hidden: torch.Tensor,
        kv: torch.Tensor,
        for_s: float = 0.0,
        bell: Bell | None = None,
    ) -> int:
        held, shared = tuple(blocks), self._step.hidden
        shared.copy_(hidden)
        self._lead.tell(Run(block, len(held), *self._lead.ranks.place_of(kv)))
        ran = self._step.run(block, held, shared, kv, for_s, bell)
        self._lead.check()
        hidden.copy_(shared)
        return ran
