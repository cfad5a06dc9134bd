"""The interface between a node and its engine, which runs any range of blocks over a batch."""

from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from services.node.core.kv import Kv
from services.node.core.load import HostTierLoad
from services.node.core.rows import Context, Draw, Row, Score, SequenceKey
from services.node.engine.bell import Bell
from services.node.engine.kv_loan import KvLoan
from shared.errors import LambdaScaleError
from shared.ids import ModelId
from shared.layout import Manifest
from shared.messages.serving import Logprobs
from shared.parts import Part
from shared.step_costs import StepCosts

__all__ = [
    "Adapter",
    "Bell",
    "Context",
    "Draw",
    "Engine",
    "MakeAdapter",
    "PartResult",
    "Row",
    "RowsRefused",
    "Rules",
    "Score",
    "SequenceKey",
    "StagePart",
    "Sweep",
    "Weights",
    "run_end",
]

Weights = memoryview | torch.Tensor
"""A block's bytes, in host memory or as uint8 on the engine's device."""
Rules = Any
"""Whatever form an engine gives to the rules of a sequence; nobody else looks inside."""
Adapter = Any
"""The same for an adapter."""
MakeAdapter = Callable[[memoryview], Adapter]
"""Makes an adapter of its block's bytes, which have all arrived and are verified, and may be reused
afterwards."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """Work for blocks start <= block < stop. The positions of all rows are packed one after the
    other.

    The engine's form of the scheduler's `Part`. That knows its path and its batch, which are no
    concern of the engine, and its hidden states may have gaps where rows have gone."""

    start: int
    stop: int
    rows: tuple[Row, ...]
    hidden: torch.Tensor | None = None
    """[sum(count), hidden_size] in the model's dtype; None if `start` is 0."""
    waits: bool = False
    """Whether blocks after the first may be attached while the part runs."""


@dataclass(frozen=True, slots=True)
class PartResult:
    rows: tuple[Row, ...]
    """The part's rows in order, without the rows of sequences that were freed meanwhile."""
    hidden: torch.Tensor | None
    """[sum(count), hidden_size] of these rows; None if the part ended with the head."""
    sampled: tuple[tuple[int, ...], ...]
    """The tokens drawn for each row. Empty if the row has no draw, if the head was not run, or if
    the rules allow no token; several if proposed tokens were accepted."""
    logprobs: Mapping[SequenceKey, tuple[Logprobs, ...]] = field(default_factory=dict)
    """Log probabilities: one for each token to be scored, and for each drawn token whose draw asks
    for them."""
    vectors: Mapping[SequenceKey, bytes] = field(default_factory=dict)
    """See `Token.vector`: of the rows that complete one."""
    failed: Mapping[SequenceKey, LambdaScaleError] = field(default_factory=dict)
    """The error of each sequence that could not be scored or drawn for. Other rows are not
    affected."""


class RowsRefused(LambdaScaleError):
    """A part cannot run because of these rows. Without them it may."""

    code = "rows_refused"

    def __init__(self, sequences: Collection[SequenceKey], why: LambdaScaleError) -> None:
        super().__init__(str(why))
        self.sequences = sequences
        self.why = why


def run_end(held: Container[int], at: int, stop: int) -> int:
    """The first block from `at` on that is not held, or `stop`."""
    return next((block for block in range(at, stop) if block not in held), stop)


class Sweep(Protocol):
    """One pass over a model's blocks, from the lowest start of its parts to the highest stop.

    A part joins at the block where it starts and leaves at the block where it stops. Each block
    runs at most once, over the rows of all parts that need it: reading the weights is what takes
    the time of a decode step, so they are read once for everybody. Blocks that no part needs are
    skipped. Between two blocks, parts may join and any other call to the engine is allowed; rows of
    sequences that were freed leave the sweep.
    """

    @property
    def at(self) -> int:
        """The next block. A part may join if it starts at this block or later."""

    @property
    def due_s(self) -> float:
        """Seconds that the blocks run so far should take at least (`node.step_floor_s`). The caller
        waits for the rest if they took less. 0: no least time."""

    def join(self, part: StagePart) -> int:
        """Adds the part and returns its number in this sweep. NotFound: a block is not held (of a
        part that waits: its first one), or a sequence is not known. CapacityExceeded: too few free
        pages of KV. BadInput, Conflict: rows or hidden states do not fit. RowsRefused: the rules of
        some rows cannot be followed here. An error changes nothing, for this part or for others."""

    def advance(self, for_s: float = 0.0, bell: Bell | None = None) -> dict[int, PartResult]:
        """Runs the next block that is needed, and may run those after it, until a part joins or
        leaves, or until `for_s` seconds have passed and the bell has rung. Without a bell the time
        alone counts. It stops before a block that is not held: then `at` stays there, and nothing
        leaves, until the block is attached. Returns the parts that left, by number. After an error
        the sweep is over, and sequences with rows in it can only be freed."""


