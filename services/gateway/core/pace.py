"""How fast the queue of a model moves: it says when a refused client should come again, and whether
a request would wait for too long."""

from collections import deque
from statistics import fmean

from shared.messages.instances import Coming

REMEMBERED = 64
"""The pace is that of the last starts, the length of a stay that of the last ends: this many."""
UNKNOWN_S = 5.0
"""Where no request has begun yet."""


class Pace:
    def __init__(self) -> None:
        self._starts: deque[float] = deque(maxlen=REMEMBERED)
        """The last start of a request that did not have to wait, and those after it."""
        self._stays_s: deque[float] = deque(maxlen=REMEMBERED)
        self._waited_s = UNKNOWN_S
        """How long the request that began last had waited."""

    def start(self, waited_s: float, now: float) -> None:
        """A request begins, which had waited for so long."""
        if waited_s <= 0:
            self._starts.clear()
        self._starts.append(now)
        self._waited_s = waited_s

    def end(self, stayed_s: float) -> None:
        """A request has ended, so long after it began."""
        self._stays_s.append(stayed_s)

    def turn_s(self, waiting: int, slots: int, now: float) -> float | None:
        """Seconds until as many requests as wait now have begun; None if nothing is known.

        The time since the last start counts, so a queue that stands still is told as slower and
        slower. While no request has begun that had to wait, it follows from how long requests
        stayed and how many stay at once (Little's law).
        """
        if len(self._starts) > 1:
            return waiting * (now - self._starts[0]) / (len(self._starts) - 1)
        if self._stays_s and slots:
            return waiting * fmean(self._stays_s) / slots
        return None

    def guess_s(self, waiting: int, slots: int, now: float) -> float:
        """The same, or how long the last request had waited."""
        known = self.turn_s(waiting, slots, now)
        return self._waited_s if known is None else known

    def told_s(
        self, waiting: int, slots: int, instances: int, now: float, coming: Coming | None
    ) -> float:
        """When a request should come that is refused now. `coming`: what is being loaded; from when
        it is there the queue moves faster, and before its first instance not at all if none is
        there."""
        guess = self.guess_s(waiting, slots, now)
        if coming is None:
            return guess
        if not slots:
            return guess if coming.first_s is None else coming.first_s
        if coming.complete_s is None or guess <= coming.complete_s:
            return guess
        rest = (guess - coming.complete_s) * instances / (instances + coming.replicas)
        return coming.complete_s + rest
