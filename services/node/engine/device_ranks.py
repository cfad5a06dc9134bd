"""Rank 0's side of tensor parallelism over the GPUs of a node: rank r computes on the r-th of them.

As on a CPU (`ranks.py`), the node's process is rank 0 and tells the others (`device_rank.py`) what
to do. What differs: each rank has its slice of the weights (`sliced.py`) and the KV of its own
heads in the memory of its device, and within a step they sum and gather (`collective.py`). They
find a block in the node's arena, and copy their slices from there.

A rank that ends, or is out of step with the others, takes the node with it.
"""

import os
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from services.node.checkpoints.config import ModelConfig
from services.node.core.kv import pages_of
from services.node.engine import kernels
from services.node.engine.adapters import Adapter
from services.node.engine.attention import Span
from services.node.engine.base import Bell
from services.node.engine.collective import Group
from services.node.engine.decoder import Decoder
from services.node.engine.kv_memory import KvMemory
from services.node.engine.leading import EngineRanks, LedDecoder
from services.node.engine.linear import Form
from services.node.engine.orders import (
    CopyPages,
    DropCache,
    ErasePages,
    Head,
    Kv,
    OpenModel,
    Order,
    Rows,
    Run,
    TakeCache,
    WarmUp,
)
from services.node.engine.share import Share, check_heads
from services.node.engine.step import Step
from services.node.engine.warmup import warm_up
from services.node.engine.weights import HeadUnit, LayerUnit
from services.node.memory.page_lock import page_unlock, try_page_lock
from services.node.memory.views import Memory, address
from shared import telemetry
from shared.errors import LambdaScaleError, UnsupportedModel
from shared.ids import ModelId
from shared.layout import Manifest

DEVICE_RANK = "services.node.engine.device_rank"
TOLD_S = 1.0
"""How long it may take until the end of a process is known, after others have noticed it."""


class DeviceRanks(EngineRanks):
    def __init__(self, devices: Sequence[torch.device], arena: Memory) -> None:
        """`devices`: one for each rank, this process's first. `arena`: what blocks lie in."""
        super().__init__(len(devices), arena)
        self.kv_ranks = len(devices)
        self.teams: dict[int, DeviceTeam] = {}
        self._devices = tuple(devices)
        self._cache = torch.empty(0)
        self._locked = False
        """Whether the arena is page-locked for this rank's device."""

    def start(self, *, threads: int, form: Form, kept_bytes: int, spare: bool = False) -> None:
        assert not spare
        meeting = os.memfd_create("lambdascale-meeting", os.MFD_CLOEXEC)
        try:
            self._begin(threads, meeting)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(meeting)

    def _begin(self, threads: int, meeting: int) -> None:
        of = len(self._devices)
        for _ in range(1, of):
            arguments = ",".join(map(str, self._devices)), max(1, threads // of)
            self._start(DEVICE_RANK, arguments, [meeting])
        self._lock_arena()
        self.hear()
        try:
            group = Group(Share(0, of), self._devices, meeting)
        except RuntimeError as error:
            if self.loss:
                raise self.failed() from error
            raise
        team = DeviceTeam(self, group, threads)
        self.teams = {of: team}
        with team.together():
            team.group.meet()

    def _lock_arena(self) -> None:
        device, memory = self._devices[0], self._arena.view
        if device.type == "cuda":
            why = try_page_lock(device, address(memory), len(memory))
            self._locked = not why
            if why:
                telemetry.logger("ranks").warning("blocks go to the devices slower", why=why)

    @property
    def staging(self) -> str:
        return f"slices of the {'pinned ' if self._locked else ''}host arena"

    def _release(self, rank: int) -> None:
        for process in tuple(self._processes):
            process.kill()
        for team in tuple(self.teams.values()):
            team.group.abort()

    @property
    def degrees(self) -> tuple[int, ...]:
        return (len(self._devices),)

    def check_results(self) -> None:
        """A group that is aborted ends kernels before they are done, and says nothing."""
        if self.loss:
            raise self.failed()

    def settle(self) -> None:
        """There is only one team, and without it no node."""

    def close(self) -> None:
        super().close()
        if self._locked:
            page_unlock(self._devices[0], address(self._arena.view))
            self._locked = False
        for team in self.teams.values():
            team.group.abort()

    def kv(self, device: torch.device) -> KvMemory:
        return DividedKv(device, self)

    def new_cache(self, own: KvMemory, nbytes: int) -> torch.Tensor:
        """Every rank takes as much. Returns this one's."""
        self.tell(TakeCache(nbytes))
        try:
            self._cache = KvMemory.allocate(own, nbytes)
        finally:
            errors = self.hear()
        if errors:
            self.drop_cache()
            raise errors[0]
        return self._cache

    def drop_cache(self) -> None:
        self._cache = torch.empty(0)
        self.tell(DropCache())

    def place_of(self, kv: torch.Tensor) -> tuple[int, int]:
        """(where the layers begin in the memory for KV, how far each is from the next), in
        bytes."""
        return kv.data_ptr() - self._cache.data_ptr(), kv.stride(0) * kv.itemsize


class DividedKv(KvMemory):
    """Each rank has the KV of its own heads, at the same places."""

    def __init__(self, device: torch.device, ranks: DeviceRanks) -> None:
        super().__init__(device)
        self._ranks = ranks

    def allocate(self, nbytes: int) -> torch.Tensor:
        return self._ranks.new_cache(self, nbytes)

    def erase(self, model: ModelId, kv: torch.Tensor, pages: Sequence[int]) -> None:
        super().erase(model, kv, pages)
        self._ranks.tell(ErasePages(self._named(model, kv), array("i", pages)))

    def copy(
        self, model: ModelId, kv: torch.Tensor, source: Sequence[int], target: Sequence[int]
    ) -> None:
        super().copy(model, kv, source, target)
        self._ranks.tell(CopyPages(self._named(model, kv), array("i", source), array("i", target)))

    def _named(self, model: ModelId, kv: torch.Tensor) -> Kv:
        return Kv(model, len(kv), *self._ranks.place_of(kv))


class DeviceTeam:
    """Implements services.node.engine.leading.Leads."""

    lost = False

    def __init__(self, ranks: DeviceRanks, group: Group, threads: int) -> None:
        self.ranks, self.group = ranks, group
        self.share = group.share
        self._threads = threads

    def threads(self, devices: int = 1) -> int:
        return self._threads

    def tell(self, order: Order) -> None:
        self.ranks.tell(order)

    def hear(self) -> list[LambdaScaleError]:
        return self.ranks.hear()

    def check(self) -> None:
        self.ranks.check_results()

    def check_divides(self, config: ModelConfig, dtype: torch.dtype) -> None:
        check_heads(self.share.of, config)

    @contextmanager
    def together(self) -> Iterator[None]:
        """In the context all ranks do the same. EngineFailed: one of them did not, so that the
        others wait for it, and all of them are given up."""
        try:
            yield
        except Exception as error:
            # If a rank has ended, that is the reason to give, and it is known in a moment.
            until = time.monotonic() + TOLD_S
            while not self.ranks.loss and time.monotonic() < until:
                time.sleep(0.01)
            self.ranks.give_up(f"its ranks are out of step: {error}")
            raise self.ranks.failed() from error
        self.check()

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
    ) -> "DeviceLeadDecoder":
        return DeviceLeadDecoder(model, manifest, self, config, dtype, device, longest, fused=fused)


