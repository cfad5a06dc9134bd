"""The KV cache: pages of PAGE positions, taken as a sequence grows.

A sequence has the same page numbers in all layers it uses, and attention reads whole pages. The
pages come from one budget for all models (paged attention: Kwon et al., SOSP 2023, section 4).
Nothing is reserved: a sequence that finds no free page has to wait until others are freed.

Sharing: a full page whose tokens are known is kept under a digest of all tokens up to its end,
chained page by page (as in vLLM's prefix caching), and read by every sequence that begins with the
same tokens. A shared page is never written: a sequence writes only behind its last page, and takes
a page of its own where it departs from the cached tokens. When its last reader has ended, a page
stays until its memory is needed; the least recently used page goes first. A sequence gives its last
pages back first, so that the end of a prefix goes before its beginning.

Placement: neighbouring pages are read as one strided view (attention.py). So the next page of a
sequence is the one after its last, if that is free. Otherwise it is in the middle of the longest
free run, far from the sequences on both sides, which grow too; in a short run, at its beginning.
"""

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import torch

from services.node.core.kv import PAGE, pages_of
from services.node.engine.base import SequenceKey
from shared.errors import CapacityExceeded, NotFound
from shared.ids import ModelId

EVICTED_TOGETHER = 16
"""Pages evicted at a time. Those of one ended sequence are neighbours, so whoever takes them gets
one piece."""


class Run(NamedTuple):
    """Positions first <= position < stop, which lie side by side from `slot` on."""

    slot: int
    first: int
    stop: int


Prefix = tuple[ModelId, bytes]
"""A model, and the digest of all tokens up to the end of a page."""


