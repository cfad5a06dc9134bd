"""A deterministic engine without weights: the next token is a hash of all tokens so far.

Each block keeps, for each sequence, a running hash of what has passed through it (its "KV"), so a
position that is lost, repeated, misplaced or run out of order changes every token after it. Values
stay below 2**16: float32 carries them exactly between stages.
"""

import threading
from collections import defaultdict
from collections.abc import Callable

import torch

from services.node.engine.base import SequenceKey, StageBatch, StageResult
from shared.errors import CapacityExceeded, NotFound
from shared.ids import ModelId
from shared.layout import BlockSpec, Manifest

HIDDEN = 4
VOCAB = 251
_PRIME = 65521


def hash_manifest(n_blocks: int) -> Manifest:
    blocks = tuple(BlockSpec(i, i, i, 1, (), (b"",)) for i in range(n_blocks))
    return Manifest("HashForCausalLM", {"hidden_size": HIDDEN, "vocab_size": VOCAB}, 1, blocks)


def continuation(prompt: tuple[int, ...], count: int, n_blocks: int, seed: int = 0) -> list[int]:
    """The `count` tokens that follow, computed without batches, stages or state."""
    tokens = list(prompt)
    for index in range(count):
        values = tokens
        for block in range(n_blocks):
            kv, passed = 0, []
            for value in values:
                kv = _mix(kv, value, block)
                passed.append(kv)
            values = passed
        tokens.append(_mix(values[-1], index, seed) % VOCAB)
    return tokens[len(prompt) :]


def _mix(kv: int, value: int, salt: int) -> int:
    return (kv * 31 + value * 7 + salt + 1) % _PRIME


class HashEngine:
    def __init__(self, kv_capacity: int = 10_000) -> None:
        self._kv_capacity = kv_capacity
        self._held: dict[ModelId, set[int]] = {}
        self._kv: dict[SequenceKey, tuple[ModelId, int, int, dict[int, int]]] = {}
        """key -> (model, limit, positions run, hash by block)"""
        self.batches: list[StageBatch] = []
        self.before_run: Callable[[StageBatch], None] = lambda batch: None
        self._n_blocks: dict[ModelId, int] = {}
        self._changed = threading.Condition()

    def open_model(self, model_id: ModelId, manifest: Manifest) -> None:
        self._held[model_id] = set()
        self._n_blocks[model_id] = manifest.n_blocks

    def attach(self, model_id: ModelId, block: int, buffer: memoryview) -> None:
        self._held[model_id].add(block)

    def held(self, model_id: ModelId) -> frozenset[int]:
        return frozenset(self._held[model_id])

    def close_model(self, model_id: ModelId) -> None:
        del self._held[model_id]
        self.free(tuple(key for key, state in self._kv.items() if state[0] == model_id))

    def run(self, batch: StageBatch) -> StageResult:
        self.before_run(batch)
        if not set(range(batch.start, batch.stop)) <= self._held.get(batch.model_id, set()):
            raise NotFound(f"blocks {batch.start}..{batch.stop} are not all here")
        new = sum(row.limit for row in batch.rows if row.position == 0)
        if self.kv_used + new > self._kv_capacity:
            raise CapacityExceeded("no KV left")
        with self._changed:
            self.batches.append(batch)
            self._changed.notify_all()
        values = self._values(batch)
        starts = [sum(row.count for row in batch.rows[:i]) for i in range(len(batch.rows))]
        for row, start in zip(batch.rows, starts, strict=True):
            self._run_row(batch, row.sequence, row.position, row.limit, values, start, row.count)
        if batch.stop < self._n_blocks[batch.model_id]:
            column = torch.tensor(values, dtype=torch.float32).unsqueeze(1)
            return StageResult(column.repeat(1, HIDDEN), (None,) * len(batch.rows))
        sampled = tuple(
            _mix(values[start + row.count - 1], row.draw.index, row.draw.sampling.seed) % VOCAB
            if row.draw
            else None
            for row, start in zip(batch.rows, starts, strict=True)
        )
        return StageResult(None, sampled)

    def _values(self, batch: StageBatch) -> list[int]:
        if batch.start == 0:
            return [token for row in batch.rows for token in row.tokens]
        if batch.hidden is None or batch.hidden.shape[1] != HIDDEN:
            raise ValueError("hidden states expected")
        return [int(value) for value in batch.hidden[:, 0].tolist()]

    def _run_row(
        self,
        batch: StageBatch,
        key: SequenceKey,
        position: int,
        limit: int,
        values: list[int],
        start: int,
        count: int,
    ) -> None:
        """Replaces values[start : start + count] by what the blocks make of them."""
        if position == 0:
            self._kv[key] = (batch.model_id, limit, 0, defaultdict(int))
        if key not in self._kv:
            raise NotFound(f"sequence {key} is not known")
        model, limit, reached, kv = self._kv[key]
        if reached != position or position + count > limit:
            raise ValueError(f"sequence {key} is at {reached} of {limit}, the row at {position}")
        for block in range(batch.start, batch.stop):
            for i in range(start, start + count):
                kv[block] = values[i] = _mix(kv[block], values[i], block)
        self._kv[key] = (model, limit, position + count, kv)

    def free(self, sequences: tuple[SequenceKey, ...]) -> None:
        with self._changed:
            for key in sequences:
                self._kv.pop(key, None)
            self._changed.notify_all()

    @property
    def kv_used(self) -> int:
        return sum(limit for _, limit, _, _ in self._kv.values())

    @property
    def kv_capacity(self) -> int:
        return self._kv_capacity

    def wait_until_free(self, timeout: float = 10) -> bool:
        """Any thread: until no sequence has KV here."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._kv, timeout)
