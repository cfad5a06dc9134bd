"""What a node holds of one model, and which plan it follows; pure.

        absent -> loading -> executable -> standby -> (executable | absent)
Loading and executable are the same to peers: any block that is held is served. Standby keeps the
bytes in host memory and runs nothing.
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
    mode: Mode = Mode.ACTIVE
    held: frozenset[int] = frozenset()
    """Verified blocks in the arena."""
    runnable: frozenset[int] = frozenset()
    """Blocks that the engine can run."""
    event: EventId | None = None
    revision: int = -1

    def follow(self, event: EventId, revision: int) -> "Residency":
        """Takes up a plan; StaleEpoch if it is older than the one being followed."""
        if event == self.event and revision < self.revision:
            raise StaleEpoch(
                f"revision {revision} of event {event} came after revision {self.revision}"
            )
        return replace(self, event=event, revision=revision)

    def activate(self) -> "Residency":
        return replace(self, mode=Mode.ACTIVE)

    def with_block(self, block: int) -> "Residency":
        """A block is held and runnable."""
        return replace(self, held=self.held | {block}, runnable=self.runnable | {block})

    def stand_by(self) -> "Residency":
        return replace(self, mode=Mode.STANDBY, runnable=frozenset(), event=None, revision=-1)

    def holdings(self) -> list[Holding]:
        found: list[Holding] = []
        if self.runnable:
            found.append(Holding(self.model_id, Tier.GPU, tuple(sorted(self.runnable))))
        if self.mode is Mode.STANDBY and self.held:
            found.append(Holding(self.model_id, Tier.HOST, tuple(sorted(self.held))))
        return found