@dataclass(slots=True, eq=False)
class KvSequence:
    """One stage's share of a sequence. A stage without layers needs no pages."""

    key: SequenceKey
    model_id: ModelId
    blocks: tuple[int, int]
    """(start, stop) of the stage that began the sequence."""
    layers: range
    limit: int
    """The most positions that the sequence may reach."""
    pages: list[int] = field(default_factory=list)
    length: int = 0
    """Positions in the cache, or about to be written."""
    proposed: int = 0
    """How many of the last positions hold proposed tokens, which may be taken back."""
    live: bool = True
    """False once the sequence was freed."""
    known: int = 0
    """Number of its first pages whose tokens are known."""
    digest: bytes = b""
    """The digest of the tokens of these pages."""
    tail: list[int] = field(default_factory=list)
    """Known tokens after these pages."""

    def slots(self, first: int, count: int) -> list[int]:
        return [self.pages[p // PAGE] * PAGE + p % PAGE for p in range(first, first + count)]

    def runs(self, positions: int) -> list[Run]:
        """The runs that hold its first `positions` positions, which must be whole pages."""
        found: list[Run] = []
        for index in range(positions // PAGE):
            slot, first = self.pages[index] * PAGE, index * PAGE
            if found and found[-1].slot - found[-1].first == slot - first:
                found[-1] = found[-1]._replace(stop=first + PAGE)
            else:
                found.append(Run(slot, first, first + PAGE))
        return found


class FreePages:
    """Free pages, kept as runs of neighbours."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._stop_of = {0: count}
        self._start_of = {count: 0}

    def add(self, page: int) -> None:
        self.count += 1
        start, stop = self._start_of.pop(page, page), self._stop_of.pop(page + 1, page + 1)
        self._stop_of[start], self._start_of[stop] = stop, start

    def take(self, count: int, after: int | None) -> list[int]:
        """Takes `count` pages, if possible the ones that follow page `after`. The caller has
        checked that there are enough."""
        taken: list[int] = []
        while len(taken) < count:
            n = count - len(taken)
            start = -1 if after is None else after + 1
            if start in self._stop_of:
                stop = self._stop_of[start]
                first = start
            else:
                start, stop = max(self._stop_of.items(), key=lambda run: run[1] - run[0])
                middle = (stop - start) // 2 if stop - start > EVICTED_TOGETHER else 0
                first = start + max(0, min(middle, stop - start - n))
            last = min(first + n, stop)
            self._cut(start, stop, first, last)
            taken.extend(range(first, last))
            after = taken[-1]
        return taken

    def _cut(self, start: int, stop: int, first: int, last: int) -> None:
        """Takes first <= page < last out of the free run start <= page < stop."""
        self.count -= last - first
        del self._stop_of[start], self._start_of[stop]
        for left, right in ((start, first), (last, stop)):
            if left < right:
                self._stop_of[left], self._start_of[right] = right, left


class KvCache:
    """`capacity` positions (rounded up to whole pages) are shared by all sequences of all
    models."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.changes = 0
        """Grows when sequences end: whatever was planned with an older value is outdated."""
        self._device = device
        self._tensors: dict[ModelId, torch.Tensor] = {}
        self._views: dict[ModelId, dict[range, torch.Tensor]] = {}
        self._erased: set[ModelId] = set()
        self._sequences: dict[SequenceKey, KvSequence] = {}
        self.resize(capacity)
        self._prefix_of: dict[int, Prefix] = {}
        self._page_of: dict[Prefix, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Pages of prefixes that no sequence uses; the least recently used is first."""

    def resize(self, capacity: int) -> None:
        """Changes the capacity. Allowed only while no model has KV."""
        self.capacity = pages_of(capacity) * PAGE
        self._free = FreePages(pages_of(capacity))
        self._readers = [0] * pages_of(capacity)
        """For each page, the number of sequences that use it."""

    @property
    def available(self) -> int:
        """Number of pages that sequences can still take."""
        return self._free.count + len(self._idle)

    @property
    def used(self) -> int:
        """Number of positions in pages that sequences use."""
        return self.capacity - self.available * PAGE

    @property
    def nbytes(self) -> int:
        """Bytes of the cache, over all models."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def open_model(
        self,
        model_id: ModelId,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        erased: bool = False,
    ) -> None:
        """Makes room for the model's keys and values. On a CPU only pages that are used become
        resident.

        `erased`: what an earlier sequence left in the page in which a sequence ends is erased,
        because attention reads that page whole, and a mask gives a foreign value no weight only if
        the value is finite.
        """
        shape = (n_layers, self.capacity, 2, n_kv_heads, head_dim)
        try:
            self._tensors[model_id] = torch.empty(shape, dtype=dtype, device=self._device)
            self._views[model_id] = {}
            if erased:
                self._erased.add(model_id)
        except RuntimeError as error:
            raise CapacityExceeded(
                f"the KV cache of model {model_id} ({math.prod(shape) * dtype.itemsize} bytes for "
                f"{self.capacity} positions) cannot be allocated: lower node.kv_bytes"
            ) from error

    def close_model(self, model_id: ModelId) -> None:
        self.free(tuple(s.key for s in self._sequences.values() if s.model_id == model_id))
        for page in [page for page in self._idle if self._prefix_of[page][0] == model_id]:
            self._evict(page)
        self._tensors.pop(model_id, None)
        self._views.pop(model_id, None)
        self._erased.discard(model_id)

    def tensor(self, model_id: ModelId) -> torch.Tensor:
        """The cache, [layers, slots, 2, kv heads, head_dim], where index 0 of the third dimension
        holds keys and 1 values. Page i is slots i * PAGE up to (i + 1) * PAGE."""
        return self._tensors[model_id]

    def of_layers(self, model_id: ModelId, layers: range) -> torch.Tensor:
        """The cache of these layers, [len(layers), slots, 2, kv heads, head_dim]; see `tensor`."""
        views = self._views[model_id]
        if layers not in views:
            views[layers] = self._tensors[model_id][layers.start : layers.stop]
        return views[layers]

    def find(self, key: SequenceKey) -> KvSequence | None:
        return self._sequences.get(key)

    def start(
        self,
        model_id: ModelId,
        blocks: tuple[int, int],
        layers: range,
        key: SequenceKey,
        limit: int,
    ) -> KvSequence:
        """A new sequence, which has no pages yet."""
        if model_id not in self._tensors:
            raise NotFound(f"model {model_id} has no KV cache: open it first")
        sequence = self._sequences[key] = KvSequence(key, model_id, blocks, layers, limit)
        return sequence

    def adopt(self, sequence: KvSequence, tokens: tuple[int, ...]) -> int:
        """Gives a sequence that has just started the cached pages of `tokens`, without the page of
        the last token (which must be run, to draw what follows). Returns the number of
        positions."""
        for start in range(0, len(tokens) - PAGE, PAGE):
            digest = _chained(sequence.digest, tokens[start : start + PAGE])
            page = self._page_of.get((sequence.model_id, digest))
            if page is None:
                break
            self._readers[page] += 1
            self._idle.pop(page, None)
            sequence.pages.append(page)
            sequence.known, sequence.digest = sequence.known + 1, digest
            sequence.length += PAGE
        return sequence.length

    def require(self, pages: int) -> None:
        """CapacityExceeded if fewer pages are free."""
        if pages > self.available:
            raise CapacityExceeded(
                f"{pages * PAGE} more positions of KV cache are needed, {self.available * PAGE} "
                f"of {self.capacity} are free: wait for running sequences to end, or raise "
                f"node.kv_bytes"
            )

    def extend(self, sequence: KvSequence, count: int, proposed: int = 0) -> None:
        """Makes room for `count` more positions, to be written before the next attention. The last
        `proposed` of them may be taken back. CapacityExceeded changes nothing."""
        end = sequence.length + count
        new = pages_of(end) - len(sequence.pages)
        if sequence.layers and new > 0:
            sequence.pages += self._take(new, sequence.pages[-1] if sequence.pages else None)
            if sequence.model_id in self._erased:
                last = sequence.pages[-1] * PAGE
                layers = self.of_layers(sequence.model_id, sequence.layers)
                layers[:, last : last + PAGE].zero_()
        sequence.length, sequence.proposed = end, proposed

    def truncate(self, sequence: KvSequence, length: int) -> None:
        """Takes back the proposed positions from `length` on. The sequence keeps their pages, since
        it will need them again."""
        assert sequence.length - sequence.proposed <= length <= sequence.length
        sequence.length, sequence.proposed = length, 0

    def keep(self, sequence: KvSequence, tokens: Iterable[int]) -> None:
        """Records that the next positions are written, with these tokens, in all layers of the
        model. Pages that they fill can be shared from now on. If several sequences computed the
        same page, the copy of one of them is shared."""
        sequence.tail += tokens
        while len(sequence.tail) >= PAGE:
            sequence.digest = _chained(sequence.digest, sequence.tail[:PAGE])
            del sequence.tail[:PAGE]
            page, prefix = sequence.pages[sequence.known], (sequence.model_id, sequence.digest)
            sequence.known += 1
            if prefix not in self._page_of:
                self._page_of[prefix], self._prefix_of[page] = page, prefix

    def free(self, keys: tuple[SequenceKey, ...]) -> None:
        for key in keys:
            sequence = self._sequences.pop(key, None)
            if sequence is not None:
                sequence.live = False
                self.changes += 1
                for page in reversed(sequence.pages):
                    self._give_back(page)

    def _take(self, count: int, after: int | None) -> list[int]:
        self.require(count)
        if count > self._free.count:
            wanted = max(count - self._free.count, EVICTED_TOGETHER)
            for _ in range(min(wanted, len(self._idle))):
                self._evict(next(iter(self._idle)))
        pages = self._free.take(count, after)
        for page in pages:
            self._readers[page] = 1
        return pages

    def _give_back(self, page: int) -> None:
        self._readers[page] -= 1
        if self._readers[page]:
            return
        if page in self._prefix_of:
            self._idle[page] = None
        else:
            self._free.add(page)

    def _evict(self, page: int) -> None:
        del self._idle[page], self._page_of[self._prefix_of.pop(page)]
        self._free.add(page)


def _chained(digest: bytes, tokens: Iterable[int]) -> bytes:
    """The digest of all tokens up to the end of a page, made from the digest of the page before.
    The hash is cryptographic, so nobody can craft a prompt that finds the KV of another."""
    return blake2b(digest + array("I", tokens).tobytes(), digest_size=16).digest()
