"""Small values for the registry's tests."""

from services.registry.core.leases import Leases
from shared.ids import EventId, Generation, ModelId, ModelName, NodeId
from shared.messages.pool import Holding, ModelRecord, NodeInfo, NodeStatus, Reserve, Tier

MODEL = ModelId("m0d3l")
OTHER = ModelId("0ther")
EVENT = EventId("ev-1")


def info(node: str = "a", generation: int = 1, address: str = "tcp://10.0.0.1:7001") -> NodeInfo:
    return NodeInfo(
        node=NodeId(node),
        generation=Generation(generation),
        address=address,
        host="host",
        device="cpu",
        arena_bytes=1000,
        link_bytes_per_s=0,
        slots=4,
    )


def status(
    node: str = "a", *holdings: Holding, generation: int = 1, seq: int = 1, free: int = 1000
) -> NodeStatus:
    return NodeStatus(
        node=NodeId(node),
        generation=Generation(generation),
        seq=seq,
        arena_free=free,
        holdings=holdings,
    )


def holding(tier: Tier, *blocks: int, model_id: ModelId = MODEL) -> Holding:
    return Holding(model_id, tier, blocks)


def record(
    name: str = "llama",
    model_id: str = MODEL,
    n_blocks: int = 4,
    created_ns: int = 1,
    max_instances: int = 0,
) -> ModelRecord:
    return ModelRecord(
        name=ModelName(name),
        model_id=ModelId(model_id),
        manifest="0" * 64,
        files={"tokenizer.json": "1" * 64},
        nbytes=400,
        n_blocks=n_blocks,
        block_bytes=(100,) * n_blocks,
        context_length=2048,
        created_ns=created_ns,
        max_instances=max_instances,
    )


def reserve(
    count: int = 1,
    *exclude: str,
    event: str = EVENT,
    model_id: ModelId = MODEL,
    nbytes: int = 400,
) -> Reserve:
    return Reserve(
        event=EventId(event),
        model_id=model_id,
        nbytes=nbytes,
        count=count,
        exclude=tuple(NodeId(node) for node in exclude),
    )


def hear_others(leases: Leases, until: float) -> None:
    """The bus stands: somebody speaks."""
    for at in (until - 2.0, until - 1.0):
        leases.heard(NodeId("other"), Generation(1), at)
