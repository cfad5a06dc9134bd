"""The torch engine: models' blocks as they come, batches over any run of them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from services.node.engine.attention import Span, pad_rows
from services.node.engine.base import Row, SequenceKey, StageBatch, StageResult
from services.node.engine.kv import KvCache, Reservation
from services.node.engine.llama import LayerStep, Llama
from services.node.engine.sampling import sample
from services.node.engine.weights import (
    BlockTensors,
    EmbeddingUnit,
    HeadUnit,
    LayerUnit,
    Unit,
    check_manifest,
)
from services.node.model.config import ModelConfig
from shared.errors import BadInput, ConfigError, Conflict, NotFound
from shared.ids import ModelId
from shared.layout import Manifest


@dataclass(frozen=True, slots=True)
class _Model:
    manifest: Manifest
    llama: Llama
    blocks: dict[int, tuple[Unit, ...]] = field(default_factory=dict)

    def units(self, start: int, stop: int) -> list[Unit]:
        return [unit for block in range(start, stop) for unit in self.blocks[block]]

    def layers(self, start: int, stop: int) -> range:
        """Decoder layers of blocks start <= block < stop, from 0."""
        blocks, n_layers = self.manifest.blocks, self.llama.config.n_layers
        return range(
            max(blocks[start].first_unit - 1, 0), min(blocks[stop - 1].last_unit, n_layers)
        )


class TorchEngine:
    """Implements services.node.engine.base.Engine.

    On a CPU a sequence's logits are, bit for bit, the same in every batch, split of the model and
    way its KV came to be (attention.py says how), on the same kind of CPU.
    On `cuda` blocks are copied to the device when they are attached. That path is written with
    device-independent calls only, but it has not been run on a GPU, and the bit-for-bit promise
    is not made for it.
    """

    def __init__(self, device: str, kv_tokens: int, threads: int) -> None:
        """`threads` 0: torch's default. Make it on the thread that calls it."""
        self._device = _device(device)
        self._kv = KvCache(kv_tokens, self._device)
        self._models: dict[ModelId, _Model] = {}
        if threads:
            torch.set_num_threads(threads)

    def open_model(self, model_id: ModelId, manifest: Manifest) -> None:
        if model_id in self._models:
            raise Conflict(f"model {model_id} is open already")
        config = ModelConfig.from_hf(manifest.config)
        dtype = check_manifest(manifest, config)
        llama = Llama(config, dtype, self._device, self._kv.capacity)
        attention = llama.attention
        self._kv.open_model(
            model_id, config.n_layers, config.n_kv_heads, config.head_dim, attention.dtype
        )
        self._models[model_id] = _Model(manifest, llama)

    def attach(self, model_id: ModelId, block: int, buffer: memoryview) -> None:
        model = self._model(model_id)
        if not 0 <= block < model.manifest.n_blocks:
            raise NotFound(f"model {model_id} has no block {block}")
        spec, config = model.manifest.blocks[block], model.llama.config
        tensors = BlockTensors(spec, buffer, self._device)
        units = range(spec.first_unit, spec.last_unit + 1)
        model.blocks[block] = tuple(tensors.unit(config, unit) for unit in units)

    def held(self, model_id: ModelId) -> frozenset[int]:
        model = self._models.get(model_id)
        return frozenset(model.blocks) if model else frozenset()

    def close_model(self, model_id: ModelId) -> None:
        self._kv.close_model(model_id)
        self._models.pop(model_id, None)

    def free(self, sequences: tuple[SequenceKey, ...]) -> None:
        self._kv.free(sequences)

    @property
    def kv_used(self) -> int:
        return self._kv.used

    @property
    def kv_capacity(self) -> int:
        return self._kv.capacity

    def run(self, batch: StageBatch) -> StageResult:
        """Besides the contract's errors: BadInput for rows, tokens or hidden states that do not
        fit, Conflict for rows that do not go on where their sequence ended."""
        model = self._model(batch.model_id)
        self._check(batch, model)
        with torch.inference_mode():
            hidden = self._input(batch, model)
            spans = self._admit(batch, model)
            return self._forward(batch, model, hidden, spans)

    # --- a step -------------------------------------------------------------

    def _input(self, batch: StageBatch, model: _Model) -> torch.Tensor:
        """[padded rows, hidden_size], the rows' hidden states in front."""
        n = sum(row.count for row in batch.rows)
        config = model.llama.config
        padded = (pad_rows(n), config.hidden_size)
        hidden = torch.zeros(padded, dtype=model.llama.dtype, device=self._device)
        if batch.start > 0:
            hidden[:n] = _checked_hidden(batch, (n, config.hidden_size))
            return hidden
        tokens = [token for row in batch.rows for token in row.tokens]
        if len(tokens) != n or min(tokens) < 0 or max(tokens) >= config.vocab_size:
            raise BadInput(
                f"{len(tokens)} tokens for {n} positions, from {min(tokens, default=None)} to "
                f"{max(tokens, default=None)}; ids go from 0 to {config.vocab_size - 1}"
            )
        embedding = model.blocks[0][0]
        assert isinstance(embedding, EmbeddingUnit)
        ids = torch.tensor(tokens, device=self._device)
        torch.index_select(embedding.table, 0, ids, out=hidden[:n])
        return hidden

    def _admit(self, batch: StageBatch, model: _Model) -> list[Span]:
        """Reserves KV for sequences that start here, and gives every row its place in it."""
        stage, layers = (batch.start, batch.stop), model.layers(batch.start, batch.stop)
        new = [Reservation(row.sequence, row.limit) for row in batch.rows if row.position == 0]
        if new:
            self._kv.reserve(batch.model_id, stage, layers, new)
        spans: list[Span] = []
        for row in batch.rows:
            sequence = self._kv.find(row.sequence)
            assert sequence is not None
            self._kv.extend(sequence, row.count)
            spans.append((sequence, row.position, row.count))
        return spans

    def _forward(
        self, batch: StageBatch, model: _Model, hidden: torch.Tensor, spans: list[Span]
    ) -> StageResult:
        kv = self._kv.tensor(batch.model_id)
        step: LayerStep | None = None
        layer = model.layers(batch.start, batch.stop).start
        sampled: tuple[int | None, ...] = (None,) * len(batch.rows)
        for unit in model.units(batch.start, batch.stop):
            if isinstance(unit, LayerUnit):
                step = step or LayerStep(model.llama, spans, hidden.shape[0])
                step.run(unit, hidden, kv[layer])
                layer += 1
            elif isinstance(unit, HeadUnit):
                sampled = _sample(model.llama, unit, hidden, batch.rows)
        if batch.stop == model.manifest.n_blocks:
            return StageResult(None, sampled)
        return StageResult(hidden[: sum(row.count for row in batch.rows)], sampled)

    # --- checks -------------------------------------------------------------

    def _model(self, model_id: ModelId) -> _Model:
        if model_id not in self._models:
            raise NotFound(f"model {model_id} is not open here")
        return self._models[model_id]

    def _check(self, batch: StageBatch, model: _Model) -> None:
        if not batch.rows or not 0 <= batch.start < batch.stop <= model.manifest.n_blocks:
            raise BadInput(
                f"{len(batch.rows)} rows for blocks {batch.start}-{batch.stop - 1} of "
                f"{model.manifest.n_blocks}: at least one row and one block are needed"
            )
        missing = [b for b in range(batch.start, batch.stop) if b not in model.blocks]
        if missing:
            raise NotFound(f"blocks {missing} of model {batch.model_id} are not held here")
        ends: dict[SequenceKey, int] = {}
        for row in batch.rows:
            self._check_row(row, batch, ends)

    def _check_row(self, row: Row, batch: StageBatch, ends: dict[SequenceKey, int]) -> None:
        """`ends`: where sequences with earlier rows in the batch will end after those."""
        sequence = self._kv.find(row.sequence)
        if sequence is None and row.position > 0 and row.sequence not in ends:
            raise NotFound(f"sequence {row.sequence} is not known here; it starts at position 0")
        if sequence and (sequence.model_id, *sequence.blocks) != (
            batch.model_id,
            batch.start,
            batch.stop,
        ):
            raise Conflict(f"sequence {row.sequence} was begun by another stage here")
        end = ends.get(row.sequence, sequence.length if sequence else 0)
        if row.position != end or (row.position == 0 and sequence):
            raise Conflict(
                f"sequence {row.sequence} has {end} positions here; a row cannot start at "
                f"{row.position}"
            )
        if row.count < 1 or row.position + row.count > row.limit:
            raise BadInput(
                f"sequence {row.sequence}: {row.count} positions from {row.position} on; "
                f"expected at least one and an end within its limit {row.limit}"
            )
        ends[row.sequence] = row.position + row.count


def _sample(
    llama: Llama, unit: HeadUnit, hidden: torch.Tensor, rows: Iterable[Row]
) -> tuple[int | None, ...]:
    """Draws after the last position of each row that has a draw."""
    draws, last, drawing = [], -1, []
    sampled: list[int | None] = []
    for index, row in enumerate(rows):
        last += row.count
        sampled.append(None)
        if row.draw is not None:
            draws.append(row.draw)
            drawing.append((index, last))
    if draws:
        logits = llama.head(unit, hidden, [position for _, position in drawing])
        for (index, _), token in zip(drawing, sample(logits, draws), strict=True):
            sampled[index] = token
    return tuple(sampled)


def _checked_hidden(batch: StageBatch, shape: tuple[int, int]) -> torch.Tensor:
    if batch.hidden is None or tuple(batch.hidden.shape) != shape:
        got = None if batch.hidden is None else tuple(batch.hidden.shape)
        raise BadInput(f"hidden states {got} for blocks from {batch.start} on; expected {shape}")
    return batch.hidden


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"node.device {name!r} is not a device: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"node.device {name!r} is not supported; supported: cpu, cuda, cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"node.device is {name!r}, but this machine has no usable CUDA device")
    return device
