"""Where each model is to have a copy in some tier; plain functions.

Two copies on one machine count as one, since they are lost together. A machine may run several
nodes.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.ids import ModelId, NodeId
from shared.messages.pool import NodeInfo


def machine_of(info: NodeInfo) -> str:
    return info.host or info.node


@dataclass(frozen=True, slots=True)
class Place:
    """A node's disk or host cache."""

    info: NodeInfo
    free: int
    spare: int = 0
    """Bytes that copies leave free."""
    busy: bool = False
    """Whether a copy comes to it: it takes one at a time."""
    drafts: frozenset[ModelId] = frozenset()
    """Models of which a part lies there from before."""

    def room(self, nbytes: int) -> bool:
        return self.free - nbytes >= self.spare


@dataclass(frozen=True, slots=True)
class Need:
    """A model, and where it is in the tier. `there`, `awaited` and `coming` name one node for each
    copy."""

    model_id: ModelId
    nbytes: int
    there: tuple[NodeInfo, ...]
    wanted: int
    """On how many machines it is to be."""
    awaited: tuple[NodeInfo, ...] = ()
    """Nodes that went lately with a copy, and may come back."""
    coming: tuple[NodeInfo, ...] = ()
    """Nodes that are making a copy."""
    sources: frozenset[NodeId] = frozenset()
    """Nodes that can give the model's blocks."""
    own: bool = False
    """Whether a source can make a copy for itself, from its disk."""
    refused: Mapping[NodeId, str] = field(default_factory=dict)
    """Nodes that could not make a copy lately, and why."""
    worth: float = 0.0
    """Of models with as many copies, the one that is worth most goes first."""

    @property
    def counted(self) -> tuple[NodeInfo, ...]:
        """What counts as a copy, or will be one. Nobody waits for lost copies if no other is
        left."""
        return (*self.there, *self.coming, *(self.awaited if self.there else ()))


@dataclass(frozen=True, slots=True)
class Choice:
    """A copy to be made on this node."""

    model_id: ModelId
    info: NodeInfo


@dataclass(frozen=True, slots=True)
class Goals:
    choices: tuple[Choice, ...]
    reasons: Mapping[ModelId, str]
    """For each model that goes on lacking copies which nobody makes: why, in words."""
    waiting: frozenset[ModelId]
    """Those of them that only wait for their turn."""


def goals(needs: Iterable[Need], places: Sequence[Place], most: int) -> Goals:
    """The next copies to make, at most `most` and one a node, so that each model comes to be on
    as many machines as are wanted. The model with the fewest copies goes first, then the model that
    is worth most.

    A copy goes to a node that has a part of it already, then to another rack than the copies that
    are there, then to the place with the most room.
    """
    choices: list[Choice] = []
    reasons: dict[ModelId, str] = {}
    waiting: set[ModelId] = set()
    taken = {place.info.node for place in places if place.busy}
    for need in sorted(needs, key=_urgency):
        counted = list(need.counted)
        while len({machine_of(info) for info in counted}) < need.wanted:
            able, reason = _able(need, counted, places)
            free = [place for place in able if place.info.node not in taken]
            if not free or len(choices) >= most:
                reasons[need.model_id] = reason or "other copies are made first"
                if not reason:
                    waiting.add(need.model_id)
                break
            racks = {info.rack for info in counted}
            best = min(free, key=lambda place: _rank(place, need.model_id, racks))
            choices.append(Choice(need.model_id, best.info))
            counted.append(best.info)
            taken.add(best.info.node)
    return Goals(tuple(choices), reasons, frozenset(waiting))


def hindrance(need: Need, places: Sequence[Place]) -> str:
    """Why none of the places can take one more copy, in words; empty if one can."""
    return _able(need, need.counted, places)[1]


def _urgency(need: Need) -> tuple[int, float, int, str]:
    copies = len({machine_of(info) for info in need.there})
    return copies, -need.worth, need.nbytes, need.model_id


def _rank(place: Place, model: ModelId, racks: Collection[str]) -> tuple[bool, bool, int, str]:
    return model not in place.drafts, place.info.rack in racks, -place.free, place.info.node


def _able(
    need: Need, counted: Iterable[NodeInfo], places: Sequence[Place]
) -> tuple[list[Place], str]:
    """The places that can take a copy, busy ones too; if there are none, the reason."""
    machines = {machine_of(info) for info in counted}
    others = [place for place in places if machine_of(place.info) not in machines]
    if not others:
        return [], "there is no other machine"
    roomy = [p for p in others if need.model_id in p.drafts or p.room(need.nbytes)]
    if not roomy:
        return [], f"no other machine has room for {need.nbytes / 1e9:.1f} GB"
    willing = [place for place in roomy if place.info.node not in need.refused]
    if not willing:
        node = roomy[0].info.node
        return [], f"{node} failed to make it: {need.refused[node]}"
    able = [place for place in willing if need.own or need.sources - {place.info.node}]
    able = able if need.sources else []
    return able, "" if able else "no node can give its blocks now"
