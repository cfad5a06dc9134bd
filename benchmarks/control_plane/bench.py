"""What the control plane costs by the number of nodes: the real planner, registry and one gateway
in virtual time, beside simulated nodes and gateways that send what real ones send.

Processor time is real, and is counted for each service by itself. What NATS's client takes for each
message is measured with a real nats-server, and added.
"""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from benchmarks.control_plane import gateways, nodes
from benchmarks.control_plane.meter import CountedBus, CountingBroker, MeteredLoop, begin
from benchmarks.control_plane.results import GATEWAY, PLANNER, REGISTRY, ROLES, Row, Settings, Spent
from benchmarks.control_plane.routing import route_us
from benchmarks.control_plane.scene import SPREADS, Scene
from services.gateway.service import GatewayService
from services.planner.service import PlannerService
from services.registry.service import RegistryService
from shared import subjects, telemetry
from shared.bus.base import Bus, On
from shared.bus.memory import MemoryBus
from shared.clock import now
from shared.config import GatewayConfig, PlannerConfig, RegistryConfig, TelemetryConfig
from shared.errors import LambdaScaleError
from shared.ids import ModelName
from shared.messages.scaling import EventChanged, EventState, ScaleAccepted, SetInstances
from shared.service import Service
from simulation.loop import reproducible

START_LIMIT_S = 60.0
EVENT_LIMIT_S = 60.0
SETTLE_S = 3.0
"""Virtual seconds between the start and the first measurement, and after the event."""
TASKS = 12
"""How many tasks are named."""
GARBAGE = 500_000
"""Objects made between two looks for cycles, in a process that plays a thousand others."""


class BenchFailed(LambdaScaleError):
    code = "bench_failed"


def measure(
    settings: Settings,
    say: Callable[[str], None],
    planner: type[PlannerService] = PlannerService,
) -> list[Row]:
    telemetry.configure("bench", TelemetryConfig(log_level="off"))
    rows = []
    for count in settings.nodes:
        scene = Scene(
            nodes=count,
            models=settings.models,
            gateways=settings.gateways,
        )
        say(f"{count} nodes")
        gc.collect()
        gc.set_threshold(GARBAGE)
        loop = MeteredLoop()
        row = Bench(scene, loop, say, planner).row(settings.window_s)
        rows.append(_in_virtual_time(loop, row))
    return rows


def _in_virtual_time(loop: MeteredLoop, work: Coroutine[Any, Any, Row]) -> Row:
    with reproducible(loop, 0), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work)


