"""An engine that takes the time of a real one, and draws right tokens without computing them.

Times are rooflines, block by block. A run of layers over n positions reads its weights once or
computes n times, whichever takes longer; so does attention, with the keys and values of the
sequences. Tokens are a hash of the request and the index, so that every path gives the same tokens
and every reader can check them. This engine refuses what the torch engine refuses: blocks that are
not attached, sequences that do not continue where they ended, more KV than there is. The KV cache
is the torch engine's, in memory that is not there: models share it as they do on a real node. No
prompt begins like another, so nothing is cached.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import xxhash

from services.node.checkpoints.packing import digest
from services.node.core.kv import Need, movable
from services.node.core.kv_host import NoHostTier
from services.node.engine.base import (
    Adapter,
    Bell,
    Context,
    MakeAdapter,
    PartResult,
    Row,
    Rules,
    SequenceKey,
    StagePart,
    Weights,
    run_end,
)
from services.node.engine.budget import KvBudget
from services.node.engine.kv import KvCache
from services.node.engine.kv_loan import KvLoan
from services.node.engine.kv_sequence import KvSequence
from services.node.execution.activations import DTYPES
from shared.errors import BadInput, CapacityExceeded, Conflict, NotFound, UnsupportedModel
from shared.ids import NO_ADAPTER, ModelId
from shared.layout import Manifest
from shared.parts import Part
from shared.step_costs import StepCosts
from simulation.hardware import Hardware
from simulation.models import Model

_ZEROS = memoryview(mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
"""All hidden states are views of this memory. Nothing reads or writes it, so it only costs address
space."""


def token_of(request: str, index: int, vocab: int) -> int:
    """The token of a request with this index, in [0, vocab)."""
    return xxhash.xxh3_64_intdigest(request.encode(), seed=index) % vocab


class Costs:
    """Seconds that the parts of a model take on one kind of accelerator."""

    def __init__(self, model: Model, hardware: Hardware) -> None:
        read, compute = hardware.read_bytes_per_s, hardware.compute_flops
        self._read_layer = model.layer_parameters * model.itemsize / read
        self._run_layer = 2 * model.layer_parameters / compute
        self._read_head = model.head_parameters * model.itemsize / read
        self._run_head = 2 * model.head_parameters / compute
        self._read_kv = model.kv_bytes / model.layers / read
        self._run_pair = 4 * model.heads * model.head_dim / compute
        self._layer_overhead = hardware.layer_overhead_s
        self.sweep_overhead = hardware.sweep_overhead_s

    def layers(self, layers: int, positions: int, context: int, pairs: float) -> float:
        """`context`: positions of KV that are read. `pairs`: (query, key) pairs of attention."""
        weights = max(self._read_layer, positions * self._run_layer)
        attention = max(context * self._read_kv, pairs * self._run_pair)
        return layers * (weights + attention + self._layer_overhead)

    def head(self, draws: int) -> float:
        return max(self._read_head, draws * self._run_head) if draws else 0.0


@dataclass(slots=True)
class _Open:
    """An open model."""

    model: Model
    manifest: Manifest
    costs: Costs
    layers: tuple[int, ...]
    """Number of layers before each block, and then of all blocks."""
    hidden: torch.Tensor
    """[very many, hidden size]"""
    held: set[int] = field(default_factory=set)
    stages: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of live sequences by their (start, stop)."""


@dataclass(slots=True)
class _Rider:
    part: StagePart
    sequences: list[KvSequence]
    positions: int
    context: int
    pairs: float
    draws: int


