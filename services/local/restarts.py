"""When a process that ended is started again."""

from dataclasses import dataclass

FIRST_S = 1.0
LONGEST_S = 30.0
HEALTHY_S = 60.0
"""Seconds. A process that lived this long was well: its end has nothing to do with earlier ones."""


@dataclass(slots=True)
class Backoff:
    """Waits of FIRST_S, doubled each time up to LONGEST_S. They begin anew after HEALTHY_S."""

    _next_s: float = FIRST_S

    def wait_s(self, lived_s: float) -> float:
        """How long to wait before the next start, if the process ended `lived_s` seconds after its
        own."""
        wait_s = FIRST_S if lived_s >= HEALTHY_S else self._next_s
        self._next_s = min(2 * wait_s, LONGEST_S)
        return wait_s
