"""A wall clock that does not jump while scaling events run: their phases are as long as they
took, although somebody sets the clock meanwhile."""

from collections.abc import Callable

from services.planner.core.tickets import Moment

DRIFT_NS = 20_000_000
"""Clocks that are slewed differ by less than this from one moment to the next."""


class SteadyClock:
    def __init__(self) -> None:
        self._ahead_ns: int | None = None
        """How far the wall clock is ahead of the other, as it is told."""

    def tell(self, now: Moment, held: Callable[[], bool]) -> Moment:
        """The moment, on a wall clock that follows a jump only while it is not `held`."""
        at_ns = round(now.at * 1e9)
        ahead_ns = now.wall_ns - at_ns
        known = self._ahead_ns
        if known is not None and abs(ahead_ns - known) > DRIFT_NS and held():
            return Moment(now.at, at_ns + known)
        self._ahead_ns = ahead_ns
        return now
