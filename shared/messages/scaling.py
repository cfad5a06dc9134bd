"""One scaling event: the plan's parts, the arrivals, and the record of it all."""

import enum

import msgspec

from shared.ids import EventId, Generation, ModelId, ModelName, NodeId
from shared.messages.base import Message
from shared.messages.instances import InstanceSet
from shared.messages.pool import ModelRecord, NodeInfo, Tier


class Transfer(msgspec.Struct, frozen=True):
    """In step `step` (from 1), `src` sends block `block` to `dst`."""

    step: int
    src: NodeId
    dst: NodeId
    block: int


class Pull(msgspec.Struct, frozen=True):
    """A target's view of a Transfer. The step is also its priority on both ports: lowest first."""

    step: int
    block: int
    source: NodeId


class ApplyPlan(Message, frozen=True, kw_only=True, tag="apply_plan"):
    """Planner -> node: hold this model, by these pulls. Ok once the arena stands and pulls began.

    A newer revision of the same event replaces the older one; blocks held stay, blocks in flight
    whose source is unchanged go on. `promote` names blocks to bring up from the node's own lower
    tiers. StaleEpoch if generation or revision is old; CapacityExceeded if the arena is full.
    """

    event: EventId
    revision: int
    node: NodeId
    generation: Generation
    model_id: ModelId
    pulls: tuple[Pull, ...]
    promote: tuple[int, ...]
    peers: tuple[NodeInfo, ...]
    """Every node that a pull names."""


class BlockArrived(Message, frozen=True, kw_only=True, tag="block_arrived"):
    """Node -> planner and observers: a block is complete, verified and executable here."""

    event: EventId
    revision: int
    node: NodeId
    generation: Generation
    model_id: ModelId
    block: int
    source: NodeId
    """The node itself for a promotion."""
    transport: str
    nbytes: int
    started_ns: int
    first_byte_ns: int
    finished_ns: int


class PullFailed(Message, frozen=True, kw_only=True, tag="pull_failed"):
    """Node -> planner: a block cannot be had from its source; the event needs a new revision."""

    event: EventId
    revision: int
    node: NodeId
    generation: Generation
    block: int
    source: NodeId
    code: str
    message: str


class ReleaseModel(Message, frozen=True, kw_only=True, tag="release_model"):
    """Planner -> node: free the device memory of a model. Ok when it is free.

    `keep` HOST keeps a copy in host memory (the pool's last one); None forgets it, except on disk.
    """

    node: NodeId
    generation: Generation
    model_id: ModelId
    keep: Tier | None


class PeerSuspect(Message, frozen=True, kw_only=True, tag="peer_suspect"):
    """Node -> planner: the data connection to a peer broke. The planner pings it to make sure."""

    reporter: NodeId
    node: NodeId
    reason: str


class ImportModel(Message, frozen=True, kw_only=True, tag="import_model"):
    """Operator -> node: pack the checkpoint at `path` (on the node's host) and publish it."""

    path: str
    name: ModelName
    blocks: int
    """How many blocks; 0: chosen from the model's size."""
    min_instances: int = 1
    max_instances: int = 0


class ModelImported(Message, frozen=True, kw_only=True, tag="model_imported"):
    record: ModelRecord


class SetInstances(Message, frozen=True, kw_only=True, tag="set_instances"):
    """Operator -> planner: keep exactly this many replicas until told otherwise.

    `instances` None hands the model back to the autoscaler. -> ScaleAccepted.
    """

    name: ModelName
    instances: int | None


class ScaleAccepted(Message, frozen=True, kw_only=True, tag="scale_accepted"):
    event: EventId | None
    """The event that was begun, if one was needed."""


class EventState(enum.Enum):
    DECIDED = "decided"
    PLANNED = "planned"
    TRANSFERRING = "transferring"
    SERVING = "serving"
    COMPLETE = "complete"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds after the decision; None when it has not happened (or was not predicted)."""

    first_byte_s: float | None = None
    first_path_s: float | None = None
    """A set of nodes with a partial one in it can serve."""
    first_partial_token_s: float | None = None
    """Such a set has served a token (reported by a gateway)."""
    first_complete_s: float | None = None
    all_complete_s: float | None = None


class EventRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A scaling event, as stored: enough to explain, draw and replay it."""

    id: EventId
    name: ModelName
    model_id: ModelId
    state: EventState
    cause: str
    """In words and numbers: why it was decided."""
    revision: int
    sources: tuple[NodeId, ...]
    targets: tuple[NodeId, ...]
    strategy: str
    transfers: tuple[Transfer, ...]
    """The current revision's schedule."""
    n_blocks: int
    nbytes: int
    """Size of one copy."""
    detected_ns: int
    decided_ns: int
    history: tuple[tuple[EventState, int], ...]
    """(state, wall ns) in order."""
    predicted: Timings
    actual: Timings
    physical_limit_s: float | None
    """Least seconds in which these links can bring every target a copy, chunk by chunk
    (`planner.core.costs.physical_limit`); None when no rate is known."""
    bytes_moved: int
    trace: str
    """W3C traceparent of the event's root span."""
    error: str = ""


class EventChanged(Message, frozen=True, kw_only=True, tag="event_changed"):
    """Planner -> observers, at every change of state."""

    record: EventRecord


class FirstPartialToken(Message, frozen=True, kw_only=True, tag="first_partial_token"):
    """Gateway -> planner: the first token that a new path or replica served (one each)."""

    event: EventId
    instance: str
    stages: int
    at_ns: int


class PlannerQuery(Message, frozen=True, kw_only=True, tag="planner_query"):
    """-> PlannerState."""

    events: int = 50
    """How many of the last events to return."""


class PlannerState(Message, frozen=True, kw_only=True, tag="planner_state"):
    sets: tuple[InstanceSet, ...]
    events: tuple[EventRecord, ...]
    """Newest first."""
