"""What a node said last of what it holds, and what a report of it changed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from shared.ids import ModelId
from shared.messages.pool import ARENA, Holding, NodeStatus, Tier

Blocks = frozenset[int]
NOTHING = Blocks()
Holdings = tuple[Holding, ...]
"""What a node holds, mostly of one model."""


@dataclass(slots=True)
class Said:
    """What a node said last."""

    status: NodeStatus
    """Its last report. That names only what had changed."""
    at: float
    holdings: dict[ModelId, Holdings] = field(default_factory=dict)
    """All that its reports say it holds."""
    in_arena: dict[ModelId, Holdings] = field(default_factory=dict)
    """What its arena holds of that."""
    models: dict[ModelId, dict[Tier, Blocks]] = field(default_factory=dict)
    """Its holdings, and what has arrived since."""
    arrived: dict[ModelId, dict[int, float]] = field(default_factory=dict)
    """When blocks of each model arrived, of those that no report has confirmed yet."""
    on_device: dict[ModelId, Blocks] = field(default_factory=dict)
    """The models in its device memory, as in `models`. Blocks that are the same stay the same
    object."""


class Change(msgspec.Struct, frozen=True):
    """What a report changed."""

    more_room: bool = False
    """Whether the node has more room than it had."""
    models: frozenset[ModelId] = frozenset()
    """The models that are in the node's device memory, or were until now."""
    changed: frozenset[ModelId] = frozenset()
    """Those of them that its device memory holds more or less of than before; all of them if what
    it measured has changed."""
    gained: Mapping[ModelId, Blocks] = {}
    """Blocks that are in its device memory now and were not."""
    missed: bool = False
    """Whether it builds on reports that did not come, so that it was not taken in."""


NO_CHANGE = Change()
MISSED = Change(missed=True)


def by_model(holdings: Holdings) -> dict[ModelId, Holdings]:
    if len(holdings) == 1:  # nearly always
        return {holdings[0].model_id: holdings}
    found: dict[ModelId, list[Holding]] = {}
    for holding in holdings:
        found.setdefault(holding.model_id, []).append(holding)
    return {model: tuple(each) for model, each in found.items()}


def in_tiers(holdings: Holdings) -> dict[Tier, Blocks]:
    """What a node holds of one model, by tier."""
    found: dict[Tier, Blocks] = {}
    for holding in holdings:
        blocks = frozenset(holding.blocks)
        known = found.get(holding.tier)
        found[holding.tier] = blocks if known is None else known | blocks
    return found


def put(said: Said, model: ModelId, holdings: Holdings) -> None:
    """The node says that it holds this of the model now."""
    for kept, new in (said.holdings, holdings), (said.in_arena, in_arena(holdings)):
        if new:
            kept[model] = new
        else:
            kept.pop(model, None)


def load_rate(status: NodeStatus | None) -> float:
    return status.profile.load_bytes_per_s if status is not None else 0.0


def out_rate(status: NodeStatus | None) -> float:
    return status.profile.out_bytes_per_s if status is not None else 0.0


def in_arena(holdings: Holdings) -> Holdings:
    return tuple([holding for holding in holdings if holding.tier in ARENA])
