"""How fast the queue of a model moves, for whoever asks when to come again."""

from collections import deque

STARTS = 64
"""The pace is that of the last so many starts."""
UNKNOWN_S = 5.0
"""Where no request has begun yet."""


class Pace:
    def __init__(self) -> None:
        self._starts: deque[float] = deque(maxlen=STARTS)
        self._waited_s = UNKNOWN_S
        """How long the request that began last had waited."""

    def start(self, waited_s: float, now: float) -> None:
        """A request begins, which had waited for so long."""
        self._starts.append(now)
        self._waited_s = waited_s

    def turn_s(self, waiting: int, now: float) -> float:
        """Seconds until as many requests as wait now have begun. The time since the last start
        counts, so a queue that stands still is told as slower and slower."""
        if len(self._starts) < 2:
            return self._waited_s
        return waiting * (now - self._starts[0]) / (len(self._starts) - 1)
