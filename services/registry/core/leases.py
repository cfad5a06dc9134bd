"""Which nodes there are: one lease a node, and what ends it.

    absent --put--> standing --owner deletes--------------------------------> over
                    standing --expires--> in doubt --silent, or too long----> over
                                          in doubt --put, same generation---> standing
    standing or in doubt --put, other generation--> the old one over, the new one standing

A lease can expire under a node that is well: while the bus's durable store elects a leader (some
seconds), nobody can renew. Hence the doubt: a node whose status reports still come keeps its
place, but gets no new work, until its lease is back. A node that died is silent, so that the doubt
does not prolong its life by more than SILENCE_S after its last report. When nothing came from
anybody, it is the registry that was cut off: silence counts from when it hears again.
A generation that is over stays over; should it show up again, it is told so again.

Causes, as changes and the story name them: a lease was put, deleted, found expired, or was missing
when a watch began (`lease_put`, `lease_deleted`, `lease_expired`, `lease_watch`); the registry
started again (`restart`); a report came (`node_status`). What ends in doubt ends by the cause of
the doubt.
"""

import enum
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from services.registry.core.duties import Duties
from shared.ids import Generation, NodeId
from shared.messages.pool import Duty, NodeGone, NodeInfo, NodeJoined
from shared.story import Story

SILENCE_S = 2.0
"""Nodes report every second. A node that lets this time pass without a report or a lease is
gone."""
LEASELESS_S = 10.0
"""How long reports alone keep a node. It is longer than the durable store may refuse writes."""
DEAF_S = 1.5
"""The registry hears itself more often than this. If it does not, the bus was away."""
OWN_DELETE_S = 0.9
"""A key lives at least one second, so a key that ends sooner after its renewal was deleted."""
REMEMBERED = 8
"""How many generations that are over are remembered for each node."""

REMEMBERED_NODES = 4096
"""Names of nodes of which such generations are remembered: those that ended last."""

Change = NodeJoined | NodeGone


class State(enum.Enum):
    STANDING = "standing"
    IN_DOUBT = "in doubt"
    OVER = "over"


_STEPS: dict[State | None, frozenset[State]] = {
    None: frozenset({State.STANDING, State.IN_DOUBT}),  # in doubt: restored after a restart
    State.STANDING: frozenset({State.STANDING, State.IN_DOUBT, State.OVER}),
    State.IN_DOUBT: frozenset({State.STANDING, State.OVER}),
    State.OVER: frozenset(),
}
"""From the state of a generation, None where none was, to those that may follow."""


@dataclass(slots=True)
class _Lease:
    info: NodeInfo
    renewed: float
    heard: float = float("-inf")
    """When its last status report came."""
    state: State | None = None
    ended: float = float("-inf")
    """When its key was seen to be gone. It counts while the lease is in doubt."""
    doubted_by: str = ""
    """The cause of the doubt. It counts while the lease is in doubt."""
    announced: bool = False


@dataclass(frozen=True, slots=True)
class _Lists:
    """Nodes by name. Renewals, which are most of what happens, leave the lists as they are."""

    present: tuple[NodeInfo, ...]
    standing: tuple[NodeInfo, ...]
    usable: tuple[NodeInfo, ...]


