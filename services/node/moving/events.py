"""What happens to the blocks that a node pulls, and who hears of it."""

from dataclasses import dataclass
from typing import Protocol

from services.node.core.residency import PlanId
from services.node.transport.base import Listener
from shared.errors import LambdaScaleError
from shared.ids import ModelId, NodeId


@dataclass(frozen=True, slots=True)
class Arrival:
    """A block is complete, verified and readable by others."""

    plan: PlanId
    """The plan that it was pulled for."""
    model_id: ModelId
    block: int
    source: NodeId
    transport: str
    nbytes: int
    started_ns: int
    first_byte_ns: int
    finished_ns: int


@dataclass(frozen=True, slots=True)
class PullFailure:
    """A block cannot be had from its source. It is said once for each block and revision."""

    plan: PlanId
    """The plan that it was pulled for."""
    model_id: ModelId
    block: int
    source: NodeId
    error: LambdaScaleError


class PlaneListener(Listener, Protocol):
    """Who hears what happens on a node's data plane, on its loop."""

    def on_arrived(self, arrival: Arrival) -> None: ...

    def on_failed(self, failure: PullFailure) -> None: ...

    def on_kv_copied(self, nbytes: int, seconds: float) -> None:
        """KV was copied out of pages or into pages, with its digest."""
