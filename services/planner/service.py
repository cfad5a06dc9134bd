"""The planner's shell: from the bus to one controller a model, ten times a second."""

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any, ClassVar

from services.planner.context import Context
from services.planner.core.choose import AUTO
from services.planner.core.cluster import Cluster
from services.planner.core.multicast.strategies import STRATEGIES
from services.planner.core.serving.strategies import SERVING
from services.planner.core.strays import Strays
from services.planner.model import ModelController
from services.planner.registry import Registry
from services.planner.store import Store, fitting
from shared import subjects
from shared.bus.base import Bus, On
from shared.clock import now, wall_ns
from shared.config import PlannerConfig
from shared.errors import BadInput, BusError, ConfigError, LambdaScaleError, NotFound
from shared.ids import Generation, ModelId, ModelName, NodeId
from shared.messages import Message, Ok
from shared.messages.instances import InstanceSet, InstanceSets, InstancesQuery
from shared.messages.load import GatewayLoad
from shared.messages.pool import (
    ModelAdded,
    ModelRecord,
    ModelRemoved,
    NodeGone,
    NodeInfo,
    NodeJoined,
    NodeStatus,
    NodeView,
    PoolQuery,
    PoolState,
)
from shared.messages.scaling import (
    BlockArrived,
    FirstPartialToken,
    PeerSuspect,
    PlannerQuery,
    PlannerState,
    PullFailed,
    ReleaseModel,
    ScaleAccepted,
    SetInstances,
)
from shared.service import Service

REGISTRY_TIMEOUT_S = 2.0
REFRESH_S = 5.0
"""Broadcasts can be lost: this often the planner compares what it knows with the registry."""
LOOKS_PER_STRAY = 10
"""How often all arenas are looked through in `planner.stray_s`."""


