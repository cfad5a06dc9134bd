"""The pages of one model's KV, in the slabs that it has of a node's memory for KV.

Sharing: a full page whose tokens are known is kept under a digest of all tokens up to its end,
chained page by page (as in vLLM's prefix caching), and read by every sequence that begins with the
same tokens. A shared page is never written: a sequence writes only behind its last page, and takes
a page of its own where it departs from the cached tokens. When its last reader has ended, a page
stays until its memory is needed; the least recently used page goes first, to host memory if there
is a host tier. A sequence gives its last
pages back first, so that the end of a prefix goes before its beginning.

Placement: neighbouring pages are read as one strided view (attention.py). So the next page of a
sequence is the one after its last, if that is free. Otherwise it is in the middle of the longest
free run, far from the sequences on both sides, which grow too; in a short run, at its beginning.

Parts: a sequence that has KV in a few layers takes no page of all layers. For it, a page is divided
into equal parts, each for as many layers, which different sequences use. The page is whole again
once no part of it is used. A number stands for a page or for a part: see kv.py.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice

from services.node.core.kv import EVICTED_TOGETHER


class FreePages:
    """Free pages, kept as runs of neighbours."""

    def __init__(self) -> None:
        self.count = 0
        self._stop_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}

    def add(self, first: int, stop: int) -> None:
        """Adds first <= page < stop."""
        self.count += stop - first
        start, end = self._start_of.pop(first, first), self._stop_of.pop(stop, stop)
        self._stop_of[start], self._start_of[end] = end, start

    def withdraw(self, first: int, stop: int) -> None:
        """Takes out all that are free of first <= page < stop."""
        for start, end in [*self._stop_of.items()]:
            if start < stop and first < end:
                self._cut(start, end, max(start, first), min(end, stop))

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


class Pages:
    """Which pages of a model are free, used or cached. A slab that belongs to the model has
    `per_slab` pages, which are neighbours."""

    def __init__(
        self,
        per_slab: int,
        layers: int,
        first_of: Callable[[int], int],
        leave: Callable[[list[tuple[int, bytes]]], None] = lambda evicted: None,
    ) -> None:
        """`layers`: that a page has. `first_of`: the first page of a slab. `leave` is told which
        cached pages are about to be evicted, with their digests, the least recently used first."""
        self.per_slab = per_slab
        self.layers = layers
        self._first_of = first_of
        self._leave = leave
        self._slab_of: dict[int, int] = {}
        """The slab of each page that the model may use."""
        self._free = FreePages()
        self._divided: dict[int, int] = {}
        """Into how many parts pages are divided. In `_parts_used`, how many of these are used."""
        self._parts_used: Counter[int] = Counter()
        self._page_with: dict[int, int] = {}
        """The page that each part belongs to."""
        self._free_parts: dict[int, dict[int, None]] = {}
        """Free parts, by how many a page has, the ones to be taken first in front."""
        self._closed: set[int] = set()
        """Slabs in which no page is taken any more."""
        self.readers: Counter[int] = Counter()
        """For each used page, the number of sequences that use it."""
        self._prefix_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        """By the digest of all tokens up to the end of the page."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Pages of prefixes that no sequence uses; the least recently used is first."""

    @property
    def available(self) -> int:
        """Number of pages that sequences can still take."""
        return self._free.count + len(self._idle)

    @property
    def free(self) -> int:
        """Number of those in which nothing is cached."""
        return self._free.count

    @property
    def used_layers(self) -> int:
        """Layers of all pages and parts that sequences use."""
        parts = sum(
            used * (self.layers // self._divided[p]) for p, used in self._parts_used.items()
        )
        whole = len(self.readers) - self._parts_used.total()
        return whole * self.layers + parts

    def pages_for(self, count: int, parts: int) -> int:
        """How many free pages it takes to have `count` pages, or this many parts."""
        if parts == 1:
            return count
        return max(0, -(-(count - len(self._free_parts.get(parts, ()))) // parts))

    def add_slab(self, slab: int) -> None:
        first = self._first_of(slab)
        self._slab_of.update(dict.fromkeys(range(first, first + self.per_slab), slab))
        self._free.add(first, first + self.per_slab)

    def close_slab(self, slab: int) -> None:
        """Forgets what is cached in the slab. No page of it is taken any more; those that
        sequences use stay theirs."""
        first = self._first_of(slab)
        stop = first + self.per_slab
        self._evict([page for page in self._idle if first <= page < stop])
        for page in range(first, stop):
            self._forget(page)
            for part in self._parts_of(page):
                self._free_parts[self._divided[page]].pop(part, None)
        self._free.withdraw(first, stop)
        self._closed.add(slab)

    def drop_slab(self, slab: int) -> None:
        """The slab, which is closed and not used, belongs to the model no more."""
        first = self._first_of(slab)
        for page in range(first, first + self.per_slab):
            del self._slab_of[page]
        self._closed.remove(slab)

    def stalest(self, slabs: Iterable[int]) -> int:
        """One of these slabs, which no sequence uses: an empty one, or else the one with the page
        that was used least recently."""
        cached = dict.fromkeys(map(self.slab_of, self._idle))
        some = set(slabs)
        empty = some - cached.keys()
        return min(empty) if empty else next(slab for slab in cached if slab in some)

    def slab_of(self, page: int) -> int:
        """The slab that holds this page or part."""
        return self._slab_of[self._page_with.get(page, page)]

    def take(self, count: int, after: int | None, parts: int = 1) -> list[int]:
        """Pages for one sequence, or such parts of pages, `after` its last. The caller has checked
        that there are enough."""
        whole = self.pages_for(count, parts)
        if whole > self._free.count:
            wanted = max(whole - self._free.count, EVICTED_TOGETHER)
            self._evict(list(islice(self._idle, wanted)))
        if parts == 1:
            pages = self._free.take(count, after)
        else:
            self._divide(self._free.take(whole, None), parts)
            pages = self._take_parts(count, after, parts)
        for page in pages:
            self.readers[page] = 1
        return pages

    def _divide(self, pages: Iterable[int], parts: int) -> None:
        pages = tuple(pages)
        step = self.layers // parts * self.per_slab
        free = self._free_parts.setdefault(parts, {})
        for first in range(0, parts * step, step):
            free.update(dict.fromkeys(page + first for page in pages))
            self._page_with.update({page + first: page for page in pages})
        self._divided.update(dict.fromkeys(pages, parts))

    def _take_parts(self, count: int, after: int | None, parts: int) -> list[int]:
        free, taken = self._free_parts[parts], list[int]()
        for _ in range(count):
            part = -1 if after is None else after + 1
            if part not in free:
                part = next(iter(free))
            del free[part]
            self._parts_used[self._page_with[part]] += 1
            taken.append(part)
            after = part
        return taken

    def _parts_of(self, page: int) -> range:
        """Empty: the page is not divided."""
        parts = self._divided.get(page, 0)
        step = self.layers // max(1, parts) * self.per_slab
        return range(page, page + parts * step, step)

    def _give_part_back(self, part: int) -> None:
        page = self._page_with[part]
        parts, closed = self._divided[page], self._slab_of[page] in self._closed
        if not closed:
            self._free_parts[parts][part] = None
        self._parts_used[page] -= 1
        if self._parts_used[page]:
            return
        for each in self._parts_of(page):
            self._free_parts[parts].pop(each, None)
            del self._page_with[each]
        del self._parts_used[page], self._divided[page]
        if not closed:
            self._free.add(page, page + 1)

    def find(self, digest: bytes) -> int | None:
        """The cached page of these tokens."""
        return self._page_of.get(digest)

    def read(self, page: int) -> bool:
        """One more sequence uses a cached page. Returns whether it is the first."""
        self._idle.pop(page, None)
        self.readers[page] += 1
        return self.readers[page] == 1

    def give_back(self, page: int) -> bool:
        """One sequence less uses the page. Returns whether it was the last."""
        self.readers[page] -= 1
        if self.readers[page]:
            return False
        del self.readers[page]
        if page in self._page_with:
            self._give_part_back(page)
        elif page in self._prefix_of:
            self._idle[page] = None
        elif self._slab_of[page] not in self._closed:
            self._free.add(page, page + 1)
        return True

    def keep(self, page: int, digest: bytes) -> None:
        """The page can be shared from now on, if no other page of the same tokens is."""
        if digest not in self._page_of and self._slab_of[page] not in self._closed:
            self._page_of[digest], self._prefix_of[page] = page, digest

    def _evict(self, pages: list[int]) -> None:
        self._leave([(page, self._prefix_of[page]) for page in pages])
        for page in pages:
            del self._idle[page]
            self._forget(page)
            self._free.add(page, page + 1)

    def _forget(self, page: int) -> None:
        if (digest := self._prefix_of.pop(page, None)) is not None:
            del self._page_of[digest]
