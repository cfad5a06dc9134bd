"""One model: takes in what happens to it, and passes it on to its parts.

`replicas` decides how many replicas there should be and begins scaling events, `fleet` has the
members and the instances over them, `standing` and `releases` the nodes that leave.
"""

from collections.abc import Collection, Iterator, Mapping

from services.planner.core.arbiter import Claim, GiveWay, Grade, Replica
from services.planner.core.arrivals import News
from services.planner.core.desk import Desk
from services.planner.core.event_machine import EventMachine
from services.planner.core.event_phases import Dropped, Freed, Joined, Phase
from services.planner.core.fleet import Cause, Fleet, describe
from services.planner.core.forecast import Expected, expected_of
from services.planner.core.journal import Journal
from services.planner.core.releases import Releases
from services.planner.core.replicas import NEVER, Replicas
from services.planner.core.rooms import Rooms, Turn
from services.planner.core.standing import Standing, State
from services.planner.core.stimuli import Answer, Failed, PathsPlanned
from shared.errors import BadInput, CapacityExceeded, Conflict
from shared.ids import NodeId
from shared.messages.decisions import Verdict
from shared.messages.pool import MEMORY, Holding, ModelRecord, NodeGone, Tier
from shared.messages.scaling import EventRecord, FirstPartialToken, PullFailed
from shared.parts import whole
from shared.wording import counted


