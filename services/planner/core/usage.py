"""What one model has had of the devices lately, and how often it was asked for."""

from math import exp

ATTAINED_S = 60.0
"""How far back device time counts when models take turns."""
ASKED_S = 600.0
"""How far back demand counts when a sleeping copy is to give way."""


class Usage:
    """Two sums over time, in which what is long past counts less and less."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._replicas = 0
        self._asked = False
        self._attained = 0.0
        self._share_asked = 0.0

    def note(self, now: float, replicas: int, *, asked: bool) -> None:
        """From now on the model has this many replicas. `asked`: whether it has any requests."""
        self._attained, self._share_asked = self.attained(now), self.chance(now)
        self._at, self._replicas, self._asked = now, replicas, asked

    def attained(self, now: float) -> float:
        """Replica seconds."""
        kept = self._kept(now, ATTAINED_S)
        return self._attained * kept + self._replicas * ATTAINED_S * (1.0 - kept)

    def chance(self, now: float) -> float:
        """The share of the time in which there were requests: about the chance that there will
        be."""
        kept = self._kept(now, ASKED_S)
        return self._share_asked * kept + self._asked * (1.0 - kept)

    def _kept(self, now: float, memory_s: float) -> float:
        return exp(-max(0.0, now - self._at) / memory_s) if self._at is not None else 1.0
