"""The parameter pool: nodes, their leases, what they hold, models, sources and reservations."""

import enum

import msgspec

from shared.ids import NO_ADAPTER, EventId, Generation, ModelId, ModelName, NodeId
from shared.messages.base import Message
from shared.parts import Part
from shared.step_costs import StepCosts


class Tier(enum.StrEnum):
    """Where a block lies. The tier nearest to execution is first."""

    GPU = "gpu"
    """In the arena, and the engine runs it."""
    HOST = "host"
    """In the arena, and the engine does not run it: the copy sleeps where it was."""
    CACHE = "cache"
    """In the host cache (`node.host_bytes`): memory of its own, beside the arena."""
    DISK = "disk"


ARENA = (Tier.GPU, Tier.HOST)
"""The tiers that take room in the arena."""
MEMORY = (*ARENA, Tier.CACHE)
"""The tiers from which blocks are sent at the speed of the network."""


class Duty(enum.Enum):
    """What a node may be used for."""

    ALL = "all"
    CORDONED = "cordoned"
    """It keeps what it has and serves with it, and is given nothing new."""
    DRAINING = "draining"
    """It is given nothing new, and other nodes take over what it serves and keeps."""
    ENDING = "ending"
    """Its process is about to end. Other nodes take over what it serves, and what nobody else
    keeps. What its disk has may come back with the next process."""

    @property
    def leaves(self) -> bool:
        """Whether other nodes take over what it serves."""
        return self in (Duty.DRAINING, Duty.ENDING)


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The properties of a node. They are the value of its lease, but for `duty` and `leave_by_ns`,
    which the registry fills in."""

    node: NodeId
    generation: Generation
    address: str
    """The address of the data plane, for example `tcp://10.0.0.7:7001`."""
    host: str
    """The machine's name. Nodes of one host share local links and disks."""
    device: str
    """`cpu` or `cuda:0`."""
    arena_bytes: int
    """Memory for weights on the device."""
    host_bytes: int = 0
    """The size of the host cache. 0: there is none, and released copies sleep in the arena."""
    link_bytes_per_s: int
    """The rate of its data link in each direction. 0: not known."""
    slots: int
    """How many sequences a full replica on this node runs at once."""
    staging: str = ""
    """How weights reach the device, in words. Empty: the engine computes where they land."""
    rack: str = ""
    """Nodes of one rack share a trunk to the others, and fail together. Empty: not known."""
    trunk_bytes_per_s: int = 0
    """The rate of the rack's trunk in each direction. 0: not known."""
    local_bytes_per_s: int = 0
    """The rate to other nodes of the same host (NVLink, shared memory). 0: no faster than the
    port."""
    duty: Duty = Duty.ALL
    leave_by_ns: int = 0
    """When what it serves ends, whether another node has taken over or not (wall clock). 0: it
    serves until another has."""


class SetDuty(Message, frozen=True, kw_only=True, tag="set_duty"):
    """Operator -> registry: what a node may be used for from now on, in this process and later
    ones. Answered with Nodes: the node, if it is there. NotFound if there is no such node, BadInput
    if the limit makes no sense."""

    node: NodeId
    duty: Duty
    within_s: float = 0.0
    """The seconds after which a node that drains ends what it serves. 0: there is no limit."""


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How fast a node runs a model. 0: not measured yet.

    A pass of t tokens through a share x of the model's blocks takes about x (decode_s + (t - 1)
    prefill_s_per_token) seconds.
    """

    model_id: ModelId
    prefill_s_per_token: float = 0.0
    decode_s: float = 0.0
    """Seconds of one pass of one token through the whole model. It is bound by reading the
    weights."""
    decode_s_per_token: float = 0.0
    """Seconds that each further sequence adds to a pass in which all decode, KV included."""
    kv_s_per_token: float = 0.0
    """Seconds in which the KV of a position comes from another node, as the node expects. 0: it is
    computed anew instead."""
    share: float = 1.0
    """The part of the model that the node ran in these passes, about. The fixed costs of a pass
    make a small part look slow."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node has measured of itself, rounded so that noise does not count as news. 0: not
    measured yet."""

    out_bytes_per_s: float = 0.0
    """beta: the sustained rate of its port at times when the port was the limit."""
    in_bytes_per_s: float = 0.0
    overhead_s: float = 0.0
    """alpha: the fixed time of a block transfer to it."""
    load_bytes_per_s: float = 0.0
    """The rate at which it brings up blocks from its own lower tiers."""
    models: tuple[ModelProfile, ...] = ()
    """The models that it ran lately, by id."""
    steps: tuple[StepCosts, ...] = ()
    """What decode steps cost, also with further devices of its machine. Empty: it runs what it
    holds alone (`node.team_devices`)."""


class Holding(msgspec.Struct, frozen=True, omit_defaults=True):
    model_id: ModelId
    tier: Tier
    blocks: tuple[int, ...]
    """Verified blocks, ascending."""
    part: Part | None = None
    """The blocks that have room there, in an arena. None: all."""


class CopyProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A copy that the registry ordered and that is not whole yet."""

    model_id: ModelId
    done: int
    """Bytes that are there, of `nbytes`."""
    nbytes: int
    running: bool = True
    """False: it is left over from before a restart or a failure, and nobody goes on with it."""
    error: str = ""
    """What it failed with, in words."""
    tier: Tier = Tier.DISK
    """Where it is made: on the disk, or in the host cache."""


