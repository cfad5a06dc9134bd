"""When a process that ended is started again."""

from dataclasses import dataclass

FIRST_S = 1.0
LONGEST_S = 30.0
HEALTHY_S = 60.0
"""Seconds. A process that lived this long was well: its end has nothing to do with earlier ones."""


@dataclass(slots=True)
class Backoff:
    """How long to wait before a process is started again: not at all if it ran for HEALTHY_S;
    otherwise FIRST_S, doubled each time up to LONGEST_S."""

    _next_s: float = FIRST_S

    def wait_s(self, lived_s: float) -> float:
        """How long to wait before the next start, if the process ended `lived_s` seconds after its
        own."""
        if lived_s >= HEALTHY_S:
            self._next_s = FIRST_S
            return 0.0
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, LONGEST_S)
        return wait_s
