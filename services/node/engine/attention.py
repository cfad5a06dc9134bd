"""Causal attention of packed rows over the KV cache by torch's operators. A row's result is the
same in every batch. (Most CPUs and GPUs attend with kernels of our own: kernel_step.py,
paged_attention.py.)

A request must get the same tokens alone or in a batch; prefilled at once, in chunks, or grown step
by step; on one node or over several. Only logits with exactly the same bits guarantee that, so a
row's result must not depend on the other rows of the call. What follows was measured for torch 2.13
with MKL on CPUs of Intel and AMD (fp32, 1 to 8 threads; rows compared bit by bit over row counts
1..640). On Intel's, MKL's strict reproducibility was on, since a CPU with AMX differs otherwise. On
AMD's it was off, since there the strict mode differs (`__init__.py`; PITCH in linear.py).

- A matrix product gives a row the same bits for every number of rows that is a multiple of 4. It
  gives other bits for 1 to 3 rows (other kernels) and, with 2 or 8 threads, for 5-7 and 9-11 (the
  rows are divided, which leaves 1 to 3 over). Hence ROWS: every product here and with stored
  weights (linear.py) has a multiple of 4 rows.
- Softmax over a row gives the same bits with additional columns of -inf.
- In weights x values, zeros at the end change nothing if the number of summed positions is a
  multiple of 16 and at most 192; otherwise MKL sums in another order. Hence VALUE_TILE, and whole
  pages.
- The bits do not depend on where keys and values lie, or on how keys are divided into whole pages.
- All this holds for head_dim 8 to 256, multiples of 4. (With less, some products are so small that
  torch uses another loop; with 10, and only 10, MKL sums the values in another order.)
- Fused silu and sigmoid depend on where a number lies in memory (vector body or scalar tail). exp
  does not; see ops.py.
- scaled_dot_product_attention fails all of this, and for the few queries of a decode step it is
  slower than the three calls here.

So a query reads the keys up to its own position, rounded up to whole pages and masked, and sums the
values tile by tile. With a sliding window (Beltagy et al. 2020, section 3.1) it skips whole value
tiles before the window, so that every query sums the rest in the same tiles, and masks what is
left. Sequences are attended one by one: batching them would need padding or a copy of their KV.
Pages that are neighbours are read in place, as one strided view; only a tile of values that lies in
several places is copied together first. Query heads that share a KV head are folded into the rows,
so KV is never repeated. On a CPU attention runs in fp32, also for bf16 models, because bf16
products of this size are several times slower there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from services.node.checkpoints.config import ModelConfig
from services.node.core.kv import PAGE, whole_pages
from services.node.engine.kv_sequence import KvSequence, Run
from services.node.engine.rope import rotations

ROWS = 4
VALUE_TILE = 128
QUERY_TILE = 128
"""Longer prefills are attended in parts. This bounds the memory of scores and skips masked keys."""

Span = tuple[KvSequence, int, int]
"""(sequence, first position, count) of one row of a step that has layers to run."""


def pad_rows(n: int) -> int:
    return -(-n // ROWS) * ROWS


@dataclass(frozen=True, slots=True)
class _Tile:
    """Up to QUERY_TILE queries of one sequence. All views are into the step's buffers."""

    first: int
    """Position of the first key that is read."""
    keys: tuple[tuple[Run, torch.Tensor], ...]
    """The keys to read, and the mask that is added to their scores. The mask broadcasts to [kv
    heads, rows, keys]."""
    values: tuple[tuple[Run, ...], ...]
    """The runs of slots that make up each VALUE_TILE of the values."""
    queries: torch.Tensor
    """[kv heads, rows, head_dim]; rows = padded(group x queries)."""
    queries_from: tuple[torch.Tensor, torch.Tensor] | None
    """(target, source) of the copy that fills `queries`; None if the queries are in place
    already."""
    out: torch.Tensor
    out_to: tuple[torch.Tensor, torch.Tensor] | None


