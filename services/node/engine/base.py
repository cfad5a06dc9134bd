"""What the node asks of an engine: run any run of blocks of a model over a batch of sequences."""

from dataclasses import dataclass
from typing import Protocol

import torch

from services.node.core.rows import Draw, Row, SequenceKey
from shared.ids import ModelId
from shared.layout import Manifest

__all__ = ["Draw", "Engine", "Row", "SequenceKey", "StageBatch", "StageResult"]


@dataclass(frozen=True, slots=True)
class StageBatch:
    """Work for blocks start <= block < stop, all rows packed one after the other."""

    model_id: ModelId
    start: int
    stop: int
    rows: tuple[Row, ...]
    hidden: torch.Tensor | None = None
    """[sum(count), hidden_size] in the model's dtype; None where start is 0."""


@dataclass(frozen=True, slots=True)
class StageResult:
    hidden: torch.Tensor | None
    """[sum(count), hidden_size]; None where the batch ended with the head."""
    sampled: tuple[int | None, ...]
    """One a row; None for rows without a draw, or where the head was not run."""


class Engine(Protocol):
    """Not thread-safe: everything is called on the engine thread."""

    def open_model(self, model_id: ModelId, manifest: Manifest) -> None:
        """Prepares for the model's blocks (config read, RoPE tables). UnsupportedModel by name."""

    def attach(self, model_id: ModelId, block: int, buffer: memoryview) -> None:
        """The block's bytes are all there and verified: its tensors become views of the buffer."""

    def held(self, model_id: ModelId) -> frozenset[int]:
        """Blocks that can be run now."""

    def close_model(self, model_id: ModelId) -> None:
        """Drops the model's tensors and its sequences' KV; the buffers may be reused after."""

    def run(self, batch: StageBatch) -> StageResult:
        """NotFound if a block is not held or a sequence not known; CapacityExceeded if the KV
        budget can't take a new sequence (no row has then been run)."""

    def free(self, sequences: tuple[SequenceKey, ...]) -> None:
        """Forgets sequences and their KV; unknown ones are ignored."""

    @property
    def kv_used(self) -> int:
        """Reserved token positions (summed over sequences)."""

    @property
    def kv_capacity(self) -> int: ...
