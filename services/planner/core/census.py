"""How many replicas each model has and wants, counted when somebody asks."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.planner.core.model import ModelMachine
from shared.ids import ModelId, ModelName


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    model: ModelName
    wanted: int
    """Replicas that its load fills, or its floor, whatever room there is."""
    complete: int
    loading: int
    """Neither counts replicas that drain."""
    scaling: bool
    """Whether a scaling event of it runs."""
    waits: bool
    """Whether it found no room for what it wants."""
    nbytes: int
    """Of one copy."""


def census(models: Iterable[ModelMachine], waiting: set[ModelId]) -> tuple[Census, ...]:
    """`waiting`: the models that found no room."""
    return tuple(_one(model, model.record.model_id in waiting) for model in models)


def _one(model: ModelMachine, waits: bool) -> Census:
    fleet = model.fleet
    complete = fleet.count(fleet.parts(fleet.replicas))
    there = fleet.count(fleet.parts(m for m in fleet.members.values() if not m.draining))
    return Census(
        model=model.record.name,
        wanted=model.wanted,
        complete=complete,
        loading=there - complete,
        scaling=model.scaling,
        waits=waits,
        nbytes=model.record.nbytes,
    )


def wanted_nodes(models: Iterable[Census], room: int) -> int:
    """How many nodes would hold every replica that is wanted, each node with `room` bytes for
    weights and at most one replica of each model: large models first, each on the first nodes that
    have room. No node can hold a model that is larger. Takes O(models x nodes)."""
    free: list[int] = []
    fitting = (model for model in models if model.wanted and 0 < model.nbytes <= room)
    for model in sorted(fitting, key=lambda model: (-model.nbytes, model.model)):
        left = model.wanted
        for node, there in enumerate(free):
            if left and there >= model.nbytes:
                free[node] -= model.nbytes
                left -= 1
        free += [room - model.nbytes] * left
    return len(free)
