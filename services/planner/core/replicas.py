"""How many replicas one model has: begins events that add some, and drains what is too many.

At most one of its events is not over; replicas that are needed meanwhile are appended to it. A
decision is due at once after what may change it, such as a load report with waiting requests, and
again when a condition has held for as long as it must (`next_wake`).
"""

from collections import Counter
from collections.abc import Collection

import msgspec

from services.planner.core import events
from services.planner.core.cut import lacking
from services.planner.core.cutting import Cutting
from services.planner.core.desk import Desk
from services.planner.core.event_machine import EventMachine
from services.planner.core.event_phases import Taken
from services.planner.core.fleet import PACE_PER_MEMBER_S, REPUBLISH_S, Cause, Fleet
from services.planner.core.growing import Needs
from services.planner.core.instances import Member
from services.planner.core.journal import Journal
from services.planner.core.ledger import expected
from services.planner.core.releases import Releases
from services.planner.core.rooms import Rooms, Turn
from services.planner.core.scaling import Decision
from services.planner.core.sizing import Sizing
from services.planner.core.standing import Standing, State
from services.planner.core.usage import Usage
from shared.ids import EventId, NodeId
from shared.messages.chronicle import Count
from shared.messages.decisions import Decided, Verdict
from shared.messages.pool import ModelRecord, NodeInfo
from shared.messages.scaling import EventState
from shared.parts import Part
from shared.wording import counted

HURRY_S = 0.005
"""The least seconds between two decisions because ever more waits, as many gateways say in turn."""
PER_MODEL_S, MOST_S = 0.002, 0.25
"""While no more waits, a changed load is looked at after `planner.tick_s`, or this long for each
model that has load, MOST_S at most: of a hundred models, each has another load all the time."""
RETRY_S = 1.0
"""Seconds between a failed event and the next one. It doubles with each further failure."""
RETRY_MAX_S = 30.0
NO_ROOM_RETRY_S = 0.05
"""The same after an event for which no node had room any more: another model was first."""
NEVER = float("inf")


