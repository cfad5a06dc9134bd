"""When a model keeps how many instances: windows of the week, in UTC.

    schedule := "" | window (";" window)*
    window   := days HH:MM "-" HH:MM setting+
    days     := "daily" | range ("," range)*      range := DAY | DAY "-" DAY
    setting  := "min=" N | "warm=" N              DAY   := mon tue wed thu fri sat sun

`mon-fri 08:00-18:00 min=2; sat,sun 10:00-12:00 min=1 warm=1`. A window that ends before it begins
goes on past midnight, and belongs to the day on which it begins. 24:00 is the end of a day. Within
a window its numbers stand in place of the model's own; where windows overlap, the larger number
counts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shared.errors import BadInput

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_S = 86_400
WEEK_S = 7 * DAY_S
EPOCH_WEEKDAY = 3
"""1 January 1970 was a Thursday."""
GRAMMAR = "as in 'mon-fri 08:00-18:00 min=2; daily 22:00-06:00 warm=1' (UTC)"
MOST_WINDOWS = 50
MOST_COPIES = 100_000
"""A larger number is taken for a typing error."""
_TIMES = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)")


@dataclass(frozen=True, slots=True)
class Window:
    days: frozenset[int]
    """The weekdays on which it begins; 0 is Monday."""
    begin_s: int
    """Seconds after midnight."""
    lasts_s: int
    min_instances: int | None
    warm: int | None

    def holds(self, week_s: float) -> bool:
        """`week_s`: seconds since Monday, 00:00."""
        return any(
            (week_s - day * DAY_S - self.begin_s) % WEEK_S < self.lasts_s for day in self.days
        )


@lru_cache(maxsize=4096)
def parse(text: str) -> tuple[Window, ...]:
    """The windows of a schedule. BadInput says what is wrong with it."""
    if not text.strip():
        return ()
    parts = text.split(";")
    if len(parts) > MOST_WINDOWS:
        raise BadInput(f"schedule has {len(parts)} windows, {MOST_WINDOWS} are the most")
    return tuple(_window(part.strip()) for part in parts)


def least(text: str, min_instances: int, warm: int, wall_ns: Sequence[int]) -> tuple[int, int]:
    """The instances that a model keeps even when idle, and its warm copies, at the time at which
    most are asked for. `min_instances` and `warm` are the model's own. BadInput as `parse`."""
    windows, found = parse(text), []
    if not windows:
        return min_instances, warm
    for at_ns in wall_ns:
        week_s = (at_ns / 1e9 + EPOCH_WEEKDAY * DAY_S) % WEEK_S
        now = [window for window in windows if window.holds(week_s)]
        kept = [w.min_instances for w in now if w.min_instances is not None]
        ready = [w.warm for w in now if w.warm is not None]
        found.append((max(kept, default=min_instances), max(ready, default=warm)))
    return max(kept for kept, _ in found), max(ready for _, ready in found)


def _window(text: str) -> Window:
    words = text.split()
    if len(words) < 3:
        raise BadInput(f"schedule: {text!r} is no window: days, times and settings, {GRAMMAR}")
    days, times, *settings = words
    begin_s, end_s = _times(times)
    numbers = dict(_setting(word) for word in settings)
    if len(numbers) < len(settings):
        raise BadInput(f"schedule: {text!r} sets the same number twice")
    lasts_s = end_s - begin_s if end_s > begin_s else end_s - begin_s + DAY_S
    return Window(_days(days), begin_s, lasts_s, numbers.get("min"), numbers.get("warm"))


def _days(text: str) -> frozenset[int]:
    if text == "daily":
        return frozenset(range(7))
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if first not in DAYS or (dash and last not in DAYS):
            raise BadInput(
                f"schedule: {part!r} is no day: 'daily', or of {', '.join(DAYS)}, {GRAMMAR}"
            )
        begin = DAYS.index(first)
        count = (DAYS.index(last) - begin) % 7 if dash else 0
        found.update((begin + i) % 7 for i in range(count + 1))
    return frozenset(found)


def _times(text: str) -> tuple[int, int]:
    match = _TIMES.fullmatch(text)
    if match is None:
        raise BadInput(f"schedule: {text!r} are no times: HH:MM-HH:MM, {GRAMMAR}")
    hour, minute, to_hour, to_minute = map(int, match.groups())
    begin_s, end_s = hour * 3600 + minute * 60, to_hour * 3600 + to_minute * 60
    if max(minute, to_minute) > 59 or begin_s >= DAY_S or end_s > DAY_S:
        raise BadInput(f"schedule: {text!r} are no times of a day: 00:00 to 24:00")
    if begin_s == end_s:
        raise BadInput(f"schedule: {text!r} is empty; a whole day is 00:00-24:00")
    return begin_s, end_s


def _setting(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if name not in ("min", "warm") or not (number.isascii() and number.isdigit()):
        raise BadInput(f"schedule: {text!r} is no setting: min=N or warm=N, {GRAMMAR}")
    if len(number) > 9 or int(number) > MOST_COPIES:
        raise BadInput(f"schedule: {text!r}: more than {MOST_COPIES} copies")
    return name, int(number)
