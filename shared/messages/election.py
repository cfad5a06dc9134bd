"""What the processes of a role tell each other: who stands by, and who keeps off."""

from shared.messages.base import Message


class StandsBy(Message, frozen=True, kw_only=True, tag="stands_by"):
    """A process that stands by -> the active one, every second. From then on the active one asks it
    before it goes on without the store (`HoldOff`)."""

    holder: str
    """The process, as in `LeaseRecord.holder`."""


class HoldOff(Message, frozen=True, kw_only=True, tag="hold_off"):
    """The active process, whose lease the store does not renew -> each that stands by. Ok: that one
    does nothing as the active process for PROMISE_S (`shared/election/lease.py`) from now, whatever
    it finds in the store. Conflict: it has the role."""
