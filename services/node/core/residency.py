"""What a node holds of one model, or of its part of it, and which plan it follows; pure.

The model's whole span in the arena is taken before its first block comes. From then on:

    step        from      to        legal if
    inherit     standby   as it is  the part has the blocks, and nothing is held yet
    follow      any       as it is  the plan is not older than the one that is followed
    activate    standby   active
    hold        active    as it is  the part has the block, and it is not held yet
    run         active    as it is  the block is held, and not run yet
    stand by    active    standby

Active: the engine has the model open, and runs each block once it is attached. Standby: the engine
has closed the model, and the bytes stay. In both modes peers can read what is held. A plan that is
older than the one being followed has come late, which happens: StaleEpoch. Any other step that is
not in the table is a bug: IllegalTransition, with the model's story.
"""

import enum
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shared.errors import StaleEpoch
from shared.ids import EventId, ModelId
from shared.messages.pool import Holding, Tier
from shared.parts import Part, whole
from shared.story import Story


class Mode(enum.Enum):
    ACTIVE = "active"
    STANDBY = "standby"


class ResidencyStep(enum.Enum):
    INHERIT = "inherit"
    FOLLOW = "follow"
    ACTIVATE = "activate"
    HOLD = "hold"
    RUN = "run"
    STAND_BY = "stand by"


STEPS: dict[ResidencyStep, tuple[frozenset[Mode], Mode | None]] = {
    ResidencyStep.INHERIT: (frozenset({Mode.STANDBY}), None),
    ResidencyStep.FOLLOW: (frozenset(Mode), None),
    ResidencyStep.ACTIVATE: (frozenset({Mode.STANDBY}), Mode.ACTIVE),
    ResidencyStep.HOLD: (frozenset({Mode.ACTIVE}), None),
    ResidencyStep.RUN: (frozenset({Mode.ACTIVE}), None),
    ResidencyStep.STAND_BY: (frozenset({Mode.ACTIVE}), Mode.STANDBY),
}
"""Each step's modes before it, and the mode after it; None: as it was."""


class PlanId(NamedTuple):
    """The plan that something was done for."""

    event: EventId
    revision: int


@dataclass(frozen=True, slots=True)
class Residency:
    model_id: ModelId
    n_blocks: int
    story: Story = field(default_factory=Story, compare=False, repr=False)
    mode: Mode = Mode.STANDBY
    held: frozenset[int] = frozenset()
    """Verified blocks in the arena."""
    runnable: frozenset[int] = frozenset()
    """Blocks that the engine can run."""
    plan: PlanId | None = None
    """The plan that was followed last. None: no plan was followed since the model stands by."""
    part: Part | None = None
    """The blocks that have room in the arena, on a device of a group. None: all."""

    @property
    def room(self) -> Part:
        """The blocks that have room in the arena."""
        return self.part or whole(self.n_blocks)

    @property
    def complete(self) -> bool:
        return len(self.held) == self.room.size

    def inherit(self, blocks: frozenset[int]) -> "Residency":
        """Verified blocks were there before this process."""
        legal = not self.held and blocks <= set(self.room.blocks)
        return self._take(ResidencyStep.INHERIT, legal, held=blocks)

    def follow(self, plan: PlanId) -> "Residency":
        """Takes up a plan. StaleEpoch if it is older than the plan being followed."""
        if self.plan and plan.event == self.plan.event and plan.revision < self.plan.revision:
            raise StaleEpoch(
                f"revision {plan.revision} of event {plan.event} came after revision "
                f"{self.plan.revision}"
            )
        return self._take(ResidencyStep.FOLLOW, plan=plan)

    def activate(self) -> "Residency":
        return self._take(ResidencyStep.ACTIVATE)

    def hold(self, block: int) -> "Residency":
        """A block has landed."""
        legal = block in self.room.blocks and block not in self.held
        return self._take(ResidencyStep.HOLD, legal, held=self.held | {block})

    def run(self, block: int) -> "Residency":
        """Records that a held block was attached."""
        legal = block in self.held and block not in self.runnable
        return self._take(ResidencyStep.RUN, legal, runnable=self.runnable | {block})

    def stand_by(self) -> "Residency":
        return self._take(ResidencyStep.STAND_BY, runnable=frozenset(), plan=None)

    def _take(self, step: ResidencyStep, legal: bool = True, **changes: Any) -> "Residency":
        before, after = STEPS[step]
        if self.mode not in before or not legal:
            held = f"{self.mode.value}, {sorted(self.held)} held, {sorted(self.runnable)} run"
            raise self.story.illegal(self.model_id, f"{step.value} while {held}")
        return replace(self, mode=after or self.mode, **changes)

    def validate(self) -> None:
        """IllegalTransition if no steps lead here."""
        sound = self.runnable <= self.held <= set(self.room.blocks)
        if self.mode is Mode.STANDBY:
            sound = sound and not self.runnable
        if not sound:
            raise self.story.illegal(self.model_id, f"to be {self}")

    def holdings(self) -> list[Holding]:
        """Names every held block once. An active model has a GPU tier even if no block is in it,
        since its space is taken."""
        found: list[Holding] = []
        if self.mode is Mode.ACTIVE:
            runnable = tuple(sorted(self.runnable))
            found.append(Holding(self.model_id, Tier.GPU, runnable, part=self.part))
        if idle := self.held - self.runnable:
            found.append(Holding(self.model_id, Tier.HOST, tuple(sorted(idle)), part=self.part))
        return found


class Planners:
    """A node takes up the plans of the newest planner that it has heard.

    The bus drops what a planner of an earlier term says (`Message.term`), at the moment of its
    delivery. That is not enough here, because a plan waits for its model's turn after it was
    delivered: the next planner may speak meanwhile. So a plan and a release carry the number of the
    term as their epoch, too, and it is looked at again when their turn has come. (The order of the
    plans of one planner is another matter: see `Residency.follow`.)
    """

    def __init__(self) -> None:
        self.epoch = 0

    def obey(self, epoch: int) -> None:
        """StaleEpoch if a newer planner has spoken. 0: it does not say which one it is."""
        if 0 < epoch < self.epoch:
            raise StaleEpoch(f"planner epoch {epoch} came after epoch {self.epoch}")
        self.epoch = max(self.epoch, epoch)
