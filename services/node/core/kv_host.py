"""The host tier of the KV cache: pages that have left the memory of the engine's device. Pure; the
copies are in `services.node.engine.kv_host`.

A page leaves the device when its memory is needed: it belonged to a sequence that was preempted or
has ended, or to a prefix that nobody reads. It is known by the digest of all tokens up to its end,
on the device and here. So one mechanism serves both: a sequence that begins, or begins again,
finds the pages of its tokens in either place.

What was used least recently goes first when the memory is full. Within a prefix the end goes before
the beginning, since a page is of no use without those before it.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Generic, TypeVar

from services.node.core.kv import EVICTED_TOGETHER, PAGE, Restoration
from services.node.core.load import HostTierLoad
from services.node.core.rows import SequenceKey
from shared.ids import NO_ADAPTER, ModelId

ASSUMED_BYTES_PER_S = 1e9
"""How fast pages are copied, until `FEW` copies were measured."""
PORTION_S = 0.01
"""For about so long steps wait for copies in one direction, if that is enough for the pages that
are evicted together. More is copied after the next step."""
COPIES = 32
"""The number of copies whose rate counts."""
FEW = 5
"""Fewer copies say too little of their rate: if the processor was taken away during the first, no
further copy would be tried."""
AGAIN = 256
"""The rate is measured anew after copies have been judged too slow this many times: the machine may
have been busy with something else when it was measured."""
TRIAL_BYTES = 4 << 20
"""About so much is copied at a time to measure the rate, where it is not expected to be worth
it."""

PageKey = tuple[ModelId, bytes]
"""(model, digest of all tokens up to the end of the page)"""
Page = TypeVar("Page")


class HostTier(Generic[Page]):
    """Which pages lie in host memory. `Page` is the memory of one."""

    def __init__(self, nbytes: int) -> None:
        """`nbytes`: what all pages may take."""
        self.nbytes = nbytes
        self.used = 0
        self._pages: OrderedDict[PageKey, tuple[int, Page]] = OrderedDict()
        """Each with its size; the least recently used is first."""

    def find(self, key: PageKey) -> Page | None:
        found = self._pages.get(key)
        return found[1] if found else None

    def touch(self, keys: Iterable[PageKey]) -> None:
        """These pages were used just now, the last one last. Unknown ones are ignored."""
        for key in keys:
            if key in self._pages:
                self._pages.move_to_end(key)

    def keep(self, key: PageKey, nbytes: int, make: Callable[[], Page]) -> Page | None:
        """Takes room for a page that is not here, whose memory `make` gives once others have gone
        for it. None: it is larger than all the memory."""
        assert key not in self._pages
        if nbytes > self.nbytes:
            return None
        while self.used + nbytes > self.nbytes:
            _, (gone, _) = self._pages.popitem(last=False)
            self.used -= gone
        page = make()
        self._pages[key] = nbytes, page
        self.used += nbytes
        return page

    def validate(self) -> None:
        """For tests. AssertionError: what is kept here cannot be."""
        assert self.used == sum(nbytes for nbytes, _ in self._pages.values()), "memory is lost"
        assert self.used <= self.nbytes, "more memory than there is"


class CopyRate:
    """How fast KV was copied lately, in either direction (the median). `bytes_per_s` may be read on
    any thread. `add` is for one thread, `tries` for one too.

    Where copies are not worth it none are made, so that none are measured. So now and then one is
    made all the same: the first FEW, and FEW more whenever AGAIN were refused."""

    def __init__(self, assumed: float = ASSUMED_BYTES_PER_S) -> None:
        """`assumed`: until FEW copies were measured, in bytes/s."""
        self.bytes_per_s = assumed
        self._rates: deque[float] = deque(maxlen=COPIES)
        self._trials = FEW
        """How many more are to be made though they are not worth it."""
        self._refused = 0

    def add(self, nbytes: int, seconds: float) -> None:
        if nbytes and seconds > 0:
            rates = self._rates
            rates.append(nbytes / seconds)
            if len(rates) >= FEW:
                self.bytes_per_s = median(rates)

    def tries(self) -> bool:
        """A copy is not worth it: whether it is made to measure the rate."""
        if not self._trials:
            self._refused += 1
            if self._refused < AGAIN:
                return False
            self._rates = deque(maxlen=COPIES)
            self._trials, self._refused = FEW, 0
        self._trials -= 1
        return True

    def portion(self, page: int, within_s: float = PORTION_S) -> int:
        """How many pages, of `page` bytes each, are copied in `within_s`. It is never less than the
        number of pages that are evicted together."""
        return max(EVICTED_TOGETHER, int(self.bytes_per_s * within_s / page))


def restoration(pages: int, nbytes: int, token_s: float, rate: CopyRate) -> Restoration:
    """What it takes to have `pages` pages on the device, of which `nbytes` lie in host memory.
    `token_s`: seconds of prefill for a token; 0: not known."""
    positions = pages * PAGE
    return Restoration(positions, nbytes / rate.bytes_per_s, positions * token_s)


class NoHostTier:
    """That part of an engine that has no host tier."""

    def restorable(
        self,
        model_id: ModelId,
        key: SequenceKey,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> Restoration | None:
        return None

    def restore(self, key: SequenceKey) -> tuple[int, bool]:
        raise AssertionError(f"no KV of {key} lies in a host tier")

    @property
    def host_tier(self) -> HostTierLoad:
        return HostTierLoad()
