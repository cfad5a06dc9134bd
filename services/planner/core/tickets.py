"""Moments and tickets: when something is handled, and which question an answer belongs to."""

import msgspec

from shared.ids import EventId, ModelId


class Moment(msgspec.Struct, frozen=True, gc=False):
    """The present moment on both clocks."""

    at: float
    """Seconds on the clock that waits and measures; its origin is arbitrary."""
    wall_ns: int
    """For records that people and other processes read."""


class Ticket(msgspec.Struct, frozen=True, gc=False):
    """The name of one question that a planner asked. Its answer carries the ticket back.

    Only the first answer counts. A repeated answer, an answer after its time, and an answer to a
    question of an earlier planner meet no open question and change nothing. The same holds for an
    answer whose asker has moved on to another revision.
    """

    epoch: int
    """The epoch of the planner that asked."""
    number: int
    model: ModelId | None = None
    """The model whose machine asked. None: the planner itself."""
    event: EventId | None = None
    revision: int = 0
    """The revision of the event's plan, or of the model's instances, when it was asked."""
