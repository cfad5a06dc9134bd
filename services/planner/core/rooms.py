"""Where a model finds room for more replicas, and what gives way for it (`arbiter` has the rule).

Room that a model was told of is promised to it: until the model has taken it, or no longer asks, no
other model may. What gives way is told after the stimulus has been handled.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from services.planner.core.arbiter import Claim, Device, GiveWay, Room, make_room
from services.planner.core.desk import Desk
from services.planner.core.disks import Read, begins_in, disks_of, to_read
from services.planner.core.tiers import apart
from shared.ids import ModelId, NodeId
from shared.messages.pool import Duty, ModelRecord, Tier

PROMISE_S = 3.0
"""Seconds after which a promise ends whose model no longer asks. Models that wait ask every
second."""


LOOK_S = 0.005
"""Models that wait for disks ask no more often than this, times their number."""
KEPT_S = 1.0
"""For so long disks are kept for a model that waits for room to be made. If others began meanwhile,
and made room too, memory would be empty before anything can be read into it."""
Turn = tuple[int, float]
"""(-priority, since when a model waits). The least turn is first."""


@dataclass(slots=True)
class _Promise:
    model: ModelId
    until: float
    priority: int
    """The model's."""
    made: bool
    """Whether something gives way there for the model. If not, any other room is as good."""


