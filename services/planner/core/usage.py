"""How much device time one model has had lately, and how often it was used."""

from math import exp

from services.planner.core.arbiter import TURN_S

ATTAINED_S = 60.0
"""How far back device time counts when models take turns."""
USED_S = 600.0
"""How far back uses count when a sleeping copy is to give way."""
ONE_USE_S = 10.0
"""So many seconds of steady requests count as another use."""
PATIENCE_S = 30.0
"""A model whose requests have waited for so long without any replica is starved. Requests are
refused after longer than that (`gateway.queue_timeout_s`)."""


class Usage:
    """Two sums over time, in which what is long past counts less and less, and since when it waits
    in vain."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._replicas = 0
        self._asked = False
        self._attained = 0.0
        self._serves = False
        self._uses = 0.0
        self._hungry_at: float | None = None
        """Since when there are requests and no complete replica."""
        self._fed_at: float | None = None
        """When the first replica came after a long time without any."""

    def note(self, now: float, replicas: int, *, asked: bool, serves: bool) -> None:
        """From now on the model has this many replicas. `asked`: whether it has any requests.
        `serves`: whether a replica is complete."""
        self._eat(now, asked=asked, serves=serves)
        begins = asked and not self._asked
        self._attained, self._uses = self.attained(now), self._used(now) + begins
        self._at, self._replicas = now, replicas
        self._asked, self._serves = asked, serves

    def attained(self, now: float) -> float:
        """Replica seconds."""
        kept = self._kept(now, ATTAINED_S)
        return self._attained * kept + self._replicas * ATTAINED_S * (1.0 - kept)

    def uses_per_minute(self, now: float) -> float:
        """How often a use begins: requests come while there are none. The time for which they wait
        does not count, or a model that came late once would be thought to be asked for more."""
        return self._used(now) * 60.0 / USED_S

    def _used(self, now: float) -> float:
        kept = self._kept(now, USED_S)
        on = USED_S / ONE_USE_S if self._asked and self._serves else 0.0
        return self._uses * kept + on * (1.0 - kept)

    def starved(self, now: float) -> bool:
        """Whether requests have waited for long without any replica, or the replica that came then
        has not had its turn yet."""
        if self._fed_at is not None:
            return now - self._fed_at < TURN_S
        return self._hungry_at is not None and now - self._hungry_at >= PATIENCE_S

    def _eat(self, now: float, *, asked: bool, serves: bool) -> None:
        if not asked or (self._fed_at is not None and now - self._fed_at >= TURN_S):
            self._hungry_at = self._fed_at = None
        elif not serves:
            self._hungry_at = now if self._hungry_at is None else self._hungry_at
        elif self._fed_at is None:
            if self.starved(now):
                self._fed_at = now
            else:
                self._hungry_at = None

    def _kept(self, now: float, memory_s: float) -> float:
        return exp(-max(0.0, now - self._at) / memory_s) if self._at is not None else 1.0
