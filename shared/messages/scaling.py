"""One scaling event: the parts of its plan, the arrivals of blocks, and its record."""

import enum

import msgspec

from shared.ids import EventId, Generation, ModelId, ModelName, NodeId
from shared.messages.base import Message
from shared.messages.instances import InstanceSet
from shared.messages.ledger import Spent
from shared.messages.pool import ModelRecord, NodeInfo, Tier
from shared.parts import Part


class Transfer(msgspec.Struct, frozen=True):
    """In step `step` (counted from 1), `src` sends block `block` to `dst`."""

    step: int
    src: NodeId
    dst: NodeId
    block: int


class Pull(msgspec.Struct, frozen=True):
    """A Transfer as its target sees it. The step is also its priority at both ports: the lowest
    goes first."""

    step: int
    block: int
    source: NodeId


class ApplyPlan(Message, frozen=True, kw_only=True, tag="apply_plan"):
    """Planner -> node: hold this model, by these pulls. Ok once the space in the arena is taken and
    the pulls have begun.

    A newer revision of the same event replaces the older one. Held blocks stay, and blocks in
    flight whose source is unchanged go on. `promote` names blocks to bring up from the node's own
    lower tiers. StaleEpoch if generation, revision or the planner's epoch is old; CapacityExceeded
    if the arena is full, or has room for another part of the model.
    """

    event: EventId
    epoch: int = 0
    """The planner's epoch. 0: it does not say."""
    revision: int
    node: NodeId
    generation: Generation
    model_id: ModelId
    pulls: tuple[Pull, ...]
    promote: tuple[int, ...]
    peers: tuple[NodeInfo, ...]
    """Every node that a pull names."""
    part: Part | None = None
    """The blocks for which the node takes room, as one device of a group. None: all."""
    devices: int = 1
    """How many devices of its machine run this part together, since they have a part each. 1: the
    node runs it alone. It counts from when the model is opened next."""
    capability: bytes = b""
    """Lets the node read the blocks of its pulls (`shared/capabilities.py`). Empty: the planner has
    no key to sign one."""
    report_s: float = 0.0
    """The least seconds between two reports of blocks (`BlocksArrived`), but for the last one. 0:
    each block is reported at once."""


class BlockArrived(Message, frozen=True, kw_only=True, tag="block_arrived"):
    """Node -> planner and observers: a block is complete, verified and executable on this node."""

    event: EventId
    revision: int
    node: NodeId
    generation: Generation
    model_id: ModelId
    block: int
    source: NodeId
    """The node itself if the block was promoted from its own lower tiers."""
    transport: str
    nbytes: int
    started_ns: int
    """When it was asked for."""
    first_byte_ns: int
    finished_ns: int
    """When it had come and was verified."""
    ready_ns: int
    """When the engine could run it."""


class Landed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One block of `BlocksArrived`. The fields are those of `BlockArrived`."""

    block: int
    source: NodeId
    transport: str
    nbytes: int
    started_ns: int
    first_byte_ns: int
    finished_ns: int
    ready_ns: int


Landing = Landed | BlockArrived
"""What is said of one block."""


class BlocksArrived(Message, frozen=True, kw_only=True, tag="blocks_arrived"):
    """Node -> planner and observers: these blocks are complete, verified and executable on this
    node. It is sent where the planner asks for few reports (`ApplyPlan.report_s`). A planner of the
    release before does not know it. It learns of the blocks by the node's next status."""

    event: EventId
    revision: int
    node: NodeId
    generation: Generation
    model_id: ModelId
    sent_ns: int
    blocks: tuple[Landed, ...]

    def each(self) -> tuple[BlockArrived, ...]:
        """The same, block by block."""
        return tuple(
            BlockArrived(
                event=self.event,
                revision=self.revision,
                node=self.node,
                generation=self.generation,
                model_id=self.model_id,
                trace=self.trace,
                cause=self.cause,
                **msgspec.structs.asdict(landed),
            )
            for landed in self.blocks
        )


