"""A step: layers that are run over some rows, and what the kernels have to know of these, without
the addresses of any process."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch

from services.node.core.kv import PAGE, pages_of
from services.node.engine.adapters import named
from services.node.engine.attention import Span
from services.node.engine.bell import Bell
from shared.ids import ModelId

BLOCK = 16
"""The most rows of a sequence that one thread attends at a time."""
SCORES = 1 << 19
"""Limit of scores kept for each thread. It is exceeded only if a single row needs more."""


if TYPE_CHECKING:
    Int32s = array[int]
else:
    Int32s = array  # cannot be subscripted when it runs


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


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    rows: int
    longest: int
    """The positions of the longest sequence."""
    scratch: int
    """Scores of a thread."""
    n_spans: int
    spans: Int32s
    """See `Attention` in kernels.h, and `pages`."""
    pages: Int32s
    adapters: tuple[ModelId, ...]
    whose: Int32s
    """For each row the number of its adapter in `adapters`, or -1. Empty: none has."""


def plan_step(spans: Sequence[Span], group: int) -> StepPlan:
    """`group`: how many query heads share a KV head."""
    blocks: list[tuple[int, int, int, int]] = []
    pages = array("i")
    rows, longest = 0, 0
    for sequence, first, count in spans:
        own = pages_of(first + count)
        size = min(BLOCK, max(1, SCORES // (group * own * PAGE))) if count > 1 else 1
        for done in range(0, count, size):
            blocks.append((rows + done, min(size, count - done), first + done, len(pages)))
        pages.extend(sequence.pages[:own])
        rows, longest = rows + count, max(longest, first + count)
    # The longest spans go first, so that threads that end with short ones end together.
    blocks.sort(key=lambda block: -block[1] * (block[1] + block[2]))
    adapters, whose = named(spans)
    return StepPlan(
        rows=rows,
        longest=longest,
        scratch=group * max(n * pages_of(first + n) * PAGE for _, n, first, _ in blocks),
        n_spans=len(blocks),
        spans=array("i", chain.from_iterable(blocks)),
        pages=pages,
        adapters=tuple(adapters),
        whose=array("i", whose if adapters else ()),
    )
