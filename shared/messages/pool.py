"""The parameter pool: nodes, their leases, what they hold, models, sources and reservations."""

import enum

import msgspec

from shared.ids import EventId, Generation, ModelId, ModelName, NodeId
from shared.messages.base import Message


class Tier(enum.Enum):
    """Where a block lies, nearest to execution first."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node is; the value of its lease."""

    node: NodeId
    generation: Generation
    address: str
    """Data plane, for example `tcp://10.0.0.7:7001`."""
    host: str
    """Name of the machine; nodes of one host share local links and disks."""
    device: str
    """`cpu` or `cuda:0`."""
    arena_bytes: int
    """Memory for weights on the device."""
    link_bytes_per_s: int
    """Rate of its data link each way; 0 when not known."""
    slots: int
    """Sequences that a full replica on this node runs at once."""
    staging: str = ""
    """How weights reach the device, in words; empty: it computes where they land."""
    rack: str = ""
    """Nodes of one rack share a trunk to the others, and fail together; empty: not known."""
    trunk_bytes_per_s: int = 0
    """Rate of the rack's trunk each way; 0 when not known."""
    local_bytes_per_s: int = 0
    """Rate to other nodes of the same host (NVLink, shared memory); 0: no faster than the port."""


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How fast a node runs a model. 0: not measured yet.

    A pass of t tokens through a share x of the model's blocks takes about
    x (decode_s + (t - 1) prefill_s_per_token).
    """

    model_id: ModelId
    prefill_s_per_token: float = 0.0
    decode_s: float = 0.0
    """One pass of one token through the whole model: bound by reading the weights."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node has measured itself, rounded so that noise is no news. 0: not measured yet."""

    out_bytes_per_s: float = 0.0
    """beta: sustained rate of its port when the port was the limit."""
    in_bytes_per_s: float = 0.0
    overhead_s: float = 0.0
    """alpha: fixed time of a block transfer to it."""
    load_bytes_per_s: float = 0.0
    """At which it brings blocks up from its own lower tiers."""
    models: tuple[ModelProfile, ...] = ()
    """Of those that it ran lately, by id."""


class Holding(msgspec.Struct, frozen=True):
    model_id: ModelId
    tier: Tier
    blocks: tuple[int, ...]
    """Verified blocks, ascending."""


class NodeStatus(Message, frozen=True, kw_only=True, tag="node_status"):
    """Node -> registry, planner: all it holds now. On change, on request, every second."""

    node: NodeId
    generation: Generation
    seq: int
    """Counts up; an older one that arrives late is ignored."""
    arena_free: int
    holdings: tuple[Holding, ...]
    running: int = 0
    """Sequences that it leads or is a stage of."""
    waiting: int = 0
    """Sequences that it leads and has no room for yet."""
    kv_used: int = 0
    """KV cache in use, token positions."""
    kv_capacity: int = 0
    """0: no model is open, and how many positions there will be depends on the model."""
    tokens_out: int = 0
    """Tokens drawn here since the node started."""
    prompt_tokens: int = 0
    """Tokens that sequences which it leads have begun with since then."""
    cached_tokens: int = 0
    """Those of them whose KV was found in the prefix cache."""
    preemptions: int = 0
    """Times since then that a sequence gave its KV back, so that others had room."""
    tokens_proposed: int = 0
    """By speculation, for sequences that it leads, since then; and those of them that were drawn.
    """
    tokens_accepted: int = 0
    violations: int = 0
    """Malformed stage messages that were refused since then."""
    faults: int = 0
    """Bugs since then that ended requests, but not the node: see its log."""
    profile: Profile = Profile()
    peers: dict[str, tuple[NodeId, ...]] = msgspec.field(default_factory=dict)
    """Nodes that it has connections to read from, by what carries the bytes: shm, rdma, tcp."""


class ReportStatus(Message, frozen=True, kw_only=True, tag="report_status"):
    """Registry -> all nodes, after a (re)start: send your NodeStatus now."""


class NodeJoined(Message, frozen=True, kw_only=True, tag="node_joined"):
    info: NodeInfo


class NodeGone(Message, frozen=True, kw_only=True, tag="node_gone"):
    """Registry -> all: the lease ended or was given back. `generation` is over for good."""

    node: NodeId
    generation: Generation
    reason: str


