"""A model with space in the arena."""

import asyncio
from dataclasses import dataclass, field

from services.node.core.residency import Mode, Residency
from services.node.hosting.demotion import Demotion
from services.node.hosting.inheritance import ARENA
from services.node.hosting.promotion import Promotion
from services.node.keeper.messages import Space
from services.node.memory.arena import ModelSpace, Span
from shared.clock import now
from shared.ids import ModelId, NodeId
from shared.layout import Manifest


@dataclass(slots=True, eq=False)
class Hosted:
    """A model with space in the arena. Whatever changes `residency` holds `lock`: plans and
    releases (which come one at a time, see `Hosting._turn`), promotion, demotion, and blocks that
    land."""

    manifest: Manifest
    span: Span
    space: ModelSpace
    residency: Residency
    trace: str = ""
    """The trace of the plan that is followed."""
    asked_ns: int = 0
    """When that plan was taken up (wall clock)."""
    devices: int = 1
    """How many devices of the machine run it together, from when it is opened next."""
    promotion: Promotion | None = None
    demotion: Demotion | None = None
    """Its way into the host cache, while its copy is made there."""
    bringing: asyncio.Task[None] | None = None
    """The task that brings the tokenizer to the engine."""
    first_block: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the engine has the first block, without which nothing can run. Also set, and
    replaced, when the engine closes the model, so that nobody waits on."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def model(self) -> ModelId:
        return self.residency.model_id

    @property
    def event(self) -> str:
        """The scaling event whose plan is followed; empty: none is."""
        return self.residency.plan.event if self.residency.plan else ""

    @property
    def kept(self) -> Space:
        """What the keeper is to know of it."""
        span, residency = self.span, self.residency
        active = residency.mode is Mode.ACTIVE
        return Space(
            ARENA,
            self.model,
            span.offset,
            span.nbytes,
            tuple(sorted(residency.held)),
            active,
            (residency.part.start, residency.part.stop) if residency.part else None,
        )

    def tell(self, cause: str, text: str, *nodes: NodeId) -> None:
        """Adds to the node's story. `nodes`: others that it concerns."""
        self.residency.story.tell(now(), cause, text, self.model, *nodes)

    async def stop_promotion(self) -> None:
        if self.promotion is not None:
            await self.promotion.stop()
            self.promotion = None
