"""The torch engine's sweep. Rows join and leave between blocks, and are packed anew when they do.

A row's result does not depend on its place or on the other rows (attention.py says how), so it does
not matter which rows share a sweep.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Protocol

import torch
from msgspec.structs import replace

from services.node.checkpoints.architecture import AnyConfig
from services.node.core.kv import pages_of
from services.node.engine.attention import Span
from services.node.engine.base import (
    Bell,
    Draw,
    PartResult,
    Row,
    RowsRefused,
    Score,
    SequenceKey,
    StagePart,
    Weights,
)
from services.node.engine.copies import to_device, to_host
from services.node.engine.kv import KvCache, KvSequence
from services.node.engine.linear import Form
from services.node.engine.processors import Processor, Processors
from services.node.engine.sampling import Drawn, sample, score
from shared.errors import BadInput, Conflict, LambdaScaleError, NotFound
from shared.ids import ModelId
from shared.layout import BlockSpec, Manifest
from shared.messages.serving import Logprobs

SCORED_AT_ONCE = 64
"""Positions scored at a time. Their logits take 32 MiB for 128k tokens; those of a whole step would
take 256 MiB."""


class Step(Protocol):
    def run(
        self,
        block: int,
        blocks: Iterable[Any],
        hidden: torch.Tensor,
        kv: torch.Tensor,
        for_s: float = 0.0,
        bell: Bell | None = None,
    ) -> int:
        """Runs the layers of `block`, the first of these blocks, and may run those after it: see
        `Sweep.advance`. Returns how many blocks it ran. Updates hidden [rows, hidden_size]. kv: the
        cache of the layers of all these blocks, see KvCache.of_layers."""


class Network(Protocol):
    """A model as the sweep runs it: the decoder or the encoder. Each has its own kinds of units."""

    @property
    def config(self) -> AnyConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def whole(self) -> int:
        """The number of positions of every sequence, if a sequence runs whole in one row and keeps
        no KV. 0: any number of positions, in any rows."""

    def units(self, spec: BlockSpec, weights: Weights, form: Form) -> tuple[Any, ...]:
        """The units of a block; see BlockTensors."""

    def embed(self, unit: Any, rows: Sequence[Row]) -> torch.Tensor:
        """Returns [positions of the rows, hidden_size] in new memory. BadInput or RowsRefused if
        they do not fit the model."""

    def step(self, spans: Sequence[Span]) -> Step:
        """A step that runs layers over these rows, packed one after the other."""

    def head(self, unit: Any, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits [len(rows), tokens or classes] in float32, computed from the given rows of
        hidden."""

    def largest_ids(self, logits: torch.Tensor) -> torch.Tensor:
        """As in sampling.py, of logits from `head`."""


if TYPE_CHECKING:
    from services.node.engine.graphs import DecodeGraphs


@dataclass(frozen=True, slots=True)
class Model:
    manifest: Manifest
    network: Network
    processors: Processors
    graphs: "DecodeGraphs | None" = None
    blocks: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    def layers(self, start: int, stop: int) -> range:
        """The layers of blocks start <= block < stop, counted from 0."""
        blocks, n_layers = self.manifest.blocks, self.network.config.n_layers
        return range(
            max(blocks[start].first_unit - 1, 0), min(blocks[stop - 1].last_unit, n_layers)
        )

    def layers_with_kv(self, start: int, stop: int) -> range:
        return range(0) if self.network.whole else self.layers(start, stop)

    def layer_units(self, block: int) -> tuple[Any, ...]:
        units, first = self.blocks[block], self.manifest.blocks[block].first_unit
        return units[max(1 - first, 0) : self._last - first]

    def head_unit(self, block: int) -> Any | None:
        ends = self.manifest.blocks[block].last_unit == self._last
        return self.blocks[block][-1] if ends else None

    @property
    def _last(self) -> int:
        return self.network.config.n_units - 1

    def step(self, spans: Sequence[Span], hidden: torch.Tensor) -> Step:
        """A step for these rows. `hidden`: [rows, hidden_size]."""
        graphed = self.graphs.step(spans, hidden) if self.graphs else None
        return graphed or self.network.step(spans)


