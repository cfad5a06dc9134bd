"""A deterministic engine without weights: the next token is a hash of all tokens so far.

Each block keeps, for each sequence, a running hash of what has passed through it (its "KV"), so a
position that is lost, repeated, misplaced or run out of order changes every token after it. Values
stay below 2**16: float32 carries them exactly between stages.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from services.node.core.kv import Need, whole_pages
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
)
from services.node.engine.kv_loan import KvLoan
from shared.errors import (
    BadInput,
    CapacityExceeded,
    Conflict,
    LambdaScaleError,
    NotFound,
    UnsupportedModel,
)
from shared.ids import NO_ADAPTER, ModelId
from shared.layout import BlockSpec, Manifest
from shared.parts import Part
from shared.step_costs import StepCosts

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


@dataclass(slots=True)
class _Sequence:
    model_id: ModelId
    limit: int
    blocks: tuple[int, int]
    position: int = 0
    kv: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """The running hash of each block."""


@dataclass(slots=True)
class _Rider:
    part: StagePart
    values: dict[SequenceKey, list[int]]
    """What each row's positions have become so far."""
    result: PartResult | None = None


class HashSweep:
    def __init__(self, engine: "HashEngine", model_id: ModelId) -> None:
        self._engine = engine
        self._model_id = model_id
        self._riders: dict[int, _Rider] = {}
        self.at = 0
        self.due_s = 0.0
        self.parts: list[StagePart] = []
        self.ran: list[int] = []
        """Blocks, in the order in which they were run."""
        self.called: list[int] = []
        """Those of them during which the bell was rung."""

    def join(self, part: StagePart) -> int:
        engine = self._engine
        if part.start < self.at:
            raise BadInput(f"the sweep is past block {part.start}")
        needed = range(part.start, part.start + 1 if part.waits else part.stop)
        if not set(needed) <= engine.attached.get(self._model_id, set()):
            raise NotFound(f"blocks {part.start}..{part.stop} are not all here")
        rider = _Rider(part, _values(part))
        new = sum(
            whole_pages(row.position + row.count) - whole_pages(row.position)
            for row in part.rows
            if not self._runs_on(row, part)
        )
        if engine.kv_used + new > engine.kv_capacity:
            raise CapacityExceeded("no KV left")
        for row in part.rows:
            self._reserve(row, part)
        self.parts.append(part)
        number = len(self.parts)
        self._riders[number] = rider
        return number

    def _runs_on(self, row: Row, part: StagePart) -> bool:
        """Whether the sequence's stage goes on to further blocks, with the same positions."""
        known = self._engine.sequences.get(row.sequence)
        there = known is not None and known.blocks[1] == part.start
        return there and known is not None and (row.position, row.count) == (0, known.position)

    def _reserve(self, row: Row, part: StagePart) -> None:
        sequences, blocks = self._engine.sequences, (part.start, part.stop)
        if self._runs_on(row, part):
            known = sequences[row.sequence]
            known.blocks = known.blocks[0], part.stop
            return
        if row.position == 0:
            sequences[row.sequence] = _Sequence(self._model_id, row.limit, blocks)
        if row.sequence not in sequences:
            raise NotFound(f"sequence {row.sequence} is not known")
        sequence = sequences[row.sequence]
        if sequence.blocks != blocks or sequence.position != row.position:
            raise Conflict(f"{row} does not go on where {sequence} ended")
        sequence.position += row.count
        if sequence.position > sequence.limit:
            raise Conflict(f"sequence {row.sequence} goes past its limit")

    def advance(self, for_s: float = 0.0, bell: Bell | None = None) -> dict[int, PartResult]:
        self._take_out_freed()
        needed = [rider for rider in self._riders.values() if rider.values]
        if needed:
            self.at = max(self.at, min(rider.part.start for rider in needed))
            if self.at not in self._engine.attached[self._model_id]:
                return self._left()
            aboard = [rider for rider in needed if rider.part.start <= self.at]
            for rider in aboard:
                self._engine.before_run(self.at, rider.part)
            self._engine.note(self)
            for rider in aboard:
                self._run(rider)
            self.ran.append(self.at)
            if bell is not None and bell.rung:
                self.called.append(self.at)
            self.due_s += self._engine.floor_s / self._engine.n_blocks[self._model_id]
            self.at += 1
        return self._left()

    def _take_out_freed(self) -> None:
        for rider in self._riders.values():
            rider.values = {
                key: values for key, values in rider.values.items() if key in self._engine.sequences
            }

    def _run(self, rider: _Rider) -> None:
        for key, values in rider.values.items():
            kv = self._engine.sequences[key].kv
            for i, value in enumerate(values):
                kv[self.at] = values[i] = _mix(kv[self.at], value, self.at)

    def _left(self) -> dict[int, PartResult]:
        left = {
            number: self._result(rider)
            for number, rider in self._riders.items()
            if rider.part.stop == self.at or not rider.values
        }
        for number in left:
            del self._riders[number]
        return left

    def _result(self, rider: _Rider) -> PartResult:
        part = rider.part
        rows = tuple(row for row in part.rows if row.sequence in rider.values)
        if part.stop < self._engine.n_blocks[self._model_id]:
            passed = [value for row in rows for value in rider.values[row.sequence]]
            column = torch.tensor(passed, dtype=torch.float32).unsqueeze(1)
            return PartResult(rows, column.repeat(1, HIDDEN), ((),) * len(rows))
        sampled = tuple(
            (_mix(rider.values[row.sequence][-1], row.draw.index, row.draw.sampling.seed) % VOCAB,)
            if row.draw
            else ()
            for row in rows
        )
        failed = {
            row.sequence: error
            for row in rows
            if row.draw and (error := self._engine.failing.get(row.sequence))
        }
        return PartResult(rows, None, sampled, failed=failed)


