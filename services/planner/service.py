"""The planner's shell: from the bus to one controller a model, ten times a second."""

import asyncio
from collections.abc import Coroutine
from typing import Any, ClassVar

from services.planner.core.cluster import Cluster
from services.planner.core.multicast.strategies import STRATEGIES
from services.planner.model import Context, ModelController
from services.planner.store import EventStore
from shared import subjects
from shared.bus.base import Bus
from shared.clock import now, wall_ns
from shared.config import PlannerConfig
from shared.errors import BadInput, BusError, ConfigError, NotFound
from shared.ids import ModelName, NodeId
from shared.messages import Message, Ok, Ping
from shared.messages.instances import InstanceSet, InstanceSets, InstancesQuery
from shared.messages.load import GatewayLoad
from shared.messages.pool import (
    ModelAdded,
    ModelRecord,
    ModelRemoved,
    NodeGone,
    NodeJoined,
    NodeStatus,
    PoolQuery,
    PoolState,
)
from shared.messages.scaling import (
    BlockArrived,
    EventChanged,
    EventRecord,
    FirstPartialToken,
    PeerSuspect,
    PlannerQuery,
    PlannerState,
    PullFailed,
    ScaleAccepted,
    SetInstances,
)
from shared.service import Service

PING_TIMEOUT_S = 0.3
POOL_TIMEOUT_S = 2.0


class PlannerService(Service):
    role: ClassVar[str] = "planner"

    def __init__(self, bus: Bus, config: PlannerConfig) -> None:
        super().__init__("planner")
        if config.strategy not in STRATEGIES:
            raise ConfigError(
                f"planner.strategy {config.strategy!r}: known are {', '.join(STRATEGIES)}"
            )
        self._bus = bus
        self._config = config
        self._cluster = Cluster()
        self._store = EventStore(bus, self.log)
        self._models: dict[ModelName, ModelController] = {}
        self._context = Context(
            bus=bus,
            cluster=self._cluster,
            config=config,
            log=self.log,
            epoch=wall_ns(),
            spawn=self._spawn,
            changed=self._on_event_changed,
        )

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self.spawn(work, name=name)

    async def open(self) -> None:
        await self._store.load()
        self.spawn(self._store.run(), name="store")
        for subject, handler in (
            (subjects.POOL_NODES, self._on_pool),
            (subjects.POOL_MODELS, self._on_pool),
            (subjects.POOL_STATUS, self._on_pool),
            (subjects.LOAD_GATEWAY, self._on_load),
            (subjects.ARRIVALS, self._on_arrival),
            (subjects.PLANNER_SUSPECT, self._on_suspect),
        ):
            subscription = await self._bus.subscribe(subject, handler)
            self.resources.push_async_callback(subscription.close)
        await self._learn_pool()
        for subject, server in (
            (subjects.PLANNER_STATE, self._state),
            (subjects.PLANNER_INSTANCES, self._instances),
            (subjects.PLANNER_SCALE, self._scale),
        ):
            served = await self._bus.serve(subject, server)
            self.resources.push_async_callback(served.close)
        self.spawn(self._tick(), name="tick")

    async def _learn_pool(self) -> None:
        """What the registry knows already; waits for it as long as it takes."""
        while True:
            try:
                pool = await self._bus.request(
                    subjects.REGISTRY_POOL, PoolQuery(), PoolState, timeout=POOL_TIMEOUT_S
                )
                break
            except BusError as error:
                self.log.info("waiting for the registry", error=str(error))
                await asyncio.sleep(self._config.tick_s)
        for view in pool.nodes:
            self._cluster.on_joined(view.info)
            self._cluster.on_status(
                NodeStatus(
                    node=view.info.node,
                    generation=view.info.generation,
                    seq=0,
                    arena_free=view.arena_free,
                    holdings=view.holdings,
                )
            )
        for record in pool.models:
            self._add(record)

    async def _tick(self) -> None:
        while True:
            for controller in list(self._models.values()):
                controller.tick()
            await asyncio.sleep(self._config.tick_s)

    # --- what comes in ---

    async def _on_pool(self, message: Message) -> None:
        if isinstance(message, NodeStatus):
            self._cluster.on_status(message)
            for controller in self._models.values():
                controller.on_status(message.node)
        elif isinstance(message, NodeJoined):
            self._cluster.on_joined(message.info)
        elif isinstance(message, NodeGone):
            if self._cluster.on_gone(message.node, message.generation):
                for controller in self._models.values():
                    controller.on_gone(message)
        elif isinstance(message, ModelAdded):
            self._add(message.record)
        elif isinstance(message, ModelRemoved):
            controller_ = self._models.pop(message.name, None)
            if controller_ is not None:
                controller_.remove()

    def _add(self, record: ModelRecord) -> None:
        known = self._models.get(record.name)
        if known is None:
            self._models[record.name] = ModelController(self._context, record)
        else:
            known.record = record

    async def _on_load(self, message: Message) -> None:
        if isinstance(message, GatewayLoad):
            self._cluster.on_load(message, now())

    async def _on_arrival(self, message: Message) -> None:
        if isinstance(message, BlockArrived | PullFailed | FirstPartialToken):
            for controller in self._models.values():
                controller.tell_event(message)

    async def _on_suspect(self, message: Message) -> None:
        if isinstance(message, PeerSuspect) and message.node in self._cluster.nodes:
            self.spawn(self._examine(message.node), name=f"ping {message.node}")

    async def _examine(self, node: NodeId) -> None:
        try:
            await self._bus.request(subjects.node_ping(node), Ping(), Ok, timeout=PING_TIMEOUT_S)
        except BusError:
            self.log.warning("node does not answer", node=node)
            for controller in self._models.values():
                controller.on_suspect(node)

    def _on_event_changed(self, record: EventRecord) -> None:
        self._store.put(record)
        self.spawn(self._publish_event(record), name="event")

    async def _publish_event(self, record: EventRecord) -> None:
        try:
            await self._bus.publish(
                subjects.EVENTS, EventChanged(record=record, trace=record.trace)
            )
        except BusError as error:
            self.log.warning("event not published", event_id=record.id, error=str(error))

    # --- what it answers ---

    async def _state(self, message: Message) -> Message:
        limit = message.events if isinstance(message, PlannerQuery) else 0
        records = {**self._store.records}
        for controller in self._models.values():
            if controller.event is not None:
                records[controller.event.record.id] = controller.event.record
        newest = sorted(records.values(), key=lambda r: r.decided_ns, reverse=True)
        return PlannerState(sets=self._sets(), events=tuple(newest[:limit]))

    async def _instances(self, message: Message) -> Message:
        if not isinstance(message, InstancesQuery):
            raise BadInput("an InstancesQuery belongs here")
        return InstanceSets(sets=self._sets())

    def _sets(self) -> tuple[InstanceSet, ...]:
        return tuple(controller.instance_set() for controller in self._models.values())

    async def _scale(self, message: Message) -> Message:
        if not isinstance(message, SetInstances):
            raise BadInput("a SetInstances belongs here")
        controller = self._models.get(message.name)
        if controller is None:
            raise NotFound(f"model {message.name!r} is not published; see `lambdascale model ls`")
        if message.instances is not None and not 0 <= message.instances <= len(self._cluster.nodes):
            raise BadInput(
                f"{message.instances} instances asked for, "
                f"{len(self._cluster.nodes)} nodes are there"
            )
        return ScaleAccepted(event=controller.set_fixed(message.instances))