class Attention:
    """The shapes of a model's attention, and the tables that all its steps share."""

    def __init__(
        self, config: ModelConfig, longest: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`longest`: the most positions that a sequence may have."""
        self.n_heads, self.n_kv_heads = config.n_heads, config.n_kv_heads
        self.head_dim = config.head_dim
        self.group = config.n_heads // config.n_kv_heads
        self.norm_eps = config.norm_eps
        # YaRN multiplies queries and keys by its factor; the scores get both at once.
        self.scale = config.head_dim**-0.5 * config.rope.attention_factor**2
        self.dtype, self.device = dtype, device
        self.q_size = self.n_heads * self.head_dim
        self.kv_size = self.n_kv_heads * self.head_dim
        self._longest = longest
        self._decode_masks = {
            window: self._mask_of_last(window or longest)
            for window in {layer.window for layer in config.layers}
        }

    @property
    def windows(self) -> Iterable[int]:
        """The different window sizes of the model's layers; 0 stands for no window."""
        return self._decode_masks

    def first_read(self, query: int, window: int) -> int:
        """The first key position that the query at position `query` reads. Every later query reads
        from there on or later."""
        return max(query + 1 - window, 0) // VALUE_TILE * VALUE_TILE if window else 0

    def decode_mask(self, length: int, window: int) -> torch.Tensor:
        """The mask for positions from first_read to whole_pages(length): 0 for the last `window`
        positions up to `length`, -inf for the others."""
        first = self.first_read(length - 1, window)
        mask = self._decode_masks[window]
        start = len(mask) - PAGE - (length - first)
        return mask[start : start + whole_pages(length) - first]

    def prefill_mask(self, first: int, count: int, window: int) -> torch.Tensor:
        """A mask [padded(group x count), first_read(first) to whole_pages(first + count)], in which
        each query sees itself and what is before it, at most `window` positions if there is a
        window."""
        start, stop = self.first_read(first, window), whole_pages(first + count)
        keys = torch.arange(start, stop, device=self.device)
        queries = torch.arange(first, first + count, device=self.device)
        queries = queries.repeat_interleave(self.group)[:, None]
        rows = len(queries)
        hidden = keys > queries
        if window:
            hidden |= keys <= queries - window
        mask = torch.zeros(pad_rows(rows), len(keys), dtype=self.dtype, device=self.device)
        mask[:rows].masked_fill_(hidden, -torch.inf)
        return mask

    def _mask_of_last(self, window: int) -> torch.Tensor:
        """A tensor of which every decode mask is a slice: -inf for a value tile, 0, -inf for a
        page."""
        mask = torch.zeros(VALUE_TILE + window + PAGE, dtype=self.dtype, device=self.device)
        mask[:VALUE_TILE] = -torch.inf
        mask[VALUE_TILE + window :] = -torch.inf
        return mask


class AttentionStep:
    """Implements services.node.engine.ops.Attends with torch's operators, on any device."""

    def __init__(
        self, attention: Attention, frequencies: torch.Tensor, spans: Sequence[Span]
    ) -> None:
        self._attention = attention
        a = attention
        n, qkv_size = sum(count for _, _, count in spans), a.q_size + 2 * a.kv_size
        self._qkv = torch.empty(n, qkv_size, dtype=a.dtype, device=a.device)
        self._attended = torch.empty(n, a.q_size, dtype=a.dtype, device=a.device)
        self._tiles: dict[int, list[_Tile]] = {window: [] for window in a.windows}
        slots: list[int] = []
        positions: list[int] = []
        for sequence, first, count in spans:
            for window in a.windows:
                self._plan(sequence, first, count, len(slots), window)
            slots.extend(sequence.slots(first, count))
            positions.extend(range(first, first + count))
        self._slots = torch.tensor(slots, device=a.device)
        self._new_kv = self._qkv[:, a.q_size :]
        self._set_up_rope(torch.tensor(positions, device=a.device), frequencies)

    def run(
        self, qkv: torch.Tensor, qk_norm: torch.Tensor | None, kv: torch.Tensor, window: int
    ) -> torch.Tensor:
        self._qkv.copy_(qkv)
        if qk_norm is not None:
            qk = self._qk
            normed = functional.rms_norm(qk, qk.shape[-1:], None, self._attention.norm_eps)
            torch.mul(normed, qk_norm, out=qk)
        self._rotate()
        kv.view(kv.shape[0], -1).index_copy_(0, self._slots, self._new_kv)
        for tile in self._tiles[window]:
            if tile.queries_from:
                tile.queries_from[0].copy_(tile.queries_from[1])
            weights = torch.softmax(self._scores(tile, kv), -1)
            self._weighted_sum(weights, tile, kv)
            if tile.out_to:
                tile.out_to[0].copy_(tile.out_to[1])
        return self._attended.to(qkv.dtype)

    def _scores(self, tile: _Tile, kv: torch.Tensor) -> torch.Tensor:
        a = self._attention
        n, dim, slot, base = a.n_kv_heads, a.head_dim, 2 * a.kv_size, kv.storage_offset()
        scores = [
            torch.baddbmm(
                mask,
                tile.queries,
                kv.as_strided(
                    (n, dim, run.stop - run.first), (dim, 1, slot), base + run.slot * slot
                ),
                alpha=a.scale,
            )
            for run, mask in tile.keys
        ]
        return scores[0] if len(scores) == 1 else torch.cat(scores, -1)

    def _weighted_sum(self, weights: torch.Tensor, tile: _Tile, kv: torch.Tensor) -> None:
        """Computes tile.out = weights @ values, VALUE_TILE positions at a time, in order."""
        a = self._attention
        n, dim, slot = a.n_kv_heads, a.head_dim, 2 * a.kv_size
        base = kv.storage_offset() + a.kv_size
        for runs in tile.values:
            pieces = [
                kv.as_strided(
                    (n, run.stop - run.first, dim), (dim, slot, 1), base + run.slot * slot
                )
                for run in runs
            ]
            values = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
            first, stop = runs[0].first - tile.first, runs[-1].stop - tile.first
            if first == 0:
                torch.bmm(weights[:, :, :stop], values, out=tile.out)
            else:
                tile.out.baddbmm_(weights[:, :, first:stop], values)

    def _plan(self, sequence: KvSequence, first: int, count: int, row: int, window: int) -> None:
        for done in range(0, count, QUERY_TILE):
            n = min(QUERY_TILE, count - done)
            tile = self._tile(sequence, first + done, n, row + done, window)
            self._tiles[window].append(tile)

    def _tile(self, sequence: KvSequence, first: int, count: int, row: int, window: int) -> _Tile:
        a = self._attention
        rows, span = a.group * count, slice(row, row + count)
        by_head = (count, a.n_kv_heads, a.group, a.head_dim)
        source = self._qkv[span, : a.q_size].view(by_head).transpose(0, 1)
        target = self._attended[span].view(by_head).transpose(0, 1)
        start = a.first_read(first, window)
        if count == 1:
            mask = a.decode_mask(first + 1, window)
        else:
            mask = a.prefill_mask(first, count, window)
        runs = _from(start, sequence.runs(whole_pages(first + count)))
        keys = tuple((run, mask[..., run.first - start : run.stop - start]) for run in runs)
        values = _in_tiles(runs)
        if count == 1 and rows == pad_rows(rows):
            return _Tile(start, keys, values, source[:, 0], None, target[:, 0], None)
        shape = (a.n_kv_heads, pad_rows(rows), a.head_dim)
        queries, out = self._qkv.new_zeros(shape), self._qkv.new_empty(shape)
        folded = (a.n_kv_heads, count, a.group, a.head_dim)
        return _Tile(
            start,
            keys,
            values,
            queries,
            (queries[:, :rows].view(folded), source),
            out,
            (target, out[:, :rows].view(folded)),
        )

    def _set_up_rope(self, positions: torch.Tensor, frequencies: torch.Tensor) -> None:
        """Makes views of queries and keys, and of their halves: RoPE pairs dimension i with i +
        D/2."""
        a, n = self._attention, len(positions)
        half = a.head_dim // 2
        cos, sin = (t.to(a.dtype) for t in rotations(positions, frequencies))
        qk = self._qkv[:n, : a.q_size + a.kv_size].view(n, -1, a.head_dim)
        turned = torch.empty_like(qk, memory_format=torch.contiguous_format)
        self._cos, self._sin, self._minus_sin = torch.cat((cos, cos), -1), sin, -sin
        self._qk, self._turned = qk, turned
        self._low, self._high = qk[..., :half], qk[..., half:]
        self._turned_low, self._turned_high = turned[..., :half], turned[..., half:]

    def _rotate(self) -> None:
        torch.mul(self._high, self._minus_sin, out=self._turned_low)
        torch.mul(self._low, self._sin, out=self._turned_high)
        self._qk.mul_(self._cos).add_(self._turned)


def _from(start: int, runs: list[Run]) -> list[Run]:
    """The part of the runs that lies at or after the position `start`."""
    return [
        Run(run.slot + max(start - run.first, 0), max(start, run.first), run.stop)
        for run in runs
        if run.stop > start
    ]


def _in_tiles(runs: list[Run]) -> tuple[tuple[Run, ...], ...]:
    """The runs, cut where a VALUE_TILE ends, in one tuple for each tile."""
    tiles: list[tuple[Run, ...]] = []
    for start in range(runs[0].first, runs[-1].stop, VALUE_TILE):
        stop = start + VALUE_TILE
        tiles.append(
            tuple(
                Run(
                    run.slot + max(start - run.first, 0), max(start, run.first), min(stop, run.stop)
                )
                for run in runs
                if run.first < stop and start < run.stop
            )
        )
    return tuple(tiles)
