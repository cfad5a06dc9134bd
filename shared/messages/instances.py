"""The instances that serve a model now: complete replicas, and paths of several stages."""

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
    """Takes no new requests. Those that it has run to their end."""
    MOVING = "moving"
    """Takes no new requests. Those that it has are resumed elsewhere, evenly, unless they would end
    sooner where they are."""


class Role(enum.Enum):
    """What an instance does for requests."""

    BOTH = "both"
    PREFILL = "prefill"
    """Requests begin here. After the first token they move on to an instance that decodes, as soon
    as one has room."""
    DECODE = "decode"
    """Requests come here with their KV. None begins here."""


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    id: InstanceId
    stages: tuple[Stage, ...]
    """The stages in order, which together cover every block once. The first stage's node leads. A
    complete replica has one stage."""
    state: InstanceState
    capacity: float
    """Throughput in units of one complete replica on an ordinary node."""
    slots: int
    """Sequences that the planner grants it at once (`shared.slots`)."""
    event: EventId | None
    """The scaling event that made the instance."""
    role: Role = Role.BOTH
    group: bool = False
    """Whether it is a group: each of its devices has one part of the model for good, since no
    device has room for all of it."""
    opening: bool = False
    """Whether it is a replica that lacks blocks: its last ones are about to come, or its node wakes
    it from memory, and may have none yet. Its node runs requests as far as its blocks go, and on as
    they come."""

    @property
    def leader(self) -> NodeId:
        return self.stages[0].node

    @property
    def is_replica(self) -> bool:
        """Whether one node serves alone."""
        return len(self.stages) == 1

    @property
    def lasts(self) -> bool:
        """Whether it is to serve for long: a replica or a group, not a path over nodes that
        load."""
        return self.group or self.is_replica


class Coming(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's running scaling event brings, as the planner sees it now."""

    share: float
    """How much of the model's blocks the node has that lacks the least of them, but lacks some."""
    first_s: float | None
    """Seconds until an instance of it can serve, as planned; 0: one can, or should by now. None: it
    is not planned yet."""
    complete_s: float | None
    """Seconds until all of it is there."""
    replicas: int
    """That it brings. 0: not known yet."""


class InstanceSet(Message, frozen=True, kw_only=True, tag="instance_set"):
    """Planner -> gateways, on change and every second: all instances of one model. Mostly only what
    has changed is said (InstanceChange).

    An instance that is missing from a newer revision is gone, and its requests are resumed
    elsewhere. `trace` is that of the scaling event that caused the change.
    """

    name: ModelName
    model_id: ModelId
    epoch: int
    """Counts the processes of the planner. A new one counts its revisions from 0 again."""
    revision: int
    instances: tuple[Instance, ...]
    node_slots: dict[NodeId, int] = msgspec.field(default_factory=dict)
    """Slots of the nodes that are stages of paths."""
    fixed: int | None = None
    """How many replicas an operator keeps the model at. None: the autoscaler decides."""
    within_s: float = 0.0
    """The model's objective for the time to the first token, while the planner can add no replica:
    a request that would miss it is better refused at once. 0: every request may wait."""
    decode_s: float = 0.0
    """Seconds that one token takes through the whole model, as nodes measured it. 0: not known."""
    prefill_s_per_token: float = 0.0
    """Seconds that each further token in a pass adds, as nodes measured it. 0: nothing, or not
    known."""
    kv_s_per_token: float = 0.0
    """Seconds in which the KV of a position moves from node to node, as nodes expect. 0: it does
    not move, or that is not known."""
    coming: Coming | None = None
    """None: no scaling event runs."""


class InstanceChange(Message, frozen=True, kw_only=True, tag="instance_change"):
    """Planner -> gateways, in place of an InstanceSet once every gateway understands changes
    (`GatewayLoad.takes_changes`): what has changed since an earlier set of the same planner.

    A receiver that knows that set or a later one then knows the new set too (`changes.whole_set`).
    Any other receiver asks for it (InstancesQuery).
    """

    now: InstanceSet
    """The new set, of whose instances only those are named that are new or have changed."""
    since: int
    """The revision of the set on which this builds. If nothing has changed, it is that of `now`."""
    gone: tuple[InstanceId, ...] = ()


class InstancesQuery(Message, frozen=True, kw_only=True, tag="instances_query"):
    """A gateway that starts, or has missed a change -> planner. Answered with InstanceSets."""

    names: tuple[ModelName, ...] = ()
    """The models whose sets are wanted. Empty: all."""


class InstanceSets(Message, frozen=True, kw_only=True, tag="instance_sets"):
    sets: tuple[InstanceSet, ...]