class Leases:
    def __init__(self, story: Story | None = None, duties: Duties | None = None) -> None:
        self._story = story or Story()
        self._duties = duties or Duties()
        self._leases: dict[NodeId, _Lease] = {}
        self._over: OrderedDict[NodeId, deque[Generation]] = OrderedDict()
        self._heard_at = float("-inf")
        """When anything came from anybody."""
        self._hears_since = float("-inf")
        """Since when it hears without having been cut off."""
        self._lists: _Lists | None = None
        """None: they have to be made anew."""

    def restore(self, info: NodeInfo, now: float) -> None:
        """Takes in a node from before this process. It is in doubt until its lease shows."""
        info = self._duties.with_duty(info)
        lease = self._leases[info.node] = _Lease(info, renewed=now, heard=now)
        self._lists = None
        self._doubt(lease, now, "restart")

    def put(self, info: NodeInfo, now: float) -> list[Change]:
        """A lease was made or renewed."""
        info = self._duties.with_duty(info)
        self.hear(now)
        if self.is_over(info.node, info.generation):
            return [self.gone_again(info.node, info.generation, "lease_put")]
        lease = self._leases.get(info.node)
        changes: list[Change] = []
        if lease is not None and lease.info.generation != info.generation:
            reason = f"a new process runs under its name ({info.generation})"
            changes.append(self._end(lease, now, "lease_put", reason))
            lease = None
        if lease is None:
            lease = self._leases[info.node] = _Lease(info, renewed=now)
        if not lease.announced or (lease.info is not info and lease.info != info):
            changes.append(NodeJoined(info=info, cause="lease_put"))
            self._lists = None
        self._step(lease, State.STANDING, now, "lease_put")
        lease.info, lease.renewed, lease.announced = info, now, True
        return changes

    def duty_changed(self, node: NodeId, cause: str) -> list[Change]:
        """What the node may be used for has changed."""
        lease = self._leases.get(node)
        info = None if lease is None else self._duties.with_duty(lease.info)
        if lease is None or info is None or info == lease.info:
            return []
        lease.info, self._lists = info, None
        return [NodeJoined(info=info, cause=cause)]

    def hear(self, now: float) -> None:
        """Something came over the bus, possibly from this process itself."""
        if now - self._heard_at >= DEAF_S:
            self._hears_since = now
        self._heard_at = now

    def heard(self, node: NodeId, generation: Generation, now: float) -> None:
        self.hear(now)
        lease = self._leases.get(node)
        if lease is not None and lease.info.generation == generation:
            lease.heard = now

    def dropped(self, node: NodeId, now: float) -> list[Change]:
        """The key of a lease is gone: deleted or expired."""
        self.hear(now)
        lease = self._leases.get(node)
        if lease is None or lease.state is State.IN_DOUBT:
            return []
        if now - lease.renewed < OWN_DELETE_S:
            gone = self._end(lease, now, "lease_deleted", "it gave its lease back")
            return [msgspec.structs.replace(gone, graceful=True)]
        self._doubt(lease, now, "lease_expired")
        return self.overdue(now)

    def only(self, nodes: Collection[NodeId], now: float) -> list[Change]:
        """Only these nodes have leases (as a new watch tells)."""
        for node, lease in self._leases.items():
            if node not in nodes and lease.state is State.STANDING:
                self._doubt(lease, now, "lease_watch")
        return self.overdue(now)

    def overdue(self, now: float) -> list[Change]:
        """Ends the leases whose doubt has lasted too long."""
        ended: list[Change] = []
        for lease in list(self._leases.values()):
            if lease.state is not State.IN_DOUBT:
                continue
            if now - max(lease.heard, self._hears_since) >= SILENCE_S:
                reason = "its lease expired and it is silent"
                ended.append(self._end(lease, now, lease.doubted_by, reason))
            elif now - lease.ended >= LEASELESS_S:
                reason = f"it reports, but has renewed no lease for {LEASELESS_S:.0f} s"
                ended.append(self._end(lease, now, lease.doubted_by, reason))
        return ended

    def is_over(self, node: NodeId, generation: Generation) -> bool:
        return generation in self._over.get(node, ())

    def gone_again(self, node: NodeId, generation: Generation, cause: str) -> NodeGone:
        """The message for a process that lives on under a generation that is over."""
        reason = "this generation is over: go on under a new one"
        return NodeGone(node=node, generation=generation, reason=reason, cause=cause)

    def info(self, node: NodeId) -> NodeInfo | None:
        lease = self._leases.get(node)
        return None if lease is None else lease.info

    def stands(self, node: NodeId) -> NodeInfo | None:
        """The node, if its lease is not in doubt."""
        lease = self._leases.get(node)
        return lease.info if lease is not None and lease.state is State.STANDING else None

    @property
    def present(self) -> tuple[NodeInfo, ...]:
        """Every node that is not gone, by name."""
        return self._listed().present

    @property
    def usable(self) -> tuple[NodeInfo, ...]:
        """Standing nodes that may be given something new, by name."""
        return self._listed().usable

    @property
    def standing(self) -> tuple[NodeInfo, ...]:
        """Nodes whose lease is not in doubt, by name."""
        return self._listed().standing

    def _listed(self) -> _Lists:
        if self._lists is None:
            self._lists = self._made_lists()
        return self._lists

    def _made_lists(self) -> _Lists:
        present = tuple(self._leases[node].info for node in sorted(self._leases))
        standing = tuple(info for info in present if self.stands(info.node))
        usable = tuple(info for info in standing if info.duty is Duty.ALL)
        return _Lists(present, standing, usable)

    def validate(self) -> None:
        """Raises AssertionError if parts of the state contradict each other."""
        assert len(self._over) <= REMEMBERED_NODES
        assert self._lists is None or self._lists == self._made_lists()
        for node, lease in self._leases.items():
            assert lease.info.node == node
            assert lease.state in (State.STANDING, State.IN_DOUBT)
            assert not self.is_over(node, lease.info.generation)
            assert lease.announced or lease.state is State.IN_DOUBT

    def _doubt(self, lease: _Lease, now: float, cause: str) -> None:
        self._step(lease, State.IN_DOUBT, now, cause)
        lease.ended, lease.doubted_by = now, cause

    def _end(self, lease: _Lease, now: float, cause: str, reason: str) -> NodeGone:
        self._step(lease, State.OVER, now, cause, reason)
        node, generation = lease.info.node, lease.info.generation
        del self._leases[node]
        self._lists = None
        self._over.setdefault(node, deque(maxlen=REMEMBERED)).append(generation)
        self._over.move_to_end(node)
        if len(self._over) > REMEMBERED_NODES:
            self._over.popitem(last=False)
        return NodeGone(node=node, generation=generation, reason=reason, cause=cause)

    def _step(self, lease: _Lease, to: State, now: float, cause: str, why: str = "") -> None:
        node = lease.info.node
        self._story.check_step(node, _STEPS, lease.state, to)
        if to is not lease.state:
            text = f"generation {lease.info.generation} {to.value}"
            self._story.tell(now, cause, f"{text}: {why}" if why else text, node)
            self._lists = None
        lease.state = to
