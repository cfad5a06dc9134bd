"""What serves a model now: complete replicas and paths of stages, both called instances."""

import enum

import msgspec

from shared.ids import EventId, InstanceId, ModelId, ModelName, NodeId
from shared.messages.base import Message


class Stage(msgspec.Struct, frozen=True):
    """One node's part of a path: blocks start <= block < stop."""

    node: NodeId
    address: str
    """Data-plane address of the node."""
    start: int
    stop: int


class InstanceState(enum.Enum):
    SERVING = "serving"
    DRAINING = "draining"
    """No new requests; those it has run to their end."""
    MOVING = "moving"
    """No new requests; those it has are resumed elsewhere, evenly, unless they end sooner."""


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    id: InstanceId
    stages: tuple[Stage, ...]
    """In order, covering every block once. One stage: a complete replica. The first leads."""
    state: InstanceState
    capacity: float
    """Throughput in units of one complete replica."""
    slots: int
    """Sequences it takes at once."""
    event: EventId | None
    """The scaling event that made it."""

    @property
    def leader(self) -> NodeId:
        return self.stages[0].node

    @property
    def is_replica(self) -> bool:
        return len(self.stages) == 1


class InstanceSet(Message, frozen=True, kw_only=True, tag="instance_set"):
    """Planner -> gateways, on change and every second: the whole truth about one model.

    An instance that is missing from a newer revision is gone: its requests are resumed elsewhere.
    `trace` is that of the scaling event that caused the change.
    """

    name: ModelName
    model_id: ModelId
    epoch: int
    """Start of the planner process, ns: a new planner's revisions count from 0 again."""
    revision: int
    instances: tuple[Instance, ...]
    decode_s: float = 0.0
    """What a pass of one token through the whole model takes, as nodes measured it; 0: not known.
    """
    prefill_s_per_token: float = 0.0
    """What each token more in a pass adds, as nodes measured it; 0: nothing, or not known."""


class InstancesQuery(Message, frozen=True, kw_only=True, tag="instances_query"):
    """-> InstanceSets, from the planner; for a gateway that starts."""


class InstanceSets(Message, frozen=True, kw_only=True, tag="instance_sets"):
    sets: tuple[InstanceSet, ...]
