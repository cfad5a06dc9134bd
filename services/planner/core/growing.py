"""How a running event takes in more targets.

    wanted: the registry sets newcomers aside -> reserved -> planning -> targets like the others

The event goes on meanwhile. Newcomers are reserved at any time, but they join only while the event
is `loading` without trouble, so that their part of the schedule is appended to what really flows. A
plan that was made for another revision is made anew. If the event ends first, the newcomers are
free again, and the model decides anew.
"""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from services.planner.core import commands, events
from services.planner.core.choose import AUTO
from services.planner.core.desk import ASK_S
from services.planner.core.event_base import MAX_REVISIONS, NEVER, THINK_S
from services.planner.core.event_phases import Joined, Phase
from services.planner.core.mending import Mending
from services.planner.core.multicast.strategies import FORMS_GROUP, LOCAL
from services.planner.core.placement import Plan
from services.planner.core.stimuli import Answer, Appended, Failed, Replied
from shared.errors import PlanError
from shared.ids import NodeId
from shared.messages import pool
from shared.messages.pool import NodeInfo, Reserved, Tier
from shared.messages.scaling import EventState, Growth

GROW_AGAIN_S = 1.0
"""Seconds for which an event that could not grow is not asked to again."""


@dataclass(slots=True)
class _Wanted:
    """Newcomers, until they are targets."""

    count: int
    cause: str
    asked: int
    """The number of the open question; 0: none."""
    infos: tuple[NodeInfo, ...] = ()
    """The newcomers, once they are reserved."""
    revision: int = 0
    """The revision to which the plan that is being made would be appended."""
    since_ns: int = 0


class Growing(Mending):
    _wanted: _Wanted | None = None
    _grow_at = float("-inf")
    """When it may be asked to grow again after it could not."""
    _promised = 0
    """How many targets the event was begun with, until they are known."""

    # --- for its model ---

    @property
    def expected(self) -> int:
        """How many replicas were asked for that are no members yet."""
        if self.over:
            return 0
        wanted = self._wanted
        more = 0 if wanted is None else len(wanted.infos) or wanted.count
        return self._promised + more

    @property
    def newcomers(self) -> tuple[NodeInfo, ...]:
        """Nodes that are set aside and are no targets yet."""
        return self._wanted.infos if self._wanted is not None else ()

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

    def grow(self, count: int, exclude: tuple[NodeId, ...], cause: str) -> None:
        """Asks for up to `count` targets more."""
        self._tell(f"grows by up to {count}: {cause}")
        ticket = self._ticket(ASK_S)
        self._wanted = _Wanted(count, cause, ticket.number, since_ns=self._desk.now.wall_ns)
        event = self.record.id
        reserve = pool.Reserve(
            event=event,
            model_id=self._model.model_id,
            nbytes=self._model.nbytes,
            count=count,
            exclude=exclude,
            cause=event,
        )
        self._do(commands.Reserve(ticket=ticket, message=reserve, cause=event))

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
                wanted.infos = infos
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
        wanted.infos = tuple(i for i in wanted.infos if self._may_join(i) and i.node not in out)
        if not wanted.infos:
            self._give_up(wanted, why_none)
        elif self.phase is Phase.LOADING:
            self._plan_growth()

    def _plan_growth(self) -> None:
        """In `loading`: asks for what newcomers get, if there are any without a plan."""
        wanted = self._wanted
        if wanted is None or wanted.asked or not wanted.infos:
            return
        newcomers = tuple(info.node for info in wanted.infos)
        receiving = tuple(n for n in newcomers if n not in self._with_copies(newcomers))
        ticket = self._ticket(THINK_S)
        wanted.asked, wanted.revision = ticket.number, self.record.revision
        lacked = {node: self._every - self._held(node) for node in receiving}
        can_send = {
            node: blocks
            for node, blocks in self._to_send().items()
            if node not in newcomers and self._may_send(node)
        }
        self._append(ticket, self._to_come(), lacked, can_send)

    def _with_copies(self, newcomers: Iterable[NodeId]) -> set[NodeId]:
        """Newcomers that load a copy of their own: from host memory, or from their disk if that is
        known to be faster than the link, or if the strategy moves nothing."""
        strategy, links = self._desk.settings.strategy, self._links()
        holders, id_ = self._desk.cluster.holders, self._model.model_id
        memory, disks = holders(id_, [Tier.HOST, Tier.CACHE]), holders(id_, [Tier.DISK])
        nothing = frozenset[int]()

        def has_own(node: NodeId) -> bool:
            faster = strategy == LOCAL or (strategy == AUTO and links.disk_beats_link(node))
            return self._every <= memory.get(node, nothing) or (
                faster and self._every <= disks.get(node, nothing)
            )

        return {node for node in newcomers if has_own(node)}

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
            and all(meets(info) and info.node not in self._out for info in wanted.infos)
            and all(map(self._may_send, {t.src for t in plan.transfers}))
        )

    def _take_in(self, wanted: _Wanted, plan: Plan) -> None:
        """Makes targets of the newcomers, and gives them their parts. The other targets keep
        theirs."""
        self._wanted, now = None, self._desk.now
        nodes = tuple(info.node for info in wanted.infos)
        self._promoting |= dict.fromkeys(self._with_copies(nodes), self._every)
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
        self.effects += [Joined(info) for info in wanted.infos]
        for node in nodes:
            self._look(node)
        self._send(nodes)

    def _give_up(self, wanted: _Wanted, why: str) -> None:
        self._wanted, self._grow_at = None, self._desk.at + GROW_AGAIN_S
        self._tell(f"does not grow: {why}")
        self._log("info", "event does not grow", why=why)
        if wanted.infos:
            nodes = tuple(info.node for info in wanted.infos)
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
