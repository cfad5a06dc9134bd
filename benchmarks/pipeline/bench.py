"""A path of stages, each a process of its own over TCP, that decodes a steady batch.

A stage takes at least a given time for a sweep, without using the processor (node.step_floor_s). So
a machine with few cores runs many stages as if each had an accelerator. Every round measures the
path, and the path without 2-D pipelining: with one micro-batch in flight, either of the same size
or of all the sequences. A step's least time does not grow with its rows, like the time of a decode
step that is bound by reading the weights. So all the sequences in one micro-batch are as good.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from benchmarks.pipeline.results import Results, Row, Settings, Window
from benchmarks.pipeline.stage import PATIENCE_S, Record, Spec, Stage, StageFailed, Sweep
from services.local.demo_model import CheckpointSpec, make_checkpoint
from services.node.checkpoints.store import Store
from shared.errors import BadInput
from shared.ids import GatewayId, InstanceId, ModelId, NodeId, RequestId
from shared.messages import instances
from shared.messages.serving import Sampling, Submit

CONTEXT = 4096
PROMPT = 16
HEAD_DIM = 64
VOCAB = 512
BLOCKS = 2
"""Blocks of a stage."""
SETTLED = 4
"""Tokens that every sequence has before it is measured."""
POLL_S = 0.05
OURS = 0
"""Lets the path have as many micro-batches in flight as it likes."""


def measure(settings: Settings, say: Callable[[str], None]) -> Results:
    """Runs the benchmark. BadInput: the stages are impossible. StageFailed: a stage went wrong."""
    if min(settings.stages) < 2:
        raise BadInput("--stages: a path has 2 stages or more")
    if settings.hidden % HEAD_DIM:
        raise BadInput(f"--hidden: {settings.hidden} is not a multiple of {HEAD_DIM}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="lambdascale-bench-") as folder:
        for count in settings.stages:
            say(f"starting {count} stages")
            with _Path(settings, count, Path(folder) / str(count)) as path:
                row = Row(count)
                for number in range(settings.rounds):
                    row.ours.append(path.decode(count * settings.batch, OURS))
                    row.one.append(path.decode(settings.batch, 1))
                    row.whole.append(path.decode(count * settings.batch, 1))
                    idle = " ".join(f"{idle:.1%}" for idle in row.ours[-1].idle)
                    say(f"round {number + 1} of {settings.rounds}: idle {idle}")
            rows.append(row)
    return Results(settings, tuple(rows))


class _Path(ExitStack):
    """The path's processes."""

    def __init__(self, settings: Settings, count: int, folder: Path) -> None:
        super().__init__()
        self._settings, self._count = settings, count
        self._made = 0
        checkpoint = folder / "checkpoint"
        make_checkpoint(checkpoint, _spec(settings, count))
        imported = Store(folder / "store").import_checkpoint(checkpoint, blocks=BLOCKS * count)
        self._model: ModelId = imported.model_id
        self._stages = [
            Stage(
                Spec(
                    node=f"stage-{number}",
                    store=folder / "store",
                    model=self._model,
                    start=BLOCKS * number,
                    stop=BLOCKS * (number + 1),
                    step_s=settings.stage_s * count,
                    slots=count * settings.batch,
                    kv_tokens=count * settings.batch * CONTEXT,
                )
            )
            for number in range(count)
        ]

    def __enter__(self) -> "_Path":
        with ExitStack() as entered:
            for stage in self._stages:
                entered.enter_context(stage)
            self._path = tuple(
                instances.Stage(
                    NodeId(f"stage-{number}"), stage.ready(), BLOCKS * number, BLOCKS * (number + 1)
                )
                for number, stage in enumerate(self._stages)
            )
            self.push(entered.pop_all().__exit__)
        return self

    def decode(self, sequences: int, depth: int) -> Window:
        """Decodes `sequences` sequences with at most `depth` micro-batches in flight."""
        leader = self._stages[0]
        submits = [self._submit() for _ in range(sequences)]
        leader.submit(submits, depth)
        try:
            self._settle(sequences)
            for stage in self._stages:
                stage.record()
            began = time.monotonic()
            time.sleep(self._settings.window_s)
            ended = time.monotonic()
            records = [stage.record() for stage in self._stages]
        finally:
            leader.cancel(submits)
        return window(records, began, ended)

    def _settle(self, sequences: int) -> None:
        """Waits until all sequences have some tokens. They take turns, so none is far behind."""
        missing = SETTLED * sequences
        until = time.monotonic() + PATIENCE_S
        while missing > 0:
            if time.monotonic() > until:
                raise StageFailed(f"{missing} tokens are missing after {PATIENCE_S:.0f} s")
            time.sleep(POLL_S)
            record = self._stages[0].record()
            if record.failures:
                raise StageFailed(record.failures[0])
            missing -= sum(count for _, count in record.tokens)

    def _submit(self) -> Submit:
        self._made += 1
        return Submit(
            request=RequestId(f"r{self._made}"),
            attempt=1,
            gateway=GatewayId("bench"),
            model_id=self._model,
            instance=InstanceId("bench"),
            stages=self._path,
            tokens=tuple((self._made + i) % VOCAB for i in range(PROMPT)),
            prompt_tokens=PROMPT,
            max_tokens=CONTEXT - PROMPT,
            stop_ids=(),
            sampling=Sampling(),
        )


def window(records: Sequence[Record], began: float, ended: float) -> Window:
    """What the stages, the leader first, did between these times. StageFailed if they did nothing,
    or if a sequence failed or ended."""
    if failures := [failure for record in records for failure in record.failures]:
        raise StageFailed(failures[0])
    tokens = [(at, count) for at, count in records[0].tokens if began <= at < ended]
    inside = [[s for s in record.sweeps if began <= s.began < ended] for record in records]
    if len(tokens) < 2 or not all(inside):
        raise StageFailed(f"nothing came in {ended - began:.1f} s: use longer windows (--window)")
    busy = (sum(_overlap(s, began, ended) for s in record.sweeps) for record in records)
    one_by_one = sorted((s for sweeps in inside for s in sweeps), key=lambda s: s.began)
    return Window(
        tokens_per_s=sum(count for _, count in tokens[1:]) / (tokens[-1][0] - tokens[0][0]),
        idle=tuple(1 - seconds / (ended - began) for seconds in busy),
        sweep_s=tuple(fmean(s.seconds for s in sweeps) for sweeps in inside),
        hand_over_s=median(
            after.began - before.began - before.seconds for before, after in pairwise(one_by_one)
        ),
    )


def _overlap(sweep: Sweep, began: float, ended: float) -> float:
    return max(0.0, min(sweep.began + sweep.seconds, ended) - max(sweep.began, began))


def _spec(settings: Settings, stages: int) -> CheckpointSpec:
    """A model as wide as asked, and otherwise so small that computing takes almost no time."""
    return CheckpointSpec(
        layers=BLOCKS * stages - 2,
        hidden=settings.hidden,
        intermediate=HEAD_DIM,
        heads=settings.hidden // HEAD_DIM,
        kv_heads=1,
        vocab_size=VOCAB,
        context_length=CONTEXT,
    )
