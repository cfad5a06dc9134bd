"""How a running event takes in more targets.

    wanted: the registry sets newcomers aside -> reserved -> planning -> targets like the others

The event goes on meanwhile. Newcomers are reserved at any time, but they join only while the event
is `loading` without trouble, so that their part of the schedule is appended to what really flows. A
plan that was made for another revision is made anew. If the event ends first, the newcomers are
free again, and the model decides anew.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from services.planner.core import commands, events
from services.planner.core.choose import AUTO
from services.planner.core.cut import room_for
from services.planner.core.desk import ASK_S
from services.planner.core.event_base import MAX_REVISIONS, NEVER, THINK_S
from services.planner.core.event_phases import Phase
from services.planner.core.mending import Mending
from services.planner.core.multicast.strategies import FORMS_GROUP, LOCAL
from services.planner.core.placement import Held, Plan
from services.planner.core.stimuli import Answer, Appended, Failed, Replied
from shared.errors import PlanError
from shared.ids import NodeId
from shared.messages import pool
from shared.messages.pool import NodeInfo, Reserved, Tier
from shared.messages.scaling import EventState, Growth
from shared.parts import Part, whole

Needs = tuple[tuple[Part, ...], ...]
"""What is missing for replicas: for each of them, the parts that it lacks. A model that fits a
device has one part."""
GROW_AGAIN_S = 1.0
"""Seconds for which an event that could not grow is not asked to again."""


@dataclass(slots=True)
class _Wanted:
    """Newcomers, until they are targets."""

    needs: Needs
    cause: str
    asked: int
    """The number of the open question; 0: none."""
    parts: dict[NodeInfo, Part] = field(default_factory=dict)
    """The newcomers, once they are reserved, with what they are to hold."""
    revision: int = 0
    """The revision to which the plan that is being made would be appended."""
    since_ns: int = 0


class Growing(Mending):
    _wanted: _Wanted | None = None
    _grow_at = float("-inf")
    """When it may be asked to grow again after it could not."""
    _promised: Needs = ()
    """What the event was begun for, until its targets are known."""

    # --- for its model ---

    @property
    def expected(self) -> Counter[Part]:
        """How many devices were asked for that are no members yet, by what they are to hold."""
        if self.over:
            return Counter()
        more: Iterable[Part] = ()
        if (wanted := self._wanted) is not None:
            more = wanted.parts.values() or chain(*wanted.needs)
        return Counter(chain(*self._promised, more))

    @property
    def newcomers(self) -> tuple[NodeInfo, ...]:
        """Nodes that are set aside and are no targets yet."""
        return tuple(self._wanted.parts) if self._wanted is not None else ()

    @property
    def growing(self) -> bool:
        return self._wanted is not None

    @property
    def may_grow_at(self) -> float:
        """From when on it may be asked to grow, as far as is known now."""
        grows = self._desk.settings.strategy not in FORMS_GROUP
        phases = (Phase.SENDING, Phase.LOADING, Phase.JUDGING, Phase.REPAIRING)
        # Half of the revisions are left for trouble.
        may = grows and self.phase in phases and self.revisions_left > MAX_REVISIONS // 2
        return self._grow_at if may and not self.growing else NEVER

    def grow(self, needs: Needs, exclude: tuple[NodeId, ...], cause: str) -> None:
        """Asks for targets for what further replicas lack."""
        self._tell(f"grows by up to {len(needs)}: {cause}")
        ticket = self._ticket(ASK_S)
        self._wanted = _Wanted(needs, cause, ticket.number, since_ns=self._desk.now.wall_ns)
        reserve = self._reserve(needs, exclude)
        self._do(commands.Reserve(ticket=ticket, message=reserve, cause=self.record.id))

    def _reserve(self, needs: Needs, exclude: tuple[NodeId, ...]) -> pool.Reserve:
        parts, sizes = tuple(chain(*needs)), self._model.block_bytes
        all_ = whole(self._model.n_blocks)
        rooms = [
            self._model.nbytes if part == all_ else room_for(sizes[part.start : part.stop])
            for part in set(parts)
        ]
        return pool.Reserve(
            event=self.record.id,
            model_id=self._model.model_id,
            nbytes=max(rooms),
            count=len(parts),
            exclude=exclude,
            groups=() if set(parts) == {all_} else needs,
            cause=self.record.id,
        )

    def _dealt(self, needs: Needs, infos: Sequence[NodeInfo]) -> dict[NodeInfo, Part]:
        """What each node that was set aside is to hold. Nodes that are not there are left out, and
        the others of their groups."""
        dealt: dict[NodeInfo, Part] = {}
        left = iter(infos)
        for group in needs:
            nodes = tuple(islice(left, len(group)))
            if len(group) == len(nodes) and all(map(self._may_join, nodes)):
                dealt |= zip(nodes, group, strict=True)
        return dealt

    def _parts_of(self, dealt: Mapping[NodeInfo, Part]) -> dict[NodeId, Part]:
        """For the event's record: those that hold a part of the model."""
        all_ = whole(self._model.n_blocks)
        return {info.node: part for info, part in dealt.items() if part != all_}

    # --- its course ---

    def _answers_growth(self, answer: Answer) -> bool:
        """Takes in the answer if it is about growth. Returns whether it is."""
        wanted = self._wanted
        if wanted is None or answer.ticket.number != wanted.asked:
            return False
        wanted.asked = 0
        match answer:
            case Failed():
                self._give_up(wanted, str(answer.error))
            case Replied(reply=Reserved(targets=infos)):
                wanted.parts = self._dealt(wanted.needs, infos)
                self._keep_present(wanted, "no node has room for another replica")
            case Appended() if self._fits(wanted, answer.plan):
                self._take_in(wanted, answer.plan)
            case Appended():
                self._keep_present(wanted, "no newcomer is there any more")
            case _:
                kind = type(answer).__name__
                self.fail(PlanError(f"a {kind} answers nothing while the event grows"))
        return True

    def _may_join(self, info: NodeInfo) -> bool:
        """Whether a node that was set aside is there. Its copy may have given way meanwhile: a node
        that is being released may not be told to load as well."""
        return self._desk.cluster.meets(info) and not self._standing.leaving(info.node)

    def _keep_present(self, wanted: _Wanted, why_none: str) -> None:
        """Goes on with the newcomers that are there."""
        out = (*self._out, *self.record.targets)
        there = {i: p for i, p in wanted.parts.items() if self._may_join(i) and i.node not in out}
        if lost := tuple(info.node for info in wanted.parts if info not in there):
            self._unreserve(lost)
        wanted.parts = there
        if not wanted.parts:
            self._give_up(wanted, why_none)
        elif self.phase is Phase.LOADING:
            self._plan_growth()

    def _plan_growth(self) -> None:
        """In `loading`: asks for what newcomers get, if there are any without a plan."""
        wanted = self._wanted
        if wanted is None or wanted.asked or not wanted.parts:
            return
        newcomers = {info.node: frozenset(part.blocks) for info, part in wanted.parts.items()}
        own = self._with_copies(newcomers)
        receiving = tuple(node for node in newcomers if node not in own)
        ticket = self._ticket(THINK_S)
        wanted.asked, wanted.revision = ticket.number, self.record.revision
        lacked = {node: newcomers[node] - self._held(node) for node in receiving}
        can_send = {
            node: blocks
            for node, blocks in self._to_send().items()
            if node not in newcomers and self._may_send(node)
        }
        self._append(ticket, self._to_come(), lacked, can_send)

    def _with_copies(self, newcomers: Held) -> set[NodeId]:
        """Newcomers that load a copy of their own: from host memory, or from their disk if that is
        known to be faster than the link, or if the strategy moves nothing."""
        strategy, links = self._desk.settings.strategy, self._links()
        holders, id_ = self._desk.cluster.holders, self._model.model_id
        memory, disks = holders(id_, [Tier.HOST, Tier.CACHE]), holders(id_, [Tier.DISK])
        nothing = frozenset[int]()

        def has_own(node: NodeId, wanted: frozenset[int]) -> bool:
            faster = strategy == LOCAL or (strategy == AUTO and links.disk_beats_link(node))
            return wanted <= memory.get(node, nothing) or (
                faster and wanted <= disks.get(node, nothing)
            )

        return {node for node, wanted in newcomers.items() if has_own(node, wanted)}

    def _may_send(self, node: NodeId) -> bool:
        """Whether newcomers may be told to load from the node. Targets that drain still send what
        others were told to load from them."""
        return node in self._desk.cluster.nodes and self._standing.fit(node, self._desk.at)

    def _fits(self, wanted: _Wanted, plan: Plan) -> bool:
        """Whether the plan still holds: for this revision, with senders and newcomers that are
        there."""
        meets = self._desk.cluster.meets
        return (
            self.phase is Phase.LOADING
            and self.record.revision == wanted.revision
            and all(meets(info) and info.node not in self._out for info in wanted.parts)
            and all(map(self._may_send, {t.src for t in plan.transfers}))
        )

    def _take_in(self, wanted: _Wanted, plan: Plan) -> None:
        """Makes targets of the newcomers, and gives them their parts. The other targets keep
        theirs."""
        self._wanted, now = None, self._desk.now
        nodes = tuple(info.node for info in wanted.parts)
        newcomers = {info.node: frozenset(part.blocks) for info, part in wanted.parts.items()}
        self._promoting |= {node: newcomers[node] for node in self._with_copies(newcomers)}
        growth = Growth(now.wall_ns, wanted.cause, nodes, wanted.since_ns)
        since_decision_s = (now.wall_ns - self.record.decided_ns) / 1e9
        over, limit = plan.forecast.predicted.all_complete_s, plan.forecast.physical_limit_s
        self._set(
            events.grow(
                self.record,
                growth,
                plan.transfers,
                complete_s=None if over is None else since_decision_s + over,
                limit_s=None if limit is None else since_decision_s + limit,
                parts=self._parts_of(wanted.parts),
            )
        )
        names = ",".join(nodes)
        self._tell(f"has grown by {names}: {wanted.cause}", *nodes)
        self._log("info", "event has grown", nodes=names, revision=self.record.revision)
        self._desk.span(
            "grow",
            self.record.trace,
            since_ns=wanted.since_ns,
            attributes={"cause": wanted.cause, "targets": names, "transfers": len(plan.transfers)},
        )
        self.effects += map(self._joined, wanted.parts)
        for node in nodes:
            self._look(node)
        self._send(nodes)

    def _give_up(self, wanted: _Wanted, why: str) -> None:
        self._wanted, self._grow_at = None, self._desk.at + GROW_AGAIN_S
        self._tell(f"does not grow: {why}")
        self._log("info", "event does not grow", why=why)
        if wanted.parts:
            nodes = tuple(info.node for info in wanted.parts)
            self._unreserve(nodes)

    def _finish(self, state: EventState, error: str = "") -> None:
        if self._wanted is not None:
            self._tell("is over before it could grow")
            self._wanted = None
        super()._finish(state, error)

    @abstractmethod
    def _look(self, node: NodeId) -> None:
        """Takes note of what a target lacks."""

    def validate(self) -> None:
        super().validate()
        assert not (self.over and self.growing)
        if self._wanted is not None and self._wanted.asked:
            assert self._desk.is_open(self._wanted.asked)