class ModelledEngine(NoHostTier):
    """Implements services.node.engine.base.Engine."""

    def __init__(
        self,
        hardware: Hardware,
        kv: KvBudget | int,
        aboard: Callable[[Sequence[Row]], None] = lambda rows: None,
        *,
        by_block: bool = False,
    ) -> None:
        """`kv`: the memory for KV caches, or directly a number of positions, for one model.
        `aboard` is told the rows of each part that is run. `by_block`: sweeps that prefill stop
        after every block, as real ones do when somebody asks for KV meanwhile."""
        self.by_block = by_block
        self._hardware = hardware
        self._aboard = aboard
        self._kv = KvCache(kv, torch.device("meta"))
        self._models: dict[ModelId, _Open] = {}

    def open_model(
        self, model_id: ModelId, manifest: Manifest, part: Part | None = None, devices: int = 1
    ) -> None:
        if model_id in self._models:
            raise Conflict(f"model {model_id} is open already")
        model = Model.of(manifest)
        layers = [0]
        for block in manifest.blocks:
            layers.append(layers[-1] + model.block_layers(block))
        dtype = DTYPES[model.dtype]
        weight = model.nbytes
        held = range(layers[part.start], layers[part.stop]) if part else range(0)
        own = held or range(model.layers)
        self._kv.open_model(model_id, own, model.kv_heads, model.head_dim, dtype, weight=weight)
        hidden = torch.frombuffer(_ZEROS, dtype=dtype)
        rows = hidden.numel() // model.hidden
        self._models[model_id] = _Open(
            model,
            manifest,
            Costs(model, self._hardware),
            tuple(layers),
            hidden[: rows * model.hidden].view(rows, model.hidden),
        )

    @property
    def costs(self) -> tuple[StepCosts, ...]:
        return ()

    def division(self, model_id: ModelId) -> str:
        return ""

    def regroup(self) -> Iterator[None]:
        return iter(())

    def warm_up(self, model_id: ModelId) -> Iterator[None]:
        return iter(())

    def attach(self, model_id: ModelId, block: int, weights: Weights) -> None:
        """AssertionError if the bytes are not the manifest's, because whoever attaches them must
        have verified them."""
        assert isinstance(weights, memoryview)
        model = self.open(model_id)
        manifest = model.manifest
        if not 0 <= block < manifest.n_blocks:
            raise NotFound(f"model {model_id} has no block {block}")
        for chunk, expected in enumerate(manifest.blocks[block].digests):
            offset, length = manifest.chunk_range(block, chunk)
            if digest(weights[offset : offset + length]) != expected:
                raise AssertionError(f"block {block} of model {model_id} was not verified")
        model.held.add(block)

    def make_adapter(self, manifest: Manifest) -> Callable[[], MakeAdapter]:
        raise UnsupportedModel("there are no adapters here")

    def use_adapter(self, name: ModelId, adapter: Adapter) -> None:
        """There is none."""

    def settle_adapter(self, adapter: Adapter) -> None:
        """There is none."""

    def drop_adapter(self, name: ModelId) -> None:
        """There is none."""

    def use_tokenizer(self, model_id: ModelId, tokenizer_json: bytes) -> None:
        """Does nothing, because tokens are no text."""

    def make_rules(self, model_id: ModelId, context: Context) -> Callable[[], Rules]:
        """Does nothing, because tokens are no text."""
        return lambda: None

    def use_rules(self, model_id: ModelId, sequence: SequenceKey, rules: Rules) -> None:
        """Does nothing."""

    def held(self, model_id: ModelId) -> frozenset[int]:
        model = self._models.get(model_id)
        return frozenset(model.held) if model else frozenset()

    def prepare(self, model_id: ModelId, manifest: Manifest, block: int, weights: Weights) -> bool:
        return False  # nothing is made of weights

    def close_model(self, model_id: ModelId, *, asleep: bool = False) -> None:
        self._kv.close_model(model_id)
        self._models.pop(model_id, None)

    def begin(self, model_id: ModelId) -> "ModelledSweep":
        return ModelledSweep(self, model_id)

    def free(self, sequences: tuple[SequenceKey, ...]) -> None:
        for key in sequences:
            sequence = self._kv.find(key)
            if sequence is None:
                continue
            self._kv.free((key,))
            _count(self._models[sequence.model_id].stages, sequence.blocks, -1)

    def adopt(
        self,
        model_id: ModelId,
        key: SequenceKey,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> int:
        return 0

    def receive(
        self,
        model_id: ModelId,
        key: SequenceKey,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> int:
        model = self.open(model_id)
        stage = 0, model.manifest.n_blocks
        sequence = self._kv.start(model_id, stage, range(model.layers[-1]), key, limit)
        try:
            self._kv.extend(sequence, movable(len(tokens)))
        except CapacityExceeded:
            self._kv.free((key,))
            raise
        model.stages[stage] = model.stages.get(stage, 0) + 1
        return 0

    def receive_more(self, key: SequenceKey, end: int) -> None:
        sequence = self._kv.find(key)
        if sequence is not None and end > sequence.length:
            self._kv.extend(sequence, end - sequence.length)

    def received(self, key: SequenceKey, tokens: tuple[int, ...]) -> None:
        """No prefixes are cached."""
        if sequence := self._kv.find(key):
            self._kv.cut(sequence, len(tokens))

    def position_bytes(self, model_id: ModelId) -> int:
        return self._kv.position_bytes(model_id)

    def lend(self, key: SequenceKey, blocks: tuple[int, int], first: int, stop: int) -> KvLoan:
        sequence = self._kv.find(key)
        if sequence is None:
            raise NotFound(f"there is no KV of sequence {key}")
        layers = self.open(sequence.model_id).layers
        return self._kv.lend(key, range(layers[blocks[0]], layers[blocks[1]]), first, stop)

    def give_back(self, loan: KvLoan) -> None:
        loan.end()
        self._kv.give_back(loan)

    @property
    def kv_used(self) -> int:
        return self._kv.used

    @property
    def kv_capacity(self) -> int:
        return self._kv.capacity

    def kv_share(self, model_id: ModelId) -> int:
        return self._kv.share(model_id)

    def kv_parts(self, model_id: ModelId, start: int, stop: int) -> int:
        model = self._models.get(model_id)
        if model is None or stop > model.manifest.n_blocks:
            return 1
        return self._kv.parts(model_id, range(model.layers[start], model.layers[stop]))

    def kv_free(self, model_id: ModelId, promised: Mapping[Need, int]) -> int:
        return self._kv.free_for(model_id, promised)

    def make_room(self, wanted: Mapping[ModelId, int]) -> None:
        self._kv.make_room(wanted)

    def keeps(self, model_id: ModelId, start: int, stop: int) -> bool:
        model = self._models.get(model_id)
        if model is None or stop > model.manifest.n_blocks:
            return True
        return model.layers[stop] > model.layers[start]

    # --- for sweeps ---------------------------------------------------------

    @property
    def changes(self) -> int:
        """Grows when sequences end."""
        return self._kv.changes

    def open(self, model_id: ModelId) -> _Open:
        if model_id not in self._models:
            raise NotFound(f"model {model_id} is not open here")
        return self._models[model_id]

    def admit(self, model_id: ModelId, model: _Open, part: StagePart) -> list[KvSequence]:
        """The rows' sequences, new or known, each with its row's positions. An error changes
        nothing."""
        stage = part.start, part.stop
        layers = range(model.layers[part.start], model.layers[part.stop])
        found, wanted = [], []
        for row in part.rows:
            sequence, end = self._kv.find(row.sequence), row.position + row.count
            if sequence and sequence.runs_on(row, part.start):
                so_far = range(model.layers[sequence.blocks[0]], layers.stop) if layers else layers
                wanted.append(self._kv.missing(sequence, model_id, so_far, end))
                found.append(sequence)
                continue
            wanted.append(self._kv.missing(sequence, model_id, layers, end))
            if sequence is None and row.position == 0:
                sequence = KvSequence(row.sequence, model_id, stage, layers, row.limit)
            found.append(self._checked(row, sequence, model_id, stage))
        self._kv.require(model_id, wanted)
        self._aboard(part.rows)
        for index, row in enumerate(part.rows):
            if found[index].runs_on(row, part.start):
                self._run_on(found[index], model, part.stop)
                continue
            if row.position == 0:
                found[index] = self._kv.start(model_id, stage, layers, row.sequence, row.limit)
                model.stages[stage] = model.stages.get(stage, 0) + 1
            self._kv.extend(found[index], row.count)
        return found

    def _run_on(self, sequence: KvSequence, model: _Open, stop: int) -> None:
        before, after = sequence.blocks, (sequence.blocks[0], stop)
        so_far = range(model.layers[after[0]], model.layers[stop])
        self._kv.run_on(sequence, stop, so_far)
        _count(model.stages, before, -1)
        _count(model.stages, after, 1)

    def _checked(
        self, row: Row, sequence: KvSequence | None, model_id: ModelId, stage: tuple[int, int]
    ) -> KvSequence:
        if sequence is None:
            raise NotFound(f"sequence {row.sequence} is not known here; it starts at position 0")
        if (sequence.model_id, sequence.blocks) != (model_id, stage):
            raise Conflict(f"sequence {row.sequence} was begun by another stage here")
        if row.position != sequence.length:
            raise Conflict(
                f"sequence {row.sequence} has {sequence.length} positions here; a row cannot "
                f"start at {row.position}"
            )
        if row.count < 1 or row.position + row.count > sequence.limit:
            raise BadInput(
                f"sequence {row.sequence}: {row.count} positions from {row.position} on, "
                f"of {sequence.limit}"
            )
        return sequence


class ModelledSweep:
    """Implements services.node.engine.base.Sweep.

    It goes at once from each block at which somebody may join or leave to the next such block.
    These are the blocks at which parts aboard, or sequences that live here, start and stop; or all,
    see `ModelledEngine`.
    """

    def __init__(self, engine: ModelledEngine, model_id: ModelId) -> None:
        self._engine = engine
        self._model_id = model_id
        self._at = 0
        self._due_s = 0.0
        self._joined = 0
        self._waiting: dict[int, _Rider] = {}
        self._aboard: dict[int, _Rider] = {}
        self._changes = engine.changes

    @property
    def at(self) -> int:
        return self._at

    @property
    def due_s(self) -> float:
        return self._due_s

    def join(self, part: StagePart) -> int:
        model = self._engine.open(self._model_id)
        n_blocks = model.manifest.n_blocks
        if not part.rows or not self._at <= part.start < part.stop <= n_blocks:
            raise BadInput(
                f"{len(part.rows)} rows for blocks {part.start}-{part.stop - 1} of {n_blocks} in a "
                f"sweep at block {self._at}"
            )
        if len(model.held) < n_blocks:
            needed = range(part.start, part.start + 1 if part.waits else part.stop)
            missing = [b for b in needed if b not in model.held]
            if missing:
                raise NotFound(f"blocks {missing} of model {self._model_id} are not held here")
        positions, context, draws, pairs = 0, 0, 0, 0.0
        for row in part.rows:
            positions += row.count
            context += row.position + row.count
            pairs += row.count * (row.position + (row.count + 1) / 2)
            draws += row.draw is not None
        _check_input(part, positions, model.model)
        sequences = self._engine.admit(self._model_id, model, part)
        self._joined += 1
        self._waiting[self._joined] = _Rider(part, sequences, positions, context, pairs, draws)
        return self._joined

    def advance(self, for_s: float = 0.0, bell: Bell | None = None) -> dict[int, PartResult]:
        left: dict[int, PartResult] = {}
        if self._changes != self._engine.changes:
            left = self._drop_freed()
        if not self._aboard and not self._waiting:
            return left
        model = self._engine.open(self._model_id)
        if not self._aboard:
            self._at = min(rider.part.start for rider in self._waiting.values())
        for number in [n for n, r in self._waiting.items() if r.part.start == self._at]:
            self._aboard[number] = self._waiting.pop(number)
        stop = run_end(model.held, self._at, self._next_stop(model))
        if stop == self._at:
            return left
        self._due_s += self._cost(model, stop)
        self._at = stop
        for number in [n for n, r in self._aboard.items() if r.part.stop == stop]:
            left[number] = _result(self._aboard.pop(number), model)
        return left

    def _next_stop(self, model: _Open) -> int:
        """The next block at which somebody joins or leaves, or a part of a live sequence might."""
        riders = self._aboard.values()
        if self._engine.by_block and any(r.positions > len(r.part.rows) for r in riders):
            return self._at + 1
        stop = min(rider.part.stop for rider in riders)
        for start, _ in model.stages:
            if self._at < start < stop:
                stop = start
        return stop

    def _cost(self, model: _Open, stop: int) -> float:
        """Seconds that the blocks from here to `stop` take for everybody aboard."""
        aboard = self._aboard.values()
        layers = model.layers[stop] - model.layers[self._at]
        cost = model.costs.layers(
            layers,
            sum(rider.positions for rider in aboard),
            sum(rider.context for rider in aboard),
            sum(rider.pairs for rider in aboard),
        )
        if stop == model.manifest.n_blocks:
            cost += model.costs.head(sum(rider.draws for rider in aboard))
        return cost if self._due_s else cost + model.costs.sweep_overhead

    def _drop_freed(self) -> dict[int, PartResult]:
        """Takes out rows of freed sequences. Parts without any rows left leave."""
        self._changes = self._engine.changes
        left: dict[int, PartResult] = {}
        for riders in (self._waiting, self._aboard):
            for number, rider in list(riders.items()):
                if all(sequence.live for sequence in rider.sequences):
                    continue
                kept = _without_freed(rider)
                if kept is None:
                    left[number] = PartResult((), None, ())
                    del riders[number]
                else:
                    riders[number] = kept
        return left


def _count(stages: dict[tuple[int, int], int], stage: tuple[int, int], more: int) -> None:
    stages[stage] = stages.get(stage, 0) + more
    if not stages[stage]:
        del stages[stage]


def _check_input(part: StagePart, positions: int, model: Model) -> None:
    if part.start == 0:
        given = sum(len(row.tokens) for row in part.rows)
        if given != positions:
            raise BadInput(f"{given} tokens for {positions} positions")
        return
    expected = positions, model.hidden
    if part.hidden is None or tuple(part.hidden.shape) != expected:
        got = None if part.hidden is None else tuple(part.hidden.shape)
        raise BadInput(f"hidden states {got} for blocks from {part.start} on; expected {expected}")


def _without_freed(rider: _Rider) -> _Rider | None:
    kept = [i for i, sequence in enumerate(rider.sequences) if sequence.live]
    if not kept:
        return None
    rows = tuple(rider.part.rows[i] for i in kept)
    return _Rider(
        StagePart(rider.part.start, rider.part.stop, rows, waits=rider.part.waits),
        [rider.sequences[i] for i in kept],
        sum(row.count for row in rows),
        sum(row.position + row.count for row in rows),
        sum(row.count * (row.position + (row.count + 1) / 2) for row in rows),
        sum(row.draw is not None for row in rows),
    )


def _result(rider: _Rider, model: _Open) -> PartResult:
    part = rider.part
    if part.stop < model.manifest.n_blocks:
        hidden = model.hidden[: rider.positions]
        return PartResult(part.rows, hidden, ((),) * len(part.rows))
    vocab = model.model.vocab
    sampled = tuple(
        (token_of(row.sequence.rpartition("#")[0], row.draw.index, vocab),) if row.draw else ()
        for row in part.rows
    )
    return PartResult(part.rows, None, sampled)
