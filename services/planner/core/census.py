"""How many replicas each model has and wants, counted when somebody asks."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median_low

from services.planner.core.model import ModelMachine
from shared.ids import ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    model: ModelName
    wanted: int
    """Replicas that its load fills, or its floor, whatever room and nodes there are."""
    complete: int
    loading: int
    """Neither counts replicas that drain."""
    scaling: bool
    """Whether a scaling event of it runs."""
    waits: bool
    """Whether it found no room, or no node, for what it wants."""
    nbytes: int
    """Of one copy."""


def census(models: Iterable[ModelMachine]) -> tuple[Census, ...]:
    return tuple(map(_one, models))


def _one(model: ModelMachine) -> Census:
    fleet = model.fleet
    complete = fleet.count(fleet.parts(fleet.replicas))
    there = fleet.count(fleet.parts(m for m in fleet.members.values() if not m.draining))
    return Census(
        model=model.record.name,
        wanted=model.wanted,
        complete=complete,
        loading=there - complete,
        scaling=model.scaling,
        waits=model.waits,
        nbytes=model.record.nbytes,
    )


def wanted_nodes(models: Iterable[Census], rooms: Collection[int]) -> int:
    """How many nodes would hold every replica that is wanted, each node with the median of `rooms`
    (bytes that nodes have for weights), and at most one replica of each model, or one part of a
    replica that fits on no node. Large models come first, each on the first nodes that have room.
    While there are no nodes, nobody knows how large the next will be: one, if any replica is
    wanted. Takes O(models x nodes)."""
    wanted = [model for model in models if model.wanted and model.nbytes]
    room = median_low(rooms) if rooms else 0
    if not room:
        return min(1, len(wanted))
    free: list[int] = []
    for model in sorted(wanted, key=lambda model: (-model.nbytes, model.model)):
        parts = -(-model.nbytes // room)
        part = -(-model.nbytes // parts)
        left = model.wanted * parts
        for node, there in enumerate(free):
            if left and there >= part:
                free[node] -= part
                left -= 1
        free += [room - part] * left
    return len(free)