class Task(enum.Enum):
    """What a model is for; named as on the Hugging Face Hub."""

    TEXT = "text-generation"
    CLASSIFY = "image-classification"


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A published model. The objects lie in the asset store, named by their SHA-256."""

    name: ModelName
    model_id: ModelId
    manifest: str
    """Object name of the encoded manifest."""
    files: dict[str, str]
    """Tokenizer and template files: file name -> object name. An image classifier has none."""
    nbytes: int
    n_blocks: int
    block_bytes: tuple[int, ...]
    context_length: int
    created_ns: int
    min_instances: int = 0
    max_instances: int = 0
    """0: as many as there are nodes."""
    chunk_bytes: int = 0
    """The manifest's. 0: not known (a record from before there was the field); it is then
    predicted that blocks are relayed whole, which is later than they are."""
    task: Task = Task.TEXT


class ModelAdd(Message, frozen=True, kw_only=True, tag="model_add"):
    """Node -> registry: a model was imported. Ok, or Conflict if the name means another model."""

    record: ModelRecord


class ModelRemove(Message, frozen=True, kw_only=True, tag="model_remove"):
    name: ModelName


class ModelsQuery(Message, frozen=True, kw_only=True, tag="models_query"):
    """-> Models."""


class Models(Message, frozen=True, kw_only=True, tag="models"):
    records: tuple[ModelRecord, ...]


class ModelAdded(Message, frozen=True, kw_only=True, tag="model_added"):
    """Registry -> all. Nodes fetch the manifest now, so that a plan need not wait for it."""

    record: ModelRecord


class ModelRemoved(Message, frozen=True, kw_only=True, tag="model_removed"):
    """Registry -> all: stop serving it, then forget it in every tier."""

    name: ModelName
    model_id: ModelId


class SourcesQuery(Message, frozen=True, kw_only=True, tag="sources_query"):
    """-> Sources: who holds blocks of the model, best first.

    Memory before disk, complete copies, most blocks; then nodes whose port and engine are idle,
    and those in the racks of the model's reserved targets.
    """

    model_id: ModelId


class Source(msgspec.Struct, frozen=True):
    info: NodeInfo
    tier: Tier
    blocks: tuple[int, ...]
    complete: bool


class Sources(Message, frozen=True, kw_only=True, tag="sources"):
    sources: tuple[Source, ...]


class Reserve(Message, frozen=True, kw_only=True, tag="reserve"):
    """Planner -> registry: set aside up to `count` nodes for an event. -> Reserved.

    Chosen: alive, room for `nbytes`, not reserved by another event, not in `exclude`; first those
    that hold blocks of the model already, then those with the most to spare, in at least two racks
    where there are two (services/registry/core/placement.py has the order).
    """

    event: EventId
    model_id: ModelId
    nbytes: int
    count: int
    exclude: tuple[NodeId, ...]


class Reserved(Message, frozen=True, kw_only=True, tag="reserved"):
    """As many targets as could be had, best first; possibly none."""

    targets: tuple[NodeInfo, ...]
    reasons: tuple[str, ...] = ()
    """Why each of them was chosen, for people."""


class Unreserve(Message, frozen=True, kw_only=True, tag="unreserve"):
    """The event is over, or `nodes` are no longer part of it (empty: all of the event's)."""

    event: EventId
    nodes: tuple[NodeId, ...] = ()


class NodesQuery(Message, frozen=True, kw_only=True, tag="nodes_query"):
    """-> Nodes: who is there, without what they hold; of a large pool a small part."""


class Nodes(Message, frozen=True, kw_only=True, tag="nodes"):
    nodes: tuple[NodeInfo, ...]


class PoolQuery(Message, frozen=True, kw_only=True, tag="pool_query"):
    """-> PoolState."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    info: NodeInfo
    holdings: tuple[Holding, ...]
    arena_free: int
    reserved_by: EventId | None
    running: int = 0
    kv_used: int = 0
    kv_capacity: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    profile: Profile = Profile()
    peers: dict[str, tuple[NodeId, ...]] = msgspec.field(default_factory=dict)


class PoolState(Message, frozen=True, kw_only=True, tag="pool_state"):
    nodes: tuple[NodeView, ...]
    models: tuple[ModelRecord, ...]
