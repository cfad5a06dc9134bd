"""What serves a model: its members, the instances over them, and the sets that gateways are sent.

Members hold what the cluster says they hold. Paths over members that still load are planned outside
(PlanPaths), because that can take long. Until a plan is there, instances are revised by the last
plan. Sets are published at once after a quiet time, and at most every `PACE_S` in a busy time; what
is said is mostly what has changed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from services.planner.core import instances
from services.planner.core.commands import PlanPaths
from services.planner.core.desk import Desk
from services.planner.core.forecast import Expected
from services.planner.core.instances import Member, Rules, Stages, rules
from services.planner.core.roles import assign_roles
from services.planner.core.stimuli import PathsPlanned
from shared.ids import EventId, InstanceId, NodeId
from shared.messages.changes import change_of
from shared.messages.instances import Coming, Instance, InstanceSet, InstanceState
from shared.messages.pool import ModelRecord, NodeInfo
from shared.parts import Part, whole
from shared.wording import counted

REPUBLISH_S = 1.0
"""Seconds after which gateways are told of a model again, also if nothing has changed."""
WHOLE_S = 30.0
"""Seconds after which they are told all of it again, and not only what has changed."""
PACE_S = 0.02
"""The least seconds between two sets of one model."""
PACE_PER_MEMBER_S = 5e-4
"""What each member adds to PACE_S: large sets take long to make, to send and to read."""
SETTLE_S = 0.25
"""A load report that comes sooner than this after a change was published may not include it yet."""
OPENING_S = 0.5
"""A replica opens so many seconds before its last block is expected. Its requests could run nowhere
else before that, and run as far as its blocks go."""
PLAN_TIMEOUT_S = 120.0
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Cause:
    """The scaling event that caused the changes."""

    event: EventId | None = None
    trace: str = ""


class Fleet:
    def __init__(self, desk: Desk, record: ModelRecord) -> None:
        self._members: dict[NodeId, Member] = {}
        self._partial: set[NodeId] = set()
        """Members that lack blocks."""
        self._replicas: tuple[Member, ...] | None = None
        """See `replicas`. None: to be found anew. The same holds for the two that follow."""
        self._serving: Counter[Part] | None = None
        self._staying: Counter[Part] | None = None
        self.cut: tuple[Part, ...] = (whole(record.n_blocks),)
        """The parts that the devices of a replica have. Empty: all nodes together have no room for
        the model."""
        self._changes = 0
        """How often the members have changed."""
        self.instances: tuple[Instance, ...] = ()
        self.cause = Cause()
        self.within_s = 0.0
        """See InstanceSet. It is published with what changes next, or after a second."""
        self.expects: Callable[[], Expected | None] = lambda: None
        """What the running scaling event brings; None: none runs."""
        self.most_slots = 0
        """The most slots that a replica may have, so that tokens come as fast as the model's
        objective says. 0: no limit."""
        self.prefill_share = 0.0
        """See `separate`."""
        self._desk = desk
        self._record = record
        self.every = frozenset(range(record.n_blocks))
        self._planned: Mapping[Stages, float] = {}
        self._planning = 0
        """The number of the open question for paths; 0: none."""
        self._planned_at = float("-inf")
        """When it was asked last."""
        self._outdated = False
        """Whether the members have changed since the plan that is being made was asked for."""
        self._retired: dict[InstanceId, float] = {}
        """Since when each retired instance takes no new requests."""
        self._revision = desk.next_revision()
        self._published_at = float("-inf")
        self._told: InstanceSet | None = None
        """The set that was published last."""
        self._told_whole_at = float("-inf")
        self._revised_at = float("-inf")
        self._changed_at = float("-inf")
        """When gateways were told last that the instances are others than before."""
        self._revise_at = NEVER
        self._plan_at = NEVER
        """When paths are next asked for."""
        self._closed = False
        self._basis: tuple[object, ...] = ()
        """What the instances were made from. While it stays the same, only retired instances
        change."""

    # --- the members ---

    @property
    def members(self) -> Mapping[NodeId, Member]:
        """The members of this moment. Plans, which threads make, are given copies."""
        return self._members

    @property
    def replicas(self) -> tuple[Member, ...]:
        """Complete members that take requests, in the order in which they joined. Of a model that
        fits no device, several of them make one replica (`count`)."""
        if self._replicas is None:
            complete = (m for n, m in self._members.items() if n not in self._partial)
            self._replicas = tuple(m for m in complete if not m.draining)
        return self._replicas

    def parts(self, members: Iterable[Member]) -> Counter[Part]:
        """How many of the members have each part."""
        return Counter(member.part or self.cut[0] for member in members)

    @property
    def serving(self) -> Mapping[Part, int]:
        """How many of the replicas have each part."""
        if self._serving is None:
            self._serving = self.parts(self.replicas)
        return self._serving

    @property
    def staying(self) -> Counter[Part]:
        """How many members have each part, without those that drain. It is not to be changed."""
        if self._staying is None:
            self._staying = self.parts(m for m in self._members.values() if not m.draining)
        return self._staying

    def count(self, parts: Mapping[Part, int]) -> int:
        """How many replicas so many devices with each part are."""
        return min((parts.get(part, 0) for part in self.cut), default=0)

    @property
    def loading(self) -> bool:
        """Whether some member is not complete yet."""
        return bool(self._partial)

    def join(
        self, info: NodeInfo, cause: Cause, part: Part | None = None, *, wakes: bool = False
    ) -> None:
        """`part`: what it is to hold, as one device of a group. `wakes`: see `Member`."""
        member = Member(
            node=info.node,
            address=info.address,
            slots=self._slots(info),
            held=(held := self._held(info.node)),
            had=len(held),
            speed=self._speed(info.node, 1.0),
            event=cause.event,
            trace=cause.trace,
            since=self._desk.at,
            part=part,
            host=info.host,
            wakes=wakes,
        )
        size = part.size if part else self._record.n_blocks
        self._desk.tell(
            f"member with {len(member.held)} of {counted(size, 'block')}",
            info.node,
            self._record.model_id,
        )
        if not self._closed:
            instances.join(self._members, member, self._record.n_blocks)
            self._note(self._members[info.node])

    def look(self, held: Mapping[NodeId, frozenset[int]]) -> None:
        """What members hold now, or how fast they are, may have changed."""
        if self._closed:
            return
        changed = False
        for node, blocks in held.items():
            member = self._members[node]
            speed = self._speed(node, member.speed)
            if blocks != member.held or speed != member.speed:
                member = msgspec.structs.replace(member, held=blocks, speed=speed)
                self._members[node], changed = member, True
                self._sort(member)
        if changed:
            self._changed()

    def limit(self, most_slots: int) -> None:
        """From now on a replica may have at most so many slots (0: as many as its node has). What
        runs already goes on."""
        self.most_slots = most_slots
        nodes = self._desk.cluster.nodes
        for node, member in list(self._members.items()):
            if node in nodes and member.slots != (slots := self._slots(nodes[node])):
                self._put(msgspec.structs.replace(member, slots=slots))

    def _slots(self, info: NodeInfo) -> int:
        most = -(-self.most_slots // max(1, len(self.cut)))
        return min(info.slots, most) if most else info.slots

    def separate(self, prefill_share: float) -> None:
        """From now on this share of the replicas prefills (`roles`)."""
        if prefill_share != self.prefill_share:
            self.prefill_share = prefill_share
            self.touch()

    def drain(self, node: NodeId, draining: bool = True) -> None:
        self._put(msgspec.structs.replace(self._members[node], draining=draining))

    def leave(self, node: NodeId) -> Member | None:
        member = self._members.get(node)
        if member is not None:
            self._desk.tell("no member any more", node, self._record.model_id)
            self._remove(node)
        return member

    def _remove(self, node: NodeId) -> None:
        if not self._closed:
            del self._members[node]
            self._partial.discard(node)
            self._changed()

    def _rules(self) -> Rules:
        settings = self._desk.settings
        return rules(self._record.n_blocks, len(self.cut), settings.max_stages, settings.serving)

    def _held(self, node: NodeId) -> frozenset[int]:
        return self._desk.cluster.executable(node, self._record.model_id) & self.every

    def _speed(self, node: NodeId, known: float) -> float:
        """Speeds stay while some node loads: a pass over a small part of the model has the same
        fixed costs as one over the whole, and makes its node look slow."""
        if self.loading:
            return known
        cluster = self._desk.cluster
        return cluster.measured.speed(node, self._record.model_id, cluster.slots, known)

    @property
    def speed(self) -> float:
        """The mean speed of its replicas; 1 if there is none."""
        speeds = [member.speed for member in self.replicas]
        return sum(speeds) / len(speeds) if speeds else 1.0

    def _put(self, member: Member) -> None:
        if self._closed:
            return
        self._members[member.node] = member
        self._note(member)

    def _note(self, member: Member) -> None:
        self._sort(member)
        self._changed()

    def _sort(self, member: Member) -> None:
        """Whether it is one of those that load."""
        if member.is_complete(self._record.n_blocks):
            self._partial.discard(member.node)
        else:
            self._partial.add(member.node)

    def _changed(self) -> None:
        self._changes += 1
        self._replicas = self._serving = self._staying = None
        self._outdated = True
        self._plan()
        self.touch()

    # --- paths ---

    def _plan(self) -> None:
        """Asks for paths, again and again until there is a plan for the current members. The more
        members there are, the longer a plan takes, and the longer it is good enough. While nothing
        loads, each replica serves by itself, which needs no asking (`_revise`). Nor does a member
        without others, over which no path goes."""
        alone = len(self._members) < 2
        if self._planning or not self._outdated or not self.loading or alone or self._closed:
            return
        plan_at = self._planned_at + PACE_PER_MEMBER_S * len(self._members)
        if self._desk.at < plan_at:
            self._plan_at = min(self._plan_at, plan_at)
            return
        self._outdated, self._planned_at, self._plan_at = False, self._desk.at, NEVER
        ticket = self._desk.ask(
            within=PLAN_TIMEOUT_S, model=self._record.model_id, revision=self._revision
        )
        self._planning = ticket.number
        self._desk.do(
            PlanPaths(
                ticket=ticket,
                previous=self.instances,
                members=dict(self._members),
                rules=self._rules(),
                cause=self._desk.cause,
            )
        )

    def on_planned(self, answer: PathsPlanned) -> None:
        if answer.ticket.number != self._planning:
            return
        self._planning = 0
        if self.loading:
            self._planned = answer.planned
            self.touch()
            self._plan()

    def on_not_planned(self, number: int) -> None:
        """Takes in that a plan failed. Another is asked for when the members change, or with the
        next set that is due."""
        if number == self._planning:
            self._planning, self._outdated = 0, True

    # --- the instances ---

    def busy(self, instance: InstanceId) -> bool:
        """Whether requests may still run on the instance. They may on every instance that is not
        retired, and on a retired one until all gateways have reported SETTLE_S later, because a
        gateway may have sent it a request before it heard that it is retired."""
        retired_at = self._retired.get(instance, NEVER)
        settled = self._desk.cluster.loads.reported_since(retired_at + SETTLE_S)
        return not settled or self._requests_on(instance) > 0

    def uses(self, node: NodeId) -> bool:
        """Whether requests run over the node, on its replica or on a path, as far as is known."""
        return any(self.busy(instance.id) for instance in self._over(node))

    def requests_by_node(self) -> Counter[NodeId]:
        """How many requests run over each node."""
        found, running = Counter[NodeId](), self._desk.cluster.loads.running(self._record.name)
        for instance in self.instances:
            if count := running.get(instance.id):
                found.update(dict.fromkeys((stage.node for stage in instance.stages), count))
        return found

    def _over(self, node: NodeId) -> list[Instance]:
        return [i for i in self.instances if any(stage.node == node for stage in i.stages)]

    def _requests_on(self, instance: InstanceId) -> int:
        return self._desk.cluster.loads.requests_on(self._record.name, instance)

    @property
    def next_wake(self) -> float:
        if self._closed:
            return NEVER
        return min(self._revise_at, self._plan_at, self._published_at + REPUBLISH_S)

    def touch(self) -> None:
        """Notes that the basis of the instances has changed. The pace
        counts from the last revision that gateways were told of. A revision that changed no
        instance does not delay the next one, which may bring a node's last block."""
        per_members = PACE_PER_MEMBER_S * len(self._members)
        told_from = self._changed_at + PACE_S + per_members
        self._revise_by(max(self._desk.at, self._revised_at + per_members, told_from))

    def _revise_by(self, at: float) -> None:
        self._revise_at = min(self._revise_at, at)

    def settle(self) -> list[Instance]:
        """Does what is due: revises the instances and tells gateways. Returns the new paths."""
        at = self._desk.at
        if self._closed or at < self.next_wake:
            return []
        if at >= min(self._plan_at, self._published_at + REPUBLISH_S):
            self._plan_at = NEVER
            self._plan()
        if at < min(self._revise_at, self._published_at + REPUBLISH_S):
            return []
        before = self.instances
        self._revise()
        if self.instances != before:
            self._revision = self._desk.next_revision()
            self._changed_at = at
            self._publish()
            known = {instance.id for instance in before}
            return [i for i in self.instances if not i.lasts and i.id not in known]
        if at >= self._published_at + REPUBLISH_S:
            self._publish()
        return []

    def _revise(self) -> None:
        """Drops instances that are no longer used, and makes those that the plan wants."""
        at = self._desk.at
        self._revised_at, self._revise_at = at, NEVER
        if self._outdated and not self.loading:
            self._outdated = False
            self._planned = instances.plan(self.instances, self._members, self._rules())
        opening = self._opening()
        basis = self._changes, self._planned, self.prefill_share, opening
        if not self._retired and basis == self._basis:
            return
        self._basis = basis
        revised = instances.revise(
            self.instances,
            self._members,
            self._planned,
            self._record.n_blocks,
            busy=self.busy,
            new_id=self._desk.settings.new_id,
            event=self.cause.event,
            opening=opening,
        )
        self.instances = assign_roles(revised, self.prefill_share)
        self._tell_roles()
        self._retired = {
            instance.id: self._retired.get(instance.id, at)
            for instance in self.instances
            if instance.state is not InstanceState.SERVING
        }
        if self._retired:  # instances whose last requests have ended go
            pace = PACE_PER_MEMBER_S * len(self._members)
            self._revise_by(at + max(self._desk.settings.tick_s, pace))

    def _opening(self) -> NodeId | None:
        """The member that takes requests although it lacks blocks. It opens only while it is the
        only member, so that nobody else could serve: at once if it wakes, and if not, when it has
        the first block and will soon have the last one if blocks come as fast as they did. What
        begins on it stays there, so it stays open, whatever comes, until it is complete."""
        opened = next((instance.leader for instance in self.instances if instance.opening), None)
        if opened in self._partial:
            return None if self._members[opened].draining else opened
        if len(self._members) != 1 or not self._partial:
            return None
        (member,) = self._members.values()
        if member.draining or member.part is not None:
            return None
        if member.wakes:
            return member.node
        if 0 not in member.held:
            return None
        came = len(member.held) - member.had
        left = self._record.n_blocks - len(member.held)
        soon = (self._desk.at - member.since) * left <= OPENING_S * came
        return member.node if soon and came else None

    # --- the gateways ---

    def set(self) -> InstanceSet:
        cluster, model = self._desk.cluster, self._record.model_id
        return InstanceSet(
            name=self._record.name,
            model_id=model,
            epoch=self._desk.settings.epoch,
            revision=self._revision,
            instances=self.instances,
            node_slots=instances.node_slots(self.instances, self._members),
            fixed=self._desk.archive.fixed.get(model),
            within_s=self.within_s,
            decode_s=cluster.measured.decode_s(model),
            prefill_s_per_token=cluster.measured.prefill_s_per_token(model),
            kv_s_per_token=cluster.measured.kv_s_per_token(model),
            trace=self.cause.trace,
            cause=self.cause.event or "",
            coming=self._coming(),
        )

    def _coming(self) -> Coming | None:
        expected = self.expects()
        if expected is None:
            return None
        blocks = self._record.n_blocks
        loading = (self._members[node] for node in self._partial)
        share = max((len(m.held) / (m.part.size if m.part else blocks) for m in loading), default=0)
        return Coming(
            share=share,
            first_s=expected.first_s,
            complete_s=expected.complete_s,
            replicas=expected.replicas,
        )

    def _publish(self) -> None:
        at, known, now = self._desk.at, self._told, self.set()
        self._published_at, self._told = at, now
        whole = known is None or at >= self._told_whole_at + WHOLE_S
        if known is not None and not whole and self._desk.cluster.loads.take_changes:
            self._desk.publish(change_of(known, now))
        else:
            self._told_whole_at = at
            self._desk.publish(now)

    def close(self) -> None:
        """Publishes that nothing serves the model from now on."""
        self.instances = ()
        self._tell_roles()
        self._revision = self._desk.next_revision()
        self._publish()
        self._closed = True

    def _tell_roles(self) -> None:
        replicas = (i for i in self.instances if i.is_replica)
        roles = {i.leader: i.role for i in replicas}
        self._desk.cluster.kv.on_roles(self._record.model_id, roles)

    def validate(self) -> None:
        """Raises AssertionError if parts of the state contradict each other."""
        if self._closed:
            assert self.instances == ()
            return
        for node, member in self._members.items():
            assert member.held == self._held(node), f"{node} holds something else"
        blocks = self._record.n_blocks
        assert self._partial == {n for n, m in self._members.items() if not m.is_complete(blocks)}
        whole_ones = [m for m in self._members.values() if m.is_complete(blocks)]
        assert list(self.replicas) == [m for m in whole_ones if not m.draining]
        assert self.serving == self.parts(self.replicas)
        assert self.staying == self.parts(m for m in self._members.values() if not m.draining)
        assert {m.part for m in self._members.values() if m.part} <= set(self.cut)
        assert self._retired.keys() == {
            i.id for i in self.instances if i.state is not InstanceState.SERVING
        }
        assert len({i.id for i in self.instances}) == len(self.instances)
        if self._planning:
            assert self._desk.is_open(self._planning)


def describe(path: Instance) -> dict[str, str | float]:
    """The attributes of a path in a trace."""
    stages = " ".join(f"{s.node}[{s.start}:{s.stop}]" for s in path.stages)
    return {"instance": path.id, "stages": stages, "capacity": round(path.capacity, 3)}
