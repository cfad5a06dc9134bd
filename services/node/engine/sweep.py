"""The torch engine's sweep. Rows join and leave between blocks, and are packed anew when they do.

A row's result does not depend on its place or on the other rows (attention.py says how), so it does
not matter which rows share a sweep.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

import torch

from services.node.core.kv import pages_of
from services.node.engine.adapters import Adapter
from services.node.engine.attention import Span
from services.node.engine.base import (
    Bell,
    PartResult,
    Row,
    SequenceKey,
    StagePart,
    run_end,
)
from services.node.engine.copies import to_host
from services.node.engine.drawing import drawn_after, pooled, scored
from services.node.engine.kv import KvCache
from services.node.engine.kv_sequence import KvSequence
from services.node.engine.model import Model
from services.node.engine.part_checks import check_adapters, check_part, checked_hidden
from services.node.engine.sampling import Drawn
from services.node.engine.step import Step
from services.node.engine.team import use_threads
from shared.errors import LambdaScaleError
from shared.ids import ModelId
from shared.messages.serving import Logprobs


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
    """For each row, once the head was run: first the scored tokens, then the drawn ones; or its
    vector."""

    @property
    def result(self) -> PartResult:
        hidden = None if self.ends else to_host(self.hidden)
        sampled: list[tuple[int, ...]] = []
        logprobs: dict[SequenceKey, tuple[Logprobs, ...]] = {}
        vectors: dict[SequenceKey, bytes] = {}
        failed: dict[SequenceKey, LambdaScaleError] = {}
        for row, ones in zip(self.rows, self.drawn or ((),) * len(self.rows), strict=True):
            sampled.append(tuple([one.token for one in ones if one.token is not None]))
            for one in ones:
                if one.logprobs:
                    logprobs[row.sequence] = (*logprobs.get(row.sequence, ()), one.logprobs)
                if one.vector:
                    vectors[row.sequence] = one.vector
                if one.error:
                    failed.setdefault(row.sequence, one.error)
        return PartResult(tuple(self.rows), hidden, tuple(sampled), logprobs, vectors, failed)

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
        adapters: Mapping[ModelId, Adapter],
        floor_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`adapters`: those that rows may name. `floor_s`: the least seconds for all of the model's
        blocks; some of the blocks take their share. `check`: is called once results have come from
        the device, and raises an error if they are worth nothing."""
        self._floor_s = floor_s
        self._check = check
        self._due_s = 0.0
        self._model_id = model_id
        self._kv = kv
        self._adapters = adapters
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
        check_part(part, self._model_id, model, self._kv, self._at)
        check_adapters(part, self._model_id, self._kv, self._adapters)
        with torch.inference_mode():
            if part.start == 0:
                hidden = model.network.embed(model.blocks[0][0], part.rows)
            else:
                hidden = checked_hidden(part, model)
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
                use_threads(model.threads)
                stop = run_end(model.blocks, self._at, self._next_stop())
                if stop == self._at:
                    self._step = None  # other sweeps run before this one goes on
                while self._at < stop:
                    ran = self._run(model, stop, until - time.monotonic(), bell)
                    self._at += ran
                    self._due_s += ran * self._floor_s / model.manifest.n_blocks
                    called = bell is None or bell.rung
                    if called and time.monotonic() >= until:
                        break
                left |= self._let_off(lambda rider: rider.stop == self._at)
                if left:
                    self._check()
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
        """Scores, draws and pools for everybody aboard. The head is the last unit, so all parts
        leave after it."""
        rows = [row for rider in self._aboard for row in rider.rows]
        drawn = drawn_after(model, unit, self._hidden, rows)
        if any(row.score for row in rows):
            known = scored(model, unit, self._hidden, rows)
            drawn = tuple((*before, *new) for before, new in zip(known, drawn, strict=True))
        if any(row.pooling for row in rows):
            vectors = pooled(model, unit, self._hidden, rows)
            drawn = tuple((*before, *new) for before, new in zip(vectors, drawn, strict=True))
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
                self._kv.keep(sequence, row.position, row.tokens[:kept])

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
            rows = {row.sequence: row for row in part.rows if not self._has_room(row)}
            layers_from = cache(lambda start: model.layers_with_kv(start, part.stop))
            wanted = [self._missing(row, part, layers_from) for row in rows.values()]
            if wanted:
                self._kv.require(self._model_id, wanted)
        sequences: list[KvSequence] = []
        for row in part.rows:
            sequence = self._kv.find(row.sequence) or self._kv.start(
                self._model_id,
                (part.start, part.stop),
                layers,
                row.sequence,
                row.limit,
                row.adapter,
            )
            if sequence.runs_on(row, part.start):
                so_far = model.layers_with_kv(sequence.blocks[0], part.stop)
                self._kv.run_on(sequence, part.stop, so_far)
                sequences.append(sequence)
                continue
            self._kv.truncate(sequence, row.position)
            self._kv.extend(sequence, row.count, row.proposed)
            sequences.append(sequence)
        return sequences

    def _has_room(self, row: Row) -> bool:
        """Whether the row goes on in pages that its sequence has, as most steps of decode do."""
        sequence = self._kv.find(row.sequence)
        if sequence is None or row.position == 0:
            return False
        return pages_of(row.position + row.count) <= len(sequence.pages)

    def _missing(
        self, row: Row, part: StagePart, layers_from: Callable[[int], range]
    ) -> tuple[int, int]:
        """See `KvCache.missing`. `layers_from`: the layers from a block to the part's end."""
        sequence, start = self._kv.find(row.sequence), part.start
        if sequence and sequence.runs_on(row, part.start):
            start = sequence.blocks[0]
        end = row.position + row.count
        return self._kv.missing(sequence, self._model_id, layers_from(start), end)
