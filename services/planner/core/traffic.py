"""How fast requests of one model arrive, how long their prompts are, and how long they stay; pure.

Gateways count all requests that they were asked for (`ModelLoad.asked_requests`). A rate is what
was counted in the last seconds. If requests arrive at random, n of them are known to within sqrt n:
so a short window says little about a few requests, and a lot about a burst. Prompts and stays are
means over some minutes, in which older values count less and less. A stay is the time of all
requests on instances, divided by the number of requests that have ended: the estimate for stays
that still go on.
"""

from collections import deque
from dataclasses import dataclass
from math import exp, inf, sqrt

import msgspec

WINDOWS_S = (0.5, 2.0, 8.0)
"""How far back arrivals are counted. In the longest window all count; in the others as many as are
hardly chance."""
DOUBT = 1.0
"""How many times sqrt n that is less than n."""
MERGE_S = 0.05
"""Counts that are closer than this are one."""
ENOUGH = 1.0
"""A mean of less than this many requests, as they count, says nothing."""
LEAST_S = 1.0
"""Arrivals of less time say nothing of the mean."""
MEMORY_S = 300.0
"""How far back prompts and stays count."""
LATELY_S = 4.0
"""How far back stays count that show how it is now."""


class Arrivals(msgspec.Struct, frozen=True, gc=False):
    """What is expected of the next requests."""

    rate: float = 0.0
    """Requests a second."""
    prompt_tokens: float = 0.0
    """The mean length of a prompt. 0: not known."""
    stay_s: float = 0.0
    """How long a request is on an instance that does no prefills. 0: not known."""
    lately_s: float = 0.0
    """The same as `stay_s`, by the last seconds alone, as if one request more had ended. If it is
    longer, those that run now stay for longer than others did."""
    steady: float = 0.0
    """Requests a second, in the mean of the longest window, or since they have come."""
    stay_so_far_s: float = 0.0
    """The same as `stay_s`, once as many requests have ended as are there. Until then `stay_s` is
    too long or not known, and this is what those that run now would make of it, if no more were to
    run at a time (Little's law): too short while they become more."""


NO_ARRIVALS = Arrivals()


@dataclass(slots=True)
class _Count:
    at: float
    requests: int


class _Window:
    """How many requests have arrived within the last `seconds`. Counts are added, and the window is
    looked at, at times that never go back."""

    __slots__ = ("_counts", "_requests", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._counts: deque[_Count] = deque()
        """At most seconds / MERGE_S + 1 of them."""
        self._requests = 0
        """The requests of all counts together."""

    def add(self, count: _Count) -> None:
        """Takes in a further count."""
        self._counts.append(count)
        self._requests += count.requests

    def more(self, requests: int) -> None:
        """Takes in that the last count has become larger by so many requests."""
        self._requests += requests

    def at(self, now: float) -> int:
        counts = self._counts
        while counts and now - counts[0].at >= self.seconds:
            self._requests -= counts.popleft().requests
        return self._requests

    @property
    def first_at(self) -> float | None:
        """When the oldest count began that it has; None: it has none."""
        return self._counts[0].at if self._counts else None


class Traffic:
    def __init__(self) -> None:
        *short, longest = (_Window(seconds) for seconds in WINDOWS_S)
        self._short, self._longest = short, longest
        self._last: _Count | None = None
        self._at: float | None = None
        self._inside = 0
        self._decoding = 0.0
        self._asked = self._tokens = self._ended = self._stays_s = 0.0
        """Sums in which what is long past counts less."""
        self._ended_lately = self._stays_lately_s = 0.0
        """The same with a shorter memory."""

    def note(
        self, now: float, asked: int, tokens: int, *, inside: int, running: int, busy: float
    ) -> None:
        """`asked` requests have arrived since the last note, with prompts of `tokens` in all. From
        now on `inside` requests are there, `running` of them on instances, which do prefills for
        `busy` of their time."""
        passed = max(0.0, now - self._at) if self._at is not None else 0.0
        kept = exp(-passed / MEMORY_S)
        ended = max(0, self._inside + asked - inside)
        self._asked = self._asked * kept + asked
        self._tokens = self._tokens * kept + tokens
        self._ended = self._ended * kept + ended
        self._stays_s = self._stays_s * kept + self._decoding * MEMORY_S * (1.0 - kept)
        kept = exp(-passed / LATELY_S)
        self._ended_lately = self._ended_lately * kept + ended
        self._stays_lately_s = self._stays_lately_s * kept + self._decoding * LATELY_S * (
            1.0 - kept
        )
        self._at, self._inside, self._decoding = now, inside, running * (1.0 - busy)
        self._count(now, asked)

    def _count(self, now: float, asked: int) -> None:
        if self._last is not None and now - self._last.at < MERGE_S:
            self._last.requests += asked
            for window in (*self._short, self._longest):
                window.more(asked)
        elif asked:
            self._last = _Count(now, asked)
            for window in (*self._short, self._longest):
                window.add(self._last)

    def arrivals(self, now: float) -> Arrivals:
        """What is known now."""
        prompt = self._tokens / self._asked if self._asked >= ENOUGH else 0.0
        stay_s = self._stays_s / self._ended if self._ended >= ENOUGH else 0.0
        steady, so_far_s = self._steady(now), stay_s
        if self._ended < self._inside and steady:
            so_far_s = min(stay_s or inf, self._decoding / steady)
        lately_s = self._stays_lately_s / (self._ended_lately + 1.0)
        return Arrivals(self._rate(now), prompt, stay_s, lately_s, steady, so_far_s)

    def _steady(self, now: float) -> float:
        count, first = self._longest.at(now), self._longest.first_at
        if first is None:
            return 0.0
        return count / max(LEAST_S, min(self._longest.seconds, now - first))

    def _rate(self, now: float) -> float:
        rate = self._longest.at(now) / self._longest.seconds
        for window in self._short:
            if count := window.at(now):
                rate = max(rate, (count - DOUBT * sqrt(count)) / window.seconds)
        return rate