def _values(part: StagePart) -> dict[SequenceKey, list[int]]:
    if part.start == 0:
        return {row.sequence: list(row.tokens) for row in part.rows}
    if part.hidden is None or part.hidden.shape[1] != HIDDEN:
        raise BadInput("hidden states expected")
    numbers = iter(part.hidden[:, 0].tolist())
    return {row.sequence: [int(next(numbers)) for _ in range(row.count)] for row in part.rows}


class HashEngine(NoHostTier):
    def __init__(self, kv_capacity: int = 10_000, *, floor_s: float = 0.0) -> None:
        """`floor_s`: what a sweep through a whole model should take."""
        self._kv_capacity = whole_pages(kv_capacity)
        self.floor_s = floor_s
        self.attached: dict[ModelId, set[int]] = {}
        self.n_blocks: dict[ModelId, int] = {}
        self.sequences: dict[SequenceKey, _Sequence] = {}
        self.sweeps: list[HashSweep] = []
        """Those that ran at least one block."""
        self.before_run: Callable[[int, StagePart], None] = lambda block, part: None
        """Called before a block is run, for each part that needs it."""
        self.failing: dict[SequenceKey, LambdaScaleError] = {}
        """Sequences for which no token can be drawn, and why."""
        self.making: Callable[[Context], None] = lambda context: None
        """Called as rules are made, on the thread that makes them."""
        self.ruled: set[SequenceKey] = set()
        """Sequences whose rules were made."""
        self._changed = threading.Condition()

    def open_model(
        self, model_id: ModelId, manifest: Manifest, part: Part | None = None, devices: int = 1
    ) -> None:
        self.attached[model_id] = set()
        self.n_blocks[model_id] = manifest.n_blocks

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
        self.attached[model_id].add(block)

    def make_adapter(self, manifest: Manifest) -> Callable[[], MakeAdapter]:
        raise UnsupportedModel("there are no adapters here")

    def use_adapter(self, name: ModelId, adapter: Adapter) -> None:
        """There is none."""

    def settle_adapter(self, adapter: Adapter) -> None:
        """There is none."""

    def drop_adapter(self, name: ModelId) -> None:
        """There is none."""

    def use_tokenizer(self, model_id: ModelId, tokenizer_json: bytes) -> None:
        """Nothing: tokens are no text."""

    def make_rules(self, model_id: ModelId, context: Context) -> Callable[[], Rules]:
        return lambda: self.making(context)

    def use_rules(self, model_id: ModelId, sequence: SequenceKey, rules: Rules) -> None:
        self.ruled.add(sequence)

    def held(self, model_id: ModelId) -> frozenset[int]:
        return frozenset(self.attached[model_id])

    def prepare(self, model_id: ModelId, manifest: Manifest, block: int, weights: Weights) -> bool:
        return False  # nothing is made of weights

    def close_model(self, model_id: ModelId, *, asleep: bool = False) -> None:
        del self.attached[model_id]
        self.free(tuple(key for key, s in self.sequences.items() if s.model_id == model_id))

    def begin(self, model_id: ModelId) -> HashSweep:
        return HashSweep(self, model_id)

    def note(self, sweep: HashSweep) -> None:
        with self._changed:
            if sweep not in self.sweeps:
                self.sweeps.append(sweep)
            self._changed.notify_all()

    def free(self, sequences: tuple[SequenceKey, ...]) -> None:
        with self._changed:
            for key in sequences:
                self.sequences.pop(key, None)
            self._changed.notify_all()

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
        raise CapacityExceeded("no KV comes from other nodes here")

    def receive_more(self, key: SequenceKey, end: int) -> None:
        raise NotFound(f"no KV of {key} comes")

    def received(self, key: SequenceKey, tokens: tuple[int, ...]) -> None:
        raise NotFound(f"no KV of {key} has come")

    def position_bytes(self, model_id: ModelId) -> int:
        return 0

    def lend(self, key: SequenceKey, blocks: tuple[int, int], first: int, stop: int) -> KvLoan:
        raise NotFound(f"there is no KV of sequence {key} to be copied")

    def give_back(self, loan: KvLoan) -> None:
        """Nothing is ever lent."""

    @property
    def kv_used(self) -> int:
        return sum(whole_pages(sequence.position) for sequence in self.sequences.values())

    @property
    def kv_capacity(self) -> int:
        return self._kv_capacity

    def kv_share(self, model_id: ModelId) -> int:
        return self.kv_capacity

    def kv_parts(self, model_id: ModelId, start: int, stop: int) -> int:
        return 1

    def kv_free(self, model_id: ModelId, promised: Mapping[Need, int]) -> int:
        return self.kv_capacity - self.kv_used - sum(promised.values())

    def make_room(self, wanted: Mapping[ModelId, int]) -> None:
        """Models do not differ."""

    def keeps(self, model_id: ModelId, start: int, stop: int) -> bool:
        return True

    def wait_until_free(self, timeout: float = 120) -> bool:
        """Any thread: until no sequence has KV here."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.sequences, timeout)
