"""The policy of who should receive a model and who should send it, as orders over what is known.

Targets are ordered by these properties (the first difference decides):

1. the event's own nodes: an event that asks again gets what it has (for the choice only, not for
   the order of the answer);
2. blocks in memory, among these blocks on the device, then blocks on disk: what need not move is
   faster than any link;
3. an engine for itself: fewer other models that are open on the device. A replica that shares an
   engine is worth only a part of a replica for as long as it serves; a slow link costs only once;
4. a complete copy on the same host, where the local link is faster than the port: it takes nothing
   from the network;
5. a faster port, by powers of two, since the slowest port sets the multicast's pace;
6. a port that is not sending to another event;
7. fewer models asleep in its memory: each will want the engine when it wakes;
8. a rack that holds a source, then a rack with fewer targets of other events: less traffic on
   trunks;
9. the least free memory that suffices (best fit), so that large holes stay for large models.

Best fit comes last on purpose. Replicas are given back seconds after a spike, so holes come back by
themselves, while two models on one engine halve each other's speed. Packing tightly first would
gain memory that nobody waits for, at the cost of throughput that everybody waits for. Only one
sleeping copy of each model stays for good (the pool's last one).

Then one correction is made, for failures. If all replicas, those that serve and those chosen, would
lie in one rack, the last chosen node that holds nothing in memory gives its place to the best node
of another rack. Two racks are enough, and cost one crossing of a trunk.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from shared.messages.pool import MEMORY, NodeInfo, Source, Tier
from shared.parts import Part


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that has room, with everything that counts for or against it. Blocks are the
    model's."""

    info: NodeInfo
    free: int
    """Free bytes of its arena."""
    own: bool = False
    """Whether it is reserved for this event already."""
    has_space: bool = False
    """Whether its arena has room set aside for the model, or for `part` of it, or may have."""
    part: Part | None = None
    """The part for which it has, or is to have, room. None: all."""
    in_memory: int = 0
    on_device: int = 0
    on_disk: int = 0
    active: int = 0
    """Number of other models open on the device."""
    asleep: int = 0
    """Number of other models in its memory that are not open."""
    beside: bool = False
    """Whether a node of the same host has a complete copy, and the local link is faster than the
    port."""
    rate: float = 0.0
    """bytes/s of its port; 0: not known."""
    sending: bool = False
    """Whether it holds what another event moves."""
    source_rack: bool = False
    crowd: int = 0
    """Number of targets of other events in its rack."""


class _Rank(NamedTuple):
    fewer_in_memory: int
    fewer_on_device: int
    fewer_on_disk: int
    active: int
    apart: bool
    slower: int
    sending: bool
    asleep: int
    far: bool
    crowd: int
    free: int
    node: str


def rank(candidate: Candidate) -> _Rank:
    """Sorts the best candidate first."""
    return _Rank(
        fewer_in_memory=-candidate.in_memory,
        fewer_on_device=-candidate.on_device,
        fewer_on_disk=-candidate.on_disk,
        active=candidate.active,
        apart=not candidate.beside,
        slower=-int(candidate.rate).bit_length(),
        sending=candidate.sending,
        asleep=candidate.asleep,
        far=not candidate.source_rack,
        crowd=candidate.crowd,
        free=candidate.free,
        node=candidate.info.node,
    )


@dataclass(frozen=True, slots=True)
class Target:
    info: NodeInfo
    reason: str
    """Why this target was chosen, for people."""
    keeps_room: bool
    """Whether a copy in its arena keeps the room, even if the reservation is lost. Not of a node
    that the event had already: that reservation may be all that keeps its room."""

    @classmethod
    def of(cls, candidate: Candidate, reason: str) -> Self:
        return cls(candidate.info, reason, candidate.has_space and not candidate.own)


def choose(
    candidates: Iterable[Candidate], count: int, blocks: int, serving_racks: Collection[str]
) -> tuple[Target, ...]:
    """Up to `count` targets, best first. `serving_racks`: the racks in which the model is open
    already.

    Takes O(n log n) for n candidates.
    """
    order = sorted(candidates, key=lambda c: (not c.own, rank(c)))
    chosen, rest = sorted(order[:count], key=rank), order[count:]
    racks = {*serving_racks, *(c.info.rack for c in chosen)}
    if len(racks) != 1 or not (serving_racks or len(chosen) > 1):
        return tuple(Target.of(c, _reason(c, blocks)) for c in chosen)
    (rack,) = racks
    spread = next((c for c in rest if c.info.rack != rack), None)
    loser = next((c for c in reversed(chosen) if not (c.own or c.in_memory)), None)
    if spread is not None and loser is not None:
        chosen = sorted([*(c for c in chosen if c is not loser), spread], key=rank)
    return tuple(Target.of(c, _reason(c, blocks, rack if c is spread else "")) for c in chosen)