@dataclass(slots=True)
class _Rider:
    """A part that waits for its first block or is on its way."""

    number: int
    start: int
    stop: int
    rows: list[Row]
    sequences: list[KvSequence]
    ends: bool
    """Whether the part ends with the head."""
    hidden: torch.Tensor
    """[sum(count), hidden_size], which nobody else writes. While the part is aboard, a view of the
    tensor that all parts share."""
    drawn: tuple[tuple[Drawn, ...], ...] = ()
    """For each row, once the head was run: first the scored tokens, then the drawn ones."""

    @property
    def result(self) -> PartResult:
        hidden = None if self.ends else to_host(self.hidden)
        sampled: list[tuple[int, ...]] = []
        logprobs: dict[SequenceKey, tuple[Logprobs, ...]] = {}
        failed: dict[SequenceKey, LambdaScaleError] = {}
        for row, ones in zip(self.rows, self.drawn or ((),) * len(self.rows), strict=True):
            sampled.append(tuple([one.token for one in ones if one.token is not None]))
            for one in ones:
                if one.logprobs:
                    logprobs[row.sequence] = (*logprobs.get(row.sequence, ()), one.logprobs)
                if one.error:
                    failed.setdefault(row.sequence, one.error)
        return PartResult(tuple(self.rows), hidden, tuple(sampled), logprobs, failed)

    def drop_freed(self) -> None:
        kept = [i for i, sequence in enumerate(self.sequences) if sequence.live]
        if len(kept) == len(self.rows):
            return
        pieces = torch.split(self.hidden, [row.count for row in self.rows])
        self.hidden = torch.cat([self.hidden[:0], *(pieces[i] for i in kept)])
        self.rows = [self.rows[i] for i in kept]
        self.sequences = [self.sequences[i] for i in kept]