class Rooms:
    def __init__(
        self,
        desk: Desk,
        claims: Callable[[ModelId], list[Claim]],
        loading: Callable[[int], Iterable[NodeId]],
    ) -> None:
        """`claims`: asks all models on behalf of this one. `loading`: the targets of running
        events that do not give way to a model of this priority."""
        self.orders: list[GiveWay] = []
        """What has to give way. The planner empties the list."""
        self.waiting: set[ModelId] = set()
        """Models that have found no room, and want some."""
        self._for_disks: dict[ModelId, tuple[Turn, Read]] = {}
        """Models that wait for disks, and what they read from them."""
        self._kept: dict[ModelId, tuple[Turn, Read, float]] = {}
        """Models that have found their disks free, and may still wait for room; until when the
        disks are kept for them."""
        self._desk = desk
        self._claims = claims
        self._loading = loading
        self._promises: dict[NodeId, _Promise] = {}

    def must_leave(self, node: NodeId, model: ModelId) -> bool:
        """Whether room is made on the node for another model than this one. (What was free there
        is promised, too, but nothing has to leave for it.)"""
        promise = self._promised(node, model)
        return promise is not None and promise.made

    def taken(self, model: ModelId, priority: int) -> frozenset[NodeId]:
        """Nodes whose room is promised to other models. Room that is being made for a lower
        priority is not; what was free is about to be reserved."""
        return frozenset(
            node
            for node in self._promises
            if (promise := self._promised(node, model))
            and (promise.priority >= priority or not promise.made)
        )

    def _promised(self, node: NodeId, model: ModelId) -> "_Promise | None":
        """The promise of room on the node to another model than this one."""
        promise = self._promises.get(node)
        other = promise is not None and promise.model != model and self._desk.at < promise.until
        return promise if other else None

    def ask(self, model: ModelId, needs: Sequence[int]) -> Room:
        """Finds room for more replicas. `needs`: how many devices each of them lacks. If there is
        too little room, some copies are told to give way, and their room is promised to the model.
        """
        claims = self._claims(model)
        claimant = next(claim for claim in claims if claim.model == model)
        self._renew(claimant)
        taken = self.taken(model, claimant.priority).union(self._loading(claimant.priority))
        devices = self._devices(claims, taken)
        room = make_room(claimant, needs, claims, devices, self._desk.at)
        if not room.free:
            self.waiting.add(model)
        if not (room.free or room.made or room.busy):
            self._kept.pop(model, None)
        for node in room.free:
            self._promise(node, claimant, made=False)
        names = {claim.model: claim.name for claim in claims}
        for node, ways in room.made.items():
            self._promise(node, claimant, made=True)
            self.orders += ways
            for way in ways:
                self._desk.tell(
                    f"{names[way.model]} makes room for {claimant.name}: {way.why}",
                    node,
                    model,
                    way.model,
                )
        return room

    def disks_for(self, model: ModelRecord, turn: Turn) -> str:
        """Why a load of the model waits until others have read the disks that it needs; empty: it
        may begin. `turn`: models with the least turn are first."""
        cluster, every = self._desk.cluster, frozenset(range(model.n_blocks))
        known = self._kept.get(model.model_id)
        self.leave(model.model_id)
        if cluster.in_memory(model.model_id, every):
            return ""
        disks = disks_of(cluster.nodes, cluster.holders(model.model_id, [Tier.DISK]))
        new = Read(dict.fromkeys(disks, inf), model.nbytes, model.priority)
        running = self._desk.reads(model.model_id)
        wait_s = self._begins_in(new, turn, running)
        if not wait_s:
            first = self._first(turn, running)
            if first is None:
                until = known[-1] if known is not None else self._desk.at + KEPT_S
                self._kept[model.model_id] = turn, new, until
                return ""
            del self._for_disks[first]  # it says so again if it still wants them
            self._desk.disks_at = self._desk.at
        else:
            least_s = LOOK_S * (1 + len(self._for_disks))
            self._desk.disks_at = min(self._desk.disks_at, self._desk.at + max(wait_s, least_s))
        self._for_disks[model.model_id] = turn, new
        self.waiting.add(model.model_id)
        for promise in self._promises.values():
            if promise.model == model.model_id and self._desk.at < promise.until:
                promise.until = self._desk.at + PROMISE_S
        return f"others are being read from {', '.join(sorted(disks))}"

    def asks_no_more(self, model: ModelId) -> None:
        """What the model waited for is void. It asks again if it still wants something."""
        self.waiting.discard(model)
        self._for_disks.pop(model, None)

    def wants_none(self, model: ModelId) -> None:
        """The model has all replicas that it wants: others need not wait for it, and may have the
        room that it was promised."""
        if self._kept.pop(model, None) is not None:
            self._desk.disks_at = self._desk.at
        for node in self._promised_to(model):
            self._give_up(node)

    def leave(self, model: ModelId) -> None:
        """The model no longer waits for disks, and none are kept for it: its load begins."""
        self._for_disks.pop(model, None)
        self._kept.pop(model, None)

    def reading_s(self, model: ModelRecord) -> dict[str, float]:
        """`Links.reading_s` for an event of the model that begins."""
        running, cluster = self._desk.reads(model.model_id), self._desk.cluster
        disks = apart(cluster.nodes, cluster.holders(model.model_id, [Tier.DISK]))
        if not (running and disks):
            return {}
        assumed = self._desk.settings.disk_bytes_per_s
        rate = sum(cluster.profile(disk).load_bytes_per_s or assumed for disk in disks)
        return to_read(Read({}, model.nbytes, model.priority), running, model.nbytes / rate)

    def _begins_in(self, new: Read, turn: Turn, running: Sequence[Read]) -> float:
        """Seconds until a load may begin beside those that run, and those for which disks are
        kept."""
        at = self._desk.at
        kept = [(r, until) for theirs, r, until in self._kept.values() if theirs < turn]
        ahead = [(read, until - at) for read, until in kept if at < until]
        wait_s = begins_in(new, [*running, *(read for read, _ in ahead)])
        return min([wait_s, *(seconds for _, seconds in ahead)])

    def _first(self, turn: Turn, running: Sequence[Read]) -> ModelId | None:
        """A model that has waited for disks for longer, and may begin now, too."""
        for model, (theirs, read) in self._for_disks.items():
            if theirs < turn and not self._begins_in(read, theirs, running):
                return model
        return None

    def _promise(self, node: NodeId, claimant: Claim, *, made: bool) -> None:
        known = self._promises.get(node)
        if made or known is None or known.model != claimant.model:
            until = self._desk.at + PROMISE_S
            self._promises[node] = _Promise(claimant.model, until, claimant.priority, made)

    def chosen(self, model: ModelId, target: NodeId) -> bool:
        """The model's event has this target: the rest of the node's memory may be others', and so
        may what else was free. Returns whether room is still being made for the model."""
        for node in self._promised_to(model):
            if node == target or not self._promises[node].made:
                self._give_up(node)
        return bool(self._promised_to(model))

    def _promised_to(self, model: ModelId) -> list[NodeId]:
        return [node for node, promise in self._promises.items() if promise.model == model]

    def _give_up(self, node: NodeId) -> None:
        """The room on the node is no longer promised."""
        del self._promises[node]
        if self.waiting:
            self._desk.room_freed = True

    def validate(self) -> None:
        """Raises AssertionError if something was not told to give way, or a promise lasts longer
        than promises do."""
        assert not self.orders
        assert all(p.until <= self._desk.at + PROMISE_S for p in self._promises.values())

    def _renew(self, claimant: Claim) -> None:
        """The promises to a model last while it asks; those it has taken end."""
        for node, promise in list(self._promises.items()):
            gone = node not in self._desk.cluster.nodes or self._desk.at >= promise.until
            if gone or (promise.model == claimant.model and node in claimant.replicas):
                del self._promises[node]
            elif promise.model == claimant.model:
                promise.until = self._desk.at + PROMISE_S

    def _devices(self, claims: Iterable[Claim], taken: frozenset[NodeId]) -> list[Device]:
        cluster, coming = self._desk.cluster, Counter[NodeId]()
        sizes = {claim.model: claim.nbytes for claim in claims}
        for claim in claims:
            coming.update(dict.fromkeys(claim.frees, claim.nbytes))
        devices = []
        for node, info in cluster.nodes.items():
            free = cluster.free(node)
            if free is not None:
                free -= sum(sizes.get(model, 0) for model in cluster.come_since(node))
            size = info.arena_bytes
            devices.append(
                Device(
                    node,
                    size,
                    size if free is None else free,  # the registry knows better
                    coming[node],
                    taken=node in taken or info.duty is not Duty.ALL,
                )
            )
        return devices
