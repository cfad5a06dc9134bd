"""Rank 0's side of tensor parallelism: it starts the other ranks, and has them run with it.

The node's process is rank 0. It alone has the scheduler, the sequences with their pages of KV, and
the sampling. The others (`rank.py`) do what it says in the order in which it says it, and tell it
only when a block is attached. Within a step nobody says anything: all ranks run the same layers in
the kernels, and meet in shared memory (`team.c`).

A rank that ends takes the node with it, since its share of the weights is gone. The ranks end with
the thread that made them.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import torch

from services.node.checkpoints.config import ModelConfig
from services.node.engine import kernels
from services.node.engine.adapters import Adapter, read_adapter
from services.node.engine.attention import Span
from services.node.engine.base import Bell
from services.node.engine.decoder import Decoder
from services.node.engine.kernel_step import KernelStep
from services.node.engine.linear import Form
from services.node.engine.share import Share
from services.node.engine.step import Step, plan_step
from services.node.engine.team import (
    AttachBlock,
    Channel,
    CloseModel,
    Done,
    Head,
    OpenModel,
    Order,
    Plan,
    Run,
    Shared,
    Team,
    UseAdapter,
    UseCache,
    UseRoom,
    head_room,
    prepare,
    write_share,
)
from services.node.engine.weights import HeadUnit, LayerUnit
from services.node.memory.views import Memory, find
from shared.errors import (
    BadInput,
    ConfigError,
    EngineFailed,
    LambdaScaleError,
    from_code,
)
from shared.ids import ModelId
from shared.layout import Manifest

PLACE_BYTES = 4096


class Ranks(Team):
    def __init__(self, degree: int, arena: Memory) -> None:
        """`arena`: what blocks lie in."""
        place = Shared.new(PLACE_BYTES)
        prepare(place, degree)
        super().__init__(Share(0, degree), place)
        self._arena = arena
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._closing = False
        self._cache = torch.empty(0)
        self.broken = ""
        """Why nothing can be run any more; empty: it can. Any thread may read it."""

    def start(self, *, threads: int, form: Form, kept_bytes: int) -> None:
        """Starts the other ranks' processes, and waits until they are there. They end with this
        thread. `threads`: of each rank. `form` and `kept_bytes`: see TorchEngine. ConfigError:
        there are no kernels for such weights."""
        degree = self.share.of
        if form == "stored" or kernels.load() is None:
            raise ConfigError(
                f"node.tensor_parallel is {degree}, which takes the kernels for CPUs: set "
                f"node.cpu_weights to packed or int8, and install a C compiler (apt install gcc)"
            )
        for rank in range(1, degree):
            self._start(rank, threads, form, kept_bytes)
        self._place.close()
        self.hear()

    def _start(self, rank: int, threads: int, form: Form, kept_bytes: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            inherited = theirs.fileno(), self._place.descriptor, self._arena.descriptor
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "services.node.engine.rank"),
                    *map(str, (rank, self.share.of, threads, form, kept_bytes, os.getpid())),
                    *map(str, inherited),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
            )
        self._processes.append(process)
        self._channels.append(Channel(ours, answers=True))
        name = f"rank-{rank}"
        threading.Thread(target=self._watch, args=(rank, process), name=name, daemon=True).start()

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        if not self._closing:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self.broken = f"its rank {rank} (process {process.pid}) ended with {how}"

    @property
    def processes(self) -> tuple[int, ...]:
        """Their ids, without this one's."""
        return tuple(process.pid for process in self._processes)

    def close(self) -> None:
        self._closing = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for channel in self._channels:
            channel.close()

    # --- orders -------------------------------------------------------------

    def tell(self, order: Order, descriptor: int | None = None) -> None:
        try:
            for channel in self._channels:
                channel.send(order, descriptor)
        except OSError as error:
            raise self._lost(error) from error

    def offset(self, weights: object) -> int:
        """Where in the arena a block lies. BadInput: it does not."""
        found = find([self._arena], weights) if isinstance(weights, memoryview) else None
        if found is None:
            raise BadInput("ranks take only blocks that lie in the arena")
        return found[1]

    def cache(self, nbytes: int) -> torch.Tensor:
        """New memory for KV, for all ranks. CapacityExceeded: there is none."""
        self._cache = self._share(nbytes, UseCache())
        return self._cache

    def use_adapter(self, name: ModelId, adapter: Adapter) -> Adapter:
        """All ranks take it. Returns it without the bytes."""
        order, shared = adapter.others
        self.tell(msgspec.structs.replace(order, name=name), shared.descriptor)
        return replace(adapter, others=None)

    def place_of(self, kv: torch.Tensor) -> tuple[int, int]:
        """(where the layers begin in the memory for KV, how far each is from the next), in
        bytes."""
        return kv.data_ptr() - self._cache.data_ptr(), kv.stride(0) * kv.itemsize

    def _grown(self, nbytes: int) -> torch.Tensor:
        return self._share(nbytes + nbytes // 2, UseRoom())

    def _share(self, nbytes: int, order: Order) -> torch.Tensor:
        shared = Shared.new(nbytes)
        self.tell(order, shared.descriptor)
        return shared.bytes

    def hear(self) -> list[LambdaScaleError]:
        """Waits for an answer from each."""
        errors: list[LambdaScaleError] = []
        for channel in self._channels:
            try:
                done, _ = channel.receive()
            except (OSError, EOFError) as error:
                raise self._lost(error) from error
            assert isinstance(done, Done)
            if done.code:
                errors.append(from_code(done.code, done.text))
        return errors

    def _lost(self, error: Exception) -> EngineFailed:
        return EngineFailed(f"a rank has ended: {self.broken or repr(error)}")


class LeadDecoder(Decoder):
    """A decoder whose other shares are at other ranks."""

    def __init__(
        self,
        model: ModelId,
        manifest: Manifest,
        ranks: Ranks,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        longest: int,
        *,
        fused: bool,
        compiled: kernels.Kernels | None,
        adapters: Mapping[ModelId, Adapter],
    ) -> None:
        """`check_divides` has seen the model."""
        super().__init__(
            config,
            dtype,
            device,
            longest,
            fused=fused,
            compiled=compiled,
            adapters=adapters,
            team=ranks,
        )
        self._model, self._manifest = model, manifest
        self._ranks = ranks
        ranks.tell(OpenModel(model, manifest, longest))

    @contextmanager
    def attaching(self, block: int, weights: object) -> Iterator[None]:
        """All ranks attach the block, this one in the context. CapacityExceeded: one has no memory
        left."""
        self._ranks.tell(AttachBlock(self._model, block, self._ranks.offset(weights)))
        try:
            yield
        finally:
            errors = self._ranks.hear()
        if errors:
            raise errors[0]

    def make_adapter(self, manifest: Manifest, weights: memoryview) -> Adapter:
        """This rank's share, with the bytes for the others."""
        made = read_adapter(
            manifest, weights, self.config, self.device, compiled=True, share=self._ranks.share
        )
        order = UseAdapter(ModelId(""), manifest, self._manifest.config)
        shared = Shared.new(len(weights))
        shared.bytes.numpy().data[:] = weights
        return replace(made, others=(order, shared))

    def close(self, *, asleep: bool) -> None:
        self._ranks.tell(CloseModel(self._model, asleep))

    def step(self, spans: Sequence[Span]) -> Step:
        plan = plan_step(spans, self.attention.group)
        step = self.planned(plan)
        self._ranks.tell(Plan(self._model, plan))
        return LeadStep(step, self._ranks)

    def head(self, unit: HeadUnit, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        x = self.states(unit, hidden, rows)
        given, logits = head_room(self._ranks, self.config, self.dtype, len(x))
        given.copy_(x)
        self._ranks.tell(Head(self._model, len(x)))
        write_share(unit, given, logits)
        self._ranks.meet()
        return logits.clone()


class LeadStep:
    """Implements services.node.engine.step.Step, with all ranks."""

    def __init__(self, step: KernelStep, ranks: Ranks) -> None:
        self._step = step
        self._ranks = ranks

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
        self._ranks.tell(Run(block, len(held), *self._ranks.place_of(kv)))
        ran = self._step.run(block, held, shared, kv, for_s, bell)
        hidden.copy_(shared)
        return ran