class TorchSweep:
    """Implements services.node.engine.base.Sweep."""

    def __init__(
        self,
        model_id: ModelId,
        kv: KvCache,
        find: Callable[[ModelId], Model],
        floor_s: float,
    ) -> None:
        """`floor_s`: the least seconds for all of the model's blocks; some of the blocks take their
        share."""
        self._floor_s = floor_s
        self._due_s = 0.0
        self._model_id = model_id
        self._kv = kv
        self._find = find
        """Finds the model as it is now, since it may be closed between two blocks. NotFound if it
        was."""
        self._at = 0
        self._joined = 0
        self._waiting: list[_Rider] = []
        self._aboard: list[_Rider] = []
        self._changes = kv.changes
        # The rows aboard, packed one after the other:
        self._hidden = torch.empty(0)
        self._packed = False
        self._step: Step | None = None
        """Planned when these rows reach a layer."""

    @property
    def at(self) -> int:
        return self._at

    @property
    def due_s(self) -> float:
        return self._due_s

    def join(self, part: StagePart) -> int:
        model = self._find(self._model_id)
        self._check(part, model)
        with torch.inference_mode():
            if part.start == 0:
                hidden = model.network.embed(model.blocks[0][0], part.rows)
            else:
                hidden = _checked_hidden(part, model)
        ends = part.stop == model.manifest.n_blocks
        processors = model.processors.made(part.rows) if ends else {}
        sequences = self._admit(part, model)
        model.processors.keep(processors)
        self._joined += 1
        self._waiting.append(
            _Rider(self._joined, part.start, part.stop, list(part.rows), sequences, ends, hidden)
        )
        return self._joined

    def advance(self, for_s: float = 0.0, bell: Bell | None = None) -> dict[int, PartResult]:
        bell = None if self._floor_s else bell
        until = time.monotonic() + (0 if self._floor_s else for_s)
        with torch.inference_mode():
            # Sequences may have been freed since the last block: their rows must not run.
            if self._changes != self._kv.changes:
                self._drop_freed()
            left = self._let_off(lambda rider: not rider.rows)
            if not self._aboard and self._waiting:
                self._at = min(rider.start for rider in self._waiting)
            boarding = [rider for rider in self._waiting if rider.start == self._at]
            # More rows for the same weights: a part joins at once instead of waiting for the next
            # sweep.
            if boarding:
                self._waiting = [r for r in self._waiting if r.start != self._at]
                self._aboard += boarding
                self._packed = False
            if self._aboard:
                model = self._find(self._model_id)
                stop = self._next_stop()
                while True:
                    ran = self._run(model, stop, until - time.monotonic(), bell)
                    self._at += ran
                    self._due_s += ran * self._floor_s / model.manifest.n_blocks
                    called = bell is None or bell.rung
                    if self._at == stop or (called and time.monotonic() >= until):
                        break
                left |= self._let_off(lambda rider: rider.stop == self._at)
            return left

    def _next_stop(self) -> int:
        """The next block before which a part leaves or boards."""
        ahead = [rider.start for rider in self._waiting if rider.start > self._at]
        return min([*ahead, *(rider.stop for rider in self._aboard)])

    # --- blocks -------------------------------------------------------------

    def _run(self, model: Model, stop: int, for_s: float, bell: Bell | None) -> int:
        """Runs the next block, and perhaps those after it, before `stop`: see `Sweep.advance`.
        Returns how many."""
        if not self._packed:
            self._pack()
        ran = 1
        if model.layer_units(self._at):
            if self._step is None:
                self._step = model.step(self._spans(), self._hidden)
            blocks = takewhile(bool, map(model.layer_units, range(self._at, stop)))
            kv = self._kv.of_layers(self._model_id, model.layers(self._at, stop))
            ran = self._step.run(self._at, blocks, self._hidden, kv, for_s, bell)
        if (head := model.head_unit(self._at + ran - 1)) is not None:
            self._sample(model, head)
        return ran

    def _pack(self) -> None:
        """Packs the rows one after the other. Parts that left keep the memory of theirs."""
        hidden = self._aboard[0].hidden
        if len(self._aboard) > 1:
            counts = [sum(row.count for row in rider.rows) for rider in self._aboard]
            hidden = torch.cat([rider.hidden for rider in self._aboard])
            for rider, own in zip(self._aboard, torch.split(hidden, counts), strict=True):
                rider.hidden = own
        self._hidden, self._packed, self._step = hidden, True, None

    def _spans(self) -> list[Span]:
        return [
            (sequence, row.position, row.count)
            for rider in self._aboard
            for sequence, row in zip(rider.sequences, rider.rows, strict=True)
        ]

    def _sample(self, model: Model, unit: Any) -> None:
        """Scores and draws for everybody aboard. The head is the last unit, so all parts leave
        after it."""
        rows = [row for rider in self._aboard for row in rider.rows]
        drawn = _drawn(model, unit, self._hidden, rows)
        if any(row.score for row in rows):
            scored = _scored(model, unit, self._hidden, rows)
            drawn = tuple((*known, *new) for known, new in zip(scored, drawn, strict=True))
        for rider in self._aboard:
            rider.drawn, drawn = drawn[: len(rider.rows)], drawn[len(rider.rows) :]

    def _let_off(self, leaves: Callable[[_Rider], bool]) -> dict[int, PartResult]:
        leaving = [rider for rider in (*self._waiting, *self._aboard) if leaves(rider)]
        if leaving:
            self._waiting = [rider for rider in self._waiting if not leaves(rider)]
            self._aboard = [rider for rider in self._aboard if not leaves(rider)]
            self._packed = False
        for rider in leaving:
            if rider.drawn:
                self._settle(rider)
        return {rider.number: rider.result for rider in leaving}

    def _settle(self, rider: _Rider) -> None:
        """Takes back proposed tokens that were not accepted. Pages of the other tokens may be
        shared."""
        for sequence, row, drawn in zip(rider.sequences, rider.rows, rider.drawn, strict=True):
            kept = row.kept(sum(one.token is not None for one in drawn))
            if row.proposed:
                self._kv.truncate(sequence, row.position + kept)
            if rider.start == 0 and sequence.layers:
                self._kv.keep(sequence, row.tokens[:kept])

    def _drop_freed(self) -> None:
        for rider in (*self._waiting, *self._aboard):
            rider.drop_freed()
        self._changes = self._kv.changes
        self._packed = False

    # --- joining ------------------------------------------------------------

    def _admit(self, part: StagePart, model: Model) -> list[KvSequence]:
        """Starts the sequences that begin here, and takes pages for every row."""
        layers = model.layers_with_kv(part.start, part.stop)
        if layers:
            ends = {row.sequence: row.position + row.count for row in part.rows}
            self._kv.require(sum(self._pages_wanted(key, end) for key, end in ends.items()))
        sequences: list[KvSequence] = []
        for row in part.rows:
            sequence = self._kv.find(row.sequence) or self._kv.start(
                self._model_id, (part.start, part.stop), layers, row.sequence, row.limit
            )
            self._kv.truncate(sequence, row.position)
            self._kv.extend(sequence, row.count, row.proposed)
            sequences.append(sequence)
        return sequences

    def _pages_wanted(self, key: SequenceKey, end: int) -> int:
        sequence = self._kv.find(key)
        return max(0, pages_of(end) - (len(sequence.pages) if sequence else 0))

    def _check(self, part: StagePart, model: Model) -> None:
        n_blocks = model.manifest.n_blocks
        if not part.rows or not self._at <= part.start < part.stop <= n_blocks:
            raise BadInput(
                f"{len(part.rows)} rows for blocks {part.start}-{part.stop - 1} of {n_blocks} in a "
                f"sweep at block {self._at}: at least one row and one block ahead are needed"
            )
        missing = [block for block in range(part.start, part.stop) if block not in model.blocks]
        if missing:
            raise NotFound(f"blocks {missing} of model {self._model_id} are not held here")
        ends: dict[SequenceKey, int] = {}
        whole, vocab_size = model.network.whole, model.manifest.config.get("vocab_size", 0)
        for row in part.rows:
            self._check_row(row, part, ends)
            if whole and (row.position, row.count) != (0, whole):
                why = BadInput(
                    f"sequence {row.sequence}: {row.count} positions from {row.position} on; "
                    f"expected all {whole} of an image"
                )
                raise RowsRefused((row.sequence,), why)
            if not whole:
                _check_ids(row, vocab_size)
            if row.score is not None:
                _check_score(row, row.score, vocab_size)

    def _check_row(self, row: Row, part: StagePart, ends: dict[SequenceKey, int]) -> None:
        """Checks one row. `ends`: the length that each sequence with earlier rows in the part will
        have after them."""
        sequence = self._kv.find(row.sequence)
        if sequence is None and row.position > 0 and row.sequence not in ends:
            raise NotFound(f"sequence {row.sequence} is not known here; it starts at position 0")
        stage = (self._model_id, (part.start, part.stop))
        if sequence and (sequence.model_id, sequence.blocks) != stage:
            raise Conflict(f"sequence {row.sequence} was begun by another stage here")
        end = ends.get(row.sequence, sequence.length if sequence else 0)
        unsure = sequence.proposed if sequence and row.sequence not in ends else 0
        if not end - unsure <= row.position <= end or (row.position == 0 and sequence):
            raise Conflict(
                f"sequence {row.sequence} has {end} positions here; a row cannot start at "
                f"{row.position}"
            )
        if row.position + row.count > row.limit or row.count <= row.proposed:
            raise BadInput(
                f"sequence {row.sequence}: {row.count} positions from {row.position} on, "
                f"{row.proposed} of them proposed; expected at least one that is not, and an end "
                f"within its limit {row.limit}"
            )
        ends[row.sequence] = row.position + row.count


