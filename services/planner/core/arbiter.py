"""Who gives memory up when there is not enough; pure.

What all devices' memory should be used for are shares: for each model the devices of its replicas.
Shares are dealt by priority. Within a priority, each model first gets what it keeps even when idle,
then the next replica always goes to the model with the least memory so far (max-min fairness), and
among equals to the model that has had the least of it lately, so that models take turns where not
even one replica each has room. A replica over several devices (a group, see `cut`) is dealt whole
or not at all, and no room is made for less: two models with half a group each would wait for each
other for ever.

A model whose requests have waited for long without a replica is *starved*: it is dealt one replica
before all others, for one turn, whatever the priorities. Few models at a time are.

A model that is short of room gets it from what is cheapest to miss, on as few devices as it needs:

1. copies that sleep: they only save time when their model is asked for again. The cost of a copy is
   that time, times how often it is asked for. The last copy in memory saves a read from disk, any
   other only a copy over a link;
2. replicas that their model's load does not fill (they would go a little later anyhow), unless
   their model has a higher priority;
3. replicas of models of lower priority, also while they load or drain;
4. replicas of models of the same priority, after they have served for a while, if requests wait for
   the model that is short.

To a higher priority a replica gives way at once, and its requests go on elsewhere; otherwise they
end first. A replica that lies where its model's share is never gives way, nor does the last copy of
a model that no disk holds whole.
"""

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import accumulate, islice

from shared.ids import ModelId, ModelName, NodeId
from shared.wording import counted

TURN_S = 10.0
"""Seconds for which a replica serves before a model of the same priority may take its place. A
change of places costs both models the time to load."""
STARVED_DEVICES = 8
"""Of so many devices one is for models that are starved. It is at least one in any case."""


@dataclass(frozen=True, slots=True)
class Replica:
    requests: int
    """Requests that run over it."""
    since: float
    """When it became complete, or began to load."""
    loading: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one model has of the devices' memory, and what it wants."""

    model: ModelId
    name: ModelName
    nbytes: int
    """What it takes of a device."""
    priority: int
    floor: int
    """Devices that it keeps even when idle."""
    wants: int
    """Devices that its load fills, or its floor."""
    asked: bool
    """Whether it has requests."""
    replicas: Mapping[NodeId, Replica]
    asleep: frozenset[NodeId]
    """Where a copy lies in memory that serves nothing."""
    space: frozenset[NodeId]
    """Where it has space in memory, filled or not: there it needs no more."""
    leaving: frozenset[NodeId]
    """Where a copy drains, or is being released."""
    draining: frozenset[NodeId]
    """Those of `leaving` where requests still run."""
    frees: frozenset[NodeId]
    """Those of `leaving` where nothing of it will stay in memory."""
    in_memory: bool
    """Whether a whole copy is in some memory, and may feed others."""
    on_disk: frozenset[NodeId]
    """The nodes whose disks hold it whole."""
    attained: float
    """Device seconds that it has had lately."""
    cost: float
    """For how many seconds a minute requests are expected to wait if a sleeping copy is missing and
    there is no other in memory."""
    cost_beside: float
    """The same while there is another."""
    cached: bool
    """Whether a host cache has all of it."""
    group: int = 1
    """The devices of one replica; `floor` and `wants` are multiples of it."""
    starved: bool = False
    """Whether its requests have waited for long without any replica, or the replica that it got
    then has not had its turn yet."""


@dataclass(frozen=True, slots=True)
class Device:
    node: NodeId
    size: int
    """Bytes of the arena."""
    free: int
    coming: int = 0
    """Bytes that are about to be free."""
    taken: bool = False
    """Whether it is out of question for now: it belongs to another scaling event, or its room is
    promised to another model."""


class Grade(enum.IntEnum):
    """How hard it is to miss something, from the easiest."""

    ASLEEP = 1
    UNFILLED = 2
    LOWER = 3
    TURN = 4


@dataclass(frozen=True, slots=True)
class GiveWay:
    """A copy of a model leaves a device."""

    model: ModelId
    node: NodeId
    grade: Grade
    nbytes: int
    cost: float
    why: str
    """In words, without whom it makes room for."""
    whom: ModelName
    at_once: bool = False
    """Whether its requests go on elsewhere. If not, they end first."""