class PullFailed(Message, frozen=True, kw_only=True, tag="pull_failed"):
    """Node -> planner: a block cannot be had from its source, so the event needs a new revision."""

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

    `keep`: HOST keeps a copy in host memory (the last copy of the pool); None forgets the model,
    except on disk.
    """

    node: NodeId
    generation: Generation
    epoch: int = 0
    """The planner's epoch. 0: it does not say. The node refuses an
    epoch before the latest that it has heard (StaleEpoch)."""
    model_id: ModelId
    keep: Tier | None


class PeerSuspect(Message, frozen=True, kw_only=True, tag="peer_suspect"):
    """Node -> planner: the data connection to a peer broke. The planner pings the peer to make
    sure."""

    reporter: NodeId
    node: NodeId
    reason: str


class ImportModel(Message, frozen=True, kw_only=True, tag="import_model"):
    """Operator -> node: pack the checkpoint at `path` (on the node's machine) and publish it."""

    path: str
    name: ModelName
    blocks: int = 0
    """The number of blocks. 0: chosen from the model's size."""
    min_instances: int = 0
    max_instances: int = 0
    base: ModelName = ModelName("")
    """Not empty: `path` has a LoRA adapter of this published model."""


class ModelImported(Message, frozen=True, kw_only=True, tag="model_imported"):
    record: ModelRecord


class SetInstances(Message, frozen=True, kw_only=True, tag="set_instances"):
    """Operator -> planner: keep exactly this many replicas until told otherwise. Answered with
    ScaleAccepted.

    `instances`: None hands the model back to the autoscaler.
    """

    name: ModelName
    instances: int | None


class ScaleAccepted(Message, frozen=True, kw_only=True, tag="scale_accepted"):
    event: EventId | None
    """The event that was begun, or that grows; None if none was needed."""


class EventState(enum.Enum):
    DECIDED = "decided"
    PLANNED = "planned"
    TRANSFERRING = "transferring"
    SERVING = "serving"
    COMPLETE = "complete"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds after the decision. None: it has not happened, or was not predicted."""

    reserved_s: float | None = None
    """When the registry had set targets aside and named sources."""
    planned_s: float | None = None
    sent_s: float | None = None
    """When targets were first sent their parts."""
    asked_s: float | None = None
    """When a target first asked for a block."""
    first_byte_s: float | None = None
    first_path_s: float | None = None
    """When a path could first serve, with a node in it that was still loading."""
    first_partial_token_s: float | None = None
    """When such a path first served a token, as a gateway reported."""
    first_complete_s: float | None = None
    last_block_s: float | None = None
    """When the last block so far had come and was verified."""
    ready_s: float | None = None
    """When an engine could run the last block so far."""
    all_complete_s: float | None = None


class Growth(msgspec.Struct, frozen=True):
    """Targets that were appended to a running event."""

    at_ns: int
    """When they became targets."""
    cause: str
    """Why more were asked for, in words and numbers."""
    nodes: tuple[NodeId, ...]
    since_ns: int = 0
    """When they were asked for. 0: not known."""


class Repair(msgspec.Struct, frozen=True):
    """A trouble that was answered with another plan."""

    since_ns: int
    """When it was taken up."""
    at_ns: int
    """When the plan was made."""
    why: str
    nodes: tuple[NodeId, ...]
    """The targets that were given new parts."""


class EventRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A scaling event as it is stored: enough to explain, draw and replay it."""

    id: EventId
    name: ModelName
    model_id: ModelId
    state: EventState
    cause: str
    """Why it was decided, in words and numbers."""
    revision: int
    sources: tuple[NodeId, ...]
    targets: tuple[NodeId, ...]
    strategy: str
    transfers: tuple[Transfer, ...]
    """The current revision's schedule."""
    n_blocks: int
    nbytes: int
    """The size of one copy of the model."""
    detected_ns: int
    decided_ns: int
    history: tuple[tuple[EventState, int], ...]
    """(state, wall clock in ns), in order."""
    predicted: Timings
    """As the event was planned. Where it has grown, `all_complete_s` is as it was then planned for
    all targets."""
    actual: Timings
    physical_limit_s: float | None
    """The least time in which the links can bring every target a copy, chunk by chunk
    (`planner.core.costs.physical_limit`). Targets that were appended need at least the time of one
    copy from then on. None if no rate is known."""
    bytes_moved: int
    trace: str
    """W3C traceparent of the event's root span."""
    error: str = ""
    growths: tuple[Growth, ...] = ()
    repairs: tuple[Repair, ...] = ()
    waiting_ns: int = 0
    """When the ledger begins: since when the oldest request had waited at the decision; if none
    waited, since when replicas were missing. Not before the end of the model's previous event. 0:
    not known."""
    wanted_ns: int = 0
    """When its replicas were first wanted. The decision came later if room had to be made. 0: not
    known."""
    last: NodeId | None = None
    """The target that was complete last, so far."""
    parts: dict[NodeId, Part] = {}
    """The blocks that each target is to hold, of a model that fits no device. Empty: all."""
    together: bool = False
    """Whether the devices of a machine that hold a part each run each part together."""
    way: str = ""
    """Why these devices, and whether together, in words and numbers, of a model that fits no
    device. Empty: there was no choice."""
    expected: dict[str, float] = {}
    """Seconds that each phase of the ledger was predicted to take, by `Phase.value`."""
    ports: tuple[str, ...] = ()
    """Which nodes send no weights, or are slow, because KV takes their ports, in words."""
    ledger: tuple[Spent, ...] = ()
    """From the first waiting request to the end, once the event is over: phases without a gap or an
    overlap. See `planner.core.ledger`."""


class EventChanged(Message, frozen=True, kw_only=True, tag="event_changed"):
    """Planner -> observers, at every change of state."""

    record: EventRecord


class FirstPartialToken(Message, frozen=True, kw_only=True, tag="first_partial_token"):
    """Gateway -> planner: a new path or replica has served its first token (one message for
    each)."""

    event: EventId
    instance: str
    stages: int
    at_ns: int


class PlannerQuery(Message, frozen=True, kw_only=True, tag="planner_query"):
    """Answered with PlannerState."""

    events: int = 50
    """How many of the last events to return."""


class PlannerState(Message, frozen=True, kw_only=True, tag="planner_state"):
    sets: tuple[InstanceSet, ...]
    events: tuple[EventRecord, ...]
    """Newest first."""