def choose_groups(
    candidates: Iterable[Candidate],
    groups: Sequence[Sequence[Part]],
    size: Callable[[Part], int],
    blocks: int,
    serving_hosts: Collection[str],
) -> tuple[tuple[Target, Part], ...]:
    """Targets for groups of devices, each in the order of its parts; groups that have no room as a
    whole are left out. `size`: the room that a part takes. `serving_hosts`: the machines on which
    the model is open already: a device that is lost is replaced on one of these if possible.

    A group lies on one machine if there is one with room. Of several, the one is taken whose
    devices come first in the order of all.
    """
    order = sorted(candidates, key=lambda c: (not c.own, rank(c)))
    chosen: list[tuple[Target, Part]] = []
    for parts in groups:
        mends = sum(part.size for part in parts) < blocks
        machines = dict.fromkeys(c.info.host or c.info.node for c in order)
        first = sorted(machines, key=lambda host: mends and host not in serving_hosts)
        places = [[c for c in order if (c.info.host or c.info.node) == host] for host in first]
        taken = next(filter(None, (_place(parts, size, each) for each in (*places, order))), None)
        if taken is not None:
            order = [c for c in order if c not in taken]
            chosen += [
                (Target.of(c, f"{_reason(c, blocks)}, for {part}"), part)
                for c, part in zip(taken, parts, strict=True)
            ]
    return tuple(chosen)


def _place(
    parts: Sequence[Part], size: Callable[[Part], int], candidates: Iterable[Candidate]
) -> list[Candidate] | None:
    """A device for each part, the largest parts first; None: there are not enough."""
    left, found = list(candidates), dict[Part, Candidate]()
    for part in sorted(parts, key=lambda part: (-size(part), part)):
        own = (c for c in left if c.has_space and c.part == part)
        free = (c for c in left if not c.has_space and c.free >= size(part))
        device = next(own, None) or next(free, None)
        if device is None:
            return None
        left.remove(device)
        found[part] = device
    return [found[part] for part in parts]


def _reason(candidate: Candidate, blocks: int, not_rack: str = "") -> str:
    """What speaks for the node and against it. `not_rack`: the node was taken for lying outside
    this rack."""
    c = candidate
    others = f"beside {c.active} other models" if c.active else "an engine for itself"
    parts = (
        f"another rack than {not_rack!r}, which has the rest" if not_rack else "",
        "the event's already" if c.own else "",
        f"{c.in_memory} of {blocks} blocks in memory" if c.in_memory else "",
        f"{c.on_disk} of {blocks} blocks on disk" if c.on_disk else "",
        others,
        "a copy on its host" if c.beside else "",
        "its port is sending to another event" if c.sending else "",
        f"{c.asleep} other models asleep in its memory" if c.asleep else "",
        f"a source in rack {c.info.rack!r}" if c.source_rack and c.info.rack else "",
    )
    return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Sender:
    """A source, and how busy it is."""

    source: Source
    running: int = 0
    """Number of sequences on its engine, whose activations share its port."""
    sending: bool = False
    """Whether it holds what another event moves."""
    same_rack: bool = False
    """Whether some target of the model is in its rack."""
    rate: float = 0.0


class _SenderRank(NamedTuple):
    disk: bool
    partial: bool
    fewer: int
    sending: bool
    running: int
    far: bool
    slower: int
    asleep: bool
    node: str


def sender_rank(sender: Sender) -> _SenderRank:
    """Sorts the best sender first. Host memory sends as fast as the device's. So between two copies
    in memory, an idle port counts more than the nearer tier."""
    source = sender.source
    return _SenderRank(
        disk=source.tier not in MEMORY,
        partial=not source.complete,
        fewer=-len(source.blocks),
        sending=sender.sending,
        running=sender.running,
        far=not sender.same_rack,
        slower=-int(sender.rate).bit_length(),
        asleep=source.tier is not Tier.GPU,
        node=source.info.node,
    )