class Bench:
    def __init__(
        self,
        scene: Scene,
        loop: MeteredLoop,
        say: Callable[[str], None],
        planner: type[PlannerService],
    ) -> None:
        self._scene = scene
        self._loop = loop
        self._say = say
        self._planner = planner
        self._broker = CountingBroker()
        self._services: dict[str, Service] = {}
        self._over = asyncio.Event()
        self._ends = asyncio.Event()
        self._stack = AsyncExitStack()

    async def row(self, window_s: float) -> Row:
        async with self._stack:
            return await self._row(window_s)

    async def _row(self, window_s: float) -> Row:
        scene = self._scene
        bus = await self._stack.enter_async_context(MemoryBus(self._broker, "bench"))
        await self._publish_models(bus)
        await bus.subscribe(subjects.EVENTS, On(EventChanged, self._on_event))
        self._play("nodes", lambda bus: nodes.run(bus, scene))
        await asyncio.sleep(SETTLE_S)
        began = now()
        planner = PlannerConfig(idle_s=3600.0)
        registry = RegistryConfig(durable_copies=1)  # nothing is copied beside what is measured
        self._serve(REGISTRY, lambda bus: RegistryService(bus, registry))
        self._serve(PLANNER, lambda bus: self._planner(bus, planner))
        gateway = GatewayConfig(check_s=0.0)
        self._serve(GATEWAY, lambda bus: GatewayService(bus, gateway, listen=False))
        await self._until_known()
        start_s, start = now() - began, self._spent()
        self._tell(f"start {start_s:.1f} s", start)
        self._play("gateways", lambda bus: gateways.run(bus, scene))
        await asyncio.sleep(SETTLE_S)
        before = self._spent()
        await asyncio.sleep(window_s)
        steady = self._since(before)
        self._tell(f"steady {window_s:.1f} s", steady)
        before, sets = self._spent(), self._set_bytes()
        began = now()
        event_s = await self._spread(bus)
        await asyncio.sleep(SETTLE_S)
        all_, took_s, sets = self._since(before), now() - began, self._set_bytes() - sets
        before = self._spent()
        await asyncio.sleep(window_s)
        after = self._since(before)
        self._tell(f"after {window_s:.1f} s", after)
        windows = {role: steady[role].and_(after[role]) for role in ROLES}
        times = took_s / (2 * window_s)
        event = {role: all_[role].since(windows[role], times) for role in ROLES}
        self._tell(f"event {event_s:.1f} s", event)
        self._tell_of_tasks(steady[PLANNER], event[PLANNER], window_s)
        return Row(
            nodes=scene.nodes,
            start_s=start_s,
            start=start,
            steady_s=window_s,
            steady=steady,
            after=after,
            event_s=event_s,
            event=event,
            event_set_bytes=sets,
            route_us=route_us(scene),
        )

    # --- who is there ---

    async def _publish_models(self, bus: Bus) -> None:
        models = await bus.kv(subjects.KV_MODELS)
        for name in self._scene.names:
            record = self._scene.record(name)
            await models.put(record.model_id, msgspec.msgpack.encode(record))

    def _play(self, name: str, play: Callable[[Bus], Coroutine[Any, Any, None]]) -> None:
        """Begins what stands in for others."""

        async def work() -> None:
            async with MemoryBus(self._broker, name) as bus:
                await play(bus)

        task = begin(name, work())
        self._stack.callback(task.cancel)

    def _serve(self, role: str, make: Callable[[Bus], Service]) -> None:
        async def work() -> None:
            async with CountedBus(self._broker, role) as bus, make(bus) as service:
                self._services[role] = service
                await asyncio.Event().wait()

        task = begin(role, work())
        self._stack.callback(task.cancel)

    # --- what happens ---

    async def _until_known(self) -> None:
        """Returns once the planner and the gateway know every instance that there is."""
        wanted, found = self._scene.nodes + 1, 0
        async with asyncio.timeout(START_LIMIT_S):
            while found < wanted:
                await asyncio.sleep(0.1)
                planner = self._services.get(PLANNER)
                if isinstance(planner, PlannerService):
                    found = sum(len(each.instances) for each in planner.core.sets())

    async def _spread(self, bus: Bus) -> float:
        """Has one node's model spread to all nodes. Returns how long that took."""
        began = now()
        request = SetInstances(name=ModelName(SPREADS), instances=self._scene.nodes)
        await bus.request(subjects.PLANNER_SCALE, request, ScaleAccepted, timeout=10.0)
        async with asyncio.timeout(EVENT_LIMIT_S):
            await self._over.wait()
        return now() - began

    async def _on_event(self, message: EventChanged) -> None:
        record = message.record
        if record.name != SPREADS:
            return
        if record.state is EventState.COMPLETE:
            whys = "; ".join(repair.why for repair in record.repairs)[:200]
            plans = f"planned again: {whys}" if whys else "planned once"
            self._say(f"  {len(record.targets)} targets, {plans}")
            self._over.set()
        elif record.state in (EventState.FAILED, EventState.CANCELLED):
            raise BenchFailed(f"the event ended: {record.error}")

    # --- what it takes ---

    def _spent(self) -> dict[str, Spent]:
        nbytes = dict.fromkeys(ROLES, 0)
        for (name, _), count in self._broker.nbytes.items():
            if name in nbytes:
                nbytes[name] += count
        return {
            role: Spent(
                cpu=self._loop.cpu_s(role),
                messages=self._broker.messages[role],
                nbytes=nbytes[role],
            )
            for role in ROLES
        }

    def _since(self, before: dict[str, Spent]) -> dict[str, Spent]:
        return {role: spent.since(before[role]) for role, spent in self._spent().items()}

    def _set_bytes(self) -> int:
        return self._broker.nbytes[GATEWAY, subjects.INSTANCES]

    def _tell(self, what: str, spent: dict[str, Spent]) -> None:
        texts = [
            f"{role} {each.cpu_s:.2f} s cpu, {each.messages} messages, {each.nbytes / 1e6:.1f} MB"
            for role, each in spent.items()
        ]
        self._say(f"  {what}: {'; '.join(texts)}; sets {self._set_bytes() / 1e6:.2f} MB")

    def _tell_of_tasks(self, steady: Spent, event: Spent, window_s: float) -> None:
        """Says what the planner spends its time on."""
        for what in sorted(event.cpu, key=event.cpu.__getitem__, reverse=True)[:TASKS]:
            cores = steady.cpu.get(what, 0.0) / window_s
            self._say(f"    {what:<32} event {event.cpu[what]:6.3f} s cpu, steady {cores:.4f} core")
