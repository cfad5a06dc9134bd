"""For how long what the load needs no longer is kept; pure.

Replicas are numbered: number k is needed while the load needs k or more. When the need falls below
k, a *gap* of number k begins; it ends when the need is k again. So the gaps of higher numbers are
those between larger bursts.

To keep a replica for T seconds of a gap takes as many device seconds. To let it go costs a price
if it is needed again: what it is worth not to load it then, in device seconds. T = price is right:
whatever the gap, no more than twice the least cost is paid (the ski rental problem). That is how
long replicas are kept.

Copies in host memory are cheaper, and stay for longer when their replicas go: there the price is
higher (`HOST_SHARE`). Gaps of that length are worth learning. Once enough of them have been seen,
that T is taken that would have cost least over them, with one more gap that never ends:

    sum over the gaps g of  g if g <= T, else T + price

So what comes back soon is kept until then, and what comes back late goes at once. T is never more
than the price times the number of gaps plus one. (Replicas are not kept so: most of their gaps are
lulls of a burst, so they went after a fraction of a second, and the burst found them gone.)
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import msgspec

ENOUGH = 8.0
"""Fewer gaps than this say nothing."""
MEMORY = 64.0
"""About as many of the last gaps of a number count; older ones count less and less."""
HOST_SHARE = 0.01
"""What the host memory of a copy costs, as a share of a device: a host's memory costs about a tenth
of its devices, and holds about ten copies for each."""
_EDGES = tuple(0.25 * 2 ** (step / 2) for step in range(29))
"""Upper ends of the lengths that gaps are counted by, in seconds: 0.25 s to about an hour."""

Counts = tuple[tuple[float, ...], ...]
"""For each number how many gaps had each length; older gaps count less."""


class Idle(msgspec.Struct, frozen=True, gc=False):
    """Which replicas are needed, and since when the others are not."""

    need: int = 0
    there: int = 0
    """How many there are, or are on their way."""
    since: tuple[float, ...] = ()
    """For number k at k - 1. Of numbers that are needed it is the begin of their last gap."""

    def after(self, need: int, now: float, there: int) -> "Idle":
        """From now on `need` are needed and `there` are there. Those that nobody asked for, such as
        a copy that was found, count as needed until now."""
        if need == self.need and there == self.there:
            return self
        known = self.since + (now,) * (max(need, there) - len(self.since))
        since = (
            now if k < self.need or self.there <= k < there else at for k, at in enumerate(known)
        )
        return Idle(need, there, tuple(since))

    def ended(self, later: "Idle", now: float) -> Iterator[tuple[int, float]]:
        """The gaps that have ended now: the replica's number, and seconds."""
        for k in range(self.need, min(later.need, len(self.since))):
            yield k + 1, now - self.since[k]

    def kept(self, most: int, now: float, keep_s: Callable[[int], float]) -> int:
        """How many are kept of at most `most`, if number k is kept for keep_s(k). Those below a
        number that is kept are kept, too."""
        for number in range(min(most, len(self.since)), self.need, -1):
            if now < self.since[number - 1] + keep_s(number):
                return number
        return min(most, self.need)

    def ends(self, kept: int, keep_s: Callable[[int], float]) -> float | None:
        """When the last of those that are kept goes; None: it is needed."""
        return self.since[kept - 1] + keep_s(kept) if kept > self.need else None


NOT_NEEDED = Idle()


class Keep(msgspec.Struct, frozen=True, gc=False):
    """For how long a copy is kept that is not needed, and why."""

    seconds: float
    shorter: int = 0
    """How many of its last gaps were no longer than that."""
    gaps: int = 0
    """How many of its last gaps are known; 0: too few to say anything."""

    def __str__(self) -> str:
        if not self.gaps:
            return f"{self.seconds:g} s"
        return f"{self.seconds:.1f} s: {self.shorter} of its last {self.gaps} gaps were no longer"


class Gaps:
    """The gaps of each number that have ended, by length."""

    def __init__(self, known: Counts = ()) -> None:
        fits = (counts for counts in known if len(counts) == len(_EDGES))
        self._counts = [list(counts) for counts in fits]
        self._found: dict[tuple[int, float], Keep] = {}
        """What `keep` has answered since the number's last gap."""

    @property
    def counts(self) -> Counts:
        return tuple(tuple(round(count, 2) for count in counts) for counts in self._counts)

    def note(self, number: int, seconds: float) -> None:
        while len(self._counts) < number:
            self._counts.append([0.0] * len(_EDGES))
        counts = self._counts[number - 1]
        counts[:] = [count * (1 - 1 / MEMORY) for count in counts]
        counts[min(bisect_left(_EDGES, seconds), len(_EDGES) - 1)] += 1
        self._found = {asked: keep for asked, keep in self._found.items() if asked[0] != number}

    def keep(self, number: int, price_s: float) -> Keep:
        """`price_s`: the price of letting it go, in seconds of keeping it."""
        asked = number, price_s
        if asked not in self._found:
            counts = self._counts[number - 1] if number <= len(self._counts) else []
            known = sum(counts) >= ENOUGH
            self._found[asked] = _cheapest(counts, price_s) if known else Keep(price_s)
        return self._found[asked]


def _cheapest(counts: Sequence[float], price_s: float) -> Keep:
    total = sum(counts)
    best, least = Keep(0.0, 0, round(total)), (total + 1) * price_s
    shorter = spent = 0.0
    for count, edge in zip(counts, _EDGES, strict=True):
        shorter += count
        spent += count * edge
        cost = spent + (total + 1 - shorter) * (edge + price_s)
        if count and cost < least:
            best, least = Keep(edge, round(shorter), round(total)), cost
    return best
