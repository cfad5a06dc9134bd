"""Nodes and gateways that speak the real messages, as tests tell them to.

Nodes follow their plans in the order of steps, each block as soon as its source holds it, and no
further than the test lets them (`Wire`).
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from shared import subjects
from shared.bus.base import On, Subscription
from shared.bus.memory import MemoryBroker, MemoryBus, MemorySubscription
from shared.clock import wall_ns
from shared.errors import LambdaScaleError, StaleEpoch
from shared.ids import GatewayId, Generation, InstanceId, ModelId, ModelName, NodeId
from shared.messages import Message, Ok, Ping
from shared.messages.instances import Instance, InstanceSet, InstanceState
from shared.messages.load import GatewayLoad, ModelLoad
from shared.messages.pool import Holding, ModelRecord, NodeInfo, NodeStatus, Profile, Tier
from shared.messages.scaling import (
    ApplyPlan,
    BlockArrived,
    FirstPartialToken,
    PeerSuspect,
    Pull,
    PullFailed,
    ReleaseModel,
)

WAIT_S = 600.0
"""Seconds of virtual time."""
REPORT_S = 0.1
MODEL = ModelId("m0d3l")
NAME = ModelName("llama")
BLOCKS = 4
BLOCK_BYTES = 100
BLOCK_S = 0.01
"""Seconds of virtual time that a block takes to come."""
ARENA_BYTES = 1000
SLOTS = 4


def record(min_instances: int = 0, max_instances: int = 0, name: str = NAME) -> ModelRecord:
    return ModelRecord(
        name=ModelName(name),
        model_id=MODEL if name == NAME else ModelId(f"{name}-1d"),
        manifest="0" * 64,
        files={"tokenizer.json": "1" * 64},
        nbytes=BLOCKS * BLOCK_BYTES,
        n_blocks=BLOCKS,
        block_bytes=(BLOCK_BYTES,) * BLOCKS,
        context_length=2048,
        created_ns=1,
        min_instances=min_instances,
        max_instances=max_instances,
    )


class World:
    """What nodes, gateways and tests share. Whatever happens lets those who wait look again."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.stack = AsyncExitStack()
        self.nodes: dict[NodeId, ScriptedNode] = {}
        self.step = 1_000_000
        """How far nodes may pull: blocks of steps up to this one arrive."""
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    def open_to(self, step: int) -> None:
        self.step = step
        self.stir()

    def stir(self) -> None:
        self.spawn(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(lambda: bool(true()))

    async def forever_until(self, true: Callable[[], object]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: bool(true()))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.append(task)
        return task

    async def close(self) -> None:
        """Raises what a node or gateway failed with."""
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.stack.aclose()
        for error in ended:
            if isinstance(error, Exception):
                raise error


class ScriptedNode:
    def __init__(self, world: World, name: str, disk: bool = False, generation: int = 0):
        self.id = NodeId(name)
        self.generation = Generation(generation or wall_ns())
        self.gpu: dict[ModelId, set[int]] = {}
        self.host: dict[ModelId, set[int]] = {}
        self.disk = {MODEL} if disk else set[ModelId]()
        self.plans: list[ApplyPlan] = []
        self.releases: list[ReleaseModel] = []
        self.refuse: LambdaScaleError | None = None
        """What it answers plans with."""
        self.broken: set[NodeId] = set()
        """Sources that it cannot pull from."""
        self.stuck: set[NodeId] = set()
        """Sources that send it nothing, without an end."""
        self.mute = False
        """Sends nothing, and delivers no block."""
        self.profile = Profile()
        """What it says that it has measured."""
        self.lossy = False
        """Its arrivals are not heard of; its reports are."""
        self.release_gate = asyncio.Event()
        self.release_gate.set()
        self._world = world
        self._seq = 0
        self._pulling: asyncio.Task[None] | None = None
        self._served: list[Subscription] = []

    @property
    def info(self) -> NodeInfo:
        return NodeInfo(
            node=self.id,
            generation=self.generation,
            address=f"tcp://{self.id}",
            host="host",
            device="cpu",
            arena_bytes=ARENA_BYTES,
            link_bytes_per_s=0,
            slots=SLOTS,
        )

    # --- its life ---

    async def start(self) -> None:
        self._bus = await self._world.stack.enter_async_context(
            MemoryBus(self._world.broker, self.id)
        )
        await self._serve()
        await self._bus.subscribe(subjects.POOL_REPORT, On(Message, self._on_report))
        leases = await self._bus.kv(subjects.KV_LEASES)
        await leases.create(self.id, msgspec.msgpack.encode(self.info), ttl=86_400)
        self._world.spawn(self._keep_reporting())

    async def _serve(self) -> None:
        bus = self._bus
        self._served += [
            await bus.serve(subjects.node_plan(self.id), ApplyPlan, self._apply),
            await bus.serve(subjects.node_release(self.id), ReleaseModel, self._release),
            await bus.serve(subjects.node_ping(self.id), Ping, self._pong),
        ]

    async def die(self) -> None:
        """As a killed process: its subscriptions end, its lease is deleted."""
        await self.vanish()
        leases = await self._bus.kv(subjects.KV_LEASES)
        await leases.delete(self.id)

    async def vanish(self) -> None:
        """Its process is gone, its lease is not yet."""
        self.mute = True
        self._stop_pulling()
        for served in self._served:
            await served.close()

    async def freeze(self) -> None:
        """Its process stands still: what is asked of it is never answered."""
        await self.vanish()
        for subject in (subjects.node_ping(self.id), subjects.node_plan(self.id)):
            frozen = MemorySubscription(self._world.broker, subject, lambda data, reply: None)
            self._world.broker.serve(frozen)
            self._served.append(frozen)

    async def thaw(self) -> None:
        for served in self._served:
            await served.close()
        self.mute = False
        await self._serve()
        await self.report()

    async def suspect(self, peer: "ScriptedNode") -> None:
        message = PeerSuspect(reporter=self.id, node=peer.id, reason="peer_lost: reset")
        await self._bus.publish(subjects.PLANNER_SUSPECT, message)

    async def report(self) -> None:
        self._seq += 1
        if not self.mute:
            status = NodeStatus(
                node=self.id,
                generation=self.generation,
                seq=self._seq,
                arena_free=ARENA_BYTES - BLOCKS * BLOCK_BYTES * len({*self.gpu, *self.host}),
                holdings=self._holdings(),
                profile=self.profile,
            )
            await self._bus.publish(subjects.POOL_STATUS, status)

    async def _keep_reporting(self) -> None:
        while True:
            await self.report()
            await asyncio.sleep(REPORT_S)

    def _holdings(self) -> tuple[Holding, ...]:
        tiers = ((Tier.GPU, self.gpu), (Tier.HOST, self.host))
        memory = [Holding(m, t, tuple(sorted(b))) for t, held in tiers for m, b in held.items()]
        return (*memory, *(Holding(m, Tier.DISK, tuple(range(BLOCKS))) for m in self.disk))

    async def _on_report(self, message: Message) -> None:
        await self.report()

    def holds(self, model: ModelId, block: int) -> bool:
        return block in self.gpu.get(model, ()) or block in self.host.get(model, ())

    # --- what it is asked ---

    async def _pong(self, message: Ping) -> Ok:
        return Ok()

    async def _apply(self, message: ApplyPlan) -> Message:
        if message.generation != self.generation:
            raise StaleEpoch("another generation")
        if self.refuse is not None:
            raise self.refuse
        self.plans.append(message)
        held = self.gpu.setdefault(message.model_id, self.host.pop(message.model_id, set()))
        self._stop_pulling()
        self._pulling = self._world.spawn(self._pull(message))
        await self.report()
        for block in sorted(held & {*message.promote, *(p.block for p in message.pulls)}):
            await self.arrived(message, block, self.id, "held")
        self._world.stir()
        return Ok()

    async def _pull(self, plan: ApplyPlan) -> None:
        missing = [b for b in plan.promote if not self.holds(plan.model_id, b)]
        for step, block in enumerate(missing, start=1):
            await self._world.forever_until(functools.partial(self._may, step))
            await self.land(plan, block, self.id)
        for pull in sorted(plan.pulls, key=lambda pull: pull.step):
            if self.holds(plan.model_id, pull.block):
                continue
            if pull.source in self.broken:
                await self.fail(plan, pull.block, pull.source)
                continue
            await self._world.forever_until(functools.partial(self._may_pull, plan, pull))
            await self.land(plan, pull.block, pull.source)

    def _may(self, step: int) -> bool:
        return step <= self._world.step

    def _may_pull(self, plan: ApplyPlan, pull: Pull) -> bool:
        source = self._world.nodes[pull.source]
        sends = not source.mute and pull.source not in self.stuck
        return self._may(pull.step) and sends and source.holds(plan.model_id, pull.block)

    async def land(self, plan: ApplyPlan, block: int, source: NodeId) -> None:
        await asyncio.sleep(BLOCK_S)
        self.gpu[plan.model_id].add(block)
        if not self.lossy:
            await self.arrived(plan, block, source, "disk" if source == self.id else "tcp")
        await self.report()
        self._world.stir()

    async def arrived(self, plan: ApplyPlan, block: int, source: NodeId, transport: str) -> None:
        at = wall_ns()
        arrival = BlockArrived(
            event=plan.event,
            revision=plan.revision,
            node=self.id,
            generation=self.generation,
            model_id=plan.model_id,
            block=block,
            source=source,
            transport=transport,
            nbytes=BLOCK_BYTES,
            started_ns=at,
            first_byte_ns=at,
            finished_ns=at,
            ready_ns=at,
        )
        await self._bus.publish(subjects.ARRIVALS, arrival)

    async def fail(
        self, plan: ApplyPlan, block: int, source: NodeId, revision: int | None = None
    ) -> None:
        failed = PullFailed(
            event=plan.event,
            revision=plan.revision if revision is None else revision,
            node=self.id,
            generation=self.generation,
            block=block,
            source=source,
            code="peer_lost",
            message="reset by peer",
        )
        await self._bus.publish(subjects.ARRIVALS, failed)

    async def _release(self, message: ReleaseModel) -> Message:
        if message.generation != self.generation:
            raise StaleEpoch("another generation")
        self.releases.append(message)
        self._world.stir()
        await self.release_gate.wait()
        self._stop_pulling()
        held = self.gpu.pop(message.model_id, set()) | self.host.pop(message.model_id, set())
        if message.keep is Tier.HOST and len(held) == BLOCKS:
            self.host[message.model_id] = held
        await self.report()
        self._world.stir()
        return Ok()

    def _stop_pulling(self) -> None:
        if self._pulling is not None:
            self._pulling.cancel()


class ScriptedGateway:
    """Holds requests, hands them to serving instances with free slots, reports all the time."""

    def __init__(self, world: World, name: str = "gateway-0", model: str = NAME) -> None:
        self.id = GatewayId(name)
        self.queued = 0
        self.on: dict[InstanceId, int] = {}
        self.table: dict[InstanceId, Instance] = {}
        self.silent = False
        self.stays = False
        """Its requests on moving instances end there."""
        self._reports = 0
        self._model = ModelName(model)
        self._world = world
        self._served: set[InstanceId] = set()

    async def start(self) -> None:
        self._bus = await self._world.stack.enter_async_context(
            MemoryBus(self._world.broker, self.id)
        )
        await self._bus.subscribe(subjects.INSTANCES, On(InstanceSet, self._on_set))
        self._world.spawn(self._report())

    async def offer(self, requests: int) -> None:
        self.queued += requests
        await self._place()

    async def reported(self) -> None:
        """Returns when what is so now has been reported."""
        before = self._reports
        await self._world.until(lambda: self._reports > before)

    def end_all(self) -> None:
        self.queued = 0
        self.on.clear()

    def end_on(self, instance: InstanceId) -> None:
        self.on.pop(instance, None)

    async def _on_set(self, message: InstanceSet) -> None:
        if message.name != self._model:
            return
        self.table = {i.id: i for i in message.instances}
        for instance in list(self.on):
            known = self.table.get(instance)
            if known is None or (known.state is InstanceState.MOVING and not self.stays):
                self.queued += self.on.pop(instance)
        await self._place()

    async def _place(self) -> None:
        for instance in self.table.values():
            if instance.state is InstanceState.SERVING:
                room = instance.slots - self.on.get(instance.id, 0)
                taken = max(0, min(room, self.queued))
                self.queued -= taken
                if taken:
                    self.on[instance.id] = self.on.get(instance.id, 0) + taken
                    await self._first_token(instance)

    async def _first_token(self, instance: Instance) -> None:
        if instance.event is None or instance.id in self._served:
            return
        self._served.add(instance.id)
        token = FirstPartialToken(
            event=instance.event,
            instance=instance.id,
            stages=len(instance.stages),
            at_ns=wall_ns(),
        )
        await self._bus.publish(subjects.ARRIVALS, token)

    async def _report(self) -> None:
        while True:
            if not self.silent:
                running = sum(self.on.values())
                load = ModelLoad(
                    model=self._model,
                    queued_requests=self.queued,
                    queued_tokens=self.queued * 10,
                    running_requests=running,
                    running_tokens=running * 10,
                    instance_requests=dict(self.on),
                )
                await self._bus.publish(
                    subjects.LOAD_GATEWAY, GatewayLoad(gateway=self.id, models=(load,))
                )
                self._reports += 1
                self._world.stir()
            await asyncio.sleep(REPORT_S)
