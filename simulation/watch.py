"""What is seen of a run in virtual time: what passes over the bus, what nodes hold, what services
log; and which invariants that violates."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from services.planner.core.events import TERMINAL
from services.planner.core.multicast.strategies import LOCAL
from shared import subjects
from shared.bus.memory import MemorySubscription
from shared.clock import now
from shared.errors import IllegalTransition
from shared.ids import ModelName, NodeId
from shared.messages import decode
from shared.messages.changes import whole_set, whole_status
from shared.messages.instances import InstanceChange, InstanceSet, InstanceState
from shared.messages.pool import Duty, NodeGone, NodeJoined, NodeStatus
from shared.messages.scaling import (
    BlockArrived,
    BlocksArrived,
    EventChanged,
    EventRecord,
    PullFailed,
)
from simulation import instance_sets, invariants
from simulation.cluster import PLANNER, Cluster
from simulation.faults import Role

LOOK_S = 0.1
"""Seconds between two looks at what nodes hold."""


@dataclass(slots=True)
class Found:
    """A verdict in the making."""

    log: list[str]
    violations: list[str]
    ended: list[tuple[float, EventRecord]]
    began: float = 0.0


class Watch:
    """Watches what passes over the bus and what nodes hold, and writes the log."""

    def __init__(self, cluster: Cluster, found: Found, *, timed: bool) -> None:
        """`timed`: whether the planners' wall clocks are right. Those of others do not matter."""
        self.said: dict[NodeId, NodeStatus] = {}
        self._cluster = cluster
        self._found = found
        self._names = {ModelName(name): model for name, model in cluster.model_ids.items()}
        self._blocks = {
            model: manifest.n_blocks
            for model, manifest in zip(self._names.values(), cluster.manifests, strict=True)
        }
        spec = cluster.spec
        # Where memory is short, the last copy of a model gives way to a model that is asked for.
        ample = sum(model.nbytes for model in spec.models) <= spec.arena_bytes
        pooled = spec.system.transfer != LOCAL
        self.pool = invariants.Pool(self._blocks if pooled else {}, ample)
        self._events = invariants.Events(timed=timed)
        self._sets: dict[ModelName, InstanceSet] = {}
        self._terms: dict[str, int] = {}
        """The latest term that was heard, by role."""
        for subject in (
            subjects.EVENTS,
            subjects.INSTANCES,
            subjects.POOL_NODES,
            subjects.ARRIVALS,
            subjects.POOL_STATUS,
        ):
            cluster.broker.listen(MemorySubscription(cluster.broker, subject, self._hear))

    def say(self, what: str) -> None:
        self._found.log.append(f"{now():11.6f} {what}")

    def violated(self, what: str) -> None:
        self.say(f"VIOLATED: {what}")
        self._found.violations.append(f"{now():.3f} s: {what}")

    def find(self, role: Role) -> list[str]:
        """Nodes that are up and have the role now."""
        found: list[str] = []
        records = [r for r in self._events.running.values() if r.transfers]
        if role is Role.SOURCE:
            found = [t.src for r in records for t in r.transfers if t.src not in r.targets]
        elif role is Role.TARGET:
            found = [node for r in records for node in r.targets]
        elif role is Role.RELAY:
            found = [t.src for r in records for t in r.transfers if t.src in r.targets]
        else:
            path = role is Role.LEADER
            found = [
                i.leader
                for s in self._sets.values()
                for i in s.instances
                if i.state is InstanceState.SERVING and i.lasts is not path
            ]
        nodes = self._cluster.nodes
        return [name for name in dict.fromkeys(found) if name in nodes]

    def crashed(self, name: str) -> None:
        nodes = self._cluster.nodes
        if name in nodes:
            self._look()
            self.pool.crashed(nodes[name])
        elif name == self._cluster.active(PLANNER):
            self._events.planner_died()

    async def look(self) -> None:
        """Looks again and again, without end."""
        while True:
            self._look()
            await asyncio.sleep(LOOK_S)

    def _look(self) -> None:
        for wrong in self.pool.look(self._cluster.nodes):
            self.violated(wrong)
        self._look_at_gateways()

    def _look_at_gateways(self) -> None:
        """Whether their cores agree with themselves."""
        for name, gateway in self._cluster.gateways.items():
            try:
                gateway.frontend.dispatch.validate()
            except IllegalTransition as error:
                self.violated(f"{name}: {error}")

    def _hear(self, data: bytes, _: object) -> None:
        message = decode(data)
        if (term := message.term) is not None:
            if term.number < self._terms.get(term.role, 0):
                self.say(f"too late: {type(message).__name__} of {term.role} {term.number}")
                return
            if term.role == PLANNER and term.number > self._terms.get(PLANNER, term.number):
                self._events.planner_died()  # what it has not heard of ended with the last one
            self._terms[term.role] = term.number
        wrong: list[str] = []
        match message:
            case EventChanged(record=record):
                targets = " ".join(record.targets)
                self.say(
                    f"{record.id} of {record.name} is {record.state.value}, revision "
                    f"{record.revision}, targets {targets or 'none'} {record.error}".rstrip()
                )
                wrong = self._events.changed(record)
                if record.state in TERMINAL:
                    self._found.ended.append((now(), record))
            case InstanceSet():
                wrong = self._on_set(message)
            case InstanceChange(now=InstanceSet(name=name)):
                if found := whole_set(self._sets.get(name), message):
                    wrong = self._on_set(found)
            case NodeJoined(info=info):
                duty = f", {info.duty.value}" if info.duty is not Duty.ALL else ""
                self.say(f"{info.node} joined as {info.generation}{duty}")
                (self.pool.leaving.add if info.duty.leaves else self.pool.leaving.discard)(
                    info.node
                )
            case NodeGone(node=node, generation=generation, reason=reason):
                self.say(f"{node} gone as {generation}: {reason}")
                self.pool.gone(message)
                self._events.gone(node)
            case BlockArrived():
                self.say(f"{message.node} has block {message.block} from {message.source}")
            case BlocksArrived():
                for block in message.blocks:
                    self.say(f"{message.node} has block {block.block} from {block.source}")
            case PullFailed():
                self.say(f"{message.node} got no block {message.block}: {message.message}")
            case NodeStatus():
                if status := whole_status(self.said.get(message.node), message):
                    self.said[message.node] = status
        for each in wrong:
            self.violated(each)

    def _on_set(self, message: InstanceSet) -> list[str]:
        before = self._sets.get(message.name)
        age = message.epoch, message.revision
        if before is not None and age < (before.epoch, before.revision):
            return [f"set {age} of {message.name} after {before.epoch, before.revision}"]
        self._sets[message.name] = message
        if before is None or age != (before.epoch, before.revision):
            instances = " ".join(map(invariants.brief, message.instances))
            self.say(f"{message.name} is served by {instances or 'nobody'}")
        return instance_sets.of_set(message, self._blocks[message.model_id])


@contextmanager
def logged(log: list[str]) -> Iterator[None]:
    """Writes what services log to the log."""

    def take(
        _: object, level: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        what = event.pop("event")
        who = event.pop("name", None) or event.pop("node", "")
        event.pop("role", None)
        rest = " ".join(f"{key}={value}" for key, value in event.items())
        log.append(f"{now():11.6f}   {who} {level}: {what} {rest}".rstrip())
        raise structlog.DropEvent

    before = structlog.get_config() if structlog.is_configured() else None
    structlog.configure(
        processors=[structlog.processors.format_exc_info, take],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        if before is None:
            structlog.reset_defaults()
        else:
            structlog.configure(**before)