@dataclass(frozen=True, slots=True)
class Room:
    free: tuple[NodeId, ...] = ()
    """Devices that have room as they are."""
    made: Mapping[NodeId, tuple[GiveWay, ...]] = field(default_factory=dict)
    """Devices that will have room, and what gives way there."""
    busy: int = 0
    """How many more will have room by themselves, because something is leaving."""
    why_not: str = ""
    """Why there is less than was asked for."""


def make_room(
    claimant: Claim,
    needs: Sequence[int],
    claims: Sequence[Claim],
    devices: Sequence[Device],
    now: float,
) -> Room:
    """Room for more replicas of the claimant, as many as can be had whole. `needs`: how many
    devices each of them lacks. `claims`: of all models, with its own."""
    count = sum(needs)
    if not (claimant.in_memory or claimant.on_disk):
        return Room(why_not="no node that is up has a whole copy of it, in memory or on disk")
    own = claimant.replicas.keys() | claimant.leaving
    fit = [d for d in devices if d.node not in own and d.size >= claimant.nbytes]
    if not fit:
        return Room(why_not=_too_large(claimant, devices))
    open_ = [d for d in fit if not d.taken]
    free = [d.node for d in open_ if d.node in claimant.space or d.free >= claimant.nbytes]
    free.sort(key=lambda node: node not in claimant.on_disk)
    if len(free) >= count:
        return Room(tuple(free[:count]))
    soon = sorted({d.node for d in open_ if d.free + d.coming >= claimant.nbytes}.difference(free))
    dealt = shares(claims, devices)
    offers, share = _Offers(claimant, claims, dealt, now), dealt[claimant.model]
    there = len(claimant.replicas) + len(free) + len(soon)
    short = [d for d in open_ if d.node not in free and d.node not in soon]
    missing, entitled = count - len(free) - len(soon), len(share) - there
    made = offers.make(missing, short, entitled)
    why_not = _why_not(claimant, share, entitled - len(made)) if len(made) < missing else ""
    used = _of_whole(needs, [*free, *soon, *made])
    soon = [node for node in soon if node in used]
    hurried = {node: ways for node in soon if (ways := _hurried(node, claimant, claims))}
    made = {node: ways for node, ways in made.items() if node in used}
    return Room(
        tuple(node for node in free if node in used),
        made | hurried,
        len(soon) - len(hurried),
        why_not,
    )


def _of_whole(needs: Sequence[int], nodes: Sequence[NodeId]) -> Collection[NodeId]:
    """The first of the nodes, as many as replicas take that will be whole."""
    counts = accumulate(needs, initial=0)
    return frozenset(nodes[: max(count for count in counts if count <= len(nodes))])


def _hurried(node: NodeId, claimant: Claim, claims: Iterable[Claim]) -> tuple[GiveWay, ...]:
    """What drains on the node, and has to be gone at once for a higher priority."""
    return tuple(
        GiveWay(
            claim.model,
            node,
            Grade.UNFILLED,
            claim.nbytes,
            0.0,
            f"drains, and has a lower priority, {claim.priority}",
            claimant.name,
            at_once=True,
        )
        for claim in claims
        if node in claim.draining & claim.frees
        and claim.priority < claimant.priority
        # The last copy of all is not hurried: it may have to stay.
        and (claim.on_disk or claim.replicas or claim.asleep)
    )