class Replicas:
    def __init__(
        self,
        desk: Desk,
        rooms: Rooms,
        record: ModelRecord,
        fleet: Fleet,
        standing: Standing,
        releases: Releases,
    ) -> None:
        self.record = record
        """With the operator's newest settings."""
        self.event: EventMachine | None = None
        """The last event, over or not."""
        self.journal = Journal()
        self.cutting = Cutting(desk, record, fleet, standing)
        self.sizing = Sizing(desk, record.model_id)
        self.usage = Usage()
        self._desk = desk
        self._rooms = rooms
        self._fleet = fleet
        self._standing = standing
        self._releases = releases
        self.waits_since_ns = 0
        """Since when replicas have been wanted for which no event could begin. 0: none are."""
        self._waits_because = ""
        """Why it waits for room, as it was last told."""
        self._no_room = False
        """Whether no room was found, nor is any being made, when replicas were last missing."""
        self._found_no_room = 0
        """How many events have failed in a row because no node had room any more."""
        self._failed = 0
        """How many have failed in a row for other reasons."""
        self._retry_at = float("-inf")
        self._decided_at = float("-inf")
        self._decide_at = float("-inf")
        """When the number of replicas is next decided."""
        self._waited = (0, 0)
        """What waited at the last decision (`LoadReports.waiting`)."""
        self._hurried_at = float("-inf")
        """The time of the last decision at which more waited than before."""
        self._ended = False
        """Whether the end of the event has been taken in."""

    @property
    def next_wake(self) -> float:
        if self.event is None:
            return self._decide_at
        if self.event.over and not self._ended:
            return self._desk.at
        return min(self._decide_at, self.event.next_wake)

    @property
    def scaling(self) -> bool:
        return self.event is not None and not self.event.over

    @property
    def total(self) -> int:
        """Replicas that serve or are on their way."""
        return self._fleet.count(self._there())

    def _there(self, without: Collection[NodeId] = ()) -> Counter[Part]:
        """The devices that have each part, or will, but for these nodes."""
        fleet = self._fleet
        there = fleet.staying
        if without:
            members = fleet.members.values()
            there = fleet.parts(m for m in members if not m.draining and m.node not in without)
        return there + self.event.expected if self.event is not None and self.scaling else there

    @property
    def _full(self) -> bool:
        """Whether no replica can be added now, whatever the load."""
        return not self.scaling and (self._no_room or self.total >= self.sizing.most)

    # --- when ---

    def on_load(self) -> None:
        """The load has changed. If more waits than at the last decision, the number of replicas is
        decided at once. That some requests wait for their first token is so at any time."""
        self._decide_by(self._decide_for_load_at())

    def minds_load(self) -> bool:
        """Whether a change of the load brings the next decision forward."""
        return self._decide_for_load_at() < self._decide_at

    def _decide_for_load_at(self) -> float:
        if self._more_waits():
            return max(self._desk.now.at, self._hurried_at + HURRY_S)
        share_s = min(PER_MODEL_S * self._desk.cluster.loads.busy, MOST_S)
        return self._decided_at + max(self._desk.settings.tick_s, share_s)

    def _more_waits(self) -> bool:
        """Whether more waits than at the last decision."""
        queued, prompts = self._desk.cluster.loads.waiting(self.record.name)
        return queued > self._waited[0] or prompts > self._waited[1]

    def on_holdings(self) -> None:
        """A member holds more or less than before. In a large event that happens all the time."""
        self._decide_by(self._decided_at + PACE_PER_MEMBER_S * len(self._fleet.members))

    def on_joined(self) -> None:
        """A new node may be what the last event lacked."""
        self._retry_at, self._failed, self._found_no_room = float("-inf"), 0, 0
        self.decide_soon()

    @property
    def turn(self) -> Turn:
        """Models with the least turn get free memory and disks first."""
        return -self.record.priority, self.waits_since_ns or NEVER

    def on_more_room(self) -> None:
        """Memory was freed, or another event has ended."""
        if self.record.model_id in self._rooms.waiting:
            self.decide_soon()
        elif self.event is not None and self.event.no_room:
            self.on_joined()

    def decide_soon(self) -> None:
        self._decide_at = float("-inf")

    def _decide_by(self, at: float) -> None:
        self._decide_at = min(self._decide_at, at)

    def settle(self) -> None:
        """Takes in the end of the event, and decides if that is due."""
        if self.event is not None and self.event.over and not self._ended:
            self._ended = True
            self._on_event_over(self.event)
        if self._desk.at >= self._decide_at:
            self._decide()

    def _on_event_over(self, event: EventMachine) -> None:
        if not event.no_room:
            self._desk.room_freed = True  # its targets can be reserved again
        if event.record.state is EventState.COMPLETE:
            self._failed = self._found_no_room = 0
        elif event.record.state is EventState.FAILED:
            why, id_ = event.record.error or event.record.state.value, event.record.id
            self.note(Verdict.FAILED, self.sizing.wants, why, event=id_)
            if event.no_room:
                retry_s = NO_ROOM_RETRY_S * 2**self._found_no_room
                self._found_no_room += 1
                self._desk.disks_at = self._desk.at  # they are not read after all
            else:
                retry_s = RETRY_S * 2**self._failed
                self._failed += 1
            self._retry_at = self._desk.at + min(retry_s, RETRY_MAX_S)
            self.waits_since_ns = event.record.wanted_ns
            self._decide_by(self._retry_at)
        self.decide_soon()

    # --- how many ---

    def _decide(self) -> None:
        at, config = self._desk.at, self._desk.settings
        self._decided_at, self._decide_at = at, at + REPUBLISH_S
        if self._desk.cluster.loads.blind(at):
            self._decide_by(at + config.tick_s)
            return
        if self._more_waits():
            self._hurried_at = at
        self._waited = self._desk.cluster.loads.waiting(self.record.name)
        self.cutting.choose(scaling=self.scaling)
        fleet, outgoing = self._fleet, self._outgoing
        leaving = {info.node for info in outgoing}
        serving = fleet.serving
        if leaving:
            serving = fleet.parts(m for m in fleet.replicas if m.node not in leaving)
        have = fleet.count(serving)
        coming = fleet.count(self._there(leaving)) - have
        wanted = self.sizing.wants
        decision = self.sizing.decide(
            self.record,
            have=have,
            coming=coming,
            fleet=fleet,
            event=self.event.record if self.event is not None and coming else None,
        )
        if self.sizing.batch != self._fleet.most_slots:
            self._fleet.limit(self.sizing.batch)
        self._fleet.separate(self.sizing.prefill_share)
        if outgoing:
            replaced = fleet.parts(fleet.members[node] for node in leaving)
            decision = self._with_successors(decision, have + coming, max(replaced.values()))
        self._releases.warm = self.sizing.warm
        asked = not self._desk.cluster.loads.demand(self.record.name).idle
        self.usage.note(at, len(fleet.members), asked=asked, serves=have > 0)
        if self.sizing.wants < wanted and self._rooms.waiting:
            self._desk.room_freed = True  # what is spare may give way
        if self.sizing.spare_at is not None and at < self.sizing.spare_at:
            self._decide_by(self.sizing.spare_at)
        self._rooms.asks_no_more(self.record.model_id)
        if decision.wake_at is not None:
            self._decide_by(decision.wake_at)
        elif self.sizing.surplus:  # the next replica goes when this one is gone
            self._decide_by(at + config.tick_s)
        missing = decision.replicas - have - coming
        if missing > 0:
            self.waits_since_ns = self.waits_since_ns or self._desk.now.wall_ns
            self._grow(decision, have + coming + missing, leaving)
        else:
            self.waits_since_ns, self._no_room = 0, False
            self._rooms.wants_none(self.record.model_id)
        self._fleet.within_s = self.record.ttft_s if self._full else 0.0
        if not self.scaling:
            self._shrink(decision)
        self._hand_over(outgoing, enough=have >= max(decision.replicas, self.sizing.wants))
        self._load_elsewhere()
        self._count(have)

    # --- more ---

    def _grow(self, decision: Decision, total: int, leaving: Collection[NodeId]) -> None:
        """`total`: how many replicas there are to be. `leaving`: nodes whose place others take."""
        there, fleet = Counter(self._there(leaving)), self._fleet
        for node in self._standing.in_state(State.DRAINING):  # the cheapest capacity there is
            part = fleet.members[node].part or fleet.cut[0]
            leaves = self._desk.cluster.leaves(node)
            must = leaves or self._rooms.must_leave(node, self.record.model_id)
            if there[part] < total and not must:
                self._standing.stay(node)
                fleet.drain(node, False)
                self._tell(f"needed again: {decision.cause}", node)
                self.note(Verdict.MORE, decision.replicas, decision.cause, node)
                there[part] += 1
        at = self._desk.at
        needs = lacking(fleet.cut, there, total)
        if fleet.cut and not needs:
            return
        if self.event is not None and not self.event.over:
            self._append(self.event, decision, needs)
        elif at < self._retry_at:
            self._decide_by(self._retry_at)
        elif not self._standing.waits(at) and self._has_turn(needs) and self._has_room(needs):
            self._begin(decision, needs)

    @property
    def _outgoing(self) -> list[NodeInfo]:
        """The nodes of replicas whose place others are to take."""
        cluster = self._desk.cluster
        if not cluster.leaving:
            return []
        replicas = (member.node for member in self._fleet.replicas)
        return [cluster.nodes[node] for node in replicas if cluster.leaves(node)]

    def _with_successors(self, decision: Decision, there: int, outgoing: int) -> Decision:
        """The decision, with a replica more for each that the load needs on nodes that leave."""
        replicas = max(decision.replicas, min(self.sizing.wants, there + outgoing))
        there_is = counted(outgoing, "replica is", "replicas are")
        cause = decision.cause or f"{there_is} on nodes that leave"
        return msgspec.structs.replace(decision, replicas=replicas, cause=cause)

    def _hand_over(self, outgoing: list[NodeInfo], *, enough: bool) -> None:
        """Drains replicas on nodes that leave, once enough others serve. `leave_by_ns` is when such
        a replica ends in any case: its requests go on elsewhere, or wait."""
        now = self._desk.now
        for info in outgoing:
            left_s = self._desk.cluster.left_s(info.node, now.wall_ns)
            if enough:
                self.note(
                    Verdict.FEWER, self.sizing.wants, f"its node is {info.duty.value}", info.node
                )
                self.drain(info.node, f"drains: its node is {info.duty.value}")
            elif left_s <= 0:
                why = f"its node is {info.duty.value}, and no other node has taken over in time"
                self.end(info.node, Verdict.FEWER, why)
            elif left_s < NEVER:
                self._decide_by(now.at + left_s)

    def _load_elsewhere(self) -> None:
        """Drains what loads on nodes that leave: it is given no more requests, since it will not
        serve for long."""
        if self.event is None or self.event.over or not self._desk.cluster.leaving:
            return
        for node in self.event.lacking:
            if not self._desk.cluster.leaves(node) or self._standing.draining(node):
                continue
            why = f"loads for no replica: its node is {self._desk.cluster.nodes[node].duty.value}"
            if node in self._fleet.members:
                self.note(Verdict.FEWER, self.sizing.wants, why, node)
                self.drain(node, why)
            else:
                self.end(node, Verdict.FEWER, why)

    def _append(self, event: EventMachine, decision: Decision, needs: Needs) -> None:
        """Lets the running event grow, unless it cannot now."""
        if self._desk.at < event.may_grow_at < NEVER:
            self._decide_by(event.may_grow_at)
        elif self._desk.at >= event.may_grow_at and self._has_room(needs):
            self.note(Verdict.MORE, decision.replicas, decision.cause, event=event.record.id)
            event.grow(needs, self._not_here(), decision.cause)

    def _not_here(self) -> tuple[NodeId, ...]:
        """The nodes that are no targets for a further replica."""
        taken = self._rooms.taken(self.record.model_id, self.record.priority)
        avoided = sorted(self._standing.avoided(self._desk.at) | taken)
        return tuple(dict.fromkeys((*self._fleet.members, *self._standing.released, *avoided)))

    def _has_turn(self, needs: Needs) -> bool:
        """Whether the disks that a load needs are not kept busy by others."""
        why = self._rooms.disks_for(self.record, self.turn)
        if why:
            self._no_room = False
            self._say_why(len(needs), "disks", why)
        return not why

    def _has_room(self, needs: Needs) -> bool:
        """Whether at least one more replica has room now. Others are asked to make room for those
        that have not."""
        if not needs:
            self._no_room, missing, why = True, 1, self.cutting.too_large
        else:
            missing = len(needs)
            room = self._rooms.ask(self.record.model_id, [len(parts) for parts in needs])
            self._no_room = not (room.free or room.made or room.busy)
            if len(room.free) >= len(needs[0]):
                self._waits_because = ""
                return True
            coming = len(room.made) + room.busy
            why = f"room for {coming} is being made" if coming else room.why_not
            if len(needs[0]) > 1:
                why = f"{counted(len(needs[0]), 'device')} with {self.cutting.room} bytes: {why}"
        self._say_why(missing, "memory", why)
        return False

    def _say_why(self, missing: int, what: str, why: str) -> None:
        """It waits for something, for this reason."""
        if why == self._waits_because:
            return
        self._waits_because = why
        self._tell(f"waits for {what} for {counted(missing, 'replica')}: {why}")
        self.note(Verdict.WAITS, self.total + missing, why)
        self._log("info", f"waits for {what}", replicas=missing, why=why)

    def _begin(self, decision: Decision, needs: Needs) -> None:
        now, settings = self._desk.now, self._desk.settings
        detected_ns = now.wall_ns - int((now.at - decision.detected_at) * 1e9)
        before = self.event.record.history[-1][1] if self.event is not None else 0
        if before > now.wall_ns:  # the clock was set back since the last event
            before = 0
        waiting_ns = self._desk.cluster.loads.waiting_since_ns(self.record.name, now)
        record = events.begin(
            EventId(settings.new_id("ev")),
            self.record,
            strategy=settings.strategy,
            cause=decision.cause,
            waiting_ns=max(before, min(waiting_ns or detected_ns, detected_ns)),
            detected_ns=detected_ns,
            wanted_ns=self.waits_since_ns,
            decided_ns=now.wall_ns,
            expected=expected(
                self._desk.archive.events.values(), self.record.model_id, settings.scale_up_hold_s
            ),
            trace=settings.new_trace(),
            together=self.cutting.together,
            way=self.cutting.why,
        )
        self._tell(f"begins {record.id} for {_in_words(needs)}", record.id)
        why = "; ".join(filter(None, (decision.cause, record.way)))
        self.note(Verdict.MORE, decision.replicas, why, event=record.id)
        if record.way:
            self._tell(record.way, record.id)
        self._desk.span("detect", record.trace, since_ns=detected_ns)
        self._desk.span(
            "decide",
            record.trace,
            attributes={"cause": decision.cause, "replicas": decision.replicas},
        )
        self._rooms.leave(self.record.model_id)
        reading_s = self._rooms.reading_s(self.record)
        event = self.follow(EventMachine(self._desk, self.record, record, self._standing))
        event.start(needs, self._not_here(), reading_s)

    def follow(self, event: EventMachine) -> EventMachine:
        self.event, self._ended, self.waits_since_ns = event, False, 0
        self._fleet.cause = Cause(event.record.id, event.record.trace)
        self._desk.chronicle.begin(event.record.id)
        return event

    # --- less ---

    def _shrink(self, decision: Decision) -> None:
        """Drains the emptiest replicas; among equals those that joined last. Of a group all devices
        go."""
        if len(self._fleet.replicas) <= decision.replicas:
            return
        stay: dict[Part | None, list[Member]] = {}
        for member in reversed(self._fleet.replicas):
            if not self._desk.cluster.leaves(member.node):
                stay.setdefault(member.part, []).append(member)
        for alike in stay.values():
            if len(alike) <= decision.replicas:
                continue
            requests = self._fleet.requests_by_node()
            alike.sort(key=lambda member: requests[member.node])
            for victim in alike[: len(alike) - decision.replicas]:
                self.note(Verdict.FEWER, decision.replicas, decision.cause, victim.node)
                self.drain(victim.node, f"drains: {decision.cause}")

    def drain(self, node: NodeId, why: str) -> None:
        self._tell(why, node)
        self._standing.drain(node, self._desk.now, self._fleet.members[node].trace)
        self._fleet.drain(node)

    def end(self, node: NodeId, verdict: Verdict, why: str) -> None:
        """Ends a replica, or what loads to be one, at once. Its requests go on elsewhere, and if an
        event needs the node, it goes on without it."""
        if self.event is not None and self.event.needs(node) and self.event.gives_up(node):
            return
        self.note(verdict, self.sizing.wants, why, node)
        self._tell(why, node)
        loads = self.event is not None and self.event.loads(node)
        if self.event is not None and self.event.needs(node):
            self.event.on_trouble(Taken(node, why))
        if not loads:  # else the event frees it
            self._releases.free(node)

    # --- for people ---

    def _count(self, serving: int) -> None:
        demand, name = self._desk.cluster.loads.demand(self.record.name), self.record.name
        wanted, granted = self.sizing.unbounded, self.total
        queued, running = demand.queued_requests, demand.running_requests
        count = Count(self._desk.now.wall_ns, queued, running, serving, granted, wanted)
        self._desk.chronicle.count(name, count)

    def note(
        self, verdict: Verdict, wanted: int, why: str, *nodes: NodeId, event: EventId | None = None
    ) -> None:
        """Keeps a decision for `lambdascale events --model`."""
        self.journal.note(
            Decided(
                at_ns=self._desk.now.wall_ns,
                verdict=verdict,
                replicas=self.total,
                wanted=wanted,
                why=why,
                nodes=nodes,
                event=event,
            )
        )

    def _tell(self, text: str, *subjects: str) -> None:
        self._desk.tell(text, self.record.model_id, *subjects)

    def _log(self, level: str, text: str, **fields: str | int | float | None) -> None:
        self._desk.log(level, text, model=self.record.name, **fields)

    def validate(self) -> None:
        """Raises AssertionError if parts of the state contradict each other."""
        if self.event is not None:
            self.event.validate()
            assert not self.event.effects
            assert self.event.over == self._ended


def _in_words(needs: Needs) -> str:
    parts = [part for group in needs for part in group]
    text = counted(len(needs), "more replica")
    if max(map(len, needs)) == 1 and len(set(parts)) == 1:
        return text
    return f"{text}, on {counted(len(parts), 'device')}: {', '.join(map(str, parts))}"