def _check_ids(row: Row, vocab_size: int) -> None:
    """RowsRefused for tokens out of range: a GPU would read outside of its memory."""
    if not _are_ids(row.tokens, vocab_size):
        why = BadInput(f"sequence {row.sequence}: ids go from 0 to {vocab_size - 1}")
        raise RowsRefused((row.sequence,), why)


def _check_score(row: Row, score: Score, vocab_size: int) -> None:
    """RowsRefused for positions or tokens out of range."""
    placed = score.first >= 0 and score.first + len(score.tokens) <= row.count
    if not placed or not _are_ids(score.tokens, vocab_size):
        why = BadInput(
            f"sequence {row.sequence}: {len(score.tokens)} tokens to score from position "
            f"{score.first} of {row.count} on; ids go from 0 to {vocab_size - 1}"
        )
        raise RowsRefused((row.sequence,), why)


def _are_ids(tokens: Sequence[int], vocab_size: int) -> bool:
    return not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size)


def _checked_hidden(part: StagePart, model: Model) -> torch.Tensor:
    expected = (sum(row.count for row in part.rows), model.network.config.hidden_size)
    if part.hidden is None or tuple(part.hidden.shape) != expected:
        got = None if part.hidden is None else tuple(part.hidden.shape)
        raise BadInput(f"hidden states {got} for blocks from {part.start} on; expected {expected}")
    return to_device(part.hidden.to(model.network.dtype, copy=True), model.network.device)


