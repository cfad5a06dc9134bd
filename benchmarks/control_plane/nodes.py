"""Nodes that hold, lend and run nothing, but say on the bus what nodes say.

Each keeps its lease, reports its status, takes plans, and reports blocks as they would arrive: the
pulls of a step end when a block has crossed the link in it.
"""

import asyncio
import random
from bisect import insort
from dataclasses import dataclass, field

import msgspec

from benchmarks.control_plane.scene import (
    ARENA_BYTES,
    BLOCK_BYTES,
    BLOCKS,
    CHUNK_BYTES,
    LINK_BYTES_PER_S,
    Scene,
)
from services.node.core.gathering import Gathering
from services.node.core.told import Telling
from services.node.hosting.reports import together
from services.node.statuses import STATUS_EVERY_S, STATUS_GAP_S
from shared import subjects
from shared.bus.base import Bus, KeyValue, On
from shared.clock import wall_ns
from shared.config import NodeConfig
from shared.errors import BusError
from shared.ids import ModelId, NodeId
from shared.messages import Ok, Ping
from shared.messages.pool import Holding, NodeStatus, ReportStatus, Tier
from shared.messages.scaling import ApplyPlan, BlockArrived, Pull, ReleaseModel

BLOCK_S = BLOCK_BYTES / LINK_BYTES_PER_S
CHUNK_S = CHUNK_BYTES / LINK_BYTES_PER_S
MOMENT_S = 1e-6
"""All that is asked at one moment is known before anything begins."""
LEASE_S = NodeConfig(id="any").lease_s


class Wires:
    """The links between the nodes, as the planner takes them to be (`costs.arrival_times`): a node
    sends one block at a time and receives one at a time, those of a model in the order of the
    plan's steps, and models in turn. A relay sends a block on while it still receives it, one chunk
    later."""

    def __init__(self, scene: Scene) -> None:
        self._out: dict[NodeId, dict[ModelId, list[_Wanted]]] = {}
        """What others want of each node, the next of each model first, and the models in turn."""
        self._in: dict[NodeId, dict[ModelId, list[_Wanted]]] = {}
        """What each node wants."""
        self._busy_out: set[NodeId] = set()
        self._busy_in: set[NodeId] = set()
        self._ends: dict[tuple[NodeId, ModelId, int], float] = {}
        """When the last chunk of each block is, or was, at a node that has its first."""
        self._due: dict[NodeId, None] = {}
        """Nodes at whose ports something may begin."""
        for index in range(scene.nodes):
            for holding in scene.holdings(index):
                for block in holding.blocks:
                    self._ends[scene.node(index).node, holding.model_id, block] = 0.0

    async def carry(self, model: ModelId, pull: Pull, target: NodeId) -> None:
        """Returns when the block is at the target."""
        over = asyncio.get_running_loop().create_future()
        wanted = _Wanted(pull.step, pull.block, pull.source, target, model, over)
        out = self._out.setdefault(pull.source, {}).setdefault(model, [])
        into = self._in.setdefault(target, {}).setdefault(model, [])
        insort(out, wanted)
        insort(into, wanted)
        self._look_at(pull.source)
        try:
            await over
        finally:
            for port in (self._out[pull.source], self._in[target]):
                if wanted in port[model]:  # given up before it began
                    port[model].remove(wanted)
            self._look_at(pull.source)
            self._look_at(target)

    def _look_at(self, node: NodeId) -> None:
        if not self._due:
            asyncio.get_running_loop().call_later(MOMENT_S, self._begin_what_may)
        self._due[node] = None

    def _begin_what_may(self) -> None:
        due, self._due = self._due, {}
        for node in due:
            for port in (self._out.get(node, {}), self._in.get(node, {})):
                for wanted in [each[0] for each in port.values() if each]:
                    if self._may_begin(wanted):
                        self._begin(wanted)

    def _may_begin(self, wanted: "_Wanted") -> bool:
        return (
            self._out[wanted.source][wanted.model][0] is wanted
            and self._in[wanted.target][wanted.model][0] is wanted
            and wanted.source not in self._busy_out
            and wanted.target not in self._busy_in
            and (wanted.source, wanted.model, wanted.block) in self._ends
        )

    def _begin(self, wanted: "_Wanted") -> None:
        loop = asyncio.get_running_loop()
        self._busy_out.add(wanted.source)
        self._busy_in.add(wanted.target)
        for port in (self._out[wanted.source], self._in[wanted.target]):
            _, *others = port.pop(wanted.model)
            port[wanted.model] = others  # its next turn is the last
        source_ends = self._ends[wanted.source, wanted.model, wanted.block]
        ends = max(loop.time() + BLOCK_S, source_ends + CHUNK_S)
        loop.call_later(CHUNK_S, self._first_chunk, wanted, ends)
        loop.call_at(ends, self._end, wanted)

    def _first_chunk(self, wanted: "_Wanted", ends: float) -> None:
        self._ends[wanted.target, wanted.model, wanted.block] = ends
        self._look_at(wanted.target)

    def _end(self, wanted: "_Wanted") -> None:
        self._busy_out.discard(wanted.source)
        self._busy_in.discard(wanted.target)
        self._look_at(wanted.source)
        self._look_at(wanted.target)
        if not wanted.over.done():
            wanted.over.set_result(None)


