"""The sweep that is under way: parts get aboard, blocks are run, and what got off is handed on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from services.node.core.batching import Batcher
from services.node.core.microbatches import Command, Failure, Hidden, Part
from services.node.core.rows import Row
from services.node.engine.base import Bell, Engine, PartResult, RowsRefused, StagePart, Sweep
from shared.errors import CapacityExceeded, EngineFailed, LambdaScaleError
from shared.ids import ModelId
from shared.layout import Manifest

Ran = Callable[[ModelId, float, float, float], None]
"""A sweep is over: (model, share of its blocks that were run, mean of the tokens in them, s)."""
AT_ONCE_S = 0.004
"""For so long blocks are run one after the other before what came meanwhile is taken in. Blocks of
small models take a fraction of a millisecond, to which taking in adds a tenth. If nothing came,
blocks are run until something comes."""


@dataclass(slots=True)
class _Run:
    model_id: ModelId
    sweep: Sweep
    began: float
    parts: dict[int, Part] = field(default_factory=dict)
    """Parts that wait for their first block or are aboard, by their number in the sweep."""
    left: dict[int, PartResult] = field(default_factory=dict)
    """Results of parts that got off, and were not handed on yet."""
    blocks: int = 0
    """Blocks that were run so far."""
    work: int = 0
    """Positions times blocks that were run, of the rows that got off where they should."""
    stuck_since: float | None = None
    """Since when it waits for its next block, which is not there yet."""

    @property
    def due(self) -> float:
        return self.began + self.sweep.due_s


class Sweeps:
    def __init__(
        self,
        engine: Engine,
        batcher: Batcher,
        models: Mapping[ModelId, Manifest],
        *,
        blamed: Callable[[], AbstractContextManager[None]],
        do: Callable[[Iterable[Command]], None],
        ran: Ran,
        bell: Bell,
    ) -> None:
        """`models`: the open ones. `blamed`: the engine is called in it; it raises typed errors
        only. `do`: carries out what follows. `bell`: is rung when something comes."""
        self._engine = engine
        self._batcher = batcher
        self._models = models
        self._blamed = blamed
        self._do = do
        self._ran = ran
        self._bell = bell
        self._run: _Run | None = None
        self._stuck: list[_Run] = []
        """Sweeps that wait for their next block to be attached, the oldest first. Meanwhile others
        run."""

    def begin(self, now: float) -> float | None:
        """Runs the next block for everything that waits for it: see `Steps.begin`."""
        run = self._run = self._run or self._resumed(now)
        self._do(self._batcher.pull(run.parts.values() if run else ()))
        if run is None:
            self._do(self._batcher.restore())
            parts = self._batcher.take()
            if not parts:
                return now if self._batcher.restoring else None
            model_id = parts[0].model_id
            run = self._run = _Run(model_id, self._engine.begin(model_id), now)
        else:
            parts = self._batcher.join(run.model_id, run.sweep.at, run.parts.values())
        for part in parts:
            self._join(run, part)
        if run.parts:
            self._advance(run, now)
        return run.due

    def finish(self, now: float) -> None:
        """Hands on what got off."""
        run = self._run
        if run is None:
            return
        if lends := self._batcher.reached(run.parts.values(), run.sweep.at):
            self._do(lends)
        left, run.left = run.left, {}
        for number, result in left.items():
            part = run.parts.pop(number)
            part = part.without(set(part.keys) - {row.sequence for row in result.rows})
            if part.rows:
                run.work += part.positions * (part.stop - part.start)
                for key, error in result.failed.items():
                    self._do(self._batcher.refused(part, [key], failure_of(error)))
                commands = self._batcher.ran(
                    part, result.sampled, result.hidden, result.logprobs, result.vectors
                )
                self._do(commands)
        if not run.parts:  # what was only waiting for these results may go on with the sweep
            for part in self._batcher.join(run.model_id, run.sweep.at, ()):
                self._join(run, part)
        if not run.parts:
            self._run = None
            self._tell(run, now)
        elif run.stuck_since is not None:
            self._run = None
            self._stuck.append(run)
            self._batcher.stuck(run.parts.values())

    def give_up(self) -> None:
        """Forgets all sweeps that are under way, with everything aboard."""
        self._run = None
        self._stuck.clear()

    def closed(self, model_id: ModelId) -> None:
        """No block of the model will come any more, and all of its sequences are over."""
        self._stuck = [run for run in self._stuck if run.model_id != model_id]

    def _resumed(self, now: float) -> _Run | None:
        """The oldest sweep whose next block has come."""
        for run in self._stuck:
            if run.sweep.at in self._engine.held(run.model_id):
                self._stuck.remove(run)
                assert run.stuck_since is not None
                run.began += now - run.stuck_since
                run.stuck_since = None
                self._batcher.stuck(run.parts.values(), over=True)
                return run
        return None

    def _join(self, run: _Run, part: Part) -> None:
        """Takes the part aboard, without the rows of sequences that had to make room. A part that
        can't be run has failed."""
        while (part := self._batcher.live(part)).rows:
            try:
                with self._blamed():
                    run.parts[run.sweep.join(_stage_part(part))] = part
                return
            except CapacityExceeded as error:
                commands = self._batcher.no_room(part, failure_of(error))
            except RowsRefused as error:
                commands = self._batcher.refused(part, error.sequences, failure_of(error.why))
            except LambdaScaleError as error:
                commands = self._batcher.failed(part, failure_of(error))
            self._do(commands)

    def _advance(self, run: _Run, now: float) -> None:
        before = run.sweep.at
        try:
            with self._blamed():
                lends = self._batcher.lends(run.parts.values())
                run.left = run.sweep.advance(AT_ONCE_S, None if lends else self._bell)
            dropped = {number for number, result in run.left.items() if not result.rows}
            starts = [part.start for number, part in run.parts.items() if number not in dropped]
            run.blocks += run.sweep.at - max(before, min(starts)) if starts else 0
            if run.sweep.at == before and not run.left:
                run.stuck_since = now
        except LambdaScaleError as error:
            why = failure_of(self._judged(run, error))
            for part in run.parts.values():
                self._do(self._batcher.failed(part, why))
            run.parts = {}

    def _judged(self, run: _Run, error: LambdaScaleError) -> LambdaScaleError:
        """What a sweep failed with. If it had no memory, later sweeps are smaller, and nobody is to
        blame, unless they are as small as they get."""
        if not isinstance(error, CapacityExceeded):
            return error
        positions = sum(part.positions for part in run.parts.values())
        if self._batcher.shrink() and positions > 1:
            return error
        return EngineFailed(f"{error}, for {positions} positions, and takes no fewer at a time")

    def _tell(self, run: _Run, now: float) -> None:
        manifest = self._models.get(run.model_id)
        if manifest is not None and run.work:
            share = run.blocks / manifest.n_blocks
            self._ran(run.model_id, share, run.work / run.blocks, now - run.began)


def failure_of(error: LambdaScaleError) -> Failure:
    return Failure(error.code, str(error))


def tensor_of(hidden: Hidden | None) -> torch.Tensor | None:
    """The scheduler passes on only what came from the wire or from the engine: tensors."""
    assert hidden is None or isinstance(hidden, torch.Tensor)
    return hidden


def _stage_part(part: Part) -> StagePart:
    """The part as the engine takes it: block numbers for the path, and the hidden states of the
    rows that are left."""
    hidden = rows_of(part.hidden, part.rows, part.offsets)
    alone = len(part.path.stages) == 1  # its attempts may come to an instance that opens
    return StagePart(part.start, part.stop, part.rows, hidden, waits=alone)


def rows_of(
    hidden: Hidden | None, rows: Sequence[Row], offsets: Sequence[int]
) -> torch.Tensor | None:
    """The hidden states of these rows, one after the other."""
    tensor = tensor_of(hidden)
    if tensor is None or sum(row.count for row in rows) == tensor.shape[0]:
        return tensor
    pairs = zip(rows, offsets, strict=True)
    return torch.cat([tensor[start : start + row.count] for row, start in pairs])