class PlannerService(Service):
    role: ClassVar[str] = "planner"

    def __init__(self, bus: Bus, config: PlannerConfig) -> None:
        super().__init__("planner")
        if config.strategy not in (known := (AUTO, *STRATEGIES)):
            raise ConfigError(f"planner.strategy {config.strategy!r}: known are {', '.join(known)}")
        if config.serving not in SERVING:
            raise ConfigError(f"planner.serving {config.serving!r}: known are {', '.join(SERVING)}")
        self._bus = bus
        self._config = config
        self._cluster = Cluster()
        self._store = Store(bus, self.log)
        self._strays = Strays(config.stray_s)
        self._models: dict[ModelName, ModelController] = {}
        self._by_id: dict[ModelId, ModelController] = {}
        self._watched: dict[NodeId, set[ModelId]] = {}
        self._examined: set[NodeId] = set()
        self._outbox: asyncio.Queue[tuple[str, Message]] = asyncio.Queue()
        self._context = Context(
            bus=bus,
            cluster=self._cluster,
            config=config,
            store=self._store,
            log=self.log,
            epoch=wall_ns(),
            revisions=itertools.count(1),
            spawn=self._spawn,
            more_room=self._more_room,
            watch=lambda node, model: self._watched.setdefault(node, set()).add(model),
            publish=lambda subject, message: self._outbox.put_nowait((subject, message)),
        )

        self._registry = Registry(self._context)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self.spawn(work, name=name)

    async def open(self) -> None:
        await self._store.load()
        self.spawn(self._store.run(), name="store")
        self.spawn(self._send_outbox(), name="outbox")
        bus = self._bus
        nodes = On(NodeJoined, self._on_joined), On(NodeGone, self._on_gone)
        self.own(await bus.subscribe(subjects.POOL_NODES, *nodes))
        models = On(ModelAdded, self._on_added), On(ModelRemoved, self._on_removed)
        self.own(await bus.subscribe(subjects.POOL_MODELS, *models))
        self.own(await bus.subscribe(subjects.POOL_STATUS, On(NodeStatus, self._on_status)))
        self.own(await bus.subscribe(subjects.LOAD_GATEWAY, On(GatewayLoad, self._on_load)))
        arrivals = (
            On(BlockArrived, self._on_arrival),
            On(PullFailed, self._on_progress),
            On(FirstPartialToken, self._on_progress),
        )
        self.own(await bus.subscribe(subjects.ARRIVALS, *arrivals))
        self.own(await bus.subscribe(subjects.PLANNER_SUSPECT, On(PeerSuspect, self._on_suspect)))
        await self._await_registry()
        self.own(await bus.serve(subjects.PLANNER_STATE, PlannerQuery, self._state))
        self.own(await bus.serve(subjects.PLANNER_INSTANCES, InstancesQuery, self._instances))
        self.own(await bus.serve(subjects.PLANNER_SCALE, SetInstances, self._scale))
        self.spawn(self._tick(), name="tick")
        self.spawn(self._keep_fresh(), name="refresh")

    async def _await_registry(self) -> None:
        """As long as it takes."""
        while True:
            if await self._refresh():
                return
            await asyncio.sleep(self._config.tick_s)

    async def drain(self) -> None:
        await self._store.settled()

    # --- time ---

    async def _tick(self) -> None:
        strays_at = now()
        while True:
            for controller in list(self._models.values()):
                controller.tick()
            if now() >= strays_at:
                strays_at = now() + self._config.stray_s / LOOKS_PER_STRAY
                self._free_strays()
            await asyncio.sleep(self._config.tick_s)

    def _free_strays(self) -> None:
        """Finds what lies in arenas without use, in part or of models that are gone."""
        if self._cluster.blind(now()):
            return
        strays: dict[tuple[NodeId, ModelId], frozenset[int]] = {}
        for node, holding in self._cluster.in_memory():
            controller, copy = self._by_id.get(holding.model_id), (node, holding.model_id)
            if controller is None or not controller.owns(node, holding):
                strays[copy] = strays.get(copy, frozenset()).union(holding.blocks)
        for node, model in self._strays.look(strays, now()):
            if controller := self._by_id.get(model):
                controller.free_stray(node)
            else:
                self.spawn(self._free_unknown(node, model), name=f"release {node}")

    async def _free_unknown(self, node: NodeId, model: ModelId) -> None:
        """Once: if it fails, the stray is found again."""
        self.log.info("memory of a model that is gone is given back", node=node, model_id=model)
        info = self._cluster.nodes.get(node)
        generation = info.generation if info else Generation(0)
        release = ReleaseModel(node=node, generation=generation, model_id=model, keep=None)
        try:
            await self._bus.request(
                subjects.node_release(node), release, Ok, timeout=REGISTRY_TIMEOUT_S
            )
        except LambdaScaleError as error:
            self.log.warning("release failed", node=node, error=str(error))

    async def _send_outbox(self) -> None:
        """In order. What the bus does not take is dropped: instance sets come again anyhow."""
        while True:
            subject, message = await self._outbox.get()
            try:
                await self._bus.publish(subject, message)
            except BusError as error:
                self.log.warning("not published", subject=subject, error=str(error))

    # --- the registry's view ---

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            await self._refresh()

    async def _refresh(self) -> bool:
        """Learns all that the registry knows and the planner has missed; False if it is away."""
        nodes, over = dict(self._cluster.nodes), dict(self._cluster.over)
        models = {c.record.model_id for c in self._models.values()}
        try:
            pool = await self._bus.request(
                subjects.REGISTRY_POOL, PoolQuery(), PoolState, timeout=REGISTRY_TIMEOUT_S
            )
        except BusError as error:
            self.log.info("registry does not answer", error=str(error))
            return False
        # Only what was so before the question can be proved wrong by the answer.
        there = {(view.info.node, view.info.generation) for view in pool.nodes}
        for info in nodes.values():
            if (info.node, info.generation) not in there:
                self._gone(info, "the registry does not know it")
        for view in pool.nodes:
            if over.get(view.info.node) == view.info.generation:
                self._cluster.on_revived(view.info)
            self._learn_node(view)
        published = {record.model_id for record in pool.models}
        for controller in list(self._models.values()):
            if controller.record.model_id in models - published:
                self._remove(controller.record.name)
        now_known = {c.record.model_id for c in self._models.values()}
        for record in pool.models:
            if record.model_id not in models - now_known:  # not removed meanwhile
                self._add(record)
        await self._unreserve_for_nobody(pool)
        return True

    def _learn_node(self, view: NodeView) -> None:
        self._join(view.info)
        self._learn_status(
            NodeStatus(
                node=view.info.node,
                generation=view.info.generation,
                seq=0,
                arena_free=view.arena_free,
                holdings=view.holdings,
                running=view.running,
                profile=view.profile,
            )
        )

    async def _unreserve_for_nobody(self, pool: PoolState) -> None:
        """Ends reservations of events that are over: of an earlier planner, or of an answer that
        came too late."""
        running = {c.event.record.id for c in self._models.values() if c.event and not c.event.over}
        held = {view.reserved_by for view in pool.nodes if view.reserved_by}
        for event in sorted(held - running):
            await self._registry.unreserve(event)

    # --- what comes in ---

    async def _on_joined(self, message: NodeJoined) -> None:
        self._join(message.info)

    async def _on_gone(self, message: NodeGone) -> None:
        if self._cluster.on_gone(message.node, message.generation):
            self._tell_gone(message)

    async def _on_added(self, message: ModelAdded) -> None:
        self._add(message.record)

    async def _on_removed(self, message: ModelRemoved) -> None:
        self._remove(message.name)

    async def _on_status(self, status: NodeStatus) -> None:
        self._learn_status(status)

    def _learn_status(self, status: NodeStatus) -> None:
        """Told to the controllers that it concerns: of a hundred models, one or two."""
        node = status.node
        more_room = self._cluster.on_status(status, now())
        models = {*self._cluster.hosted(node), *self._watched.get(node, ())}
        concerned = [self._by_id[model] for model in sorted(models & self._by_id.keys())]
        for controller in concerned:
            controller.on_status(node)
        self._watched[node] = {c.record.model_id for c in concerned if c.uses(node)}
        if more_room:
            self._more_room()

    def _more_room(self) -> None:
        for controller in self._models.values():
            controller.on_more_room()

    def _join(self, info: NodeInfo) -> None:
        known = self._cluster.nodes.get(info.node)
        before = self._cluster.on_joined(info)
        if before is not None:
            reason = "a new process runs under its name"
            self._tell_gone(NodeGone(node=before.node, generation=before.generation, reason=reason))
        if known is None or before is not None:
            for controller in self._models.values():
                controller.on_joined()

    def _gone(self, info: NodeInfo, reason: str) -> None:
        if self._cluster.on_gone(info.node, info.generation):
            self._tell_gone(NodeGone(node=info.node, generation=info.generation, reason=reason))

    def _tell_gone(self, message: NodeGone) -> None:
        for controller in self._models.values():
            controller.on_gone(message)
        self._watched.pop(message.node, None)

    def _add(self, record: ModelRecord) -> None:
        known = self._models.get(record.name)
        if known is not None and known.record.model_id != record.model_id:
            self._remove(record.name)
            known = None
        if known is None:
            controller = ModelController(self._context, record)
            self._models[record.name] = self._by_id[record.model_id] = controller
        else:
            known.record = record

    def _remove(self, name: ModelName) -> None:
        controller = self._models.pop(name, None)
        if controller is not None:
            del self._by_id[controller.record.model_id]
            controller.remove()

    async def _on_load(self, message: GatewayLoad) -> None:
        self._cluster.on_load(message, now())

    async def _on_arrival(self, message: BlockArrived) -> None:
        if controller := self._by_id.get(message.model_id):
            controller.tell_event(message)

    async def _on_progress(self, message: PullFailed | FirstPartialToken) -> None:
        for controller in self._models.values():
            controller.tell_event(message)

    async def _on_suspect(self, message: PeerSuspect) -> None:
        if message.node in self._cluster.nodes and message.node not in self._examined:
            self._examined.add(message.node)
            self.spawn(self._examine(message.node), name=f"examine {message.node}")

    async def _examine(self, node: NodeId) -> None:
        try:
            if await self._context.answers(node):
                return
        finally:
            self._examined.discard(node)
        self.log.warning("node does not answer", node=node)
        for controller in self._models.values():
            controller.on_suspect(node)

    # --- what it answers ---

    async def _state(self, message: PlannerQuery) -> PlannerState:
        records = dict(self._store.events)
        for controller in self._models.values():
            if controller.event is not None:
                records[controller.event.record.id] = controller.event.record
        newest = sorted(records.values(), key=lambda r: r.decided_ns, reverse=True)
        return PlannerState(sets=self._sets(), events=fitting(newest[: message.events]))

    async def _instances(self, message: InstancesQuery) -> InstanceSets:
        return InstanceSets(sets=self._sets())

    def _sets(self) -> tuple[InstanceSet, ...]:
        return tuple(controller.serving.set() for controller in self._models.values())

    async def _scale(self, message: SetInstances) -> ScaleAccepted:
        controller = self._models.get(message.name)
        if controller is None:
            raise NotFound(f"model {message.name!r} is not published; see `lambdascale model ls`")
        if message.instances is not None and not 0 <= message.instances <= len(self._cluster.nodes):
            raise BadInput(
                f"{message.instances} instances asked for, "
                f"{len(self._cluster.nodes)} nodes are there"
            )
        return ScaleAccepted(event=controller.set_fixed(message.instances))