@dataclass(frozen=True, slots=True, order=True)
class _Wanted:
    """A pull of a block, in the order in which ports serve them."""

    step: int
    block: int
    source: NodeId
    target: NodeId
    model: ModelId
    over: "asyncio.Future[None]" = field(compare=False)


class Node:
    def __init__(
        self, bus: Bus, leases: KeyValue, wires: "Wires", scene: Scene, index: int
    ) -> None:
        self.info = scene.node(index)
        self._wires = wires
        self._bus = bus
        self._leases = leases
        self._holdings = {(h.model_id, h.tier): h.blocks for h in scene.holdings(index)}
        self._telling = Telling()
        self._asked = False
        self._due = asyncio.Event()
        self._offset = index / scene.nodes
        self._pulling: asyncio.Task[None] | None = None
        self._gathering: Gathering | None = None

    async def open(self) -> None:
        node, bus = self.info.node, self._bus
        for subject in (subjects.POOL_REPORT, subjects.node_report(node)):
            await bus.subscribe(subject, On(ReportStatus, self._on_report))
        await bus.serve(subjects.node_plan(node), ApplyPlan, self._apply)
        await bus.serve(subjects.node_release(node), ReleaseModel, self._release)
        await bus.serve(subjects.node_ping(node), Ping, self._pong)

    async def keep_lease(self) -> None:
        value = msgspec.msgpack.encode(self.info)
        revision = await self._leases.create(self.info.node, value, ttl=LEASE_S)
        await asyncio.sleep(self._offset * LEASE_S / 4)
        while True:
            await asyncio.sleep(LEASE_S / 4)
            try:
                revision = await self._leases.update(self.info.node, value, revision, ttl=LEASE_S)
            except BusError:
                revision = await self._leases.create(self.info.node, value, ttl=LEASE_S)

    async def report(self) -> None:
        wait_s = self._offset * STATUS_EVERY_S
        while True:
            try:
                async with asyncio.timeout(wait_s):
                    await self._due.wait()
            except TimeoutError:
                pass
            self._due.clear()
            await self._say_arrived(early=True)
            await self._bus.publish(subjects.POOL_STATUS, self._status())
            await asyncio.sleep(STATUS_GAP_S)
            wait_s = STATUS_EVERY_S - STATUS_GAP_S

    def _status(self) -> NodeStatus:
        holdings = [Holding(*key, blocks) for key, blocks in self._holdings.items()]
        told, self._asked = self._telling.next(holdings, whole=self._asked), False
        in_arena = {model for model, tier in self._holdings if tier is Tier.GPU}
        return NodeStatus(
            node=self.info.node,
            generation=self.info.generation,
            seq=told.seq,
            since=told.since,
            arena_free=ARENA_BYTES - len(in_arena) * BLOCKS * BLOCK_BYTES,
            holdings=told.holdings,
            dropped=told.dropped,
            running=random.randrange(16),
            kv_used=random.randrange(10_000),
            kv_capacity=100_000,
            tokens_out=wall_ns() // 10**7,
            disk_bytes=4 * 10**12,
            disk_free=2 * 10**12,
        )

    async def _on_report(self, message: ReportStatus) -> None:
        self._asked = True
        self._due.set()

    async def _pong(self, message: Ping) -> Ok:
        return Ok()

    async def _release(self, message: ReleaseModel) -> Ok:
        self._holdings.pop((message.model_id, Tier.GPU), None)
        self._due.set()
        return Ok()

    async def _apply(self, plan: ApplyPlan) -> Ok:
        self._holdings.setdefault((plan.model_id, Tier.GPU), ())
        self._due.set()
        if self._pulling is not None:
            self._pulling.cancel()
        self._pulling = asyncio.create_task(self._pull(plan))
        return Ok()

    async def _pull(self, plan: ApplyPlan) -> None:
        held = self._holdings[plan.model_id, Tier.GPU]
        missing = [pull for pull in plan.pulls if pull.block not in held]
        self._gathering = Gathering(plan.report_s, {pull.block for pull in missing})
        async with asyncio.TaskGroup() as tasks:
            for pull in missing:
                tasks.create_task(self._pull_one(plan, pull, self._gathering))

    async def _pull_one(self, plan: ApplyPlan, pull: Pull, gathering: Gathering) -> None:
        began_ns, loop = wall_ns(), asyncio.get_running_loop()
        await self._wires.carry(plan.model_id, pull, self.info.node)
        self._hold(plan.model_id, pull.block)
        gathering.add(self._arrived(plan, pull, began_ns))
        if (wait_s := gathering.due - loop.time()) > 0:
            await asyncio.sleep(wait_s)
        await self._say_arrived()

    async def _say_arrived(self, *, early: bool = False) -> None:
        if self._gathering is None:
            return
        if blocks := self._gathering.take(asyncio.get_running_loop().time(), early=early):
            report = together(blocks, wall_ns()) if len(blocks) > 1 else blocks[0]
            await self._bus.publish(subjects.ARRIVALS, report)

    def _arrived(self, plan: ApplyPlan, pull: Pull, began_ns: int) -> BlockArrived:
        ended_ns = wall_ns()
        return BlockArrived(
            event=plan.event,
            revision=plan.revision,
            node=self.info.node,
            generation=self.info.generation,
            model_id=plan.model_id,
            block=pull.block,
            source=pull.source,
            transport="tcp",
            nbytes=BLOCK_BYTES,
            started_ns=began_ns,
            first_byte_ns=ended_ns - int(BLOCK_S * 1e9),
            finished_ns=ended_ns,
            ready_ns=ended_ns,
            cause=plan.event,
        )

    def _hold(self, model: ModelId, block: int) -> None:
        held = (*self._holdings[model, Tier.GPU], block)
        self._holdings[model, Tier.GPU] = tuple(sorted(held))
        if len(held) == BLOCKS:
            self._due.set()


async def run(bus: Bus, scene: Scene) -> None:
    leases = await bus.kv(subjects.KV_LEASES)
    wires = Wires(scene)
    nodes = [Node(bus, leases, wires, scene, index) for index in range(scene.nodes)]
    for node in nodes:
        await node.open()
    async with asyncio.TaskGroup() as tasks:
        for node in nodes:
            tasks.create_task(node.keep_lease())
            tasks.create_task(node.report())
