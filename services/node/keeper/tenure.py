"""Who owns a keeper's memories; pure.

    state    means                                               goes on with
    free     no process can touch them                           owned, ended
    owned    one process can touch them: the owner               orphan, ousted
    orphan   the owner's connection has ended; it may still live free, ousted
    ousted   the owner is being killed, and is not dead yet      free
    ended    the memories are freed

A process that claims the memories gets them once they are free, and waits in line until then. An
owner whose connection has ended is killed as soon as another process waits, since it could still
write; so is an owner that was silent for HUNG_S. Only its death, which the kernel reports, frees
the memories: a process that was stopped and wakes finds itself dead. Free memories that nobody
claims for `keep_s` are given up. So are those of an orphan: its own mapping, if it lives, stays.

Time in which the keeper itself did not run (a frozen machine) does not count as the owner's
silence.
"""

import enum
from dataclasses import dataclass

HUNG_S = 3.0
"""An owner says that it is at work every ALIVE_S. If it was silent this long, it hangs."""
ALIVE_S = 0.5
LATE_S = 1.0
"""If the keeper comes this much later than it wanted to, it was itself held up."""

Client = int
"""A process with a connection, by a number that does not come twice."""


class State(enum.Enum):
    FREE = "free"
    OWNED = "owned"
    ORPHAN = "orphan"
    OUSTED = "ousted"
    ENDED = "ended"


STEPS: dict[State, frozenset[State]] = {
    State.FREE: frozenset({State.OWNED, State.ENDED}),
    State.OWNED: frozenset({State.ORPHAN, State.OUSTED}),
    State.ORPHAN: frozenset({State.FREE, State.OUSTED, State.ENDED}),
    State.OUSTED: frozenset({State.FREE}),
    State.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Grant:
    client: Client


@dataclass(frozen=True, slots=True)
class Wait:
    client: Client
    owner: Client


@dataclass(frozen=True, slots=True)
class Kill:
    client: Client


@dataclass(frozen=True, slots=True)
class End:
    """Free the memories and end."""


Command = Grant | Wait | Kill | End


class Illegal(Exception):
    """A step that is not in the table: a bug."""


class Tenure:
    def __init__(self, keep_s: float, now: float) -> None:
        self.state = State.FREE
        self.owner: Client | None = None
        self._keep_s = keep_s
        self._waiting: list[Client] = []
        self._left_at = now
        """Since when there is no owner that says anything."""
        self._heard_at = now
        self._due: float | None = None
        """When `tick` was last asked for."""

    # --- what happens ---

    def claimed(self, client: Client, now: float) -> list[Command]:
        if client == self.owner or client in self._waiting or self.state is State.ENDED:
            return []
        self._waiting.append(client)
        if self.state is State.FREE:
            return self._grant(now)
        assert self.owner is not None  # somebody has them
        if self.state is State.ORPHAN:
            return [Wait(client, self.owner), *self._oust()]
        return [Wait(client, self.owner)]

    def heard(self, client: Client, now: float) -> None:
        if client == self.owner:
            self._heard_at = now

    def closed(self, client: Client, now: float) -> list[Command]:
        """The connection has ended, whatever ended it."""
        if client in self._waiting:
            self._waiting.remove(client)
        elif client == self.owner and self.state is State.OWNED:
            self._to(State.ORPHAN)
            self._left_at = now
            return self._oust() if self._waiting else []
        return []

    def died(self, client: Client, now: float) -> list[Command]:
        """The process has ended. `closed` was called before."""
        if client != self.owner:
            return []
        self._to(State.FREE)
        self.owner, self._left_at = None, now
        return self._grant(now)

    def tick(self, now: float) -> list[Command]:
        """To be called at `due`, or any time."""
        if self._due is not None and now > self._due + LATE_S:
            self._heard_at = now  # it may have been as silent as this process
        if self.state is State.OWNED and self._waiting and now - self._heard_at >= HUNG_S:
            return self._oust()
        if self.state in (State.FREE, State.ORPHAN) and now - self._left_at >= self._keep_s:
            self._to(State.ENDED)
            self.owner = None
            return [End()]
        return []

    def due(self, now: float) -> float | None:
        """When `tick` is wanted. None: something else must happen before."""
        if self.state is State.OWNED and self._waiting:
            self._due = min(self._heard_at + HUNG_S, now + ALIVE_S)
        elif self.state in (State.FREE, State.ORPHAN):
            self._due = self._left_at + self._keep_s
        else:
            self._due = None
        return self._due

    # --- what follows ---

    def _grant(self, now: float) -> list[Command]:
        if not self._waiting:
            return []
        self._to(State.OWNED)
        self.owner, self._heard_at = self._waiting.pop(0), now
        return [Grant(self.owner), *(Wait(client, self.owner) for client in self._waiting)]

    def _oust(self) -> list[Command]:
        assert self.owner is not None  # there is somebody to oust
        self._to(State.OUSTED)
        return [Kill(self.owner)]

    def _to(self, state: State) -> None:
        if state not in STEPS[self.state]:
            raise Illegal(f"from {self.state.value} to {state.value}")
        self.state = state

    def validate(self) -> None:
        """For tests. AssertionError: no steps lead here."""
        assert (self.owner is None) == (self.state in (State.FREE, State.ENDED))
        assert self.owner not in self._waiting
        assert len(set(self._waiting)) == len(self._waiting)
        assert not (self.state in (State.FREE, State.ORPHAN) and self._waiting)
