"""The KV cache: every sequence has a run of slots, the same ones in all layers it uses.

A slot holds keys and values of one position. A sequence's slots are one contiguous run, reserved
for its limit when it starts: attention reads keys and values as plain strided views, and nothing
runs out midway. Runs are taken first-fit; when the free slots suffice but not in one piece, the
sequences are moved together. So only the budget can refuse a sequence.
"""

import math
from bisect import insort
from dataclasses import dataclass
from typing import NamedTuple

import torch

from services.node.engine.base import SequenceKey
from shared.errors import CapacityExceeded, NotFound
from shared.ids import ModelId

GRANULE = 16
"""Attention reads whole granules (see attention.py), so runs begin and end on them."""
ROUNDING_SLOTS = 256 * GRANULE
"""Slots beyond the budget, so that rounding up of limits (in 256 sequences) costs no budget."""


def round_up(positions: int) -> int:
    return -(-positions // GRANULE) * GRANULE


@dataclass(slots=True, eq=False)
class Sequence:
    """One stage's part of a sequence. Without layers it has no slots and costs nothing."""

    key: SequenceKey
    model_id: ModelId
    blocks: tuple[int, int]
    """(start, stop) of the stage that began it."""
    layers: range
    limit: int
    first: int
    """First slot."""
    length: int = 0
    """Positions in the cache."""
    live: bool = True
    """False once it was freed."""

    @property
    def slots(self) -> int:
        return round_up(self.limit) if self.layers else 0

    @property
    def cost(self) -> int:
        return self.limit if self.layers else 0


class Reservation(NamedTuple):
    key: SequenceKey
    limit: int


class KvCache:
    """Budget: `capacity` positions over all sequences of all models."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.used = 0
        self.changes = 0
        """Grows when sequences end or are moved: what was planned over their slots is outdated."""
        self._device = device
        self._n_slots = round_up(capacity) + ROUNDING_SLOTS
        self._tensors: dict[ModelId, torch.Tensor] = {}
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._by_slot: list[Sequence] = []
        """Those with slots, in the order of their slots."""

    def open_model(
        self, model_id: ModelId, n_layers: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        """Memory for the model's keys and values; on a CPU only what is used becomes resident."""
        shape = (n_layers, self._n_slots, 2, n_kv_heads, head_dim)
        try:
            self._tensors[model_id] = torch.empty(shape, dtype=dtype, device=self._device)
        except RuntimeError as error:
            raise CapacityExceeded(
                f"the KV cache of model {model_id} ({math.prod(shape) * dtype.itemsize} bytes for "
                f"{self.capacity} positions) cannot be allocated: lower node.kv_tokens"
            ) from error

    def close_model(self, model_id: ModelId) -> None:
        keys = [s.key for s in self._sequences.values() if s.model_id == model_id]
        self.free(tuple(keys))
        self._tensors.pop(model_id, None)

    def tensor(self, model_id: ModelId) -> torch.Tensor:
        """[layers, slots, 2, kv heads, head_dim]; index 2 is 0 for keys, 1 for values."""
        return self._tensors[model_id]

    def find(self, key: SequenceKey) -> Sequence | None:
        return self._sequences.get(key)

    def reserve(
        self,
        model_id: ModelId,
        blocks: tuple[int, int],
        layers: range,
        wanted: list[Reservation],
    ) -> None:
        """Makes new sequences, all or none. CapacityExceeded if the budget can't take them."""
        cost = sum(limit for _, limit in wanted) if layers else 0
        if self.used + cost > self.capacity:
            raise CapacityExceeded(
                f"{len(wanted)} new sequences need {cost} positions of KV cache, "
                f"{self.capacity - self.used} of {self.capacity} are free: wait for running "
                f"sequences to end, or raise node.kv_tokens"
            )
        made: list[SequenceKey] = []
        try:
            for key, limit in wanted:
                self._add(Sequence(key, model_id, blocks, layers, limit, first=0))
                made.append(key)
        except CapacityExceeded:
            self.free(tuple(made))
            raise

    def extend(self, sequence: Sequence, count: int) -> None:
        """Makes room for `count` more positions, to be written before the next attention.

        The granule they end in is read whole: what is left in it by an earlier sequence is erased,
        since masking makes a foreign value weigh nothing only if it is finite.
        """
        end = sequence.length + count
        if sequence.layers and round_up(end) > round_up(sequence.length):
            tensor = self._tensors[sequence.model_id]
            layers = slice(sequence.layers.start, sequence.layers.stop)
            last = sequence.first + round_up(end)
            tensor[layers, last - GRANULE : last].zero_()
        sequence.length = end

    def free(self, keys: tuple[SequenceKey, ...]) -> None:
        for key in keys:
            sequence = self._sequences.pop(key, None)
            if sequence is not None:
                sequence.live = False
                self.changes += 1
                self.used -= sequence.cost
                if sequence.slots:
                    self._by_slot.remove(sequence)

    def _add(self, sequence: Sequence) -> None:
        if sequence.model_id not in self._tensors:
            raise NotFound(f"model {sequence.model_id} has no KV cache: open it first")
        if sequence.slots:
            sequence.first = self._place(sequence.slots)
            insort(self._by_slot, sequence, key=lambda s: s.first)
        self._sequences[sequence.key] = sequence
        self.used += sequence.cost

    def _place(self, slots: int) -> int:
        """First slot of a free run of `slots`."""
        end = 0
        for sequence in self._by_slot:
            if sequence.first - end >= slots:
                return end
            end = sequence.first + sequence.slots
        if self._n_slots - end < slots:
            end = self._compact()
        if self._n_slots - end < slots:
            raise CapacityExceeded(
                f"no {slots} free slots of KV cache for a sequence; "
                f"{len(self._by_slot)} sequences run: wait for some to end"
            )
        return end

    def _compact(self) -> int:
        """Moves all sequences to the front, in order; the first free slot after them."""
        self.changes += 1
        end = 0
        for sequence in self._by_slot:
            if sequence.first != end:
                layers = slice(sequence.layers.start, sequence.layers.stop)
                cached = self._tensors[sequence.model_id][layers]
                length = round_up(sequence.length)
                # The two runs may overlap.
                kept = cached[:, sequence.first : sequence.first + length].clone()
                cached[:, end : end + length] = kept
                sequence.first = end
            end += sequence.slots
        return end
