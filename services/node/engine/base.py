"""What the node asks of an engine: run any run of blocks of a model over a batch of sequences."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from services.node.core.kv import Kv
from services.node.core.rows import Context, Draw, Row, Score, SequenceKey
from shared.errors import LambdaScaleError
from shared.ids import ModelId
from shared.layout import Manifest
from shared.messages.serving import Logprobs

__all__ = [
    "Context",
    "Draw",
    "Engine",
    "PartResult",
    "Row",
    "RowsRefused",
    "Rules",
    "Score",
    "SequenceKey",
    "StagePart",
    "Sweep",
    "Weights",
]

Weights = memoryview | torch.Tensor
"""A block's bytes where the engine computes: in host memory, or uint8 on its device."""
Rules = Any
"""What an engine has made of a context; whatever form it gives that."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """Work for blocks start <= block < stop, all rows packed one after the other."""

    start: int
    stop: int
    rows: tuple[Row, ...]
    hidden: torch.Tensor | None = None
    """[sum(count), hidden_size] in the model's dtype; None where start is 0."""


@dataclass(frozen=True, slots=True)
class PartResult:
    rows: tuple[Row, ...]
    """The part's, in order, less those whose sequences were freed on the way."""
    hidden: torch.Tensor | None
    """[sum(count), hidden_size] of these rows; None where the part ended with the head."""
    sampled: tuple[tuple[int, ...], ...]
    """For each row the tokens drawn: none without a draw, where the head was not run, and where the
    rules leave none; several where proposed ones were accepted."""
    logprobs: Mapping[SequenceKey, tuple[Logprobs, ...]] = field(default_factory=dict)
    """Of the tokens that were to be scored, and of those whose draws asked for them, one each."""
    failed: Mapping[SequenceKey, LambdaScaleError] = field(default_factory=dict)
    """Rows that could not be scored or drawn for, and why; the others are not concerned."""


class RowsRefused(LambdaScaleError):
    """A part cannot be run because of these rows; without them it may be."""

    code = "rows_refused"

    def __init__(self, sequences: Collection[SequenceKey], why: LambdaScaleError) -> None:
        super().__init__(str(why))
        self.sequences = sequences
        self.why = why


class Sweep(Protocol):
    """One pass over a model's blocks, from the lowest start of its parts to the highest stop.

    Parts get on where they start and off where they stop. Each block is run at most once, over the
    rows of all parts that need it: a decode step is bound by reading the weights, and reads them
    once for all. Blocks that no part needs are skipped. Between two blocks parts may join, and any
    other call to the engine is allowed: rows of sequences that were freed leave the sweep.
    """

    @property
    def at(self) -> int:
        """The blocks before this one are behind: parts that start here or later may join."""

    @property
    def due_s(self) -> float:
        """How long all that was run in this sweep should have taken: less than that, and the caller
        waits. 0: as long as it took."""

    def join(self, part: StagePart) -> int:
        """The part's number in this sweep. NotFound if a block is not held or a sequence not known;
        CapacityExceeded if there are not enough pages of KV; BadInput or Conflict if rows or
        hidden states do not fit; RowsRefused if some rows' rules can't be followed here. An error
        changes nothing, for this part or others."""

    def advance(self) -> dict[int, PartResult]:
        """Runs the next block that is needed, or several where nobody gets on or off between them;
        the parts that got off, by number. After an error the sweep is over, and sequences with rows
        in it can only be freed."""


class Engine(Kv, Protocol):
    """Not thread-safe: everything is called on the engine thread."""

    def open_model(self, model_id: ModelId, manifest: Manifest) -> None:
        """Prepares for the model's blocks (config read, RoPE tables). UnsupportedModel by name."""

    def warm_up(self, model_id: ModelId) -> Iterator[None]:
        """Prepares what an open model's first steps would wait for, a piece at each step of the
        iterator, which ends early if the model is closed."""

    def attach(self, model_id: ModelId, block: int, weights: Weights) -> None:
        """The block's bytes are all there and verified: its tensors become views of them."""

    def use_tokenizer(self, model_id: ModelId, tokenizer_json: bytes) -> None:
        """What an open model's grammars are followed with; until then they are refused."""

    def make_rules(self, model_id: ModelId, context: Context) -> Callable[[], Rules]:
        """What makes a sequence's rules, grammar and all, ready to be followed. That is called on
        another thread, one at a time: the engine goes on meanwhile. NotReady: the tokenizer is not
        here yet."""

    def use_rules(self, model_id: ModelId, sequence: SequenceKey, rules: Rules) -> None:
        """Before the row whose draw has that context joins."""

    def held(self, model_id: ModelId) -> frozenset[int]:
        """Blocks that can be run now."""

    def close_model(self, model_id: ModelId) -> None:
        """Drops the model's tensors and its sequences' KV; the buffers may be reused after."""

    def begin(self, model_id: ModelId) -> Sweep:
        """A sweep without parts. One that is given up is just dropped."""

    def free(self, sequences: tuple[SequenceKey, ...]) -> None:
        """Forgets sequences and gives their pages back; unknown ones are ignored."""
