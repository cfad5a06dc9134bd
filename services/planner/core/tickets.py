"""Moments and tickets: when something is handled, and which question an answer belongs to."""

import msgspec

from shared.ids import EventId, ModelId


class Moment(msgspec.Struct, frozen=True, gc=False):
    """Now, on both clocks."""

    at: float
    """Seconds on the clock that waits and measures; any origin."""
    wall_ns: int
    """For records that people and other processes read."""


class Ticket(msgspec.Struct, frozen=True, gc=False):
    """Names one question that a planner asked. Its answer carries the ticket back.

    The first answer counts. A repeated one, one that comes after its time, and one to a question of
    an earlier planner meet no open question and change nothing; so does one whose asker has moved
    on to another revision.
    """

    epoch: int
    """Of the planner that asked."""
    number: int
    model: ModelId | None = None
    """Whose machine asked; None: the planner's own."""
    event: EventId | None = None
    revision: int = 0
    """Of the event's plan, or of the model's instances, when it was asked."""
