"""What the planner decided about one model lately, and why: the question and its answer."""

import enum

import msgspec

from shared.ids import EventId, ModelName, NodeId
from shared.messages.base import Message


class Verdict(enum.Enum):
    MORE = "more"
    """Replicas are loaded, or one that drained stays."""
    FEWER = "fewer"
    """A replica goes that is not needed."""
    GIVES_WAY = "gives way"
    """A copy goes, because another model needs its memory more."""
    WAITS = "waits"
    """More replicas are needed, and there is no room for them now."""
    FAILED = "failed"
    """An event ended before its replicas were complete."""


class Decided(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    at_ns: int
    verdict: Verdict
    replicas: int
    """How many replicas served or were on their way."""
    wanted: int
    """How many there should be."""
    why: str
    """In words and numbers."""
    nodes: tuple[NodeId, ...] = ()
    """The nodes that it concerns, where they are known."""
    event: EventId | None = None


class DecisionsQuery(Message, frozen=True, kw_only=True, tag="decisions_query"):
    """Answered with Decisions; NotFound if no such model is published."""

    name: ModelName
    limit: int = 50


class Decisions(Message, frozen=True, kw_only=True, tag="decisions"):
    decisions: tuple[Decided, ...]
    """Newest first."""
