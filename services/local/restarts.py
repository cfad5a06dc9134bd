"""When a process that ended is started again."""

from dataclasses import dataclass

FIRST_S = 1.0
LONGEST_S = 30.0
HEALTHY_S = 60.0
"""A process that lived this long was well: what ended it has nothing to do with what was before."""


@dataclass(slots=True)
class Backoff:
    """Waits of FIRST_S, doubled each time up to LONGEST_S; from the start again after HEALTHY_S."""

    _next_s: float = FIRST_S

    def wait_s(self, lived_s: float) -> float:
        """How long to wait now that the process has ended, `lived_s` after its start."""
        wait_s = FIRST_S if lived_s >= HEALTHY_S else self._next_s
        self._next_s = min(2 * wait_s, LONGEST_S)
        return wait_s
