"""A role's lease in the durable store, and when a standby may take it over.

No wall clock is used. A standby counts from when it last saw the lease renewed, on its own loop's
clock, and a renewal is a new revision. So hosts whose clocks are a day apart agree.
"""

from dataclasses import dataclass

import msgspec

RENEW_S = 0.25
"""Seconds between renewals."""
ABSENT_S = 0.5
"""A lease that was not renewed for so long is taken over if its holder's process has no connection
to the bus. A connection that breaks for a moment loses no role."""
SILENT_S = 1.5
"""A lease that was not renewed for so long is taken over in any case."""
PAUSE_S = 1.0
"""A holder that has not come to look at the clock for so long may have lost its lease meanwhile. It
does nothing more until it has renewed it. Less than SILENT_S."""
GRACE_S = 15.0
"""The longest time for which a holder goes on while the store takes no renewal, and all that stand
by keep off. A store of three servers was seen to take no writes for 7.3 s, while it elected a
leader."""
PROMISE_S = 0.75
"""For how long a process that stands by keeps off once the holder has asked it to. If it wins in
that time, it waits, and renews nothing: so this is well below SILENT_S."""
OVERDUE_S = 0.3
"""A renewal that was not acknowledged for so long is overdue: the holder asks those that stand by.
Between RENEW_S and ABSENT_S."""
KNOWN_S = 3.0
"""A process that has not said for so long that it stands by does so no more; but nobody is left out
while the store takes no renewals."""


class LeaseRecord(msgspec.Struct, frozen=True):
    holder: str
    """The process that has the role. Empty: it was given back."""
    term: int
    host: str = ""
    """Where it runs, and as which process: for people."""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Sighting:
    """A lease as a standby last saw it change."""

    revision: int
    at: float
    """Seconds on the standby's clock."""


def sighted(before: Sighting | None, revision: int, at: float) -> Sighting:
    """What is known after a look at the lease."""
    return before if before and before.revision == revision else Sighting(revision, at)


def silence(seen: Sighting, at: float) -> float:
    """Seconds for which the lease was not renewed, as far as the standby knows."""
    return at - seen.at
