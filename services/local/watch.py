"""What an observer on the bus sees of a cluster while one model scales: blocks, roles of nodes,
scaling events, load. The demo, benchmarks and tests read it."""

import asyncio
import enum
import time
from dataclasses import dataclass, field

from shared import subjects
from shared.bus.base import Bus, On
from shared.ids import EventId, InstanceId, NodeId
from shared.messages import Message
from shared.messages.changes import heard_set, whole_status
from shared.messages.instances import Instance, InstanceChange, InstanceSet, InstanceState
from shared.messages.load import GatewayLoad, ModelLoad
from shared.messages.pool import NodeStatus, ReportStatus, Tier
from shared.messages.scaling import (
    BlockArrived,
    BlocksArrived,
    EventChanged,
    EventRecord,
    FirstPartialToken,
)


class Role(enum.Enum):
    """How a node takes part in serving."""

    IDLE = "idle"
    PATH = "path"
    """As a stage of paths, with the blocks that it has so far."""
    REPLICA = "replica"
    """Alone, with all blocks."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster at one moment, a time.monotonic()."""

    at: float
    queued: int
    running: int
    replicas: int
    paths: int


@dataclass(slots=True)
class Watch:
    """Collects what is published about one model. All its times are of time.monotonic(), in
    seconds. `clock_offset`: what to add to a wall clock's time, in seconds, to get such a time."""

    clock_offset: float = field(default_factory=lambda: time.monotonic() - time.time())
    n_blocks: int = 0
    arrivals: list[BlockArrived] = field(default_factory=list)
    records: dict[EventId, EventRecord] = field(default_factory=dict)
    partial_tokens: list[FirstPartialToken] = field(default_factory=list)
    instances: tuple[Instance, ...] = ()
    held: dict[NodeId, frozenset[int]] = field(default_factory=dict)
    """Blocks that each node can run."""
    roles: dict[NodeId, list[tuple[float, Role]]] = field(default_factory=dict)
    """The roles of each node with their beginnings, in order of time."""
    load: ModelLoad | None = None
    samples: list[Sample] = field(default_factory=list)
    switched: list[tuple[float, InstanceId]] = field(default_factory=list)
    """When paths gave way to local execution."""
    _set: InstanceSet | None = None
    """The newest that was heard."""
    _statuses: dict[NodeId, NodeStatus] = field(default_factory=dict)
    """What each node said last."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self, bus: Bus) -> None:
        for subject in (
            subjects.ARRIVALS,
            subjects.EVENTS,
            subjects.INSTANCES,
            subjects.LOAD_GATEWAY,
            subjects.POOL_STATUS,
        ):
            await bus.subscribe(subject, On(Message, self.hear))
        await bus.publish(subjects.POOL_REPORT, ReportStatus(cause="watch"))

    async def hear(self, message: Message) -> None:
        match message:
            case BlockArrived():
                self._on_blocks((message,))
            case BlocksArrived():
                self._on_blocks(message.each())
            case EventChanged():
                self.records[message.record.id] = message.record
            case FirstPartialToken():
                self.partial_tokens.append(message)
            case InstanceSet() | InstanceChange():
                if found := heard_set(self._set, message):
                    self._set = found
                    self._on_instances(found.instances)
            case NodeStatus():
                if status := whole_status(self._statuses.get(message.node), message):
                    self._statuses[message.node] = status
                    blocks = [h.blocks for h in status.holdings if h.tier is Tier.GPU]
                    self.held[message.node] = frozenset().union(*blocks)
            case GatewayLoad():
                self._on_load(message)
            case _:
                pass
        self._changed.set()

    def _on_blocks(self, arrived: tuple[BlockArrived, ...]) -> None:
        for each in arrived:
            self.arrivals.append(each)
            self.held[each.node] = self.held.get(each.node, frozenset()) | {each.block}

    async def change(self) -> None:
        """Waits for the next message."""
        self._changed.clear()
        await self._changed.wait()

    def _on_instances(self, instances: tuple[Instance, ...]) -> None:
        before = {i.id for i in self.instances if i.state is InstanceState.MOVING}
        at = time.monotonic()
        for instance in instances:
            if instance.state is InstanceState.MOVING and instance.id not in before:
                self.switched.append((at, instance.id))
        self.instances = instances
        stages = {stage.node for path in self.paths for stage in path.stages}
        alone = {instance.leader for instance in instances if instance.is_replica}
        for node in stages | alone | set(self.roles):
            shared = Role.PATH if node in stages else Role.IDLE
            role = Role.REPLICA if node in alone else shared
            history = self.roles.setdefault(node, [])
            if not history or history[-1][1] is not role:
                history.append((at, role))

    def _on_load(self, message: GatewayLoad) -> None:
        if not message.models:
            self.load = None if message.whole else self.load
            return
        self.load = message.models[0]
        self.samples.append(
            Sample(
                time.monotonic(),
                self.load.queued_requests,
                self.load.running_requests,
                len(self.replicas),
                len(self.paths),
            )
        )

    def role(self, node: NodeId) -> Role:
        history = self.roles.get(node)
        return history[-1][1] if history else Role.IDLE

    @property
    def replicas(self) -> list[Instance]:
        """Those that are complete."""
        serving = (i for i in self.instances if i.state is InstanceState.SERVING)
        return [i for i in serving if i.lasts and not i.opening]

    @property
    def paths(self) -> list[Instance]:
        return [i for i in self.instances if not i.lasts]

    def scale_out(self) -> EventRecord | None:
        """The event that the burst caused: the event that moved bytes between nodes."""
        moved = [r for r in self.records.values() if r.sources and r.transfers]
        return max(moved, key=lambda r: r.bytes_moved, default=None)

    def monotonic(self, wall_ns: int) -> float:
        return wall_ns / 1e9 + self.clock_offset