def _scored(
    model: Model, unit: Any, hidden: torch.Tensor, rows: Sequence[Row]
) -> list[tuple[Drawn, ...]]:
    """The log probabilities of each row's known tokens."""
    scored = []
    end = 0
    for row in rows:
        start, end = end, end + row.count
        found: list[Drawn] = []
        if known := row.score:
            positions = range(start + known.first, start + known.first + len(known.tokens))
            for at in range(0, len(positions), SCORED_AT_ONCE):
                some = slice(at, at + SCORED_AT_ONCE)
                logits = model.network.head(unit, hidden, positions[some])
                found += score(logits, known.tokens[some], known.top)
        scored.append(tuple(found))
    return scored


def _drawn(
    model: Model, unit: Any, hidden: torch.Tensor, rows: Sequence[Row]
) -> tuple[tuple[Drawn, ...], ...]:
    """What is drawn after each row; empty for a row without a draw."""
    draws: list[Draw] = []
    positions: list[int] = []
    processors: list[Processor | None] = []
    proposed: list[int | None] = []
    end = 0
    for row in rows:
        end += row.count
        draw = row.draw
        if draw is None:
            continue
        draws.append(draw)
        positions.append(end - 1 - len(draw.proposed))
        processors.append(model.processors.of(row.sequence))
        proposed.append(None)
        for number, due in enumerate(draw.proposed, start=1):
            draws.append(replace(draw, index=draw.index + number))
            positions.append(positions[-1] + 1)
            processors.append(processors[-1])
            proposed.append(due)
    if not draws:
        return ((),) * len(rows)
    logits = model.network.head(unit, hidden, positions)
    drawn = iter(sample(logits, draws, processors, proposed, model.network.largest_ids))
    return tuple([_accepted(drawn, row.draw) if row.draw else () for row in rows])


def _accepted(drawn: Iterator[Drawn], draw: Draw) -> tuple[Drawn, ...]:
    """Takes what was drawn for a row: the tokens up to the first that fails, or that failure alone
    if it comes first. A failure after tokens is left to the next step."""
    first = next(drawn)
    if not draw.proposed:
        return (first,)
    rest = list(islice(drawn, len(draw.proposed)))
    return (first, *(one for one in rest if one.token is not None))