class NodeStatus(Message, frozen=True, kw_only=True, tag="node_status"):
    """Node -> registry and planner: how the node is, and what has changed of what it holds. Sent on
    change, on request, and every second."""

    node: NodeId
    generation: Generation
    seq: int
    """Counts up. An older status that arrives late is ignored."""
    since: int = 0
    """Models that are not named are held as status `since` had it, or a later one. 0: models that
    are not named are not held."""
    arena_free: int
    holdings: tuple[Holding, ...]
    """All that is held of the models that it names."""
    dropped: tuple[ModelId, ...] = ()
    """Models of which nothing is held any more."""
    running: int = 0
    """Sequences that the node leads or is a stage of."""
    waiting: int = 0
    """Sequences that the node leads and has no room for yet."""
    kv_used: int = 0
    """Token positions of the KV cache in use."""
    kv_capacity: int = 0
    """0: no model is open; the number of positions will depend on the model."""
    kv_shares: dict[ModelId, int] = msgspec.field(default_factory=dict)
    """The positions that each open model can have however much the others need. 0: it keeps no
    KV."""
    tokens_out: int = 0
    """Tokens drawn since the node started. (The counters below count from then, too.)"""
    prompt_tokens: int = 0
    """Tokens with which sequences began that this node leads."""
    cached_tokens: int = 0
    """How many of `prompt_tokens` had their KV in the prefix cache."""
    received_tokens: int = 0
    """Tokens whose KV came from another node."""
    kv_sent_bytes: int = 0
    """Bytes of KV that other nodes were lent, and that came from others."""
    kv_received_bytes: int = 0
    preemptions: int = 0
    """How often a sequence gave its KV back to make room for others."""
    tokens_proposed: int = 0
    """Tokens proposed by speculation, for sequences that this node leads. `tokens_accepted` of them
    were drawn."""
    tokens_accepted: int = 0
    violations: int = 0
    """Malformed stage messages that were refused."""
    faults: int = 0
    """Bugs that ended requests, but not the node: see its log."""
    profile: Profile = Profile()
    peers: dict[str, tuple[NodeId, ...]] = msgspec.field(default_factory=dict)
    """The nodes that it has connections to read from, by what carries the bytes: shm, rdma, tcp."""
    disk_bytes: int = 0
    """The size of the disk that holds its packed models. 0: it does not say."""
    disk_free: int = 0
    host_free: int = 0
    """Free bytes of the host cache."""
    copying: tuple[CopyProgress, ...] = ()
    unfit: str = ""
    """Why nothing new may come to it, in words; empty: it is well."""


class ReportStatus(Message, frozen=True, kw_only=True, tag="report_status"):
    """Registry -> all nodes, when it (re)starts; registry and planner -> a node of which they have
    missed something: say now all that you hold."""


class NodeJoined(Message, frozen=True, kw_only=True, tag="node_joined"):
    info: NodeInfo


