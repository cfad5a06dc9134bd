"""The planner's view of the pool: which nodes there are, and what they say of themselves.

Broadcasts can be lost. So the registry is asked now and then, and what it knows and the planner has
missed is taken in as if it had been heard.
"""

from dataclasses import dataclass
from functools import partial

from services.planner.core import commands
from services.planner.core.alarms import NEVER, Alarms
from services.planner.core.desk import ASK_S, Desk
from services.planner.core.machines import Machines
from services.planner.core.model import ModelMachine
from services.planner.core.stimuli import Answer, Failed, PoolRead
from shared.ids import Generation, ModelId, NodeId
from shared.messages.pool import (
    NodeGone,
    NodeInfo,
    NodeStatus,
    NodeView,
    PoolQuery,
    PoolState,
    Unreserve,
)

REFRESH_S = 5.0
"""How often the planner compares what it knows with the registry."""
MOST_SLOTS = 1 << 20
"""A node that claims more slots is not believed."""
REFRESH = ".refresh"
"""The name of the alarm at which the registry is asked."""


@dataclass(frozen=True, slots=True)
class _PoolQuestion:
    """A question to the registry, and what was known when it was asked. The answer can only correct
    what was known then: what was heard since is newer."""

    number: int
    nodes: dict[NodeId, NodeInfo]
    over: dict[NodeId, Generation]
    models: frozenset[ModelId]


