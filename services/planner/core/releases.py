"""Releases nodes that drain or hold something without use, and decides what they keep.

`standing` has the states. A release is repeated until the node's own report says that the memory is
free.
"""

from services.planner.core import commands
from services.planner.core.desk import RELEASE_S, Desk
from services.planner.core.fleet import Fleet
from services.planner.core.multicast.strategies import LOCAL
from services.planner.core.rooms import Rooms
from services.planner.core.standing import Leaving, Standing, State
from services.planner.core.stimuli import Answer, Failed
from shared.errors import StaleEpoch
from shared.ids import NodeId
from shared.messages.pool import MEMORY, ModelRecord, Tier
from shared.messages.scaling import ReleaseModel
from shared.parts import whole

DRAIN_LIMIT_S = 60.0
NEVER = float("inf")


class Releases:
    def __init__(
        self, desk: Desk, rooms: Rooms, record: ModelRecord, fleet: Fleet, standing: Standing
    ) -> None:
        self._desk = desk
        self._rooms = rooms
        self._record = record
        self._fleet = fleet
        self._standing = standing
        self.warm = 0
        """How many copies sleep in memory, at most, when their replicas are not needed."""

    @property
    def next_wake(self) -> float:
        if self._standing.all_well:
            return NEVER
        drains = (
            self._limit(node, each)
            for node in self._standing.in_state(State.DRAINING)
            if (each := self._standing.of(node)) is not None
        )
        limit = min((at for at in drains if at > self._desk.at), default=NEVER)
        return min(self._standing.next_wake(self._desk.at), limit)

    def drain(self, node: NodeId) -> None:
        """Lets a draining node go once nothing runs over it."""
        known = self._standing.of(node)
        if known is None:
            return
        if self._desk.at < self._limit(node, known) and self._fleet.uses(node):
            return
        self._fleet.leave(node)
        self._release(node)

    def _limit(self, node: NodeId, known: Leaving) -> float:
        """When a draining node goes even if requests run over it: they go on elsewhere."""
        now = self._desk.now
        left_s = self._desk.cluster.left_s(node, now.wall_ns)
        return min(known.since.at + DRAIN_LIMIT_S, now.at + left_s)

    def leave(self, node: NodeId) -> None:
        self._standing.stay(node)
        self._fleet.leave(node)

    def free(self, node: NodeId) -> None:
        """Releases a node that serves nothing any more."""
        self.leave(node)
        if node in self._desk.cluster.nodes:
            self._release(node)

    def free_stray(self, node: NodeId) -> None:
        """Releases a node that holds something of the model, and neither serves nor loads it."""
        if not self._standing.leaving(node):
            self._log("info", "memory without use is given back", node=node)
            self._release(node)

    def keep(self, node: NodeId) -> Tier | None:
        """Where the node keeps a copy. The pool's invariant is that the last copy in memory stays,
        in the host cache if the node has one and else in the arena; it does not apply if every node
        loads from its own disk or cache. So do the model's warm copies. What makes room for another
        model leaves the arena. On a node that leaves, only the last copy of any kind stays."""
        if self._desk.settings.strategy == LOCAL:
            return None
        if self._desk.cluster.leaves(node):
            return None if self._elsewhere(node) else Tier.HOST
        holders = self._desk.cluster.holders(self._record.model_id, MEMORY)
        wanted = self._blocks(node)
        others = [
            other
            for other, held in holders.items()
            if other != node and held >= wanted and self._stays(other)
        ]
        asleep = sum(other not in self._fleet.members for other in others)
        if others and asleep >= self.warm:
            return None
        if not self._rooms.must_leave(node, self._record.model_id):
            return Tier.HOST
        info = self._desk.cluster.nodes.get(node)
        return Tier.CACHE if info is not None and info.host_bytes else None

    def _blocks(self, node: NodeId) -> frozenset[int]:
        """What the node has room for: all of the model, or its part as one device of a group."""
        part = self._desk.cluster.part(node, self._record.model_id)
        return frozenset((part or whole(self._record.n_blocks)).blocks)

    def _stays(self, node: NodeId) -> bool:
        """Whether the node's copy stays in memory, as far as is decided."""
        known = self._standing.of(node)
        return known is None or (known.state is not State.DRAINING and known.keep is Tier.HOST)

    def _elsewhere(self, node: NodeId) -> bool:
        """Whether another node that stays has as much of the model, in any tier."""
        cluster, wanted = self._desk.cluster, self._blocks(node)
        return any(
            held >= wanted
            for tier in Tier
            for other, held in cluster.holders(self._record.model_id, [tier]).items()
            if other != node and not cluster.leaves(other)
        )

    def _release(self, node: NodeId) -> None:
        """Frees what the node holds. The node is asked until it has done it, or is gone."""
        keep = self.keep(node)
        kept = f", a copy is kept in {keep.value} memory" if keep else ""
        self._tell(f"is released{kept}", node)
        self._standing.release(node, keep, self._desk.now, self._fleet.cause.trace)
        self._ask(node)

    def again(self, node: NodeId) -> None:
        """Asks again: the node refused, or still holds what it was asked to free."""
        known = self._standing.of(node)
        if known is not None and known.state is State.ANSWERED:
            self._log("warning", "a node holds a model that it had freed", node=node)
            self._release(node)
        else:
            self._ask(node)

    def _ask(self, node: NodeId) -> None:
        info, known = self._desk.cluster.nodes.get(node), self._standing.of(node)
        if info is None or known is None:
            self._standing.forget(node)
            return
        release = ReleaseModel(
            node=node,
            generation=info.generation,
            epoch=self._desk.settings.epoch,
            model_id=self._record.model_id,
            keep=known.keep,
            trace=self._fleet.cause.trace,
            cause=self._desk.cause,
        )
        ticket = self._desk.ask(within=RELEASE_S, model=self._record.model_id)
        self._standing.asked(node, ticket.number)
        self._desk.do(commands.Release(ticket=ticket, message=release, cause=self._desk.cause))

    def on_answer(self, answer: Answer) -> NodeId | None:
        """Takes in the answer to a release. Returns the node if it has accepted."""
        released = (
            node
            for node in self._standing.in_state(State.RELEASING)
            if (each := self._standing.of(node)) is not None and each.number == answer.ticket.number
        )
        node = next(released, None)
        if node is None:
            return None
        if isinstance(answer, Failed) and not isinstance(answer.error, StaleEpoch):
            error = answer.error
            self._log("warning", "release failed", node=node, code=error.code, error=str(error))
            self._standing.refused(node, self._desk.at)
            return None
        known = self._standing.of(node)
        if known is not None and known.drained:
            kept = known.keep.value if known.keep else ""
            attributes = {"node": node, "model": self._record.name, "keep": kept}
            self._desk.span(
                "drain", known.trace, since_ns=known.since.wall_ns, attributes=attributes
            )
        self._standing.answered(node, self._desk.at)
        self._desk.cluster.on_released(node, self._record.model_id, self._desk.at)
        return node

    def freed(self, node: NodeId) -> bool:
        """Whether the node has freed its memory. Only its own report says so; until then the node
        counts as leaving."""
        known = self._standing.of(node)
        hosts = self._desk.cluster.hosts(node, self._record.model_id)
        if known is None or known.state is not State.ANSWERED or hosts:
            return False
        self._tell("has freed its memory", node)
        self._standing.stay(node)
        return True

    # --- for people ---

    def _tell(self, text: str, *subjects: str) -> None:
        self._desk.tell(text, self._record.model_id, *subjects)

    def _log(self, level: str, text: str, **fields: str | int | float | None) -> None:
        self._desk.log(level, text, model=self._record.name, **fields)
