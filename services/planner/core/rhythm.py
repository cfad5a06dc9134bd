"""The load that a model's own history predicts: its daily and weekly rhythm, and its bursts' sizes.

A day has slots of five minutes. Of each slot two numbers are kept for two weeks: how many replicas
the load needed at most, and when in the slot it came (when it was more than half of that). What the
load needed says nothing of a backlog: a burst that was answered late is not remembered as a larger
one.

A slot repeats itself if it was so on both of the last two days, or on this weekday in both of the
last two weeks; the smaller of the two numbers is expected. So what happened once is never expected,
what happens daily is expected on the third day, and what has ceased is forgotten after a day (or a
week). On a weekday that was without load in both of the last two weeks, no rhythm is expected.

What is expected is loaded ahead. It stays until the load has come, or until it is clear that it
does not come today; then the rules for what is there take over. So a wrong expectation costs
little.
"""

from dataclasses import dataclass
from math import ceil, exp, frexp

import msgspec

from services.planner.core.keeping import Counts

DAY_S = 86_400
SLOT_S = 300
SLOTS = DAY_S // SLOT_S
WEEK = 7
KEPT_DAYS = 2 * WEEK
GRACE_S = 30.0
"""How long after the latest time at which the load has come so far it is waited for."""
SMOOTH_S = 5.0
"""Needs that last for less than this hardly count."""
LAG_S = 0.7 * SMOOTH_S
"""How much later than the load itself half of a smoothed need is seen."""
FILLED = 0.25
"""A need of less than this share of one more replica is none."""
_PARTS = 255
"""A time in a slot is kept in this many parts of it."""


class History(msgspec.Struct, frozen=True):
    """As it is stored. Small: 576 bytes for each of the last 14 days on which there was load, and
    some hundred for each replica that is needed now and then."""

    since: int
    """The first day that was seen. (Days count from 1 January 1970.)"""
    days: dict[int, bytes] = {}
    """For each slot of a day: replicas, then the time. A day without load is missing."""
    gaps: Counts = ()
    """For how long each replica was not needed between its uses."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A slot of some day."""

    replicas: int
    at_s: float
    """Seconds after the slot's begin."""


@dataclass(frozen=True, slots=True)
class Expected:
    replicas: int
    earliest_s: float
    """Seconds after the slot's begin at which the load came, on the earliest and the latest day."""
    latest_s: float
    weekly: bool


class Rhythm:
    def __init__(self, history: History | None = None) -> None:
        known = history.days if history is not None else {}
        self._days = {day: bytearray(kept) for day, kept in known.items()}
        self._since = history.since if history is not None else None
        self._at_s: float | None = None
        self._slot = -1
        """The current slot, counted from 1 January 1970."""
        self._smooth = 0.0
        self._need = 0.0
        self._reached: dict[int, float] = {}
        """When in the slot the need reached each power of two first."""
        self._found: dict[int, Expected | None] = {}
        """What `expected` has answered in the current slot."""

    @property
    def history(self) -> History:
        days = {day: bytes(kept) for day, kept in self._days.items()}
        return History(self._since or 0, days)

    def note(self, wall_s: float, need: float) -> bool:
        """From now on the load needs so many replicas. Returns whether the history has changed."""
        slot, changed = int(wall_s // SLOT_S), False
        if slot != self._slot:
            changed = self._keep()
            self._slot, self._need, self._reached, self._found = slot, 0.0, {}, {}
        if self._since is None:
            self._since = slot // SLOTS
        passed = max(0.0, wall_s - self._at_s) if self._at_s is not None else 0.0
        self._smooth += (need - self._smooth) * (1 - exp(-passed / SMOOTH_S))
        self._at_s = wall_s
        if self._smooth > self._need:
            self._need = self._smooth
            self._reached.setdefault(_power(self._need), max(0.0, wall_s % SLOT_S - LAG_S))
        return changed

    def ahead(self, wall_s: float, lead_s: float) -> Expected | None:
        """What should be there `lead_s` from now, because it is expected and has not come yet."""
        for at_s in (wall_s, wall_s + lead_s):
            slot = int(at_s // SLOT_S)
            expected = self.expected(slot)
            if expected is None or (slot == self._slot and self._came(expected)):
                continue
            begin_s = slot * SLOT_S
            from_s = begin_s + expected.earliest_s - lead_s
            if from_s <= wall_s <= begin_s + expected.latest_s + GRACE_S:
                return expected
        return None

    def expected(self, slot: int) -> Expected | None:
        """What the history lets expect of a slot (counted from 1 January 1970)."""
        if slot not in self._found:
            self._found[slot] = self._look(slot)
        return self._found[slot]

    def _look(self, slot: int) -> Expected | None:
        day, since = slot // SLOTS, self._since if self._since is not None else slot
        daily = self._repeated(slot, 1)
        weekly = self._repeated(slot, WEEK)
        weeks = (self._seen(slot, WEEK), self._seen(slot, 2 * WEEK))
        if day - since >= KEPT_DAYS and not any(seen.replicas for seen in weeks):
            daily = None
        found = [each for each in (daily, weekly) if each is not None]
        return max(found, key=lambda each: each.replicas, default=None)

    def _came(self, expected: Expected) -> bool:
        """Whether the load of the current slot has come, more than half of it."""
        return 2 * self._need > expected.replicas

    def _repeated(self, slot: int, days: int) -> Expected | None:
        last, before = self._seen(slot, days), self._seen(slot, 2 * days)
        replicas = min(last.replicas, before.replicas)
        if not replicas:
            return None
        earliest, latest = sorted((last.at_s, before.at_s))
        return Expected(replicas, earliest, latest, weekly=days == WEEK)

    def _seen(self, slot: int, days_ago: int) -> Seen:
        day, index = divmod(slot, SLOTS)
        kept = self._days.get(day - days_ago)
        if kept is None:
            return Seen(0, 0.0)
        return Seen(kept[2 * index], kept[2 * index + 1] / _PARTS * SLOT_S)

    def _keep(self) -> bool:
        """Keeps the slot that is over."""
        replicas = min(255, replicas_of(self._need))
        if self._slot < 0 or not replicas:
            return False
        day, index = divmod(self._slot, SLOTS)
        kept = self._days.setdefault(day, bytearray(2 * SLOTS))
        kept[2 * index] = replicas
        kept[2 * index + 1] = int(self._reached[_power(self._need)] / SLOT_S * _PARTS)
        for old in [known for known in self._days if known < day - KEPT_DAYS]:
            del self._days[old]
        return True


def replicas_of(need: float) -> int:
    return max(0, ceil(need - FILLED))


def _power(need: float) -> int:
    """The exponent of the largest power of two that is not above the need."""
    return frexp(need)[1] - 1
