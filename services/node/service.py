"""The node's shell: from the bus to the models it hosts, the engine and the data plane."""

import asyncio
import dataclasses
import threading
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import ClassVar, TypeVarTuple

from services.node.core.profile import Profiler
from services.node.hosting.hosting import Hosting
from services.node.hosting.library import REGISTRY_TIMEOUT_S, Library
from services.node.hosting.reports import Reports
from services.node.lease import Lease, next_generation
from services.node.memory.arena import Arena
from services.node.memory.device import DeviceArena
from services.node.memory.views import Memory
from services.node.parts import Parts, RealParts
from services.node.transport.base import Buffer
from shared import subjects
from shared.bus.base import Bus, On
from shared.clock import now
from shared.config import NodeConfig
from shared.errors import BusError, LambdaScaleError, PeerLost, StaleEpoch, TransportError
from shared.ids import GatewayId, Generation, ModelId, NodeId, check_name
from shared.messages import Message, Ok, Ping
from shared.messages.pool import (
    Holding,
    ModelAdded,
    ModelRemoved,
    Models,
    ModelsQuery,
    NodeGone,
    NodeInfo,
    NodeJoined,
    Nodes,
    NodesQuery,
    NodeStatus,
    ReportStatus,
)
from shared.messages.scaling import (
    ApplyPlan,
    ImportModel,
    ModelImported,
    PeerSuspect,
    ReleaseModel,
)
from shared.messages.serving import Cancel, Submit, Tokens
from shared.service import Service

STATUS_EVERY_S = 1.0
STATUS_GAP_S = 0.05
"""Between two, however much changes: while blocks land, each is reported by itself anyhow."""
RETRY_S = 0.2

Args = TypeVarTuple("Args")


