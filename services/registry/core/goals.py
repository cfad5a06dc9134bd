"""On which disks each model is to have a durable copy; plain functions.

Two copies on one machine count as one, since they are lost together. A machine may run several
nodes.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.ids import ModelId, NodeId
from shared.messages.pool import NodeInfo

FREE_SHARE = 0.02
"""The share of a disk that copies leave free."""


def machine_of(info: NodeInfo) -> str:
    return info.host or info.node


@dataclass(frozen=True, slots=True)
class Disk:
    info: NodeInfo
    free: int
    nbytes: int
    busy: bool = False
    """Whether a copy comes to it: it takes one at a time."""
    drafts: frozenset[ModelId] = frozenset()
    """Models of which a part lies there from before."""

    def room(self, nbytes: int) -> bool:
        return self.free - nbytes >= FREE_SHARE * self.nbytes


@dataclass(frozen=True, slots=True)
class Need:
    """A model, and where it is on disks. `there`, `awaited` and `coming` name one node for each
    copy."""

    model_id: ModelId
    nbytes: int
    there: tuple[NodeInfo, ...]
    awaited: tuple[NodeInfo, ...] = ()
    """Nodes that went lately with a copy, and may come back."""
    coming: tuple[NodeInfo, ...] = ()
    """Nodes that are making a copy."""
    sources: frozenset[NodeId] = frozenset()
    """Nodes that can give the model's blocks."""
    refused: Mapping[NodeId, str] = field(default_factory=dict)
    """Nodes that could not make a copy lately, and why."""
    users: int = 0
    """How many nodes have it in memory: the more, the more it is asked for."""

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


def goals(needs: Iterable[Need], disks: Sequence[Disk], wanted: int, most: int) -> Goals:
    """The next copies to make, at most `most` and one a node, so that each model comes to be on
    `wanted` machines. The model with the fewest copies goes first, then the most used one.

    A copy goes to a node that has a part of it already, then to another rack than the copies that
    are there, then to the disk with the most room.
    """
    choices: list[Choice] = []
    reasons: dict[ModelId, str] = {}
    waiting: set[ModelId] = set()
    taken = {disk.info.node for disk in disks if disk.busy}
    for need in sorted(needs, key=_urgency):
        counted = list(need.counted)
        while len({machine_of(info) for info in counted}) < wanted:
            able, reason = _able(need, counted, disks)
            free = [disk for disk in able if disk.info.node not in taken]
            if not free or len(choices) >= most:
                reasons[need.model_id] = reason or "other copies are made first"
                if not reason:
                    waiting.add(need.model_id)
                break
            racks = {info.rack for info in counted}
            best = min(free, key=lambda disk: _rank(disk, need.model_id, racks))
            choices.append(Choice(need.model_id, best.info))
            counted.append(best.info)
            taken.add(best.info.node)
    return Goals(tuple(choices), reasons, frozenset(waiting))


def _urgency(need: Need) -> tuple[int, int, int, str]:
    copies = len({machine_of(info) for info in need.there})
    return copies, -need.users, need.nbytes, need.model_id


def _rank(disk: Disk, model: ModelId, racks: Collection[str]) -> tuple[bool, bool, int, str]:
    return model not in disk.drafts, disk.info.rack in racks, -disk.free, disk.info.node


def _able(need: Need, counted: Iterable[NodeInfo], disks: Sequence[Disk]) -> tuple[list[Disk], str]:
    """The disks that can take a copy, busy ones too; if there are none, the reason."""
    machines = {machine_of(info) for info in counted}
    others = [disk for disk in disks if machine_of(disk.info) not in machines]
    if not others:
        return [], "there is no other machine"
    roomy = [d for d in others if need.model_id in d.drafts or d.room(need.nbytes)]
    if not roomy:
        return [], f"no other machine's disk has room for {need.nbytes / 1e9:.1f} GB"
    willing = [disk for disk in roomy if disk.info.node not in need.refused]
    if not willing:
        node = roomy[0].info.node
        return [], f"{node} failed to make it: {need.refused[node]}"
    able = [disk for disk in willing if need.sources - {disk.info.node}]
    return able, "" if able else "no node can give its blocks now"
