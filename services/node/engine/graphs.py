"""Decode steps on a GPU as CUDA graphs: launches that are recorded once and repeated.

A decode step of a small batch is over sooner than the CPU can launch its kernels one by one. A
graph repeats launches as they were, with the same addresses: so it works in buffers of its own, of
fixed sizes, that are filled before each step. There are some for each of a few batch sizes; a step
takes the next larger one, and its last rows only pad. A graph holds the layers of one block, since
rows get on and off a sweep between blocks.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from functools import partial

import torch

from services.node.engine.attention import Span
from services.node.engine.decoder import Decoder, LayerStep
from services.node.engine.paged_attention import PagedStep, StepShape, plan_size
from services.node.engine.weights import LayerUnit

BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Sequences, a position each. What is larger is launched kernel by kernel, as prefills are."""

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Records what the work would launch, without running it; the result runs it."""


class CudaCapture:
    """Graphs that are never run at a time, so that they share memory. On one thread, whose stream
    is not the default one."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        anything = torch.zeros(1, device=device)
        # torch takes a pool back for good when the last graph of it goes.
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
    """A model's. One step is under way at a time; what is asked between its blocks leaves it as it
    is."""

    def __init__(self, decoder: Decoder, longest: int, capture: Capture) -> None:
        """`longest`: most positions a sequence may have."""
        self._decoder, self._capture = decoder, capture
        self._plan = torch.zeros(
            plan_size(BATCHES[-1], longest), dtype=torch.int32, device=decoder.device
        )
        self._steps: dict[int, GraphedStep] = {}
        self.warm = False
        """Whether all kernels were run before, so that `prepare` can record them."""

    def step(self, spans: Rows[Span], hidden: torch.Tensor) -> "GraphedStep | None":
        """For these rows; None: it is not a decode step, or too large."""
        if len(spans) > BATCHES[-1] or any(count != 1 for _, _, count in spans):
            return None
        step = self._of(next(batch for batch in BATCHES if batch >= len(spans)))
        step.fill(spans, hidden)
        return step

    def prepare(self, block: int, layers: Rows[LayerUnit], kv: torch.Tensor) -> None:
        """Records the block, for every batch size; see `GraphedStep.run`."""
        for batch in BATCHES:
            self._of(batch).record(block, layers, kv)

    def forget(self, block: int) -> None:
        """The block's weights are no longer where they were."""
        for step in self._steps.values():
            step.forget(block)

    def _of(self, batch: int) -> "GraphedStep":
        if batch not in self._steps:
            self._steps[batch] = GraphedStep(self._decoder, batch, self._plan, self._capture)
        return self._steps[batch]


class GraphedStep:
    """Steps of a batch size, one after the other."""

    def __init__(self, decoder: Decoder, batch: int, plan: torch.Tensor, capture: Capture) -> None:
        shape = StepShape(batch, few=batch)
        self._attention = PagedStep(decoder.attention, decoder.frequencies, shape, plan)
        self._layers = LayerStep(decoder, self._attention)
        width = decoder.config.hidden_size
        self._hidden = torch.zeros(batch, width, dtype=decoder.dtype, device=decoder.device)
        self._capture = capture
        self._replays: dict[int, Replay] = {}

    def fill(self, spans: Rows[Span], hidden: torch.Tensor) -> None:
        self._attention.fill(spans)
        self._hidden[: len(hidden)].copy_(hidden)
        self._hidden[len(hidden) :].zero_()

    def run(
        self, block: int, layers: Rows[LayerUnit], hidden: torch.Tensor, kv: torch.Tensor
    ) -> None:
        """A block's layers over the rows that it was filled with, whose `hidden` is updated. kv:
        [layers, slots, 2, kv heads, head_dim]."""
        if block in self._replays:
            self._replays[block]()
        else:
            self._layers.run(block, layers, self._hidden, kv)  # loads what is recorded then
            self.record(block, layers, kv)
        hidden.copy_(self._hidden[: len(hidden)])

    def record(self, block: int, layers: Rows[LayerUnit], kv: torch.Tensor) -> None:
        work = partial(self._layers.run, block, layers, self._hidden, kv)
        self._replays[block] = self._capture(work)

    def forget(self, block: int) -> None:
        self._replays.pop(block, None)
