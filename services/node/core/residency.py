"""What a node holds of one model, and which plan it follows; pure.

        (no space) -> standby -> active -> standby | (no space)

The space in the arena is taken whole before the first block. In `active` the engine has the model
open, and runs each block once it is attached. In `standby` the engine does not have the model open,
but the bytes stay. Peers are served in both modes.
"""

import enum
from dataclasses import dataclass, replace

from shared.errors import StaleEpoch
from shared.ids import EventId, ModelId
from shared.messages.pool import Holding, Tier


class Mode(enum.Enum):
    ACTIVE = "active"
    STANDBY = "standby"


@dataclass(frozen=True, slots=True)
class Residency:
    model_id: ModelId
    n_blocks: int
    mode: Mode = Mode.STANDBY
    held: frozenset[int] = frozenset()
    """Verified blocks in the arena."""
    runnable: frozenset[int] = frozenset()
    """Blocks that the engine can run."""
    event: EventId | None = None
    revision: int = -1

    @property
    def complete(self) -> bool:
        return len(self.held) == self.n_blocks

    def follow(self, event: EventId, revision: int) -> "Residency":
        """Takes up a plan. StaleEpoch if it is older than the plan being followed."""
        if event == self.event and revision < self.revision:
            raise StaleEpoch(
                f"revision {revision} of event {event} came after revision {self.revision}"
            )
        return replace(self, event=event, revision=revision)

    def activate(self) -> "Residency":
        return replace(self, mode=Mode.ACTIVE)

    def hold(self, block: int) -> "Residency":
        return replace(self, held=self.held | {block})

    def run(self, block: int) -> "Residency":
        """Records that a held block was attached."""
        return replace(self, runnable=self.runnable | {block})

    def stand_by(self) -> "Residency":
        return replace(self, mode=Mode.STANDBY, runnable=frozenset(), event=None, revision=-1)

    def holdings(self) -> list[Holding]:
        """Every held block once. An active model has its GPU tier even without a block in it,
        because the space is taken."""
        found: list[Holding] = []
        if self.mode is Mode.ACTIVE:
            found.append(Holding(self.model_id, Tier.GPU, tuple(sorted(self.runnable))))
        if idle := self.held - self.runnable:
            found.append(Holding(self.model_id, Tier.HOST, tuple(sorted(idle))))
        return found
