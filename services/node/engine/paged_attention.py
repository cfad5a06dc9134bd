"""Attention on a GPU: fused kernels read keys and values where they lie in the cache's pages.

Two launches attend all rows of a step. Rows of few positions (decode steps) are bound by reading
KV: the keys of each sequence are divided over as many programs as fill the GPU (Flash-Decoding: Dao
et al. 2023). The number of programs depends only on the batch, so that one CUDA graph serves every
length. Rows of many positions (prefills) are cut into tiles of queries, which fill the GPU by
themselves. `triton_kernels.py` has the mathematics.

All numbers that the kernels need for a step go to the device in one copy. A row's bits may depend
on how many other rows are in the step: the promise of attention.py is not made here.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from math import e, log2

import torch

from services.node.core.kv import PAGE, pages_of
from services.node.engine import triton_kernels as kernels
from services.node.engine.attention import Attention, Span
from services.node.engine.copies import to_device

FEW = 8
"""The most positions of a row whose keys are divided: a decode step, or one with drafts."""
TILE_ROWS = 128
"""The most queries x heads of a group that one program of a prefill has."""
LEAST_ROWS = 16
"""The fewest rows that a product in Triton can have."""
QUERIES_BYTES = 32 << 10
"""The most bytes of queries that one program has."""
KEYS_BYTES = 16 << 10
"""The most bytes of keys that one program reads at a time. Two such stages of keys and values fit,
beside the queries, into the shared memory of all GPUs from compute capability 8.0 on."""
PROGRAMS = 4
"""Programs for each multiprocessor, if there are enough keys."""
MOST_SPLITS = 64
ROTATED_HEADS = 8
"""Heads that one program of the rotation has."""
_TILE = 4
"""Numbers that describe a tile; see triton_kernels.attend."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Everything that the launches of a step depend on."""

    rows: int
    """Rows of the step, including rows that only pad."""
    few: int = 0
    """Number of spans of at most FEW positions."""
    drafts: bool = False
    """Whether some of these spans have more than one position."""
    many: int = 0
    """Number of tiles of the longer spans."""