class NodeGone(Message, frozen=True, kw_only=True, tag="node_gone"):
    """Registry -> all: the lease ended or was given back. Nothing of this `generation` counts any
    more."""

    node: NodeId
    generation: Generation
    reason: str
    graceful: bool = False
    """It stopped as it was told to: none of what it did has failed."""


class Task(enum.Enum):
    """What a model is for; named as on the Hugging Face Hub."""

    TEXT = "text-generation"
    CLASSIFY = "image-classification"


PLANNERS_CHOICE = -1.0
"""A `prefill_share` that the planner chooses, by load and objectives."""


class DecodeShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a decode step of a model has to do, beside reading its blocks."""

    layers: int
    heads: int
    """KV heads: ranks have as many of them each. 1 too if ranks do not divide the model."""
    itemsize: int
    """Bytes of a weight."""
    looked_up: int
    """Bytes of the first block of which a step reads a row for each token."""


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A published model. Its objects lie in the asset store, named by their SHA-256."""

    name: ModelName
    model_id: ModelId
    manifest: str
    """The name of the object with the encoded manifest."""
    files: dict[str, str]
    """Tokenizer and template files: file name -> object name. An image classifier has none."""
    nbytes: int
    n_blocks: int
    block_bytes: tuple[int, ...]
    context_length: int
    created_ns: int
    min_instances: int = 0
    max_instances: int = 0
    """0: no limit but the number of nodes."""
    priority: int = 0
    """Who gets memory that is short: models of higher priority come first, and may take the place
    of what serves models of lower priority."""
    keep_alive_s: float | None = None
    """Seconds for which a replica stays that the load no longer fills. None: `planner.idle_s`."""
    ttft_s: float = 0.0
    """The objective for the time to the first token, which nine of ten requests should keep. 0:
    none."""
    tpot_s: float = 0.0
    """The objective for the time between tokens. 0: none."""
    warm: int = 0
    """Copies that stay in memory, ready, when their replicas are no longer needed. They give way to
    models that are asked for."""
    schedule: str = ""
    """Windows of the week with other numbers, see `shared/schedule.py`."""
    prefill_share: float = 0.0
    """The share of the replicas that only prefill; the others only decode. 0: each does both.
    PLANNERS_CHOICE: as load and objectives have it."""
    chunk_bytes: int = 0
    """The manifest's chunk size. 0: not known (the record is older than this field). Predictions
    then assume that relays forward whole blocks, which is later than they do."""
    task: Task = Task.TEXT
    embeds: bool = False
    """Whether the model gives vectors of texts and generates none. Its `task` is TEXT, which the
    release before knows."""
    shape: DecodeShape | None = None
    """None: it is no decoder, or the record is older than this field."""
    base: ModelId = ModelId("")
    """Not empty: this is a LoRA adapter of that model, whose instances serve it."""

    @property
    def served_by(self) -> ModelId:
        """The model whose instances serve it."""
        return self.base or self.model_id

    @property
    def adapter(self) -> ModelId:
        """Its own id if it is an adapter, else empty."""
        return self.model_id if self.base else NO_ADAPTER


class ModelAdd(Message, frozen=True, kw_only=True, tag="model_add"):
    """Node -> registry: a model was imported. Ok; or Conflict if the name stands for another
    model."""

    record: ModelRecord


class ModelRemove(Message, frozen=True, kw_only=True, tag="model_remove"):
    name: ModelName


class ModelSet(Message, frozen=True, kw_only=True, tag="model_set"):
    """Operator -> registry: changes what a published model is to have. None leaves a field as it
    is. Answered with Models, of this one model."""

    name: ModelName
    min_instances: int | None = None
    max_instances: int | None = None
    priority: int | None = None
    keep_alive_s: float | None = None
    """Negative: `planner.idle_s` again."""
    ttft_s: float | None = None
    """0: no objective."""
    tpot_s: float | None = None
    warm: int | None = None
    schedule: str | None = None
    """Empty: none."""
    prefill_share: float | None = None


class ModelsQuery(Message, frozen=True, kw_only=True, tag="models_query"):
    """Answered with Models."""


class Models(Message, frozen=True, kw_only=True, tag="models"):
    records: tuple[ModelRecord, ...]
    keeps_access: bool = False
    """Whether the registry keeps tenants and keys (`messages/access`). The release before did not:
    then there are none."""


