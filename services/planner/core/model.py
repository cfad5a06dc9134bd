"""One model: decides how many replicas there should be, runs scaling events, drains and releases.

At most one of its events is not over; replicas that are needed meanwhile are appended to it. Any
stimulus may make a decision due at once, such as a load report with waiting requests. A condition
that must hold for some time is looked at again when that time is over (`next_wake`).
"""

from collections.abc import Collection

from services.planner.core import events
from services.planner.core.arbiter import Claim, GiveWay, Grade, Replica
from services.planner.core.desk import Desk
from services.planner.core.event_machine import EventMachine
from services.planner.core.event_phases import Dropped, Freed, Joined
from services.planner.core.fleet import REPUBLISH_S, Cause, Fleet, describe
from services.planner.core.instances import Member
from services.planner.core.journal import Journal
from services.planner.core.ledger import expected
from services.planner.core.releases import Releases
from services.planner.core.rooms import Rooms
from services.planner.core.scaling import Decision
from services.planner.core.sizing import Sizing
from services.planner.core.standing import Standing, State
from services.planner.core.stimuli import Answer, Failed, PathsPlanned
from services.planner.core.usage import Usage
from shared.errors import BadInput, Conflict
from shared.ids import EventId, NodeId
from shared.messages.decisions import Decided, Verdict
from shared.messages.pool import Holding, ModelRecord, NodeGone, Tier
from shared.messages.scaling import (
    BlockArrived,
    EventRecord,
    EventState,
    FirstPartialToken,
    PullFailed,
)

RETRY_S = 1.0
"""Seconds between a failed event and the next one. It doubles with each further failure."""
RETRY_MAX_S = 30.0
NEVER = float("inf")


