"""Decode steps on a GPU as CUDA graphs: launches that are recorded once and then repeated.

A GPU finishes the decode step of a small batch sooner than a CPU can launch its kernels one by one.
A graph repeats launches exactly, with the same addresses. So it works in fixed buffers that are
filled before each step. There is a graph for each of a few batch sizes; a step takes the next
larger size and pads the rest. A graph holds the layers of one block, because rows join and leave a
sweep between blocks.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from services.node.engine.attention import Span
from services.node.engine.base import Bell
from services.node.engine.decoder import Decoder
from services.node.engine.paged_attention import PagedStep, StepShape, plan_size
from services.node.engine.weights import LayerUnit

BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Batch sizes, in sequences of one position each. Larger steps are launched kernel by kernel, as
prefills are."""

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Records what `work` would launch, without running it. The result runs it."""


class CudaCapture:
    """Records graphs that share memory, since only one of them runs at a time. To be used on one
    thread, whose stream is not the default stream."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        anything = torch.zeros(1, device=device)
        # torch frees a pool for good when its last graph goes, so one graph is always kept.
        self._first = self(anything.zero_)

    def __call__(self, work: Callable[[], object]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # Other threads use CUDA meanwhile, to bring weights: that must not end the recording.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        return graph.replay


class DecodeGraphs:
    """The graphs of one model. One step runs at a time; calls to the engine between its blocks do
    not disturb it."""

    def __init__(self, decoder: Decoder, longest: int, capture: Capture) -> None:
        """`longest`: the most positions that a sequence may have."""
        self._decoder, self._capture = decoder, capture
        self._plan = torch.zeros(
            plan_size(BATCHES[-1], longest), dtype=torch.int32, device=decoder.device
        )
        self._steps: dict[int, GraphedStep] = {}
        self.warm = False
        """Whether every kernel has run before, so that `prepare` can record it."""

    def step(self, spans: Sequence[Span], hidden: torch.Tensor) -> "GraphedStep | None":
        """A step for these rows. None if they are no decode step, or too many for a graph."""
        if len(spans) > BATCHES[-1] or any(count != 1 for _, _, count in spans):
            return None
        step = self._of(next(batch for batch in BATCHES if batch >= len(spans)))
        step.fill(spans, hidden)
        return step

    def prepare(self, block: int, layers: Sequence[LayerUnit], kv: torch.Tensor) -> None:
        """Records the block for every batch size; see `GraphedStep.run`."""
        for batch in BATCHES:
            self._of(batch).record(block, layers, kv)

    def forget(self, block: int) -> None:
        """Drops the block's graphs, because its weights have moved."""
        for step in self._steps.values():
            step.forget(block)

    def _of(self, batch: int) -> "GraphedStep":
        if batch not in self._steps:
            self._steps[batch] = GraphedStep(self._decoder, batch, self._plan, self._capture)
        return self._steps[batch]


class GraphedStep:
    """Steps of one batch size, one after the other."""

    def __init__(self, decoder: Decoder, batch: int, plan: torch.Tensor, capture: Capture) -> None:
        shape = StepShape(batch, few=batch)
        self._attention = PagedStep(decoder.attention, decoder.frequencies, shape, plan)
        self._layers = decoder.layer_step(self._attention, batch)
        width = decoder.config.hidden_size
        self._hidden = torch.zeros(batch, width, dtype=decoder.dtype, device=decoder.device)
        self._capture = capture
        self._replays: dict[int, Replay] = {}

    def fill(self, spans: Sequence[Span], hidden: torch.Tensor) -> None:
        self._attention.fill(spans)
        self._hidden[: len(hidden)].copy_(hidden)
        if len(hidden) < len(self._hidden):
            self._hidden[len(hidden) :].zero_()

    def run(
        self,
        block: int,
        blocks: Iterable[Sequence[LayerUnit]],
        hidden: torch.Tensor,
        kv: torch.Tensor,
        for_s: float = 0.0,
        bell: Bell | None = None,
    ) -> int:
        """Launches the layers of `blocks` over the rows that `fill` was given. Their results
        replace `hidden`, [rows, hidden_size]. kv: [layers, slots, 2, kv heads, head_dim]."""
        until = time.monotonic() + for_s
        ran = done = 0
        for layers in blocks:
            own = kv[done : done + len(layers)]
            if replay := self._replays.get(block + ran):
                replay()
            else:
                self._layers.run_layers(layers, self._hidden, own)  # loads the kernels
                self.record(block + ran, layers, own)
            ran, done = ran + 1, done + len(layers)
            if (bell is None or bell.rung) and time.monotonic() >= until:
                break
        hidden.copy_(self._hidden[: len(hidden)])
        return ran

    def record(self, block: int, layers: Sequence[LayerUnit], kv: torch.Tensor) -> None:
        work = partial(self._layers.run_layers, layers, self._hidden, kv)
        self._replays[block] = self._capture(work)

    def forget(self, block: int) -> None:
        self._replays.pop(block, None)
