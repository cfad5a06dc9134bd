"""Whether the engine hangs, judged by its own pace, or is broken.

The engine's thread says when it begins a piece of work (a step, a call) and when it waits for more.
A piece that takes many times as long as the longest one before, and longer than the node's
patience, does not come back. Time in which the whole process was stopped does not count, since
nothing of it went on.

An engine that raises fails what it ran, and may be well. One that has raised `FAILURES` times
without a sweep between is broken, as after an error that ruins the context of a GPU. All blocks of
a model that cannot be attached count as one failure: the model may be to blame.
"""

from dataclasses import dataclass

LOOK_S = 0.5
"""Seconds between looks."""
TIMES = 10
"""How many times as long as the longest piece so far one may take."""

FAILURES = 5


@dataclass(frozen=True, slots=True)
class Pulse:
    """What the engine's thread says of itself."""

    busy_s: float | None = None
    """Seconds since the piece of work began that is under way; None: it waits for work."""
    longest_s: float = 0.0
    """The longest piece so far."""
    failed_in_a_row: int = 0
    """How often it failed since it last ran a sweep, where a model's blocks count once."""
    broken: str = ""
    """Why it can run nothing any more; empty: it can."""


class Watchdog:
    def __init__(self, patience_s: float) -> None:
        """`patience_s`: the least time that counts as a hang; 0: none does."""
        self._patience_s = patience_s
        self._looked_at: float | None = None
        self._awake_since = float("-inf")
        """Since when the process was not stopped."""

    def look(self, pulse: Pulse, now: float) -> str:
        """Why the node is unfit; empty if it is not. To be called every `LOOK_S`."""
        before, self._looked_at = self._looked_at, now
        if before is None or now - before > 4 * LOOK_S:
            self._awake_since = now
        if pulse.broken:
            return pulse.broken
        if pulse.failed_in_a_row >= FAILURES:
            return f"its engine has failed {pulse.failed_in_a_row} times in a row: see its log"
        if pulse.busy_s is None or not self._patience_s:
            return ""
        took_s = min(pulse.busy_s, now - self._awake_since)
        if took_s <= max(self._patience_s, TIMES * pulse.longest_s):
            return ""
        return (
            f"its engine has been at one step for {took_s:.1f} s; the longest before took "
            f"{pulse.longest_s:.2f} s"
        )