class ModelAdded(Message, frozen=True, kw_only=True, tag="model_added"):
    """Registry -> all. Nodes fetch the manifest now, so that a plan does not have to wait for
    it."""

    record: ModelRecord


class ModelRemoved(Message, frozen=True, kw_only=True, tag="model_removed"):
    """Registry -> all: stop serving the model, then forget it in every tier."""

    name: ModelName
    model_id: ModelId


class SourcesQuery(Message, frozen=True, kw_only=True, tag="sources_query"):
    """Asks who holds blocks of the model. Answered with Sources, best first.

    The order: memory before disk, then complete copies, then the number of blocks; then nodes whose
    port and engine are idle, and nodes in the racks of the model's reserved targets.
    """

    model_id: ModelId
    reader: NodeId = NodeId("")
    """A node that asks for an adapter, which it is about to read."""


class Source(msgspec.Struct, frozen=True):
    info: NodeInfo
    tier: Tier
    blocks: tuple[int, ...]
    complete: bool


class Sources(Message, frozen=True, kw_only=True, tag="sources"):
    sources: tuple[Source, ...]
    capability: bytes = b""
    """Lets the `reader` of an adapter read it (`shared/capabilities.py`). Empty: none is signed."""


class Reserve(Message, frozen=True, kw_only=True, tag="reserve"):
    """Planner -> registry: set aside up to `count` nodes for an event. Answered with Reserved.

    A chosen node is alive, has room for `nbytes`, is not reserved by another event and not in
    `exclude`. Nodes that already hold blocks of the model come first, then nodes with the most to
    spare, in at least two racks if there are two (services/registry/core/placement.py has the exact
    order).
    """

    event: EventId
    model_id: ModelId
    nbytes: int
    count: int
    exclude: tuple[NodeId, ...]
    groups: tuple[tuple[Part, ...], ...] = ()
    """For a model that fits no device: the parts that each group lacks. Then `count` is the number
    of all of them, and `nbytes` the room that the largest takes."""


class Reserved(Message, frozen=True, kw_only=True, tag="reserved"):
    """The targets that could be had, best first; possibly none. For groups, those of one group
    after the other, each in the order of its parts; groups that cannot be whole are left out."""

    targets: tuple[NodeInfo, ...]
    reasons: tuple[str, ...] = ()
    """Why each target was chosen, for people."""


class Unreserve(Message, frozen=True, kw_only=True, tag="unreserve"):
    """Planner -> registry: the event is over, or `nodes` are no longer part of it. Empty `nodes`:
    all of the event's."""

    event: EventId
    nodes: tuple[NodeId, ...] = ()


class NodesQuery(Message, frozen=True, kw_only=True, tag="nodes_query"):
    """Asks who is there. Answered with Nodes (`shared/pool_pages.py` asks for all), without what
    they hold."""

    after: NodeId = NodeId("")
    """Only nodes whose names come after this one."""


class Nodes(Message, frozen=True, kw_only=True, tag="nodes"):
    """The next nodes, by name."""

    nodes: tuple[NodeInfo, ...]
    more: bool = False
    """Whether there are nodes after the last of these."""


class PoolQuery(Message, frozen=True, kw_only=True, tag="pool_query"):
    """Asks who is there and what each holds. Answered with PoolPage (`shared/pool_pages.py`)."""

    after: NodeId = NodeId("")
    """Only nodes whose names come after this one."""
    holdings: bool = True
    """Whether to say what the nodes hold, and what they have measured."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    info: NodeInfo
    holdings: tuple[Holding, ...]
    arena_free: int
    reserved_by: EventId | None
    seq: int = 0
    """The number of the status that said this. 0: it has said nothing yet."""
    running: int = 0
    kv_used: int = 0
    kv_capacity: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    profile: Profile = Profile()
    peers: dict[str, tuple[NodeId, ...]] = msgspec.field(default_factory=dict)
    unfit: str = ""
    """See NodeStatus."""


class PoolPage(Message, frozen=True, kw_only=True, tag="pool_page"):
    """The next nodes, by name."""

    nodes: tuple[NodeView, ...]
    more: bool
    """Whether there are nodes after the last of these."""


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """All pages, and the models."""

    nodes: tuple[NodeView, ...]
    models: tuple[ModelRecord, ...]
