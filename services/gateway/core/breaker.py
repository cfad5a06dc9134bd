"""Whether a gateway sends requests to an instance, after it refused or failed some, or was slow.

    closed    --refused, failed, slow-------------------------> open
    open      --its pause is over, and a request begins there-> half-open
    half-open --that request went well------------------------> closed
    half-open --refused, failed, slow again-------------------> open, for twice as long

An instance that answers wrong (`checks`) is left alone until it answers as others do.

While it is open, nothing begins there; half-open, one request at a time. What "well" means depends
on what opened it: after refusals, that the instance accepts the request; after failures, its first
token; after slowness, that its tokens come at a usual pace. A request that its client ends, or that
cannot be right (BadInput), says nothing about the instance.

Refusals are no fault: the instance is full. Their pauses are short. Pauses after faults may become
long, but never for more than a share of a model's instances at once (`may_eject`). So where all are
ill, or the fault is elsewhere, requests go on being tried, wait, and are refused with 429 in the
end.
"""

import enum
from collections.abc import Collection
from dataclasses import dataclass
from math import inf

from shared.ids import RequestId

PAUSE_S = 0.05
"""The first pause. Each that follows is twice as long, up to its limit."""
REFUSED_S = 1.0
"""The longest pause after refusals, and after faults of an instance that may not be ejected."""
EJECTED_S = 30.0
"""The longest pause of an ejected instance."""
FORGIVEN_S = 10.0
"""Faults are forgotten when there was no further one for so long."""
SHARE = 1 / 3
"""The share of a model's instances that may be ejected. Of two, one may be."""


class Cause(enum.Enum):
    REFUSED = "refused"
    FAILED = "failed"
    SLOW = "slow"
    WRONG = "wrong"


class State(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class Breaker:
    state: State = State.CLOSED
    cause: Cause = Cause.REFUSED
    """What opened it last."""
    why: str = ""
    """What opened it last, in words."""
    pause_s: float = 0.0
    """The last pause."""
    until: float = float("-inf")
    """When the pause ends."""
    trial: RequestId | None = None
    """The request that is tried in half-open."""
    _refusals: int = 0
    """How many in a row opened it."""
    _faults: int = 0
    _fault_at: float = float("-inf")

    def admits(self, now: float, *, suspect: bool = False) -> bool:
        """`suspect`: see `Suspects`."""
        if self.state is State.CLOSED:
            return True
        until = self.until
        if suspect and self.cause is Cause.REFUSED:
            until -= self.pause_s - PAUSE_S
        return now >= until and self.trial is None

    @property
    def faulty(self) -> bool:
        """Whether it keeps requests away for a fault."""
        return self.state is not State.CLOSED and self.cause is not Cause.REFUSED

    @property
    def wrong(self) -> bool:
        """Whether it keeps requests away because the instance answers wrong."""
        return self.state is not State.CLOSED and self.cause is Cause.WRONG

    @property
    def ejects(self) -> bool:
        """Whether it keeps requests away for longer than refusals would."""
        return self.state is not State.CLOSED and self.pause_s > REFUSED_S

    def begin(self, request: RequestId) -> None:
        """A request begins here."""
        if self.state is not State.CLOSED:
            self.state, self.trial = State.HALF_OPEN, request

    def end(self, request: RequestId) -> None:
        """A request ended here, whatever the reason."""
        if self.trial == request:
            self.trial = None

    def refuse(self, request: RequestId, now: float, *, suspect: bool = False) -> bool:
        """The instance did not take the request. Returns whether it is opened by that. If it is a
        suspect, another gateway's may be tried there, which takes no longer if it is asked again.
        """
        if not self._counts(request, now):
            return False
        self._refusals += not suspect
        self._open(Cause.REFUSED, PAUSE_S if suspect else pause(self._refusals - 1), now)
        return True

    def fail(self, request: RequestId, may_eject: bool, now: float) -> bool:
        """The instance failed the request. Returns whether it is opened by that."""
        if not self._counts(request, now):
            return False
        self._count_fault(now)
        limit_s = EJECTED_S if may_eject else REFUSED_S
        self._open(Cause.FAILED, _pause(self._faults - 1, PAUSE_S, limit_s), now)
        return True

    def slow(self, now: float) -> None:
        """The instance is too slow, and may be ejected for that."""
        self._count_fault(now)
        self._open(Cause.SLOW, _pause(self._faults - 1, 2 * REFUSED_S, EJECTED_S), now)

    def condemn(self) -> None:
        """The instance answers wrong."""
        self._open(Cause.WRONG, inf, 0.0)

    def accepted(self, request: RequestId) -> bool:
        """The instance has the request. Returns whether it is closed by that."""
        return self._closes(request, self.cause is Cause.REFUSED)

    def gave(self, request: RequestId, now: float) -> bool:
        """It gave a token. Returns whether it is closed by that."""
        if now - self._fault_at > FORGIVEN_S:
            self._faults = 0
        self._refusals = 0
        return self._closes(request, self.cause in (Cause.REFUSED, Cause.FAILED))

    def close(self) -> None:
        """It is as it should be: its tokens come at a usual pace, or its answers are right."""
        self.state, self.trial = State.CLOSED, None

    def _closes(self, request: RequestId, well: bool) -> bool:
        if self.trial != request or not well:
            return False
        self.state, self.trial = State.CLOSED, None
        return True

    def _counts(self, request: RequestId, now: float) -> bool:
        """Whether what became of the request says something new. While it is open, answers to
        earlier attempts come; half-open, the trial alone decides. What answers wrong is left alone
        anyway."""
        if self.wrong:
            return False
        if self.state is State.HALF_OPEN:
            return self.trial == request
        return now >= self.until

    def _count_fault(self, now: float) -> None:
        if now - self._fault_at > FORGIVEN_S + self.pause_s:
            self._faults = 0
        self._faults, self._fault_at = self._faults + 1, now

    def _open(self, cause: Cause, pause_s: float, now: float) -> None:
        self.state, self.cause, self.trial = State.OPEN, cause, None
        self.pause_s, self.until = pause_s, now + pause_s


def pause(before: int) -> float:
    """How long to keep away after a refusal, with `before` others in a row before it."""
    return _pause(before, PAUSE_S, REFUSED_S)


def _pause(before: int, first_s: float, limit_s: float) -> float:
    return min(first_s * float(1 << min(before, 16)), limit_s)


def may_eject(one: Breaker, breakers: Collection[Breaker]) -> bool:
    """Whether an instance may be ejected. `breakers`: those of all instances of its model."""
    ejected = sum(breaker.ejects for breaker in breakers if breaker is not one)
    return len(breakers) > 1 and ejected < max(1, int(SHARE * len(breakers)))
