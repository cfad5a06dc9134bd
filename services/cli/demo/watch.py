"""What an observer on the bus sees of the cluster while the demo runs."""

import asyncio
import time
from dataclasses import dataclass, field

from shared import subjects
from shared.bus.base import Bus
from shared.ids import EventId, InstanceId, NodeId
from shared.messages import Message
from shared.messages.instances import Instance, InstanceSet, InstanceState
from shared.messages.load import GatewayLoad, ModelLoad
from shared.messages.pool import NodeStatus, Tier
from shared.messages.scaling import BlockArrived, EventChanged, EventRecord, FirstPartialToken


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster at one moment (time.monotonic())."""

    at: float
    queued: int
    running: int
    replicas: int
    paths: int


@dataclass(slots=True)
class Watch:
    """Collects; the view and the report read. `clock_offset` maps wall ns to monotonic seconds."""

    clock_offset: float = field(default_factory=lambda: time.monotonic() - time.time())
    n_blocks: int = 0
    arrivals: list[BlockArrived] = field(default_factory=list)
    records: dict[EventId, EventRecord] = field(default_factory=dict)
    partial_tokens: list[FirstPartialToken] = field(default_factory=list)
    instances: tuple[Instance, ...] = ()
    held: dict[NodeId, int] = field(default_factory=dict)
    """Blocks that each node can run."""
    load: ModelLoad | None = None
    samples: list[Sample] = field(default_factory=list)
    switched: list[tuple[float, InstanceId]] = field(default_factory=list)
    """When paths gave way to local execution."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self, bus: Bus) -> None:
        for subject in (
            subjects.ARRIVALS,
            subjects.EVENTS,
            subjects.INSTANCES,
            subjects.LOAD_GATEWAY,
            subjects.POOL_STATUS,
        ):
            await bus.subscribe(subject, self._on)

    async def _on(self, message: Message) -> None:
        match message:
            case BlockArrived():
                self.arrivals.append(message)
                self.held[message.node] = self.held.get(message.node, 0) + 1
            case EventChanged():
                self.records[message.record.id] = message.record
            case FirstPartialToken():
                self.partial_tokens.append(message)
            case InstanceSet():
                self._on_instances(message.instances)
            case NodeStatus():
                held = [len(h.blocks) for h in message.holdings if h.tier is Tier.GPU]
                self.held[message.node] = max(held, default=0)
            case GatewayLoad():
                self._on_load(message)
            case _:
                pass
        self._changed.set()

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

    def _on_load(self, message: GatewayLoad) -> None:
        if not message.models:
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

    @property
    def replicas(self) -> list[Instance]:
        return [i for i in self.instances if i.is_replica and i.state is InstanceState.SERVING]

    @property
    def paths(self) -> list[Instance]:
        return [i for i in self.instances if not i.is_replica]

    def scale_out(self) -> EventRecord | None:
        """The event that the burst caused: the one that moved bytes between nodes."""
        moved = [r for r in self.records.values() if r.sources and r.transfers]
        return max(moved, key=lambda r: r.bytes_moved, default=None)

    def monotonic(self, wall_ns: int) -> float:
        return wall_ns / 1e9 + self.clock_offset