class PoolView:
    def __init__(self, desk: Desk, machines: Machines, alarms: Alarms) -> None:
        self.ready = False
        """Whether the registry has answered once."""
        self._desk = desk
        self._cluster = desk.cluster
        self._machines = machines
        self._alarms = alarms
        self._asked: _PoolQuestion | None = None
        self._unfit: dict[NodeId, Generation] = {}
        """Nodes that have said so."""
        alarms.set(REFRESH, float("-inf"))

    # --- the registry's view ---

    def refresh(self) -> None:
        desk = self._desk
        self._alarms.set(REFRESH, NEVER)
        ticket = desk.ask(within=ASK_S)
        self._asked = _PoolQuestion(
            ticket.number,
            dict(self._cluster.nodes),
            dict(self._cluster.over),
            frozenset(self._machines.by_id),
        )
        # What nodes hold they say themselves. Only a planner that starts has not heard it.
        query = PoolQuery(holdings=not self.ready, cause=desk.cause)
        desk.do(commands.ReadPool(ticket=ticket, message=query, cause=desk.cause))

    def on_answer(self, answer: Answer) -> bool:
        """Takes the answer in, if it is the registry's. Returns whether it is."""
        if self._asked is None or answer.ticket.number != self._asked.number:
            return False
        self._on_read(self._asked, answer)
        return True

    def _on_read(self, asked: _PoolQuestion, answer: Answer) -> None:
        """Learns all that the registry knows and the planner has missed."""
        self._asked = None
        again_s = REFRESH_S if self.ready else self._desk.settings.tick_s
        self._alarms.set(REFRESH, self._desk.at + again_s)
        if not isinstance(answer, PoolRead):
            error = str(answer.error) if isinstance(answer, Failed) else "it said something else"
            self._desk.log("info", "registry does not answer", error=error)
            return
        self._learn(asked, answer.pool)
        if not self.ready:
            self._end_what_cannot_go_on()
            self.ready = True
            self._alarms.set(REFRESH, self._desk.at + REFRESH_S)
            self._desk.do(commands.Ready(cause=self._desk.cause))

    def _learn(self, asked: _PoolQuestion, pool: PoolState) -> None:
        there = {(view.info.node, view.info.generation) for view in pool.nodes}
        for info in asked.nodes.values():
            if (info.node, info.generation) not in there:
                self._gone(info, "the registry does not know it")
        for view in pool.nodes:
            if asked.over.get(view.info.node) == view.info.generation:
                self._cluster.on_revived(view.info)
            self.join(view.info)
            if not self.ready:
                self._learn_holdings(view)
        published = {record.model_id for record in pool.models}
        for model in list(self._machines.named.values()):
            if model.record.model_id in asked.models - published:
                self._machines.remove(model.record.name)
        for record in pool.models:
            removed_meanwhile = asked.models - self._machines.by_id.keys()
            if record.model_id not in removed_meanwhile:
                self._machines.add(record, resume=not self.ready)
        self._unreserve_for_nobody(pool)
        self._cluster.forget(self._desk.at, self._machines.by_id.keys())
        self._cluster.loads.forget(self._machines.named.keys())

    def _end_what_cannot_go_on(self) -> None:
        """Ends events that an earlier planner had begun, unless they go on (`Machines.add`)."""
        desk = self._desk
        running = {event.record.id for event in self._machines.events()}
        desk.do(*desk.archive.fail_unfinished(running, desk.now.wall_ns, desk.cause))

    def _learn_holdings(self, view: NodeView) -> None:
        status = NodeStatus(
            node=view.info.node,
            generation=view.info.generation,
            seq=view.seq,
            arena_free=view.arena_free,
            holdings=view.holdings,
            running=view.running,
            profile=view.profile,
        )
        self.on_status(status)

    def _unreserve_for_nobody(self, pool: PoolState) -> None:
        """Ends reservations of events that are over. They were made for an earlier planner, or the
        answer to a `Reserve` came too late."""
        running = {event.record.id for event in self._machines.events() if not event.over}
        held = {view.reserved_by for view in pool.nodes if view.reserved_by}
        for event in sorted(held - running):
            ticket = self._desk.ask(within=ASK_S)
            message = Unreserve(event=event, cause=self._desk.cause)
            self._desk.do(
                commands.Unreserve(ticket=ticket, message=message, cause=self._desk.cause)
            )

    # --- what nodes say ---

    def on_status(self, status: NodeStatus) -> None:
        """Tells the models that the report concerns: usually one or two of a hundred."""
        change = self._cluster.on_status(status, self._desk.at)
        if change.missed:
            self._desk.do(commands.AskStatus(node=status.node, cause=self._desk.cause))
        for id_ in sorted(change.models):
            model = self._machines.by_id.get(id_)
            if model is None:
                continue
            if id_ in change.changed or status.node not in model.fleet.members:
                gained = change.gained.get(id_, frozenset())
                self._machines.mention(model, partial(_hear_holdings, status.node, gained))
        self._look_whether_fit(status)
        if change.more_room:
            self._desk.room_freed = True

    def _look_whether_fit(self, status: NodeStatus) -> None:
        """A node that says that it is unfit is not used, like a node that does not answer."""
        known = self._cluster.nodes.get(status.node)
        if not status.unfit or known is None or known.generation != status.generation:
            return
        if self._unfit.get(status.node) != status.generation:
            self._unfit[status.node] = status.generation
            self._desk.tell(f"unfit: {status.unfit}", status.node)
            self._machines.tell_all(lambda model: model.on_suspect(status.node))

    def join(self, info: NodeInfo) -> None:
        if not 0 < info.slots <= MOST_SLOTS:
            self._desk.log("warning", "not a node", node=info.node, slots=info.slots)
            return
        known = self._cluster.nodes.get(info.node)
        before = self._cluster.on_joined(info)
        if before is not None:
            self._say_gone(before, "a new process runs under its name")
        if info.node in self._cluster.nodes and (known is None or before is not None):
            self._desk.tell(f"joined as generation {info.generation}", info.node)
            self._desk.do(commands.Greet(node=info.node, cause=self._desk.cause))
            self._machines.tell_all(lambda model: model.on_joined())
            for id_ in self._cluster.models_on(info.node):
                if model := self._machines.by_id.get(id_):
                    self._machines.tell(model, partial(_holdings, info.node, frozenset()))
        elif known is not None and info.node in self._cluster.nodes and known.duty is not info.duty:
            self._desk.tell(f"duty: {info.duty.value}", info.node)
            self._machines.tell_all(lambda model: model.on_joined())

    def on_gone(self, message: NodeGone) -> None:
        self._unfit.pop(message.node, None)
        if self._cluster.on_gone(message.node, message.generation, self._desk.at):
            self._desk.tell(f"gone: {message.reason}", message.node)
            self._machines.tell_all(lambda model: model.on_gone(message))

    def _gone(self, info: NodeInfo, reason: str) -> None:
        self.on_gone(NodeGone(node=info.node, generation=info.generation, reason=reason))

    def _say_gone(self, info: NodeInfo, reason: str) -> None:
        """Says that a node is gone whose name another process has now."""
        message = NodeGone(node=info.node, generation=info.generation, reason=reason)
        self._desk.tell(f"gone: {reason}", info.node)
        self._machines.tell_all(lambda model: model.on_gone(message))


def _hear_holdings(node: NodeId, gained: frozenset[int], model: ModelMachine) -> float:
    return model.hear_holdings(node, gained)


def _holdings(node: NodeId, gained: frozenset[int], model: ModelMachine) -> None:
    model.on_holdings(node, gained)