class Engine(Kv, Protocol):
    """Not thread-safe: every method is called on the engine thread."""

    def open_model(
        self, model_id: ModelId, manifest: Manifest, part: Part | None = None, devices: int = 1
    ) -> None:
        """Prepares for the model's blocks (reads the config, makes RoPE tables). `part`: no other
        blocks will come, so pages for KV have its layers only. None: all may come. `devices`: so
        many devices of the machine run it together, so that it has the threads of all of them.
        UnsupportedModel names what is not supported."""

    @property
    def costs(self) -> tuple[StepCosts, ...]:
        """What decode steps cost, also with the threads of more devices. Empty: it has those of its
        own device only."""

    def division(self, model_id: ModelId) -> str:
        """How many processes run an open model, and why, in words. Empty: there was no choice."""

    def regroup(self) -> Iterator[None]:
        """Goes on without processes that have ended, where it can: fewer of them run the models
        that they ran. After the first step of the iterator, it is known how many (`division`). Each
        further one makes a block runnable again; until then rows wait for it, as for a block that
        has not come. Their KV stays. An error: it cannot go on."""

    def warm_up(self, model_id: ModelId) -> Iterator[None]:
        """Prepares what an open model's first steps would wait for, one piece at each step of the
        iterator. The iterator ends early if the model is closed."""

    def attach(self, model_id: ModelId, block: int, weights: Weights) -> None:
        """Makes the block runnable. Its bytes have all arrived and are verified; its tensors become
        views of them."""

    def prepare(self, model_id: ModelId, manifest: Manifest, block: int, weights: Weights) -> bool:
        """Makes of a block's bytes what `attach` will make of them, as far as that lies in memory
        of its own, before the model is opened. The buffer may be reused afterwards. False: there is
        nothing to make, or no memory is left for it."""

    def make_adapter(self, manifest: Manifest) -> Callable[[], MakeAdapter]:
        """Returns a function that finds memory for an adapter, and returns what makes it. Another
        thread calls both. NotFound: the base is not open. UnsupportedModel: it takes no
        adapters."""

    def use_adapter(self, name: ModelId, adapter: Adapter) -> None:
        """Makes rows with this adapter runnable."""

    def settle_adapter(self, adapter: Adapter) -> None:
        """Makes steps with an adapter that is in use faster. It takes tens of ms: another thread
        calls it."""

    def drop_adapter(self, name: ModelId) -> None:
        """Forgets an adapter. Conflict: sequences run with it."""

    def use_tokenizer(self, model_id: ModelId, tokenizer_json: bytes) -> None:
        """Gives an open model the tokenizer that its grammars need. Until then grammars are
        refused."""

    def make_rules(self, model_id: ModelId, context: Context) -> Callable[[], Rules]:
        """Returns a function that makes a sequence's rules, grammar included. Another thread calls
        it, one at a time, because a grammar can take long and the engine must go on meanwhile.
        NotReady: the tokenizer has not arrived yet."""

    def use_rules(self, model_id: ModelId, sequence: SequenceKey, rules: Rules) -> None:
        """Hands over a sequence's rules, before the row whose draw has their context joins."""

    def held(self, model_id: ModelId) -> frozenset[int]:
        """The blocks that can be run now."""

    def close_model(self, model_id: ModelId, *, asleep: bool = False) -> None:
        """Drops the model's tensors and the KV of its sequences. The buffers may be reused
        afterwards. `asleep`: they will not be, before this is called once more without it: what was
        made of the weights stays, so that the model can soon be opened again."""

    def begin(self, model_id: ModelId) -> Sweep:
        """A new sweep without parts. To give a sweep up, drop it."""

    def lend(self, key: SequenceKey, blocks: tuple[int, int], first: int, stop: int) -> KvLoan:
        """The KV of positions first <= position < stop in these blocks (start, stop), to be copied
        from or to. It stays where it is until it is given back, even if the sequence is freed.
        NotFound: the sequence does not have it."""

    def give_back(self, loan: KvLoan) -> None:
        """The loan is over: nobody copies from or to it any more."""

    @property
    def host_tier(self) -> HostTierLoad:
        """What lies in the host tier of KV."""

    def free(self, sequences: tuple[SequenceKey, ...]) -> None:
        """Forgets sequences and frees their pages. Unknown sequences are ignored."""
