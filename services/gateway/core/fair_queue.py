"""Who is next: start-time fair queueing of tenants by weight (Goyal, Vin and Cheng 1996, section
2).

Work is counted in tokens. The first item that waits for a tenant has a start tag: the work per
weight that the tenant had before it. The item with the lowest tag begins; then the tenant's next
item has this tag plus the work of the one that began, divided by the weight. Virtual time is the
tag of the item that began last, and who begins to wait gets no lower tag: what a tenant did not use
while it had nothing to ask is gone. So

- while two tenants both wait, the work per weight that begins for each differs by no more than one
  item of each;
- a tenant that had nothing waiting, and has not used more than others, waits for one item of each
  other tenant at most;
- if anything waits, something is next.

An item of an earlier rank goes before all of later ranks. The items of one tenant and rank go in
the order of their places. Items that have begun and come back go before everything, in the order in
which they are given back: their work is counted already. What an item did not use is taken off its
tenant's tag when it ends.

Every step takes O(log tenants), and to find a place O(log items) comparisons, but for `make_room`.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
SPARE = 64
"""Tenants with nothing waiting that are kept in mind at least."""


@dataclass(frozen=True, slots=True)
class Share:
    """What an item waits as."""

    tenant: str = ""
    weight: float = 1.0
    rank: int = 0
    """Lower goes first."""


ALONE = Share()


@dataclass(frozen=True, slots=True, order=True)
class _Waiting(Generic[T]):
    """An item that waits for the first time."""

    place: float
    number: int
    """Items are numbered as they come."""
    item: T = field(compare=False)
    share: Share = field(compare=False)
    work: int = field(compare=False)


@dataclass(slots=True, eq=False)
class _Flow(Generic[T]):
    """What waits for one tenant in one rank."""

    weight: float
    tag: float = 0.0
    """Of its first item, or of the next that comes."""
    base: float = 0.0
    """What it was when the tenant last began to wait."""
    waiting: "list[_Waiting[T]]" = field(default_factory=list)
    """The first one is next."""
    entry: int = 0
    """Which entry of the heap is valid; 0: none."""


@dataclass(slots=True)
class _Rank(Generic[T]):
    now: float = 0.0
    """Virtual time."""
    last: float = 0.0
    """The tag behind all work that has begun. Virtual time goes there when nothing waits."""
    flows: dict[str, _Flow[T]] = field(default_factory=dict)
    many: int = SPARE
    """From so many on, those are looked for that can be forgotten."""
    heap: list[tuple[float, int, str]] = field(default_factory=list)
    """(tag, number, tenant) of every tenant that waits, and entries that are valid no longer."""


@dataclass(frozen=True, slots=True)
class _Begun:
    share: Share
    work: int


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self._ranks: dict[int, _Rank[T]] = {}
        self._new: dict[T, _Waiting[T]] = {}
        """Items that wait for the first time."""
        self._begun: dict[T, _Begun] = {}
        """Items that have begun and not ended, in the queue again or not."""
        self._again: OrderedDict[T, None] = OrderedDict()
        self._passed: list[T] = []
        """Items that are passed over now, in order."""
        self._counts: Counter[str] = Counter()
        """How many items wait for the first time, by tenant."""
        self._weights: dict[str, float] = {}
        self._entries = self._came = 0

    def __len__(self) -> int:
        return len(self._new) + len(self._again)

    def __contains__(self, item: T) -> bool:
        return item in self._new or item in self._again

    def __iter__(self) -> Iterator[T]:
        """All that wait, in no order that matters."""
        yield from self._again
        yield from self._new

    # --- coming and going ----------------------------------------------------

    def add(self, item: T, share: Share, work: int, place: float = 0.0) -> None:
        """An item that has not begun yet. Among those of its tenant and rank it is behind all whose
        `place` is not greater."""
        self._came += 1
        waiting = self._new[item] = _Waiting(place, self._came, item, share, work)
        self._counts[share.tenant] += 1
        self._weights[share.tenant] = share.weight
        rank = self._ranks.setdefault(share.rank, _Rank())
        flow = rank.flows.get(share.tenant)
        if flow is None:
            self._forget_idle(rank)
            flow = rank.flows[share.tenant] = _Flow(share.weight, rank.now)
        flow.weight = share.weight
        insort(flow.waiting, waiting)
        if len(flow.waiting) == 1:
            flow.base = flow.tag = max(flow.tag, rank.now)
            self._enter(rank, flow, share.tenant)

    def put_back(self, items: Iterable[T], *, last: bool = False) -> None:
        """Items that have begun and must begin again, to the head in the order given; `last`: as
        the last of those that must."""
        if last:
            self._again.update(dict.fromkeys(items))
            return
        for item in reversed(list(items)):
            self._again[item] = None
            self._again.move_to_end(item, last=False)

    def remove(self, item: T) -> None:
        """An item that waits goes."""
        if item in self._again:
            del self._again[item]
            return
        self._take(self._leave(item))

    def end(self, item: T, unused: int) -> None:
        """An item that had begun has ended, and did so much less work than it was counted for."""
        begun = self._begun.pop(item, None)
        if begun is None or unused <= 0:
            return
        share = begun.share
        rank = self._ranks[share.rank]
        flow = rank.flows.get(share.tenant)
        if flow is None or flow.tag <= flow.base:
            return
        flow.tag = max(flow.base, flow.tag - min(unused, begun.work) / flow.weight)
        if flow.waiting:
            self._enter(rank, flow, share.tenant)

    # --- turns ---------------------------------------------------------------

    def next(self) -> T | None:
        """Whose turn it is, of those that were not passed over; None: nobody's."""
        if self._again:
            return next(iter(self._again))
        for number in sorted(self._ranks):
            if flow := self._first(self._ranks[number]):
                return flow.waiting[0].item
        return None

    def start(self, item: T) -> None:
        """The item whose turn it is begins."""
        if item in self._again:
            del self._again[item]
            return
        waiting = self._leave(item)
        share = waiting.share
        flow = self._take(waiting)
        rank = self._ranks[share.rank]
        self._begun[item] = _Begun(share, waiting.work)
        rank.now = max(rank.now, flow.tag)
        flow.tag += waiting.work / flow.weight
        flow.entry = 0
        rank.last = max(rank.last, flow.tag)
        if flow.waiting:
            self._enter(rank, flow, share.tenant)
        elif not self._passed and self._first(rank) is None:
            rank.now = rank.last

    def pass_over(self, item: T) -> None:
        """The item whose turn it is lets others go first, until `restore`."""
        self._passed.append(item)
        if item in self._again:
            del self._again[item]
        else:
            self._take(self._new[item])

    def restore(self) -> None:
        """Those that were passed over have their places again."""
        while self._passed:
            item = self._passed.pop()
            waiting = self._new.get(item)
            if waiting is None:
                self.put_back([item])
                continue
            rank = self._ranks[waiting.share.rank]
            flow = rank.flows[waiting.share.tenant]
            insort(flow.waiting, waiting)
            if not flow.entry:
                self._enter(rank, flow, waiting.share.tenant)

    # --- shares of the queue -------------------------------------------------

    def make_room(self, share: Share, arriving: int, excess: int) -> list[T] | None:
        """The items that have to go so that `excess` fewer wait and as many as arrive for a tenant
        find room: the last of the tenants that have most waiting for their weight. None: that is
        the tenant itself, or nobody has as much to give."""
        own = (self._counts[share.tenant] + arriving) / share.weight
        counts = {tenant: count for tenant, count in self._counts.items() if count}
        counts.pop(share.tenant, None)
        gone: Counter[str] = Counter()
        for _ in range(excess):
            most = max(
                counts, key=lambda tenant: counts[tenant] / self._weights[tenant], default=""
            )
            if most not in counts or counts[most] / self._weights[most] <= own:
                return None
            counts[most] -= 1
            gone[most] += 1
        return [item for tenant, count in gone.items() for item in self._last(tenant, count)]

    def _last(self, tenant: str, count: int) -> Iterator[T]:
        """The items of a tenant that would be the last to begin."""
        for number in sorted(self._ranks, reverse=True):
            if flow := self._ranks[number].flows.get(tenant):
                for waiting in islice(reversed(flow.waiting), count):
                    count -= 1
                    yield waiting.item

    # --- within --------------------------------------------------------------

    def _leave(self, item: T) -> "_Waiting[T]":
        waiting = self._new.pop(item)
        tenant = waiting.share.tenant
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant], self._weights[tenant]
        return waiting

    def _take(self, waiting: "_Waiting[T]") -> _Flow[T]:
        """Takes it out of its tenant's flow, which is returned."""
        flow = self._ranks[waiting.share.rank].flows[waiting.share.tenant]
        del flow.waiting[bisect_left(flow.waiting, waiting)]
        if not flow.waiting:
            flow.entry = 0
        return flow

    def _enter(self, rank: _Rank[T], flow: _Flow[T], tenant: str) -> None:
        self._entries += 1
        flow.entry = self._entries
        heapq.heappush(rank.heap, (flow.tag, flow.entry, tenant))

    def _first(self, rank: _Rank[T]) -> _Flow[T] | None:
        """The tenant with the lowest tag, of those that wait."""
        while rank.heap:
            _, entry, tenant = rank.heap[0]
            flow = rank.flows.get(tenant)
            if flow is not None and flow.entry == entry:
                return flow
            heapq.heappop(rank.heap)
        return None

    def _forget_idle(self, rank: _Rank[T]) -> None:
        """Forgets tenants of whom nothing waits or counts, now and then."""
        if len(rank.flows) < rank.many:
            return
        rank.flows = {
            tenant: flow
            for tenant, flow in rank.flows.items()
            if flow.waiting or flow.entry or flow.tag > rank.now
        }
        rank.many = SPARE + 2 * len(rank.flows)