def shares(
    claims: Collection[Claim], devices: Iterable[Device]
) -> dict[ModelId, frozenset[NodeId]]:
    """For each model the devices that should have a replica of it, for what all models want.

    Replicas stay where they are if they can. Where models differ in size, or a device has several
    places, they are packed only about fairly: what finds no room when its turn comes is out. Takes
    O(r + n d) for r replicas that stay and n new ones on d devices.
    """
    devices = tuple(devices)
    dealer = _Dealer(claims, devices)
    starved = _first_starved(claims, max(1, len(devices) // STARVED_DEVICES))
    dealer.deal(starved, {c.model: min(c.group, c.wants) for c in starved})
    for level in sorted({c.priority for c in claims}, reverse=True):
        peers = [c for c in claims if c.priority == level]
        dealer.deal(peers, {c.model: min(c.floor, c.wants) for c in peers})
        dealer.deal(peers, {c.model: c.wants for c in peers})
    return {c.model: frozenset(dealer.dealt[c.model]) for c in claims}


def _first_starved(claims: Iterable[Claim], count: int) -> list[Claim]:
    """The starved models whose turn it is: those that are having it, then those that have had
    least."""
    starved = (c for c in claims if c.starved)
    return sorted(starved, key=lambda c: (not c.replicas, c.attained, c.model))[:count]


class _Dealer:
    def __init__(self, claims: Collection[Claim], devices: Iterable[Device]) -> None:
        self.dealt: dict[ModelId, set[NodeId]] = {c.model: set() for c in claims}
        self._free = {device.node: device.size for device in devices}
        self._places = {c.model: _busiest_first(c) for c in claims}
        """Where each model's replicas are, the busiest first."""
        self._filled = {c.model: frozenset(self._places[c.model][: c.wants]) for c in claims}
        """Those of them that the model's load fills."""
        self._stay: Counter[NodeId] = Counter()
        """Bytes on each device of replicas that are filled and not dealt yet."""
        for claim in claims:
            for node in self._filled[claim.model]:
                self._stay[node] += claim.nbytes

    def deal(self, claims: Iterable[Claim], upto: Mapping[ModelId, int]) -> None:
        """Deals replicas in turns, until each model has `upto` devices or finds no more room."""
        hungry = {c.model: c for c in claims if len(self.dealt[c.model]) < upto[c.model]}
        while hungry:
            claim = min(hungry.values(), key=self._order)
            nodes = self._next(claim)
            for node in nodes:
                self._free[node] -= claim.nbytes
                if node in self._filled[claim.model]:
                    self._stay[node] -= claim.nbytes
            self.dealt[claim.model].update(nodes)
            if not nodes or len(self.dealt[claim.model]) >= upto[claim.model]:
                del hungry[claim.model]

    def _order(self, claim: Claim) -> tuple[int, float, str]:
        return len(self.dealt[claim.model]) * claim.nbytes, claim.attained, claim.model

    def _next(self, claim: Claim) -> list[NodeId]:
        """The devices for the model's next replica: where it is, and then where least else would
        have to go. Empty: there are too few."""
        has, need = self.dealt[claim.model], claim.group

        def fits(node: NodeId) -> bool:
            return node not in has and self._free.get(node, -1) >= claim.nbytes

        found = list(islice(filter(fits, self._places[claim.model]), need))
        if len(found) < need:
            others = [n for n in self._free if n not in found and fits(n)]
            found += nsmallest(need - len(found), others, lambda n: self._stay[n] - self._free[n])
        return found if len(found) == need else []


def _busiest_first(claim: Claim) -> list[NodeId]:
    return sorted(claim.replicas, key=lambda node: (-claim.replicas[node].requests, node))


class _Offers:
    """What may give way to the claimant, less what has been taken."""

    def __init__(
        self,
        claimant: Claim,
        claims: Iterable[Claim],
        share: Mapping[ModelId, Collection[NodeId]],
        now: float,
    ) -> None:
        self._claimant = claimant
        self._now = now
        self._share = share
        self._claims = {c.model: c for c in claims if c.model != claimant.model}
        self._unfilled = {m: len(c.replicas) - c.wants for m, c in self._claims.items()}
        """For each model how many replicas its load does not fill."""
        self._copies = {m: len(c.replicas) + len(c.asleep) for m, c in self._claims.items()}

    def make(
        self, count: int, devices: Sequence[Device], entitled: int
    ) -> dict[NodeId, tuple[GiveWay, ...]]:
        """Room on up to `count` of the devices. `entitled`: how many replicas the claimant's share
        still has."""
        made: dict[NodeId, tuple[GiveWay, ...]] = {}
        while len(made) < count:
            ways = (
                (way, device.node)
                for device in devices
                if device.node not in made
                and (way := self.on(device, entitled=entitled > len(made)))
            )
            best = min(ways, key=lambda way: (_price(way[0]), way[1]), default=None)
            if best is None:
                break
            made[best[1]] = best[0]
            self.take(best[0])
        return made

    def on(self, device: Device, *, entitled: bool) -> tuple[GiveWay, ...]:
        """The easiest set whose going leaves room on the device; empty: there is none. `entitled`:
        whether the claimant's share lets replicas go that are filled."""
        limit = Grade.TURN if entitled else Grade.UNFILLED
        ways = sorted(
            (way for way in self._ways(device.node) if way.grade <= limit),
            key=lambda way: (way.grade, way.cost / way.nbytes, way.model),
        )
        chosen: list[GiveWay] = []
        need = self._claimant.nbytes - device.free - device.coming
        for way in ways:
            if need <= 0:
                break
            chosen.append(way)
            need -= way.nbytes
        if need > 0:
            return ()
        for way in reversed(chosen):  # what the larger ones after it have made needless
            if need + way.nbytes <= 0:
                chosen.remove(way)
                need += way.nbytes
        return tuple(chosen)

    def take(self, ways: Iterable[GiveWay]) -> None:
        for way in ways:
            self._copies[way.model] -= 1
            if way.grade is not Grade.ASLEEP:
                self._unfilled[way.model] -= 1

    def _ways(self, node: NodeId) -> Iterator[GiveWay]:
        for claim in self._claims.values():
            last = self._copies[claim.model] <= claim.group
            if last and not claim.on_disk:
                continue
            if node in claim.asleep:
                cost = claim.cost if last and not claim.cached else claim.cost_beside
                why = f"sleeps; its loss is expected to cost {cost:.2f} s a minute"
                yield self._way(claim, node, Grade.ASLEEP, cost, why)
            elif (replica := claim.replicas.get(node)) is not None:
                yield from self._replica(claim, node, replica)

    def _replica(self, claim: Claim, node: NodeId, replica: Replica) -> Iterator[GiveWay]:
        have, share = len(claim.replicas), self._share[claim.model]
        lower = claim.priority < self._claimant.priority
        if node in share or (replica.loading and not lower):
            return
        spare = self._unfilled[claim.model] > 0 and claim.priority <= self._claimant.priority
        if spare:
            grade, why = Grade.UNFILLED, f"{have} replicas, load for {claim.wants}"
        elif lower:
            grade, why = Grade.LOWER, f"{have} replicas of lower priority, {claim.priority}"
        elif self._claimant.starved:
            grade, why = Grade.TURN, "a model with no replica has waited for long"
        elif self._may_take_turn(claim, replica):
            grade, why = Grade.TURN, f"{have} replicas, a fair share of {len(share)}"
        else:
            return
        yield self._way(claim, node, grade, float(replica.requests), why)

    def _way(self, claim: Claim, node: NodeId, grade: Grade, cost: float, why: str) -> GiveWay:
        at_once = claim.priority < self._claimant.priority
        return GiveWay(
            claim.model, node, grade, claim.nbytes, cost, why, self._claimant.name, at_once
        )

    def _may_take_turn(self, claim: Claim, replica: Replica) -> bool:
        same = claim.priority == self._claimant.priority
        return same and self._claimant.asked and self._now - replica.since >= TURN_S


def _price(ways: Collection[GiveWay]) -> tuple[int, float]:
    return max(way.grade for way in ways), sum(way.cost for way in ways)


def _too_large(claimant: Claim, devices: Collection[Device]) -> str:
    largest = max((device.size for device in devices), default=0)
    if largest < claimant.nbytes:
        return f"it takes {claimant.nbytes} bytes, and the largest arena has {largest}"
    return "every node that could hold it has it already"


def _why_not(claimant: Claim, share: Collection[NodeId], entitled: int) -> str:
    have, fair = len(claimant.replicas), counted(len(share), "replica")
    if entitled <= 0:
        return (
            f"its fair share of the memory at priority {claimant.priority} is {fair}, it has "
            f"{have}, and nothing sleeps that could give way"
        )
    return (
        f"its fair share is {fair}, it has {have}; what should give way has just "
        "begun, or is the last copy of its model"
    )