class PagedStep:
    """Implements services.node.engine.ops.Attends on a GPU.

    A step is made for given spans; or it is kept for a CUDA graph, and filled anew for other spans
    of the same shape.
    """

    def __init__(
        self,
        attention: Attention,
        frequencies: torch.Tensor,
        shape: StepShape,
        plan: torch.Tensor | None = None,
    ) -> None:
        """`plan`: int32 memory on the device, of at least `plan_size` numbers, which outlives the
        step. None: the step takes its own when it is filled."""
        self._attention, self._frequencies, self._shape = attention, frequencies, shape
        a, rows = attention, shape.rows
        # Rows that only pad are multiplied too, and must be finite.
        self._attended = torch.zeros(rows, a.q_size, dtype=a.dtype, device=a.device)
        self._dim = _dim(a)
        self._keys = max(LEAST_ROWS, min(64, KEYS_BYTES // (self._dim * a.dtype.itemsize)))
        self._few_rows = max(LEAST_ROWS, power_of_2(a.group * (FEW if shape.drafts else 1)))
        self._many_rows = _tile_rows(a)
        self._splits = _splits(a, shape.few)
        parts = (shape.few, a.n_kv_heads, self._few_rows, self._splits)
        self._partial = torch.empty(*parts, a.head_dim, device=a.device)
        self._weight = torch.empty(parts, device=a.device)
        self._plan = plan
        if plan is not None:
            self._divide(plan)

    def fill(self, spans: Iterable[Span]) -> None:
        """Makes these the rows of the step. They must fit its shape."""
        shape, queries = self._shape, self._many_rows // self._attention.group
        positions, slots, few, many, pages = (array("i") for _ in range(5))
        for sequence, first, count in spans:
            at = len(positions)
            positions.extend(range(first, first + count))
            slots.extend(sequence.slots(first, count))
            if count <= FEW:
                few.extend((at, count, first, len(pages)))
            else:
                for skip in range(0, count, queries):
                    tile = (at + skip, min(queries, count - skip), first + skip, len(pages))
                    many.extend(tile)
            pages.extend(sequence.pages[: pages_of(first + count)])
        positions.extend([0] * (shape.rows - len(positions)))
        slots.extend([-1] * (shape.rows - len(slots)))
        few.extend([0] * (_TILE * shape.few - len(few)))
        planned = array("i", chain(positions, slots, few, many, pages))
        self._set(torch.frombuffer(planned, dtype=torch.int32))

    def _set(self, planned: torch.Tensor) -> None:
        there = to_device(planned, self._attention.device)
        if self._plan is None:
            self._divide(there)
        else:
            self._plan[: len(there)].copy_(there)

    def _divide(self, plan: torch.Tensor) -> None:
        rows, shape = self._shape.rows, self._shape
        sizes = (rows, rows, _TILE * shape.few, _TILE * shape.many)
        parts = torch.split(plan, [*sizes, len(plan) - sum(sizes)])
        self._positions, self._slots, self._few, self._many, self._pages = parts

    def run(
        self, qkv: torch.Tensor, qk_norm: torch.Tensor | None, kv: torch.Tensor, window: int
    ) -> torch.Tensor:
        """Attends as ops.Attends says, but overwrites `qkv`. The result lies in the step's own
        memory."""
        a, shape = self._attention, self._shape
        heads = a.n_heads + 2 * a.n_kv_heads
        kernels.rotate_and_store[shape.rows, -(-heads // ROTATED_HEADS)](
            qkv,
            qkv if qk_norm is None else qk_norm,
            a.norm_eps,
            self._positions,
            self._frequencies,
            self._slots,
            kv,
            HEADS=a.n_heads,
            KV_HEADS=a.n_kv_heads,
            HEAD_DIM=a.head_dim,
            HALF=power_of_2(a.head_dim // 2),
            TILE=ROTATED_HEADS,
            NORMED=qk_norm is not None,
            num_warps=1,
        )
        if shape.few:
            self._attend(qkv, kv, window, self._few, self._few_rows, self._splits)
        if self._splits > 1:
            kernels.combine[shape.few, a.n_kv_heads, self._few_rows](
                self._partial,
                self._weight,
                self._attended,
                self._few,
                self._splits,
                HEADS=a.n_heads,
                KV_HEADS=a.n_kv_heads,
                HEAD_DIM=a.head_dim,
                ROWS=self._few_rows,
                DIM=self._dim,
                MOST_SPLITS=MOST_SPLITS,
            )
        if shape.many:
            self._attend(qkv, kv, window, self._many, self._many_rows, 1)
        return self._attended

    def _attend(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor,
        window: int,
        tiles: torch.Tensor,
        rows: int,
        splits: int,
    ) -> None:
        """`splits`: into how many parts the keys are divided."""
        a = self._attention
        kernels.attend[len(tiles) // _TILE, a.n_kv_heads, splits](
            qkv,
            kv,
            self._attended,
            self._partial,
            self._weight,
            tiles,
            self._pages,
            a.scale * log2(e),
            HEADS=a.n_heads,
            KV_HEADS=a.n_kv_heads,
            HEAD_DIM=a.head_dim,
            WINDOW=window,
            PAGE=PAGE,
            ROWS=rows,
            KEYS=self._keys,
            DIM=self._dim,
            DIVIDED=splits > 1,
            num_warps=8 if rows > LEAST_ROWS * 4 else 4,
            num_stages=2,
        )


def paged_step(attention: Attention, frequencies: torch.Tensor, spans: Iterable[Span]) -> PagedStep:
    """A step for exactly these spans."""
    spans = tuple(spans)
    counts = [count for _, _, count in spans]
    few = [count for count in counts if count <= FEW]
    queries = _tile_rows(attention) // attention.group
    many = sum(-(-count // queries) for count in counts if count > FEW)
    shape = StepShape(sum(counts), len(few), max(few, default=1) > 1, many)
    step = PagedStep(attention, frequencies, shape)
    step.fill(spans)
    return step


def plan_size(rows: int, longest: int) -> int:
    """How many numbers a plan has for `rows` sequences of one position each and up to `longest`
    positions."""
    return rows * (2 + _TILE + pages_of(longest))


def _tile_rows(attention: Attention) -> int:
    rows = QUERIES_BYTES // (_dim(attention) * attention.dtype.itemsize)
    return max(LEAST_ROWS, min(TILE_ROWS, rows), power_of_2(attention.group))


def _dim(attention: Attention) -> int:
    """head_dim, padded to a power of two."""
    return max(LEAST_ROWS, power_of_2(attention.head_dim))


def _splits(attention: Attention, few: int) -> int:
    """Number of programs that divide the keys of a sequence and KV head."""
    if not few:
        return 1
    programs = PROGRAMS * _processors(attention.device) // (few * attention.n_kv_heads)
    return max(1, min(MOST_SPLITS, programs))


def _processors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