class DeviceLeadDecoder(LedDecoder):
    def __init__(
        self,
        model: ModelId,
        manifest: Manifest,
        team: DeviceTeam,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        longest: int,
        *,
        fused: bool,
    ) -> None:
        super().__init__(config, dtype, device, longest, fused=fused, group=team.group)
        self._alone = Decoder(config, dtype, device, longest, fused=fused, group=team.group)
        """The same, but tells nobody."""
        self._model, self._manifest = model, manifest
        self._lead = self._team = team
        team.tell(OpenModel(model, team.share.of, manifest, longest, 1))

    def make_adapter(self, manifest: Manifest, weights: memoryview) -> Adapter:
        raise UnsupportedModel(
            f"node.tensor_parallel is {self.share.of}, and models that several GPUs run take no "
            f"adapters: serve adapters on nodes where it is 1"
        )

    def warm_up(self) -> Iterator[None]:
        pieces = warm_up(self._alone)
        while True:
            self._team.tell(WarmUp(self._model))
            with self._team.together():
                try:
                    next(pieces)
                except StopIteration:
                    return
            yield

    def step(self, spans: Sequence[Span]) -> Step:
        step = self._alone.step(spans)
        pages = [sequence.pages[: pages_of(first + count)] for sequence, first, count in spans]
        rows = Rows(
            self._model,
            firsts=array("i", [first for _, first, _ in spans]),
            counts=array("i", [count for _, _, count in spans]),
            pages_each=array("i", map(len, pages)),
            pages=array("i", [page for each in pages for page in each]),
        )
        self._team.tell(rows)
        return DeviceLeadStep(step, self._team)

    def head(self, unit: HeadUnit, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        x = self.states(unit, hidden, rows).contiguous()
        self._team.tell(Head(self._model, len(x)))
        with self._team.together():
            self._team.group.hand_on(x)
            return unit.head(x, torch.float32)


class DeviceLeadStep:
    """Implements services.node.engine.step.Step, with all ranks."""

    def __init__(self, step: Step, team: DeviceTeam) -> None:
        self._step = step
        self._team = team
        self._handed_on = False
        """Whether the other ranks have the hidden states."""

    def run(
        self,
        block: int,
        blocks: Iterable[Sequence[LayerUnit]],
        hidden: torch.Tensor,
        kv: torch.Tensor,
        for_s: float = 0.0,
        bell: Bell | None = None,
    ) -> int:
        own = next(iter(blocks))
        self._team.tell(Run(block, 1, *self._team.ranks.place_of(kv)))
        with self._team.together():
            if not self._handed_on:
                self._team.group.hand_on(hidden)
                self._handed_on = True
            return self._step.run(block, (own,), hidden, kv)