class ModelMachine:
    def __init__(self, desk: Desk, rooms: Rooms, record: ModelRecord) -> None:
        self.fleet = Fleet(desk, record)
        self.standing = Standing(desk.story)
        self._releases = Releases(desk, rooms, record, self.fleet, self.standing)
        self._replicas = Replicas(desk, rooms, record, self.fleet, self.standing, self._releases)
        self._desk = desk
        self._rooms = rooms
        self._removed = False
        self.fleet.expects = self._expects
        self._replicas.cutting.choose(scaling=self.scaling)
        for node in desk.cluster.holders(record.model_id, [Tier.GPU]):
            self.on_holdings(node, ())

    @property
    def fixed(self) -> int | None:
        """The operator's number of replicas; None: there is none."""
        return self._desk.archive.fixed.get(self.record.model_id)

    @property
    def record(self) -> ModelRecord:
        return self._replicas.record

    @property
    def event(self) -> EventMachine | None:
        """The last event, over or not."""
        return self._replicas.event

    @property
    def scaling(self) -> bool:
        return self._replicas.scaling

    @property
    def wanted(self) -> int:
        """How many replicas there should be, whatever room and nodes there are."""
        return self._replicas.sizing.unbounded

    @property
    def waits(self) -> bool:
        """Whether it found no room, or no node, for what it wants."""
        sizing = self._replicas.sizing
        return self.record.model_id in self._rooms.waiting or sizing.unbounded > sizing.wants

    @property
    def journal(self) -> Journal:
        return self._replicas.journal

    @property
    def next_wake(self) -> float:
        if self._removed:
            return NEVER
        return min(self._replicas.next_wake, self.fleet.next_wake, self._releases.next_wake)

    # --- what happens to it ---

    def on_holdings(self, node: NodeId, gained: Collection[int]) -> None:
        """What a node holds of the model may have changed. `gained` is new."""
        self._on_holdings({node: (gained, self._desk.now.wall_ns)})

    def hear_holdings(self, node: NodeId, gained: Collection[int]) -> float:
        """A report of a node says what it holds now (see `on_holdings`). Returns when something
        follows from it."""
        self.on_holdings(node, gained)
        return min(self._due(), self._releases.next_wake)

    def on_blocks(self, news: News) -> float:
        """Takes in reports of one event. Returns when something follows from them."""
        event = self.event
        told = event is not None and event.record.id == news[0][0].event
        if event is not None and told:
            event.on_blocks(news)
        gains: dict[NodeId, tuple[Collection[int], int]] = {}
        for arrivals, gained in news:
            if gained:
                ended_ns = max([each.finished_ns for each in arrivals.blocks])
                if before := gains.pop(arrivals.node, None):
                    gained, ended_ns = gained.union(before[0]), max(ended_ns, before[1])
                gains[arrivals.node] = gained, ended_ns
        self._on_holdings(gains, told=told)
        return self._due()

    def _on_holdings(
        self, gains: Mapping[NodeId, tuple[Collection[int], int]], *, told: bool = False
    ) -> None:
        """What nodes hold of the model may have changed. Each has these new blocks, since so many
        ns. `told`: the event knows when they came. What follows from all of it is done once."""
        found: dict[NodeId, frozenset[int]] = {}
        lost: list[NodeId] = []
        for node, (gained, at_ns) in gains.items():
            if self.standing.count:
                self._note_released(node)
                if self.standing.leaving(node):
                    continue
            held, member = self._held(node), self.fleet.members.get(node)
            if self.event is not None:  # of a target that has just left the fleet, too
                new = () if told and held.issuperset(gained) else gained
                self.event.on_holdings(node, held, new, at_ns)
            if member is not None:
                found[node] = held
                if not member.held <= held:
                    lost.append(node)
            elif self._is_whole(node, held) and self.standing.fit(node, self._desk.at):
                self._log("info", "complete copy found", node=node)
                part = self._desk.cluster.part(node, self.record.model_id)
                self.fleet.join(self._desk.cluster.nodes[node], Cause(), part)
                self.decide_soon()
        if not found:
            return
        self.fleet.look(found)
        if self.event is not None:
            self.event.after_holdings()
        for node in lost:
            if not self._loads(node):
                self._log("warning", "a member lost blocks", node=node)
                self._releases.leave(node)
        self._replicas.on_holdings()

    def on_settings(self, record: ModelRecord) -> None:
        """Takes in that the operator has changed the model's settings. Its weights are the same."""
        self._replicas.record = record

    def minds_load(self) -> bool:
        """Whether something follows from a change of its load, beside what is due anyway. Mostly it
        is decided soon enough."""
        return self._replicas.minds_load() or not self.standing.all_well

    def on_load(self) -> float:
        """Returns when something follows from it."""
        self._replicas.on_load()
        return self._due()

    def _due(self) -> float:
        """When something follows from what was just heard. At once if nodes leave: they may have
        waited for it."""
        event = self.event
        if self.standing.count or (event is not None and event.effects):
            return self._desk.at
        return min(self._replicas.next_wake, self.fleet.next_wake)

    def on_joined(self) -> None:
        self._replicas.on_joined()

    def on_more_room(self) -> None:
        self._replicas.on_more_room()

    @property
    def turn(self) -> Turn:
        """Models with the least turn get free memory first."""
        return self._replicas.turn

    def decide_soon(self) -> None:
        self._replicas.decide_soon()

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

    def on_answer(self, answer: Answer) -> float:
        """Takes in the first answer to a question of this model. Returns when something follows
        from it."""
        ticket = answer.ticket
        if ticket.event is not None:
            if self.event is not None and self.event.record.id == ticket.event:
                self.event.on_answer(answer)
                if self.event.phase is Phase.SENDING:  # other targets have still to answer
                    return self._due()
        elif isinstance(answer, PathsPlanned):
            self.fleet.on_planned(answer)
        else:
            if isinstance(answer, Failed):
                self.fleet.on_not_planned(ticket.number)
            released = self._releases.on_answer(answer)
            if released is not None:
                self._note_released(released)
        return self._desk.at

    def check_fixed(self, count: int | None) -> None:
        """BadInput if an operator's number of replicas is above the model's own limit;
        CapacityExceeded if not even all nodes together have room for one; Conflict while a scaling
        event runs that would have to shrink, or cannot grow now."""
        self._replicas.cutting.choose(scaling=self.scaling)
        if count and (why := self._replicas.cutting.too_large):
            raise CapacityExceeded(why)
        limit = self.record.max_instances
        if count is not None and limit and count > limit:
            raise BadInput(
                f"{counted(count, 'instance')} asked for, max_instances of the model is {limit}"
            )
        event = self.event
        if event is None or event.over:
            return
        grows = count is not None and count >= self._replicas.total
        if not grows or self._desk.at < event.may_grow_at:
            raise Conflict(f"a scaling event of {self.record.name} is running: wait for its end")

    def remove(self) -> None:
        """The model was removed: nothing serves it from now on. Nodes forget it by themselves."""
        self._rooms.asks_no_more(self.record.model_id)
        self._rooms.wants_none(self.record.model_id)
        if self.event is not None:
            self.event.cancel("the model was removed")
            self.event.effects.clear()
        self._removed = True
        self.fleet.close()

    def resume(self, begun: EventRecord) -> None:
        """Goes on with an event of an earlier planner, where it is."""
        self._replicas.cutting.choose(scaling=False, planned=begun.parts.values())
        self._replicas.follow(EventMachine(self._desk, self.record, begun, self.standing)).resume()

    def _expects(self) -> Expected | None:
        event = self.event
        if event is None or event.over:
            return None
        return expected_of(event.record, self._desk.now.wall_ns)

    # --- what is due ---

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
            if self._in_event(node):
                self._drain_in_event(node)
            else:
                self._releases.drain(node)
        self._replicas.settle()
        if self._take_effects():  # the event goes on without a node that leaves
            self._replicas.settle()
        for path in self.fleet.settle():
            self._desk.span("path_formed", self.fleet.cause.trace, attributes=describe(path))
            if self.event is not None:
                self.event.on_path()

    def _drain_in_event(self, node: NodeId) -> None:
        """Lets a draining node go that has a part in the running event, once it sends nothing to
        others and no request runs over it, or its time is over."""
        if self._desk.cluster.left_s(node, self._desk.now.wall_ns) <= 0:
            self._replicas.end(node, Verdict.FEWER, "the time of its node is over")
        elif not (self._sends(node) or self.fleet.uses(node)):
            self._replicas.end(node, Verdict.FEWER, "its requests have ended")

    def _take_effects(self) -> bool:
        """Returns whether there were any."""
        event = self.event
        if event is None:
            return False
        effects = event.effects.copy()
        event.effects.clear()
        for effect in effects:
            match effect:
                case Joined(info, part, wakes):
                    if info.node not in self.fleet.members:
                        self.fleet.join(info, self.fleet.cause, part, wakes=wakes)
                    if self._rooms.chosen(self.record.model_id, info.node):
                        self._replicas.decide_soon()  # it may need no more
                case Dropped(node):
                    self.standing.avoid(node, self._desk.at)
                    self._releases.free(node)
                case Freed(node):
                    self._releases.free(node)
        return bool(effects)

    # --- what it has ---

    def give_way(self, way: GiveWay) -> None:
        """A copy makes room for another model. The last copy in memory may, too."""
        why = f"makes room for {way.whom}: {way.why}"
        node, sleeps = way.node, way.grade is Grade.ASLEEP
        if sleeps and not (node in self.fleet.members or self._in_event(node)):
            self._replicas.note(Verdict.GIVES_WAY, self._replicas.sizing.wants, why, node)
            self._releases.free_stray(node)
        elif not sleeps and node in self.fleet.members:
            self._leave(node, why, at_once=way.at_once)

    def _leave(self, node: NodeId, why: str, *, at_once: bool) -> None:
        """A replica leaves. `at_once`: its requests go on elsewhere."""
        if at_once:
            self._replicas.end(node, Verdict.GIVES_WAY, why)
        elif any(member.node == node for member in self.fleet.replicas):
            self._replicas.note(Verdict.GIVES_WAY, self._replicas.sizing.wants, why, node)
            self._replicas.drain(node, why)

    def targets(self, priority: int) -> Iterator[NodeId]:
        """The targets of the running event that do not give way to a model of this priority."""
        if self.event is None or self.event.over:
            return
        for node in self.event.record.targets:
            hosts = self._desk.cluster.hosts(node, self.record.model_id)
            if not (hosts and node in self.fleet.members and self.record.priority < priority):
                yield node

    def claim(self) -> Claim:
        """What the model has of the devices' memory, and what it wants."""
        record, cluster, members = self.record, self._desk.cluster, self.fleet.members
        id_, devices = record.model_id, max(1, len(self.fleet.cut))
        draining = self.standing.in_state(State.DRAINING)
        leaving = {*self.standing.released, *draining}
        on_host = cluster.holders(id_, [Tier.HOST]).items()
        asleep = {n for n, held in on_host if self._is_whole(n, held) and not self._in_event(n)}
        in_memory = cluster.holders(id_, MEMORY).values()
        together = frozenset[int]().union(*in_memory) >= set(range(record.n_blocks))
        requests = self.fleet.requests_by_node()
        in_caches = cluster.holders(id_, [Tier.CACHE])
        uses = self._replicas.usage.uses_per_minute(self._desk.at)
        return Claim(
            model=id_,
            name=record.name,
            nbytes=self._replicas.cutting.room,
            priority=record.priority,
            floor=self._replicas.sizing.floor * devices,
            wants=self._replicas.sizing.wants * devices,
            asked=not cluster.loads.demand(record.name).idle,
            replicas={
                node: Replica(
                    requests[node],
                    m.since,
                    loading=not m.is_complete(record.n_blocks),
                )
                for node, m in members.items()
                if not m.draining
            },
            asleep=frozenset(asleep.difference(members, leaving)),
            space=frozenset(cluster.with_space(id_)),
            leaving=frozenset(leaving),
            draining=frozenset(draining),
            frees=frozenset(node for node in leaving if self._frees(node)),
            # An event that runs feeds what is appended to it.
            in_memory=self.scaling or together,
            on_disk=cluster.whole_on_disk(record),
            attained=self._replicas.usage.attained(self._desk.at),
            cost=uses * cluster.load_s(record),
            cost_beside=uses * cluster.copy_s(record, self._desk.settings.link_bytes_per_s),
            cached=any(len(held) == record.n_blocks for held in in_caches.values()),
            group=devices,
            starved=self._replicas.usage.starved(self._desk.at),
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
        if self._sends(node):
            return True
        part = holding.part
        if part not in (None, *self.fleet.cut):
            return False
        if len(holding.blocks) < (part.size if part else self.record.n_blocks):
            return False
        if holding.tier is Tier.GPU:  # it serves as soon as its node is no longer avoided
            return True
        return holding.tier is Tier.HOST and self._releases.keep(node) is Tier.HOST

    # --- helpers ---

    def _note_released(self, node: NodeId) -> None:
        if self._releases.freed(node):
            self.decide_soon()

    def _held(self, node: NodeId) -> frozenset[int]:
        return self._desk.cluster.executable(node, self.record.model_id) & self.fleet.every

    def _is_whole(self, node: NodeId, held: Collection[int]) -> bool:
        """Whether that is all that the node has room for, and of use together with what others
        have."""
        part = self._desk.cluster.part(node, self.record.model_id)
        wanted = part or whole(self.record.n_blocks)
        return len(held) == wanted.size and (part is None or part in self.fleet.cut)

    def _in_event(self, node: NodeId) -> bool:
        """Whether the running event needs the node, or is about to make it a target."""
        event = self.event
        return event is not None and (event.needs(node) or event.awaits(node))

    def _sends(self, node: NodeId) -> bool:
        return self.event is not None and self.event.sends(node)

    def _loads(self, node: NodeId) -> bool:
        return self.event is not None and self.event.loads(node)

    def _log(self, level: str, text: str, **fields: str | int | float | None) -> None:
        self._desk.log(level, text, model=self.record.name, **fields)

    def validate(self) -> None:
        """Raises AssertionError if parts of the state contradict each other."""
        self.fleet.validate()
        if self._removed:
            return
        members = self.fleet.members
        self.standing.validate(members, [n for n, m in members.items() if m.draining])
        self._replicas.validate()
        for node in (*members, *self.standing.released):
            assert node in self._desk.cluster.nodes
