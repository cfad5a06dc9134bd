"""What a node shows of itself to people and their tools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.node.core.load import WorkerLoad
from shared.ids import ModelId, ModelName, NodeId
from shared.messages.pool import CopyProgress, Holding, NodeInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    info: NodeInfo
    names: Mapping[ModelId, ModelName]
    load: WorkerLoad
    engine_s: Mapping[ModelId, float]
    """Seconds that the engine has spent in sweeps."""
    holdings: Sequence[Holding]
    arena_free: int
    host_free: int
    disk_bytes: int
    disk_free: int
    peers: dict[str, tuple[NodeId, ...]]
    """The nodes that it has connections to read from, by way."""
    blocks: Mapping[str, int]
    """Blocks that have come, by way."""
    received_bytes: Mapping[str, int]
    failures: Mapping[str, int]
    """Blocks that could not be had, by the error's code."""
    sent_bytes: int
    copying: tuple[CopyProgress, ...]
    unfit: str
    """Why it takes nothing new; empty: it is fit."""

    def name(self, model: ModelId) -> str:
        """The name of a published model; its id, if it is not known."""
        return self.names.get(model, model)