class ModelMachine:
    def __init__(self, desk: Desk, rooms: Rooms, record: ModelRecord) -> None:
        self.record = record
        self.event: EventMachine | None = None
        """The last event, over or not."""
        self.fleet = Fleet(desk, record)
        self.standing = Standing(desk.story)
        self.journal = Journal()
        self._releases = Releases(desk, rooms, record, self.fleet, self.standing)
        self._desk = desk
        self._rooms = rooms
        self._sizing = Sizing(desk, record.model_id)
        self._usage = Usage()
        self._wanted_ns = 0
        """Since when replicas have been wanted for which no event could begin. 0: none are."""
        self._waits_because = ""
        """Why it waits for room, as it was last told."""
        self._failed = 0
        """How many events have failed in a row."""
        self._retry_at = float("-inf")
        self._decided_at = float("-inf")
        self._decide_at = float("-inf")
        """When the number of replicas is next decided."""
        self._ended = False
        """Whether the end of the event has been taken in."""
        self._removed = False
        for node in desk.cluster.holders(record.model_id, [Tier.GPU]):
            self.on_holdings(node, ())

    @property
    def fixed(self) -> int | None:
        """The operator's number of replicas; None: there is none."""
        return self._desk.archive.fixed.get(self.record.model_id)

    @property
    def scaling(self) -> bool:
        return self.event is not None and not self.event.over

    @property
    def next_wake(self) -> float:
        if self._removed:
            return NEVER
        event = self.event.next_wake if self.event is not None else NEVER
        return min(self._decide_at, self.fleet.next_wake, event, self._releases.next_wake)

    # --- what happens to it ---

    def on_holdings(self, node: NodeId, gained: Collection[int], at_ns: int = 0) -> None:
        """What a node holds of the model may have changed. `gained` is new since `at_ns` (0:
        now)."""
        held = self._held(node)
        self._note_released(node)
        if self.standing.leaving(node):
            return
        member = self.fleet.members.get(node)
        if member is not None:
            lost = bool(member.held - held)
            self.fleet.look(node)
            if self.event is not None:
                self.event.on_holdings(node, gained, at_ns or self._desk.now.wall_ns)
            if lost and not self._loads(node):
                self._log("warning", "a member lost blocks", node=node)
                self._releases.leave(node)
            self.decide_soon()
        elif len(held) == self.record.n_blocks and self.standing.fit(node, self._desk.at):
            self._log("info", "complete copy found", node=node)
            self.fleet.join(self._desk.cluster.nodes[node], Cause())
            self.decide_soon()

    def on_block(self, message: BlockArrived, gained: bool) -> None:
        if self.event is not None and self.event.record.id == message.event:
            self.event.on_block(message)
        if gained:
            self.on_holdings(message.node, (message.block,), message.finished_ns)

    def on_load(self) -> None:
        """The load has changed. If requests wait, the number of replicas is decided at once."""
        demand = self._desk.cluster.loads.demand(self.record.name)
        if demand.queued_requests or demand.prompt_tokens:
            self.decide_soon()
        else:
            self._decide_by(self._decided_at + self._desk.settings.tick_s)

    def on_joined(self) -> None:
        """A new node may be what the last event lacked."""
        self._retry_at, self._failed = float("-inf"), 0
        self.decide_soon()

    def on_more_room(self) -> None:
        """Memory was freed, or another event has ended."""
        if self.record.model_id in self._rooms.waiting:
            self.decide_soon()
        elif self.event is not None and self.event.no_room:
            self.on_joined()

    def on_gone(self, message: NodeGone) -> None:
        self.fleet.leave(message.node)
        self.standing.forget(message.node)
        if self.event is not None:
            self.event.on_trouble(message)
        self.decide_soon()

    def on_suspect(self, node: NodeId) -> None:
        """A node does not answer: nothing may use it for a while, whatever its lease says."""
        info = self._desk.cluster.nodes.get(node)
        if info is not None:
            reason = "it does not answer"
            self.on_gone(NodeGone(node=node, generation=info.generation, reason=reason))
            self.standing.avoid(node, self._desk.at)

    def on_news(self, message: PullFailed | FirstPartialToken) -> None:
        if self.event is None or self.event.record.id != message.event:
            return
        if isinstance(message, PullFailed):
            self.event.on_trouble(message)
        else:
            self.event.on_token(message)

    def on_answer(self, answer: Answer) -> None:
        """Takes in the first answer to a question of this model."""
        ticket = answer.ticket
        if ticket.event is not None:
            if self.event is not None and self.event.record.id == ticket.event:
                self.event.on_answer(answer)
        elif isinstance(answer, PathsPlanned):
            self.fleet.on_planned(answer)
        else:
            if isinstance(answer, Failed):
                self.fleet.on_not_planned(ticket.number)
            released = self._releases.on_answer(answer)
            if released is not None:
                self._note_released(released)

    def check_fixed(self, count: int | None) -> None:
        """BadInput if an operator's number of replicas is above the model's own limit; Conflict
        while a scaling event runs that would have to shrink, or cannot grow now."""
        limit = self.record.max_instances
        if count is not None and limit and count > limit:
            raise BadInput(f"{count} instances asked for, max_instances of the model is {limit}")
        event = self.event
        if event is None or event.over:
            return
        grows = count is not None and count >= len(self.fleet.members) + event.expected
        if not grows or self._desk.at < event.may_grow_at:
            raise Conflict(f"a scaling event of {self.record.name} is running: wait for its end")

    def remove(self) -> None:
        """The model was removed: nothing serves it from now on. Nodes forget it by themselves."""
        self._rooms.waiting.discard(self.record.model_id)
        if self.event is not None:
            self.event.cancel("the model was removed")
            self.event.effects.clear()
        self._removed = True
        self.fleet.close()

    def resume(self, begun: EventRecord) -> None:
        """Goes on with an event of an earlier planner, where it is."""
        self._follow(EventMachine(self._desk, self.record, begun, self.standing)).resume()

    # --- what is due ---

    def decide_soon(self) -> None:
        self._decide_at = float("-inf")

    def _decide_by(self, at: float) -> None:
        self._decide_at = min(self._decide_at, at)

    def settle(self) -> None:
        """Does everything that is due. It is called after every stimulus, and at `next_wake`."""
        if self._removed:
            return
        at = self._desk.at
        if self.event is not None:
            self.event.wake()
        self._take_effects()
        for node in self.standing.due(at):
            self._releases.again(node)
        for node in self.standing.in_state(State.DRAINING):
            if self.event is None or not self.event.sends(node):
                self._releases.drain(node)
        if at >= self._decide_at:
            self._decide()
        for path in self.fleet.settle():
            self._desk.span("path_formed", self.fleet.cause.trace, attributes=describe(path))
            if self.event is not None:
                self.event.on_path()

    def _take_effects(self) -> None:
        event = self.event
        if event is None:
            return
        effects = event.effects.copy()
        event.effects.clear()
        for effect in effects:
            match effect:
                case Joined(info):
                    if info.node not in self.fleet.members:
                        self.fleet.join(info, self.fleet.cause)
                    self._rooms.chosen(self.record.model_id)
                case Dropped(node):
                    self.standing.avoid(node, self._desk.at)
                    self._releases.free(node)
                case Freed(node):
                    self._releases.free(node)
        if event.over and not self._ended:
            self._ended = True
            self._on_event_over(event)

    def _on_event_over(self, event: EventMachine) -> None:
        if not event.no_room:
            self._desk.room_freed = True  # its targets can be reserved again
        if event.record.state is EventState.COMPLETE:
            self._failed = 0
        else:
            why, id_ = event.record.error or event.record.state.value, event.record.id
            self._note(Verdict.FAILED, self._sizing.wants, why, event=id_)
            self._retry_at = self._desk.at + min(RETRY_S * 2**self._failed, RETRY_MAX_S)
            self._failed += 1
            self._decide_by(self._retry_at)
        self.decide_soon()

    # --- how many ---

    def _decide(self) -> None:
        at, config = self._desk.at, self._desk.settings
        self._decided_at, self._decide_at = at, at + REPUBLISH_S
        if self._desk.cluster.loads.blind(at):
            self._decide_by(at + config.tick_s)
            return
        members = self.fleet.members
        have = len(self.fleet.replicas)
        draining = sum(m.draining for m in members.values())
        coming = len(members) - have - draining
        if self.event is not None:
            coming += self.event.expected
        wanted = self._sizing.wants
        decision = self._sizing.decide(
            self.record,
            have=have,
            coming=coming,
            leaving=self.standing.count,
            fleet=self.fleet,
            event=self.event.record if self.event is not None and coming else None,
        )
        self._releases.warm = self._sizing.warm
        asked = not self._desk.cluster.loads.demand(self.record.name).idle
        self._usage.note(at, len(members), asked=asked)
        if self._sizing.wants < wanted and self._rooms.waiting:
            self._desk.room_freed = True  # what is spare may give way
        if self._sizing.spare_at is not None and at < self._sizing.spare_at:
            self._decide_by(self._sizing.spare_at)
        self._rooms.waiting.discard(self.record.model_id)
        if decision.wake_at is not None:
            self._decide_by(decision.wake_at)
        elif self._sizing.surplus:  # the next replica goes when this one is gone
            self._decide_by(at + config.tick_s)
        missing = decision.replicas - have - coming
        if missing > 0:
            self._wanted_ns = self._wanted_ns or self._desk.now.wall_ns
            self._grow(decision, missing)
            return
        self._wanted_ns = 0
        if decision.replicas < have and not self.scaling:
            self._shrink(decision)

    def _grow(self, decision: Decision, missing: int) -> None:
        for node in self.standing.in_state(State.DRAINING):
            leaves = self._rooms.must_leave(node, self.record.model_id)
            if missing > 0 and not leaves:  # the cheapest capacity there is
                self.standing.stay(node)
                self.fleet.drain(node, False)
                self._tell(f"needed again: {decision.cause}", node)
                self._note(Verdict.MORE, decision.replicas, decision.cause, node)
                missing -= 1
        at = self._desk.at
        if missing == 0:
            return
        if self.event is not None and not self.event.over:
            self._append(self.event, decision, missing)
        elif at < self._retry_at:
            self._decide_by(self._retry_at)
        elif not self.standing.waits(at) and self._has_room(missing):
            self._begin(decision, missing)

    def _append(self, event: EventMachine, decision: Decision, missing: int) -> None:
        """Lets the running event grow, unless it cannot now."""
        if self._desk.at < event.may_grow_at < NEVER:
            self._decide_by(event.may_grow_at)
        elif self._desk.at >= event.may_grow_at and self._has_room(missing):
            self._note(Verdict.MORE, decision.replicas, decision.cause, event=event.record.id)
            event.grow(missing, self._not_here(), decision.cause)

    def _not_here(self) -> tuple[NodeId, ...]:
        """The nodes that are no targets for a further replica."""
        taken = self._rooms.taken(self.record.model_id)
        avoided = sorted(self.standing.avoided(self._desk.at) | taken)
        return tuple(dict.fromkeys((*self.fleet.members, *self.standing.released, *avoided)))

    def _has_room(self, missing: int) -> bool:
        """Whether at least one more replica has room now. Others are asked to make room for those
        that have not."""
        room = self._rooms.ask(self.record.model_id, missing)
        if room.free:
            self._waits_because = ""
            return True
        coming = len(room.made) + room.busy
        why = f"room for {coming} is being made" if coming else room.why_not
        if why != self._waits_because:
            self._waits_because = why
            self._tell(f"waits for memory for {missing} replicas: {why}")
            self._note(Verdict.WAITS, self._total + missing, why)
            self._log("info", "waits for memory", replicas=missing, why=why)
        return False

    def _begin(self, decision: Decision, missing: int) -> None:
        now, settings = self._desk.now, self._desk.settings
        detected_ns = now.wall_ns - int((now.at - decision.detected_at) * 1e9)
        before = self.event.record.history[-1][1] if self.event is not None else 0
        waiting_ns = self._desk.cluster.loads.waiting_since_ns(self.record.name)
        record = events.begin(
            EventId(settings.new_id("ev")),
            self.record,
            strategy=settings.strategy,
            cause=decision.cause,
            waiting_ns=max(before, min(waiting_ns or detected_ns, detected_ns)),
            detected_ns=detected_ns,
            wanted_ns=self._wanted_ns,
            decided_ns=now.wall_ns,
            expected=expected(
                self._desk.archive.events.values(), self.record.model_id, settings.scale_up_hold_s
            ),
            trace=settings.new_trace(),
        )
        self._tell(f"begins {record.id} for {missing} more replicas", record.id)
        self._note(Verdict.MORE, decision.replicas, decision.cause, event=record.id)
        self._desk.span("detect", record.trace, since_ns=detected_ns)
        self._desk.span(
            "decide",
            record.trace,
            attributes={"cause": decision.cause, "replicas": decision.replicas},
        )
        self._follow(EventMachine(self._desk, self.record, record, self.standing)).start(
            missing, self._not_here()
        )

    def _follow(self, event: EventMachine) -> EventMachine:
        self.event, self._ended, self._wanted_ns = event, False, 0
        self.fleet.cause = Cause(event.record.id, event.record.trace)
        return event

    # --- less ---

    def _shrink(self, decision: Decision) -> None:
        """Drains the emptiest replica; among equals the one that joined last."""

        def load(member: Member) -> int:
            return self.fleet.requests_over(member.node)

        victim = min(reversed(self.fleet.replicas), key=load)
        self._note(Verdict.FEWER, decision.replicas, decision.cause, victim.node)
        self._drain(victim.node, f"drains: {decision.cause}")

    def _drain(self, node: NodeId, why: str) -> None:
        self._tell(why, node)
        self.standing.drain(node, self._desk.now, self.fleet.members[node].trace)
        self.fleet.drain(node)

    def give_way(self, way: GiveWay) -> None:
        """A copy makes room for another model. The last copy in memory may, too."""
        why = f"makes room for {way.whom}: {way.why}"
        if way.grade is Grade.ASLEEP:
            if not (way.node in self.fleet.members or self._in_event(way.node)):
                self._note(Verdict.GIVES_WAY, self._sizing.wants, why, way.node)
                self._releases.free_stray(way.node)
        elif any(member.node == way.node for member in self.fleet.replicas):
            self._note(Verdict.GIVES_WAY, self._sizing.wants, why, way.node)
            self._drain(way.node, why)

    def claim(self) -> Claim:
        """What the model has of the devices' memory, and what it wants."""
        record, cluster, members = self.record, self._desk.cluster, self.fleet.members
        every, id_ = record.n_blocks, record.model_id
        draining = self.standing.in_state(State.DRAINING)
        leaving = {*self.standing.released, *draining}
        on_host = cluster.holders(id_, [Tier.HOST]).items()
        asleep = {n for n, held in on_host if len(held) == every and not self._in_event(n)}
        on_disk = {n for n, held in cluster.holders(id_, [Tier.DISK]).items() if len(held) == every}
        cached = any(len(held) == every for held in cluster.holders(id_, [Tier.CACHE]).values())
        return Claim(
            model=id_,
            name=record.name,
            nbytes=record.nbytes,
            priority=record.priority,
            floor=self._sizing.floor,
            wants=self._sizing.wants,
            asked=not cluster.loads.demand(record.name).idle,
            replicas={
                node: Replica(self.fleet.requests_over(node), m.since, loading=len(m.held) < every)
                for node, m in members.items()
                if not m.draining
            },
            asleep=frozenset(asleep.difference(members, leaving)),
            space=frozenset(cluster.with_space(id_)),
            leaving=frozenset(leaving),
            frees=frozenset(node for node in leaving if self._frees(node)),
            # An event that runs feeds what is appended to it.
            in_memory=self.scaling
            or cached
            or bool(self.fleet.replicas or draining or asleep.difference(leaving)),
            on_disk=frozenset(on_disk),
            attained=self._usage.attained(self._desk.at),
            cost=self._usage.chance(self._desk.at) * cluster.load_s(record),
        )

    def _frees(self, node: NodeId) -> bool:
        """Whether nothing of the model will stay in the arena of a node that it leaves."""
        known = self.standing.of(node)
        if known is None or known.state is State.DRAINING:
            return self._releases.keep(node) is not Tier.HOST
        return known.keep is not Tier.HOST

    def free_stray(self, node: NodeId) -> None:
        self._releases.free_stray(node)

    def owns(self, node: NodeId, holding: Holding) -> bool:
        """Whether what a node holds of the model in memory is there for a reason."""
        if node in self.fleet.members or self.standing.of(node) or self._loads(node):
            return True
        if self.event is not None and self.event.sends(node):
            return True
        if len(holding.blocks) < self.record.n_blocks:
            return False
        if holding.tier is Tier.GPU:  # it serves as soon as its node is no longer avoided
            return True
        return holding.tier is Tier.HOST and self._releases.keep(node) is Tier.HOST

    # --- helpers ---

    def _note_released(self, node: NodeId) -> None:
        if self._releases.freed(node):
            self.decide_soon()

    def _held(self, node: NodeId) -> frozenset[int]:
        every = range(self.record.n_blocks)
        return self._desk.cluster.executable(node, self.record.model_id).intersection(every)

    def _in_event(self, node: NodeId) -> bool:
        return self.event is not None and (self.event.loads(node) or self.event.sends(node))

    def _loads(self, node: NodeId) -> bool:
        return self.event is not None and self.event.loads(node)

    @property
    def _total(self) -> int:
        """Replicas that serve or are on their way."""
        members = sum(not m.draining for m in self.fleet.members.values())
        return members + (self.event.expected if self.event is not None else 0)

    def _note(
        self, verdict: Verdict, wanted: int, why: str, *nodes: NodeId, event: EventId | None = None
    ) -> None:
        """Keeps a decision for `lambdascale events --model`."""
        self.journal.note(
            Decided(
                at_ns=self._desk.now.wall_ns,
                verdict=verdict,
                replicas=self._total,
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
        self.fleet.validate()
        if self._removed:
            return
        members = self.fleet.members
        self.standing.validate(members, [n for n, m in members.items() if m.draining])
        if self.event is not None:
            self.event.validate()
            assert not self.event.effects
            assert self.event.over == self._ended
        for node in (*members, *self.standing.released):
            assert node in self._desk.cluster.nodes
