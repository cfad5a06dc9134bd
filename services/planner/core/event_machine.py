"""The course of one scaling event, from its decision to its end (`event_phases` has the table).

Trouble that comes in another phase waits until the event is `loading`. All trouble that has come by
then is answered with one revision.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import msgspec

from services.planner.core import commands, events
from services.planner.core.arrivals import News
from services.planner.core.desk import ASK_S
from services.planner.core.event_base import NEVER, THINK_S
from services.planner.core.event_phases import Case, Phase, Trouble
from services.planner.core.forecast import later
from services.planner.core.growing import Growing, Needs
from services.planner.core.ledger import planned
from services.planner.core.part_plans import roles_by_part, together
from services.planner.core.placement import Plan, Roles
from services.planner.core.stimuli import Answer, Appended, Failed, Planned, Repaired, Replied
from shared.errors import CapacityExceeded, PlanError
from shared.ids import Generation, NodeId
from shared.messages import pool
from shared.messages.pool import NodeGone, NodeInfo, Reserved, Sources
from shared.messages.scaling import EventState, FirstPartialToken, Landing
from shared.parts import Part


class EventMachine(Growing):
    _reserved: Reserved | None = None
    _sources: Sources | None = None
    _infos: tuple[NodeInfo, ...] = ()
    """Infos of the targets."""
    _reserved_ns: int | None = None
    _form_at = NEVER

    @property
    def next_wake(self) -> float:
        if self.phase is Phase.FORMING:
            return self._form_at
        if self.phase is Phase.SENDING:
            return self._orders.next_wake
        if self.phase is Phase.LOADING:
            return min(self._trust.look_at, self._news_at + self._patience)
        return NEVER

    def awaits(self, node: NodeId) -> bool:
        """Whether the node is set aside for the event, which has no plan for it yet."""
        if self.over:
            return False
        if self.record.state is EventState.DECIDED:
            infos = self._reserved.targets if self._reserved is not None else ()
        else:
            infos = self.newcomers
        return any(info.node == node for info in infos)

    # --- from the decision to the first bytes ---

    def start(
        self, needs: Needs, exclude: tuple[NodeId, ...], reading_s: Mapping[str, float]
    ) -> None:
        """Reserves targets for what replicas lack. `reading_s`: see `Links`."""
        self._promised, self._reading_s = needs, reading_s
        self._desk.announce(self.record)
        self._tell(f"decided: {self.record.cause}")
        event, reserve = self.record.id, self._reserve(needs, exclude)
        query = pool.SourcesQuery(model_id=self._model.model_id, cause=event)
        self._do(commands.Reserve(ticket=self._ask(ASK_S), message=reserve, cause=event))
        self._do(commands.FindSources(ticket=self._ask(ASK_S), message=query, cause=event))

    def resume(self) -> None:
        """Goes on with an event that another planner began. The nodes follow its plan, and what
        they hold by now is known. A node that has not got its part is found when it stalls."""
        self._tell("goes on under another planner")
        targets, nodes = self.record.targets, self._desk.cluster.nodes
        transfers = self.record.transfers
        pulled = {node: {t.block for t in transfers if t.dst == node} for node in targets}
        receiving = tuple(node for node in targets if pulled[node])
        self._roles = Roles(self.record.sources, (), (), receiving)
        self._promoting = {n: self._wanted_by(n) - self._held(n) - pulled[n] for n in targets}
        self._orders.sent = dict.fromkeys(targets, self.record.revision)
        self._trust.begin(self._desk.at, len(self.record.transfers))
        self.record = msgspec.structs.replace(self.record, bytes_moved=0)
        for node in targets:
            self._look(node)
            sizes = self._model.block_bytes if node in receiving else (0,) * self._model.n_blocks
            self._count(node, {block: sizes[block] for block in self._held(node)})
        self.effects += [self._joined(nodes[n]) for n in targets if n in nodes]
        reason = "it went while there was no planner"
        self._troubles += [
            NodeGone(node=node, generation=Generation(0), reason=reason)
            for node in dict.fromkeys((*self.record.sources, *targets))
            if node not in nodes
        ]
        self._step(Phase.LOADING)
        self._go_on()

    def on_answer(self, answer: Answer) -> None:
        """Takes in the first answer to a question of this event."""
        if self._answers_growth(answer):
            return
        if self.phase is Phase.SENDING:
            self._orders.on_answer(answer, self.record, self._promoting)
            self._sent()
            return
        if answer.ticket.number not in self._waits:
            return  # the event has gone on without it
        node = self._waits.pop(answer.ticket.number)
        match self.phase, answer:
            case Phase.JUDGING, _ if node is not None:
                self._on_ping(node, answer)
            case Phase.REPAIRING, Repaired():
                self._on_repaired(answer.transfers)
            case Phase.REPAIRING, Appended():
                self._on_amended(answer.plan.transfers)
            case Phase.REPAIRING, Failed():
                self._on_not_repaired(answer.error)
            case _, Failed():
                self.fail(answer.error)
            case Phase.RESERVING, Replied():
                self._on_reserved(answer)
            case Phase.PLANNING, Planned():
                self._on_planned(answer.plan)
            case _:
                kind = type(answer).__name__
                self.fail(PlanError(f"a {kind} answers nothing in phase {self.phase.value}"))

    def _on_reserved(self, answer: Replied) -> None:
        if isinstance(answer.reply, Reserved):
            self._reserved = answer.reply
        elif isinstance(answer.reply, Sources):
            self._sources = answer.reply
        if self._reserved is None or self._sources is None:
            return
        self._note(self._desk.now.wall_ns, "reserved_s")
        meets, at = self._desk.cluster.meets, self._desk.at
        dealt = self._dealt(self._promised, self._reserved.targets)
        self._infos = tuple(dealt)
        sources = [source for source in self._sources.sources if meets(source.info)]
        if not self._infos:
            self.fail(CapacityExceeded("no node has room for another replica"))
            return
        chosen = {info.node for info in self._infos}
        if others := tuple(i.node for i in self._reserved.targets if i.node not in chosen):
            self._unreserve(others)
        self._promised = tuple((part,) for part in dealt.values())
        staying = [s for s in sources if self._standing.fit(s.info.node, at)]
        try:
            by_part = roles_by_part(staying, {i.node: part for i, part in dealt.items()})
        except PlanError as error:
            self.fail(error)
        else:
            self.record = msgspec.structs.replace(self.record, parts=self._parts_of(dealt))
            self._plan(by_part)

    def _plan(self, by_part: Mapping[Part, Roles]) -> None:
        self._step(Phase.PLANNING)
        roles = together(by_part.values())
        self._roles, self._reserved_ns = roles, self._desk.now.wall_ns
        settings = self._desk.settings
        targets = (*roles.promoting, *roles.receiving)
        plan = commands.MakePlan(
            ticket=self._ask(THINK_S),
            roles=by_part,
            held={node: self._held(node) for node in targets},
            model=self._model,
            links=replace(self._links(), reading_s=self._reading_s),
            strategy=settings.strategy,
            executing={*targets, *(n for n in roles.memory if self._held(n))},
            max_stages=settings.max_stages,
            cause=self.record.id,
        )
        self._do(plan)

    def _on_planned(self, plan: Plan) -> None:
        roles, now = self._roles, self._desk.now
        if roles is None:
            raise self._desk.story.illegal(self.record.id, "a plan without roles")
        self._step(Phase.FORMING)
        self._promoting = dict(plan.loading)
        since_decision_s = (now.wall_ns - self.record.decided_ns) / 1e9
        record = msgspec.structs.replace(
            self.record,
            sources=plan.sources,
            targets=(*roles.promoting, *roles.receiving),
            strategy=plan.strategy,
            transfers=plan.transfers,
            predicted=later(plan.forecast.predicted, since_decision_s),
            expected=planned(self.record.expected, plan.forecast.predicted, setup_s=plan.setup_s),
            physical_limit_s=plan.forecast.physical_limit_s,
            ports=plan.ports,
        )
        for words in plan.ports:
            self._tell(words)
        record = events.note(record, now.wall_ns, "planned_s")
        self._set(events.advance(record, EventState.PLANNED, now.wall_ns))
        self._span_of_plan(plan=plan, reserved_ns=self._reserved_ns)
        self._set(events.advance(self.record, EventState.TRANSFERRING, now.wall_ns))
        self.effects += map(self._joined, self._infos)
        self._promised = ()
        for node in self.record.targets:
            self._look(node)
        if (read := self.read()) is not None:  # it is known now when others may read its disks
            self._desk.disks_at = min(self._desk.disks_at, now.at + read.free_in)
        self._form_at = now.at + plan.setup_s
        if plan.setup_s <= 0:
            self._send(self.record.targets)

    def _send(self, targets: Iterable[NodeId]) -> None:
        self._step(Phase.SENDING)
        self._note(self._desk.now.wall_ns, "sent_s")
        self._trust.begin(self._desk.at, len(self.record.transfers))
        self._orders.send(self.record, targets, self._promoting)
        self._sent()

    def _sent(self) -> None:
        """Goes on once every target has answered, without the targets that did not take their
        part."""
        if not self._orders.done:
            return
        refused = self._orders.refused
        if not refused:
            self._load()
            return
        for node, error in refused.items():
            self._log("warning", "target refused its plan", node=node, error=str(error))
        whys = "; ".join(f"{node}: {error}" for node, error in refused.items())
        self._drop(refused, fit=self._orders.gone)
        self._replan(Case(f"targets refused: {whys}"))

    # --- until everything has arrived ---

    def _load(self) -> None:
        if self.phase is Phase.SENDING:
            self._news_at = self._desk.at
        self._step(Phase.LOADING)
        self._go_on()

    def _go_on(self) -> None:
        """In `loading`: finishes if all is there, mends if something went wrong, or else grows if
        that was asked for."""
        if not self._incomplete:
            self._finish(EventState.COMPLETE)
        elif self._troubles:
            self._mend()
        else:
            self._plan_growth()

    def wake(self) -> None:
        """Does what is due after some time has passed."""
        at = self._desk.at
        if self.phase is Phase.FORMING and at >= self._form_at:
            self._send(self.record.targets)
        elif self.phase is Phase.SENDING and at >= self._orders.next_wake:
            self._orders.wake(self.record, self._promoting)
            self._sent()
        elif self.phase is Phase.LOADING and at >= self._news_at + self._patience:
            self._stalled()
        elif self.phase is Phase.LOADING and at >= self._trust.look_at:
            self._look_for_slow_nodes()

    def on_blocks(self, news: News) -> None:
        """Targets say that they have blocks."""
        at, moved, landings = self._desk.at, 0, list[Landing]()
        for arrivals, gained in news:
            node = arrivals.node
            if node not in self.targets:
                continue
            if gained and not self.over:
                self._news_at, self._stalls = at, 0
            since = zip(arrivals.blocks, arrivals.since_s, strict=True)
            self._trust.land(node, {each.block: at - ago_s for each, ago_s in since})
            landings += arrivals.blocks
            counted = self._counted.setdefault(node, set())
            for each in arrivals.blocks:
                if each.block not in counted:
                    counted.add(each.block)
                    moved += each.nbytes if each.source != node else 0
        if landings:
            self._noted(events.arrived(self.record, landings, moved))

    def on_holdings(
        self, node: NodeId, held: frozenset[int], gained: Collection[int], at_ns: int
    ) -> None:
        """What a node holds has changed: it is `held` now, of which the blocks `gained` are new.
        `after_holdings` is to follow."""
        if not self.loads(node):
            return
        before = len(self._incomplete)
        self._compare(node, held)
        if new := [block for block in gained if block in held]:
            self._news_at, self._stalls = self._desk.at, 0
            self._trust.land(node, dict.fromkeys(new, self._desk.at), vague=True)
            sizes, loaded = self._model.block_bytes, self._promoting.get(node, ())
            self._count(node, {block: 0 if block in loaded else sizes[block] for block in new})
        if len(self._incomplete) < before:
            self.record = msgspec.structs.replace(self.record, last=node)
            self._note(at_ns, "first_complete_s")

    def after_holdings(self) -> None:
        """All that was heard just now of what nodes hold is taken in."""
        if self.phase is Phase.LOADING:
            self._go_on()

    def _count(self, node: NodeId, nbytes: Mapping[int, int]) -> None:
        """Counts the bytes that blocks brought to a target, once for each."""
        counted = self._counted.setdefault(node, set())
        moved = sum(size for block, size in nbytes.items() if block not in counted)
        counted.update(nbytes)
        if moved:
            moved += self.record.bytes_moved
            self.record = msgspec.structs.replace(self.record, bytes_moved=moved)

    def _look(self, node: NodeId) -> None:
        self._compare(node, self._held(node))

    def _compare(self, node: NodeId, held: frozenset[int]) -> None:
        if held != self._wanted_by(node):
            self._incomplete[node] = None
        else:
            self._incomplete.pop(node, None)

    def on_path(self) -> None:
        """A path over nodes that are still loading has opened. The time of the first is noted."""
        if self.over:
            return
        at = self._desk.now.wall_ns
        self._note(at, "first_path_s")
        if self.record.state is EventState.TRANSFERRING:
            self._set(events.advance(self.record, EventState.SERVING, at))

    def on_token(self, message: FirstPartialToken) -> None:
        if message.stages > 1:
            self._note(message.at_ns, "first_partial_token_s")

    def on_trouble(self, trouble: Trouble) -> None:
        if self.over:
            return
        self._troubles.append(trouble)
        if trouble.node in self.targets:
            self._look(trouble.node)
        if self.phase is Phase.LOADING:
            self._go_on()
        elif self.phase is Phase.SENDING and isinstance(trouble, NodeGone):
            self._orders.on_gone(trouble.node)
            self._sent()
