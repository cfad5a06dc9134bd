"""Which models are kept in host caches, and what gives way there; plain functions."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shared.ids import ModelId, ModelName

STAYS = 2.0
"""A model whose copy is there gives way only to one that is worth this many times as much: every
change of places moves both."""


@dataclass(frozen=True, slots=True)
class Sized:
    """A model that is to have a copy in memory. `worth` is for each byte."""

    model_id: ModelId
    nbytes: int
    worth: float
    there: bool


def kept(models: Iterable[Sized], room: int) -> frozenset[ModelId]:
    """The models to keep a copy of in `room` bytes of host caches: those that are worth most. The
    smaller goes first among equals, since more of them fit."""
    chosen: set[ModelId] = set()
    for model in sorted(models, key=_order):
        if model.nbytes <= room:
            chosen.add(model.model_id)
            room -= model.nbytes
    return frozenset(chosen)


def _order(model: Sized) -> tuple[float, bool, int, str]:
    worth = model.worth * (STAYS if model.there else 1.0)
    return -worth, not model.there, model.nbytes, model.model_id


@dataclass(frozen=True, slots=True)
class Resident:
    """A copy in a host cache. `worth` is for each byte."""

    model_id: ModelId
    name: ModelName
    nbytes: int
    worth: float
    last: bool
    """Whether its model is kept, and would have too few copies in memory without it."""


@dataclass(frozen=True, slots=True)
class GiveWay:
    model_id: ModelId
    worth: float
    """Seconds that its going is expected to cost."""
    why: str
    """In words and numbers."""
    cause: str = ""
    """What made the room needed."""

    def for_(self, name: ModelName, cause: str) -> "GiveWay":
        return replace(self, why=f"makes room for {name}: {self.why}", cause=cause)


def make_room(nbytes: int, free: int, residents: Iterable[Resident]) -> tuple[GiveWay, ...]:
    """What gives way so that `nbytes` fit, cheapest first; empty if nothing has to, or if it cannot
    be. A last copy stays."""
    chosen: list[Resident] = []
    need = nbytes - free
    movable = (resident for resident in residents if not resident.last)
    for resident in sorted(movable, key=lambda r: (r.worth, r.model_id)):
        if need <= 0:
            break
        chosen.append(resident)
        need -= resident.nbytes
    if need > 0:
        return ()
    for resident in reversed(chosen):  # what larger ones after it have made needless
        if need + resident.nbytes <= 0:
            chosen.remove(resident)
            need += resident.nbytes
    return tuple(_way(resident) for resident in chosen)


def _way(resident: Resident) -> GiveWay:
    cost_s = resident.worth * resident.nbytes
    why = f"{resident.nbytes / 1e6:.1f} MB, whose loss is expected to cost {cost_s:.3f} s"
    return GiveWay(resident.model_id, cost_s, why)