class NodeService(Service):
    role: ClassVar[str] = "node"

    def __init__(self, bus: Bus, config: NodeConfig, parts: Parts | None = None) -> None:
        """`parts`: other than this machine's own."""
        check_name("node.id", config.id)
        super().__init__(config.id)
        self._bus = bus
        self._config = config
        self._parts = parts or RealParts(config)
        self._tokens: asyncio.Queue[tuple[GatewayId, Tokens]] = asyncio.Queue()
        self._calls: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        """Of other threads, for the control loop to make."""
        self._calling = threading.Lock()
        self._status_due = asyncio.Event()
        self._status_seq = 0
        self._profiler = Profiler()
        self.node = NodeId(config.id)
        self._peers: dict[str, NodeInfo] = {}
        """By data-plane address."""
        self._addresses: dict[NodeId, set[str]] = {}
        """Of peers, that of an earlier process included."""
        self._connected: set[str] = set()
        """Peers that connections were made to ahead of need."""
        self._ways: dict[str, str] = {}
        """Address of a peer -> what carries the bytes of reads from it."""

    @property
    def info(self) -> NodeInfo:
        return self._lease.info

    async def open(self) -> None:
        config = self._config
        self._loop = asyncio.get_running_loop()
        self._library = Library(self._bus, self._parts.store(), changed=self._status_due.set)
        await self._library.read_store()
        started = now()
        arena = await asyncio.to_thread(Arena, config.arena_bytes)
        self.resources.callback(arena.close)
        self.log.info("arena taken", nbytes=arena.nbytes, seconds=round(now() - started, 3))
        device = self._parts.device(arena.memory)
        if device is not None:
            await asyncio.to_thread(device.__enter__)
            self.resources.push(device)
        await self._start_threads(arena.memory, device)
        leases = await self._bus.kv(subjects.KV_LEASES)
        counters = await self._bus.kv(subjects.KV_COUNTERS)
        info = self._describe(await next_generation(counters, self.node))
        self._lease = Lease(leases, counters, info, config.lease_s, self.log)
        self._hosting = Hosting(
            self.node,
            arena,
            self._library,
            self._data,
            self._worker,
            Reports(self._bus, self.log, lambda: self._lease.info, self._profiler),
            changed=self._status_due.set,
            spawn=lambda work, name: self.spawn(work, name=name),
        )
        self.resources.push_async_callback(self._hosting.close)
        await self._connect_to_bus()

    async def _start_threads(self, memory: Memory, device: DeviceArena | None) -> None:
        self._worker = self._parts.worker(
            device,
            send=self._send,
            emit=lambda gateway, tokens: self._call(self._tokens.put_nowait, (gateway, tokens)),
            ran=lambda *sweep: self._call(self._profiler.ran, *sweep),
        )
        self._data = self._parts.data_plane(
            memory,
            device,
            on_message=self._worker.on_message,
            on_peer_lost=self._on_peer_lost,
            on_connected=lambda address, way: self._call(self._ways.__setitem__, address, way),
            on_sent=lambda *sent: self._call(self._profiler.sent, *sent),
            on_arrived=lambda arrival: self._call(self._hosting.land, arrival),
            on_failed=lambda failure: self._call(self._hosting.land, failure),
        )
        await self.resources.enter_async_context(self._data)
        self.spawn(self._data.wait(), name="data plane")
        self._worker.start()
        self.resources.push_async_callback(self._worker.stop)
        self.spawn(self._worker.wait(), name="engine")
        await self._worker.ready()

    async def drain(self) -> None:
        """No new work; what runs ends at once, and its gateways resume it elsewhere."""
        await self._lease.give_back()
        await self._worker.stop()
        await self._tokens.join()

    # --- between the threads ---

    def _send(self, address: str, header: bytes, payload: Sequence[Buffer]) -> None:
        self._data.send(address, header, payload)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        """From another thread: has the control loop call `function`, which raises nothing; in
        the order of the calls. The loop is woken once for all that come before it looks."""
        with self._calling:
            first = not self._calls
            self._calls.append((function, args))
        if first:
            with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._make_calls)

    def _make_calls(self) -> None:
        with self._calling:
            calls, self._calls = self._calls, []
        for function, args in calls:
            function(*args)

    def _describe(self, generation: Generation) -> NodeInfo:
        config = self._config
        return NodeInfo(
            node=self.node,
            generation=generation,
            address=self._data.address,
            host=config.machine,
            device=config.device,
            staging=self._worker.staging,
            arena_bytes=config.arena_bytes,
            link_bytes_per_s=config.link_bytes_per_s,
            slots=config.slots,
            rack=config.rack,
            trunk_bytes_per_s=config.trunk_bytes_per_s,
            local_bytes_per_s=config.local_bytes_per_s,
        )

    async def _connect_to_bus(self) -> None:
        node = self.node
        await self._lease.wait_until_free()
        bus = self._bus
        models = On(ModelAdded, self._on_added), On(ModelRemoved, self._on_removed)
        self.own(await bus.subscribe(subjects.POOL_MODELS, *models))
        nodes = On(NodeJoined, self._on_joined), On(NodeGone, self._on_gone)
        self.own(await bus.subscribe(subjects.POOL_NODES, *nodes))
        self.own(await bus.subscribe(subjects.POOL_REPORT, On(ReportStatus, self._on_report)))
        self.own(await bus.subscribe(subjects.node_cancel(node), On(Cancel, self._on_cancel)))
        self.own(await bus.serve(subjects.node_plan(node), ApplyPlan, self._apply))
        self.own(await bus.serve(subjects.node_release(node), ReleaseModel, self._release))
        self.own(await bus.serve(subjects.node_import(node), ImportModel, self._import))
        self.own(await bus.serve(subjects.node_submit(node), Submit, self._submit))
        self.own(await bus.serve(subjects.node_ping(node), Ping, self._pong))
        await self._lease.take()  # last: whoever sees the node may call it
        self.resources.push_async_callback(self._lease.give_back)
        self.spawn(self._lease.keep(), name="lease")
        self.spawn(self._hosting.run(), name="landings")
        self.spawn(self._publish_tokens(), name="tokens")
        self.spawn(self._publish_status(), name="status")
        self.spawn(self._learn_pool(), name="learn pool")

    def _try(self, what: str, action: Callable[[*Args], Awaitable[object]], *args: *Args) -> None:
        """Does it beside everything else. What the action cannot do is logged, no more."""

        async def work() -> None:
            try:
                await action(*args)
            except LambdaScaleError as error:
                self.log.warning(f"{what} failed", code=error.code, error=str(error))

        self.spawn(work(), name=what)

    # --- the pool ---

    async def _learn_pool(self) -> None:
        """Models and peers that were there before this node; waits for the registry."""
        while True:
            try:
                models = await self._bus.request(
                    subjects.REGISTRY_MODELS, ModelsQuery(), Models, timeout=REGISTRY_TIMEOUT_S
                )
                peers = await self._bus.request(
                    subjects.REGISTRY_NODES, NodesQuery(), Nodes, timeout=REGISTRY_TIMEOUT_S
                )
                break
            except LambdaScaleError:
                await asyncio.sleep(RETRY_S)
        for record in models.records:
            self._try("learning a model", self._library.learn, record)
        for info in sorted(peers.nodes, key=self._distance):
            self._meet(info)

    async def _on_added(self, message: ModelAdded) -> None:
        self._try("learning a model", self._library.learn, message.record)

    async def _on_removed(self, message: ModelRemoved) -> None:
        stored = self._library.forget(message.model_id)
        self._try("forgetting a model", self._remove, message.model_id, stored)

    async def _on_joined(self, message: NodeJoined) -> None:
        self._meet(message.info)

    async def _remove(self, model: ModelId, stored: bool) -> None:
        await self._hosting.release(model, keep=None)
        if stored:
            await self._library.delete(model)

    def _meet(self, info: NodeInfo) -> None:
        """Makes the connections to a peer before a plan needs them, to `mesh_peers` of them."""
        if info.node == self.node:
            return
        self._know(info)
        if len(self._connected) < self._config.mesh_peers:
            self._connected.add(info.address)
            self._try(f"connecting to {info.node}", self._data.connect, info.address)

    def _know(self, info: NodeInfo) -> None:
        self._peers[info.address] = info
        self._addresses.setdefault(info.node, set()).add(info.address)

    def _distance(self, other: NodeInfo) -> tuple[bool, bool, int]:
        """Own host, own rack, and then at random, so that no node is near to all; the same from
        either end."""
        apart = zlib.crc32(self.node.encode()) ^ zlib.crc32(other.node.encode())
        return other.host != self.info.host, other.rack != self.info.rack, apart

    async def _on_gone(self, gone: NodeGone) -> None:
        """A peer is no more: what the engine keeps for its paths is freed."""
        if gone.node == self.node:
            if gone.generation == self.info.generation and not self._lease.over:
                self.spawn(self._start_over(gone.generation), name="new generation")
            return
        error = PeerLost(f"node {gone.node} is gone: {gone.reason}")
        addresses = self._addresses.pop(gone.node, set())
        for address in sorted(addresses):
            peer = self._peers.get(address)
            if peer is None or peer.node != gone.node:
                continue  # another node has it now
            if peer.generation > gone.generation:
                self._know(peer)
            else:
                del self._peers[address]
                self._connected.discard(address)
                self._worker.on_peer_lost(address, error)

    async def _start_over(self, ended: Generation) -> None:
        await self._lease.start_over(ended)
        self._status_due.set()

    async def _on_report(self, message: ReportStatus) -> None:
        self._status_due.set()

    def _on_peer_lost(self, address: str, error: TransportError) -> None:
        """On the data loop."""
        self._worker.on_peer_lost(address, error)
        self._call(self._suspect, address, error)

    def _suspect(self, address: str, error: TransportError) -> None:
        self._ways.pop(address, None)
        peer = self._peers.get(address)
        if peer is not None:
            suspect = PeerSuspect(
                reporter=self.node, node=peer.node, reason=f"{error.code}: {error}"
            )
            self._try("reporting a peer", self._bus.publish, subjects.PLANNER_SUSPECT, suspect)

    # --- requests of others ---

    def _check_generation(self, generation: Generation) -> None:
        if generation != self.info.generation:
            raise StaleEpoch(
                f"node {self.info.node} has generation {self.info.generation}, not {generation}"
            )

    async def _pong(self, message: Ping) -> Ok:
        return Ok()

    async def _apply(self, message: ApplyPlan) -> Ok:
        self._check_generation(message.generation)
        for peer in message.peers:
            if peer.node != self.node:
                self._know(peer)
        await self._hosting.apply(message)
        return Ok()

    async def _release(self, message: ReleaseModel) -> Ok:
        self._check_generation(message.generation)
        await self._hosting.release(message.model_id, message.keep)
        return Ok()

    async def _submit(self, message: Submit) -> Ok:
        await self._worker.submit(message)
        return Ok()

    async def _on_cancel(self, message: Cancel) -> None:
        self._worker.cancel(message)

    async def _import(self, message: ImportModel) -> ModelImported:
        record = await self._library.pack(message)
        await self._bus.publish(subjects.POOL_STATUS, self._status())  # before it is announced
        await self._library.publish(record)
        self.log.info("model imported", model=record.name, model_id=record.model_id)
        return ModelImported(record=record)

    # --- reports ---

    async def _publish(self, subject: str, message: Message) -> None:
        try:
            await self._bus.publish(subject, message)
        except BusError as error:
            self.log.warning("not published", subject=subject, error=str(error))

    async def _publish_tokens(self) -> None:
        while True:
            gateway, tokens = await self._tokens.get()
            await self._publish(subjects.gateway_tokens(gateway), tokens)
            self._tokens.task_done()

    def in_memory(self) -> list[Holding]:
        """What it holds on the device and in host memory."""
        return self._hosting.holdings()

    def holdings(self) -> tuple[Holding, ...]:
        """What it holds now, in every tier."""
        return (*self.in_memory(), *self._library.holdings())

    def _status(self) -> NodeStatus:
        self._status_seq += 1
        return NodeStatus(
            node=self.info.node,
            generation=self.info.generation,
            seq=self._status_seq,
            arena_free=self._hosting.arena_free,
            holdings=self.holdings(),
            profile=self._profiler.profile(),
            peers=self._peers_by_way(),
            **dataclasses.asdict(self._worker.load()),
        )

    def _peers_by_way(self) -> dict[str, tuple[NodeId, ...]]:
        ways: dict[str, set[NodeId]] = {}
        for address, way in self._ways.items():
            if address in self._peers:
                ways.setdefault(way, set()).add(self._peers[address].node)
        return {way: tuple(sorted(ways[way])) for way in sorted(ways)}

    async def _publish_status(self) -> None:
        while not self._lease.over:
            self._status_due.clear()
            await self._publish(subjects.POOL_STATUS, self._status())
            await asyncio.sleep(STATUS_GAP_S)
            try:
                async with asyncio.timeout(STATUS_EVERY_S - STATUS_GAP_S):
                    await self._status_due.wait()
            except TimeoutError:
                continue
