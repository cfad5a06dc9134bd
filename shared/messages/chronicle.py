"""What the planner remembers of the last hours, for people who look later: which block came when in
a scaling event and what served meanwhile, and how many replicas each model had, wanted and got.

Askers put together what they are told: an item may come twice, and is the same then. So whoever has
asked an earlier planner keeps what that planner said.
"""

import msgspec

from shared.ids import EventId, InstanceId, ModelName, NodeId
from shared.messages.base import Message
from shared.messages.decisions import Decided
from shared.messages.scaling import EventRecord


class Count(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A model's load and replicas from a moment on, until the next of its counts."""

    at_ns: int
    queued: int
    """Requests that wait at all gateways."""
    running: int
    serving: int
    """Complete replicas that take requests."""
    granted: int
    """Replicas that serve or are on their way: what the model was allowed so far."""
    wanted: int
    """Replicas that the model should have, whatever room there is."""


class Rate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens that all nodes drew since the chronicle before this one."""

    at_ns: int
    tokens_per_s: float


class ModelPast(msgspec.Struct, frozen=True, kw_only=True):
    name: ModelName
    counts: tuple[Count, ...]
    """Oldest first."""
    decisions: tuple[Decided, ...]
    """Newest first."""


class ChronicleQuery(Message, frozen=True, kw_only=True, tag="chronicle_query"):
    """Operator or gateway -> planner. Answered with Chronicle."""

    last_s: float = 0.0
    """Only what was noted in the last so many seconds, and what has not ended. 0: everything."""


class Chronicle(Message, frozen=True, kw_only=True, tag="chronicle"):
    at_ns: int
    """The planner's wall clock."""
    events: tuple[EventRecord, ...]
    """Newest first, without their schedules."""
    models: tuple[ModelPast, ...]
    rates: tuple[Rate, ...]
    """Oldest first."""


class Arrival(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A block that came to a target of an event: see BlockArrived."""

    node: NodeId
    block: int
    source: NodeId
    way: str
    """What carried it; `BlockArrived.transport`."""
    asked_ns: int
    first_byte_ns: int
    finished_ns: int
    ready_ns: int


class Served(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An instance that an event made, from its beginning to its end."""

    instance: InstanceId
    stages: tuple[tuple[NodeId, int, int], ...]
    """(node, first block, the block after the last)."""
    began_ns: int
    first_token_ns: int = 0
    """0: no gateway has said so."""
    moving_ns: int = 0
    """Since when its requests go on elsewhere. 0: they do not."""
    ended_ns: int = 0
    """0: it is there."""
    group: bool = False
    """See `Instance.group`. Otherwise several stages are a path."""

    @property
    def lasts(self) -> bool:
        """See `Instance.lasts`."""
        return self.group or len(self.stages) == 1


class EventQuery(Message, frozen=True, kw_only=True, tag="event_query"):
    """Operator or gateway -> planner. Answered with EventPast; NotFound if there is no such
    event."""

    event: EventId
    after: int = 0
    """How many arrivals the asker knows already."""


class EventPast(Message, frozen=True, kw_only=True, tag="event_past"):
    record: EventRecord
    """Without its schedule."""
    arrivals: tuple[Arrival, ...]
    """In the order in which they were heard, from the asker's `after` on. Whoever knows more of
    them than there are had them from another planner."""
    arrived: int
    """How many are known in all."""
    forgotten: int
    """How many are known no more, or never were kept, because there are so many."""
    served: tuple[Served, ...]
    """The instances that the event made, in the order of their beginnings."""
