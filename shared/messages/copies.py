"""Copies that the registry keeps, whole models on disks and in host caches of different machines,
and its orders to the nodes that hold them."""

import msgspec

from shared.ids import Generation, ModelId, ModelName, NodeId
from shared.messages.base import Message
from shared.messages.pool import CopyProgress, Source, Tier


class KeepCopy(Message, frozen=True, kw_only=True, tag="keep_copy"):
    """Registry -> node: keep a copy of this model. Ok once the copy is there or under way; the
    node's statuses tell how far it is (`copying`), and that it is there (`holdings`).

    It may come again, and then changes the sources of a copy that is under way. StaleEpoch if the
    generation is old, NotFound if the model is not published, CapacityExceeded if the tier lacks
    room.
    """

    node: NodeId
    generation: Generation
    model_id: ModelId
    sources: tuple[Source, ...]
    """Who holds its blocks in any tier, best first."""
    bytes_per_s: int
    """The rate that the copy keeps to."""
    tier: Tier = Tier.DISK
    """Where the copy is to be: on the disk, or in the host cache."""
    capability: bytes = b""
    """Lets the node read the model (`shared/capabilities.py`). Empty: the registry has no key to
    sign one."""


class DropCopy(Message, frozen=True, kw_only=True, tag="drop_copy"):
    """Registry -> node: this model's copy in your host cache gives way. Ok once its memory is free,
    or if there is none. StaleEpoch if the generation is old, Conflict while the copy is in use."""

    node: NodeId
    generation: Generation
    model_id: ModelId
    why: str
    """In words and numbers, for the node's story."""


class Leave(Message, frozen=True, kw_only=True, tag="leave"):
    """Node -> registry: this node is about to end. Answered with MayLeave. It asks again until it
    may, or until its own time is up. Until then its duty is ENDING."""

    node: NodeId
    generation: Generation
    within_s: float = 0.0
    """How long it will wait at most."""


class MayLeave(Message, frozen=True, kw_only=True, tag="may_leave"):
    waits_for: tuple[ModelId, ...]
    """Models of which only this node's machine has a copy on disk or in memory, and which another
    machine is about to have there. Empty: the node may go."""


class CopiesQuery(Message, frozen=True, kw_only=True, tag="copies_query"):
    """Asks the registry where models and nodes have their copies. Answered with
    PoolCopies."""


class Durable(msgspec.Struct, frozen=True):
    """A durable copy."""

    node: NodeId
    machine: str


class UnderWay(msgspec.Struct, frozen=True):
    """A durable copy that is being made."""

    node: NodeId
    machine: str
    progress: CopyProgress


class ModelCopies(msgspec.Struct, frozen=True, kw_only=True):
    name: ModelName
    model_id: ModelId
    nbytes: int
    device: tuple[NodeId, ...]
    """Nodes that run every block."""
    host: tuple[NodeId, ...]
    """Nodes that hold every block in memory, in the arena or the host cache, and do not run them
    all."""
    together: tuple[NodeId, ...] = ()
    """Nodes that hold a part each in memory, and together every block."""
    durable: tuple[Durable, ...]
    under_way: tuple[UnderWay, ...]
    wanted: int
    """How many machines shall have a durable copy."""
    shortfall: str = ""
    """What is missing on disks or in memory, and why, in words. Empty: nothing."""


class NodeTiers(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's tiers have room for, in bytes."""

    node: NodeId
    machine: str
    rack: str
    arena_bytes: int
    arena_free: int
    host_bytes: int
    host_free: int
    disk_bytes: int
    disk_free: int


class PoolCopies(Message, frozen=True, kw_only=True, tag="pool_copies"):
    models: tuple[ModelCopies, ...]
    nodes: tuple[NodeTiers, ...]
    memory_bytes: int
    """What all copies in memory take that do not run."""
    per_host_bytes: int
    """What they would take if every machine cached every model in its memory."""
