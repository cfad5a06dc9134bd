"""A planner and a registry on a memory bus, among scripted nodes and gateways."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from types import TracebackType
from typing import Self, TypeVar, cast

import msgspec

from services.registry.service import RegistryService
from shared import subjects
from shared.bus.base import KvEntry, On
from shared.bus.memory import MemoryBus
from shared.config import PlannerConfig, RegistryConfig
from shared.ids import EventId, ModelName, NodeId
from shared.messages import Message, Ok
from shared.messages.instances import Instance, InstanceSet, InstanceState
from shared.messages.pool import ModelAdd, ModelRecord, ModelRemove, PoolState
from shared.messages.scaling import (
    EventChanged,
    EventRecord,
    EventState,
    PlannerQuery,
    PlannerState,
    ScaleAccepted,
    SetInstances,
)
from shared.pool_pages import read_pool
from simulation.checked import CheckedPlanner
from tests.unit.planner.scripted import (
    MODEL,
    NAME,
    REPORT_S,
    WAIT_S,
    ScriptedGateway,
    ScriptedNode,
    World,
    record,
)

CONFIG = PlannerConfig(link_bytes_per_s=10_000)
M = TypeVar("M", bound=Message)


class Cluster:
    """Use as an async context manager; `planner` is started by `start_planner`."""

    def __init__(self, config: PlannerConfig = CONFIG) -> None:
        self.config = config
        self.world = World()
        self.nodes = self.world.nodes
        self.sets: list[InstanceSet] = []
        self.changes: list[EventRecord] = []
        self._planner = AsyncExitStack()
        self.planner_bus: MemoryBus | None = None

    async def __aenter__(self) -> Self:
        self.bus = await self.bus_of("test")
        await self.bus.subscribe(subjects.INSTANCES, On(InstanceSet, self._on_set))
        await self.bus.subscribe(subjects.EVENTS, On(EventChanged, self._on_event))
        registry = RegistryService(await self.bus_of("registry"), RegistryConfig(report_s=0.0))
        await self.world.stack.enter_async_context(registry)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop_planner()
        await self.world.close()
        self._check_sets()

    def _check_sets(self) -> None:
        """Gateways trust that a revision means one set, and a later one a later set."""
        known: dict[tuple[ModelName, tuple[int, int]], InstanceSet] = {}
        newest: dict[ModelName, tuple[int, int]] = {}
        for each in self.sets:
            version = (each.epoch, each.revision)
            assert version >= newest.get(each.name, (0, 0))
            newest[each.name] = version
            same = known.setdefault((each.name, version), each)
            assert same.instances == each.instances

    async def bus_of(self, name: str) -> MemoryBus:
        return await self.world.stack.enter_async_context(MemoryBus(self.world.broker, name))

    async def add_nodes(self, count: int, disk: int = 1) -> list[ScriptedNode]:
        """The first `disk` of them have the model on disk."""
        added = []
        for _ in range(count):
            number = len(self.nodes)
            node = ScriptedNode(self.world, f"n{number}", disk=number < disk)
            self.nodes[node.id] = node
            await node.start()
            added.append(node)
        return added

    async def add_gateway(self, name: str = "gateway-0", model: str = NAME) -> ScriptedGateway:
        gateway = ScriptedGateway(self.world, name, model)
        await gateway.start()
        return gateway

    async def start_planner(self, bus: MemoryBus | None = None) -> CheckedPlanner:
        self.planner_bus = bus or MemoryBus(self.world.broker, "planner")
        await self._planner.enter_async_context(self.planner_bus)
        service = CheckedPlanner(self.planner_bus, self.config)
        return await self._planner.enter_async_context(service)

    async def serve(self, nodes: int, min_instances: int = 1, warm: int = 0) -> list[ScriptedNode]:
        """`nodes` nodes, of which n0 has brought a model up; its event is forgotten."""
        added = await self.add_nodes(nodes)
        await self.start_planner()
        await self.publish_model(msgspec.structs.replace(record(min_instances), warm=warm))
        await self.until_replicas("n0")
        await self.until_event(EventState.COMPLETE)
        await self.until_unreserved()
        self.changes.clear()
        return added

    def node(self, number: int) -> ScriptedNode:
        return self.nodes[NodeId(f"n{number}")]

    async def crash_planner(self) -> None:
        """It says and writes nothing more, from one moment to the next."""
        assert self.planner_bus is not None
        await self.planner_bus.__aexit__(None, None, None)
        await self.stop_planner()

    async def stop_planner(self) -> None:
        stack, self._planner = self._planner, AsyncExitStack()
        await stack.aclose()
        assert self.planner_bus is None or not self.planner_bus.failed, "the log says what raised"

    async def publish_model(self, model: ModelRecord) -> None:
        await self.ask(subjects.REGISTRY_MODEL_ADD, ModelAdd(record=model), Ok)

    async def remove_model(self, name: ModelName = NAME) -> None:
        await self.ask(subjects.REGISTRY_MODEL_REMOVE, ModelRemove(name=name), Ok)

    async def scale(self, count: int | None) -> EventId | None:
        request = SetInstances(name=NAME, instances=count)
        return (await self.ask(subjects.PLANNER_SCALE, request, ScaleAccepted)).event

    async def ask(self, subject: str, message: Message, reply: type[M]) -> M:
        return await self.bus.request(subject, message, reply, timeout=WAIT_S)

    # --- what is seen ---

    async def _on_set(self, message: InstanceSet) -> None:
        self.sets.append(message)
        self.world.stir()

    async def _on_event(self, message: EventChanged) -> None:
        self.changes.append(message.record)
        self.world.stir()

    async def until(self, true: Callable[[], object]) -> None:
        await self.world.until(true)

    async def until_more_sets(self, count: int) -> int:
        """Returns how many had come before."""
        before = len(self.sets)
        await self.until(lambda: len(self.sets) >= before + count)
        return before

    @property
    def instances(self) -> tuple[Instance, ...]:
        return self.sets[-1].instances if self.sets else ()

    @property
    def paths(self) -> list[Instance]:
        return [i for i in self.instances if not i.is_replica]

    def replicas(self, state: InstanceState = InstanceState.SERVING) -> set[str]:
        return {i.leader for i in self.instances if i.is_replica and i.state is state}

    async def until_replicas(self, *nodes: str) -> None:
        """Exactly these serve, and nothing else."""
        await self.until(
            lambda: self.replicas() == set(nodes) and len(self.instances) == len(nodes)
        )

    async def until_replica_count(self, count: int) -> None:
        await self.until(lambda: len(self.replicas()) == count == len(self.instances))

    @property
    def event(self) -> EventRecord:
        """The last one, as it was last told."""
        return self.changes[-1]

    def events(self, state: EventState) -> list[EventRecord]:
        return [change for change in self.changes if change.state is state]

    async def until_event(self, state: EventState, count: int = 1) -> EventRecord:
        await self.until(lambda: len(self.events(state)) >= count)
        return self.events(state)[count - 1]

    async def stored(self) -> tuple[EventRecord, ...]:
        """What the planner says of events, newest first."""
        return (await self.ask(subjects.PLANNER_STATE, PlannerQuery(), PlannerState)).events

    async def ask_until_stored(self, record: EventRecord) -> None:
        """Until the durable store has this state of the event."""
        bucket = await self.bus.kv(subjects.KV_EVENTS)
        watch = cast(AsyncGenerator[KvEntry | None, None], bucket.watch())
        async with asyncio.timeout(WAIT_S), aclosing(watch):
            async for entry in watch:
                if entry is not None and entry.key == record.id and entry.value:
                    stored = msgspec.msgpack.decode(entry.value, type=EventRecord)
                    if stored.state is record.state:
                        return

    async def scale_in_store(self, count: int | None) -> None:
        """The operator's number, as if it had been another when the planner crashed."""
        bucket = await self.bus.kv(subjects.KV_SCALE)
        if count is None:
            await bucket.delete(MODEL)
        else:
            await bucket.put(MODEL, msgspec.msgpack.encode(count))

    async def pool(self) -> PoolState:
        return await read_pool(self.ask)

    async def until_unreserved(self) -> None:
        """Asks again and again: the registry announces no reservations."""
        async with asyncio.timeout(WAIT_S):
            while True:
                if not any(view.reserved_by for view in (await self.pool()).nodes):
                    return
                await asyncio.sleep(REPORT_S)
