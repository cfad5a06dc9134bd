"""What the parts of a planner share, and how they reach the bus."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from structlog.stdlib import BoundLogger

from services.planner.core.cluster import Cluster
from services.planner.store import Store
from shared import subjects
from shared.bus.base import Bus
from shared.clock import now
from shared.config import PlannerConfig
from shared.errors import BusTimeout, LambdaScaleError, NoResponders
from shared.ids import ModelId, NodeId
from shared.messages import Message, Ok, Ping

PING_TIMEOUT_S = 0.5
PINGS = 2

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


@dataclass(frozen=True, slots=True)
class Context:
    bus: Bus
    cluster: Cluster
    config: PlannerConfig
    store: Store
    log: BoundLogger
    epoch: int
    """Start of this planner, wall ns."""
    revisions: Iterator[int]
    """Of instance sets; one row for all, so that a model that comes back begins no older."""
    spawn: Spawn
    more_room: Callable[[], None]
    """Tells all controllers that nodes which could not be had may be had now."""
    watch: Callable[[NodeId, ModelId], None]
    """The model's controller hears what the node reports for as long as it uses the node, also
    when the node no longer speaks of the model."""
    publish: Callable[[str, Message], None]
    """Queues a message; they are sent in order."""

    async def answers(self, node: NodeId) -> bool:
        """Whether the node's process is there. A planner that is cut off itself takes it so."""
        for _ in range(PINGS):
            try:
                await self.bus.request(subjects.node_ping(node), Ping(), Ok, timeout=PING_TIMEOUT_S)
                return True
            except NoResponders:
                break
            except BusTimeout:
                continue
            except LambdaScaleError:
                return True
        return self.cluster.blind(now())
