"""The node's shell: from the bus to the models it hosts, the engine and the data plane."""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from services.node.data_plane import DataPlane
from services.node.engine.engine import TorchEngine
from services.node.hosting import Hosting
from services.node.lease import Lease
from services.node.memory.arena import Arena
from services.node.model.store import Imported, Store
from services.node.transport.base import Buffer
from services.node.worker import Worker
from shared import subjects
from shared.bus.base import Bus
from shared.clock import wall_ns
from shared.config import NodeConfig
from shared.errors import BadInput, BusError, LambdaScaleError, PeerLost, StaleEpoch, TransportError
from shared.ids import GatewayId, Generation, NodeId, check_model_name, check_name
from shared.layout import encode_manifest
from shared.messages import Message, Ok
from shared.messages.load import NodeLoad
from shared.messages.pool import (
    ModelAdd,
    ModelAdded,
    ModelRecord,
    ModelRemoved,
    Models,
    ModelsQuery,
    NodeGone,
    NodeInfo,
    NodeJoined,
    NodeStatus,
    PoolQuery,
    PoolState,
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

LOAD_EVERY_S = 0.1
STATUS_EVERY_S = 1.0
REGISTRY_TIMEOUT_S = 2.0


class NodeService(Service):
    role: ClassVar[str] = "node"

    def __init__(self, bus: Bus, config: NodeConfig) -> None:
        check_name("node.id", config.id)
        super().__init__(config.id)
        self._bus = bus
        self._config = config
        self._tokens: asyncio.Queue[tuple[GatewayId, Tokens]] = asyncio.Queue()
        self._status_due = asyncio.Event()
        self._status_seq = 0
        self._peers: dict[str, NodeId] = {}
        """Data-plane address -> node."""

    @property
    def info(self) -> NodeInfo:
        return self._lease.info

    async def open(self) -> None:
        config = self._config
        self._loop = asyncio.get_running_loop()
        self._store = Store(Path(config.data_dir) / "store")
        arena = await asyncio.to_thread(Arena, config.arena_bytes)
        self._worker = Worker(
            node=NodeId(config.id),
            make_engine=lambda: TorchEngine(config.device, config.kv_tokens, config.threads),
            slots=config.slots,
            step_tokens=config.step_tokens,
            step_floor_s=config.step_floor_s,
            send=self._send,
            emit=lambda gateway, tokens: self._call(self._tokens.put_nowait, (gateway, tokens)),
        )
        self._data = DataPlane(
            config.host,
            config.port,
            config.link_bytes_per_s,
            log=self.log,
            on_message=self._worker.on_message,
            on_peer_lost=self._on_peer_lost,
            on_arrived=lambda arrival: self._call(self._hosting.land, arrival),
            on_failed=lambda failure: self._call(self._hosting.land, failure),
        )
        await self.resources.enter_async_context(self._data)
        self._worker.start()
        self.resources.push_async_callback(self._worker.stop)
        self.spawn(self._worker.wait(), name="engine")
        self._lease = Lease(self._bus, self._describe(), config.lease_s, self.log)
        self._hosting = Hosting(
            self._bus,
            arena,
            self._store,
            self._data,
            self._worker,
            self.log,
            info=lambda: self._lease.info,
            changed=self._status_due.set,
            spawn=self._spawn,
        )
        self.resources.push_async_callback(self._hosting.close)
        await self._hosting.read_store()
        await self._connect_to_bus()

    # --- between the threads ---

    def _call(self, function: Callable[..., None], *args: object) -> None:
        """From another thread: has the control loop call `function`."""
        with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(function, *args)

    def _send(self, address: str, header: bytes, payload: Sequence[Buffer]) -> None:
        self._data.send(address, header, payload)

    def _describe(self) -> NodeInfo:
        config = self._config
        return NodeInfo(
            node=NodeId(config.id),
            generation=Generation(wall_ns()),
            address=self._data.address,
            host=config.machine,
            device=config.device,
            arena_bytes=config.arena_bytes,
            link_bytes_per_s=config.link_bytes_per_s,
            slots=config.slots,
            kv_tokens=config.kv_tokens,
        )

    async def _connect_to_bus(self) -> None:
        node = NodeId(self._config.id)
        await self._lease.wait_until_free()
        for subject, handler in (
            (subjects.POOL_MODELS, self._on_pool),
            (subjects.POOL_NODES, self._on_pool),
            (subjects.POOL_REPORT, self._on_report),
            (subjects.node_cancel(node), self._on_cancel),
        ):
            subscription = await self._bus.subscribe(subject, handler)
            self.resources.push_async_callback(subscription.close)
        for subject, server in (
            (subjects.node_plan(node), self._apply),
            (subjects.node_release(node), self._release),
            (subjects.node_import(node), self._import),
            (subjects.node_submit(node), self._submit),
            (subjects.node_ping(node), self._pong),
        ):
            served = await self._bus.serve(subject, server)
            self.resources.push_async_callback(served.close)
        await self._lease.take()  # last: whoever sees the node may call it
        self.resources.push_async_callback(self._lease.give_back)
        self.spawn(self._lease.keep(), name="lease")
        self.spawn(self._hosting.run(), name="landings")
        self.spawn(self._publish_tokens(), name="tokens")
        self.spawn(self._publish_status(), name="status")
        self.spawn(self._publish_load(), name="load")
        self.spawn(self._learn_pool(), name="learn pool")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self.spawn(work, name=name)

    # --- the pool ---

    async def _learn_pool(self) -> None:
        """Models and peers that were there before this node; waits for the registry."""
        while True:
            try:
                models = await self._bus.request(
                    subjects.REGISTRY_MODELS, ModelsQuery(), Models, timeout=REGISTRY_TIMEOUT_S
                )
                pool = await self._bus.request(
                    subjects.REGISTRY_POOL, PoolQuery(), PoolState, timeout=REGISTRY_TIMEOUT_S
                )
                break
            except BusError:
                await asyncio.sleep(LOAD_EVERY_S)
        for record in models.records:
            await self._learn(record)
        for view in pool.nodes:
            self._meet(view.info)

    async def _learn(self, record: ModelRecord) -> None:
        try:
            await self._hosting.learn(record)
        except LambdaScaleError as error:
            self.log.warning("manifest not had", model=record.name, error=str(error))

    def _meet(self, info: NodeInfo) -> None:
        """Makes the connections to a peer before a plan needs them."""
        if info.node != self._config.id:
            self._peers[info.address] = info.node
            self.spawn(self._connect(info), name=f"connect {info.node}")

    async def _connect(self, info: NodeInfo) -> None:
        try:
            await self._data.connect(info.address)
        except TransportError as error:
            self.log.warning("peer not reached", peer=info.node, error=str(error))

    async def _on_pool(self, message: Message) -> None:
        if isinstance(message, ModelAdded):
            self.spawn(self._learn(message.record), name="learn model")
        elif isinstance(message, ModelRemoved):
            self.spawn(self._hosting.forget(message.model_id), name="forget model")
        elif isinstance(message, NodeJoined):
            self._meet(message.info)
        elif isinstance(message, NodeGone) and message.node == self.info.node:
            if message.generation == self.info.generation:
                self._lease.start_over()
                self._status_due.set()
        elif isinstance(message, NodeGone):
            self._forget(message)

    def _forget(self, message: NodeGone) -> None:
        """A peer is no more: what the engine keeps for its paths is freed."""
        error = PeerLost(f"node {message.node} is gone: {message.reason}")
        for address in [a for a, node in self._peers.items() if node == message.node]:
            del self._peers[address]
            self._worker.on_peer_lost(address, error)

    async def _on_report(self, message: Message) -> None:
        self._status_due.set()

    def _on_peer_lost(self, address: str, error: TransportError) -> None:
        """On the data loop."""
        self._worker.on_peer_lost(address, error)
        self._call(self._suspect, address, error)

    def _suspect(self, address: str, error: TransportError) -> None:
        node = self._peers.get(address)
        if node is not None:
            suspect = PeerSuspect(
                reporter=NodeId(self._config.id), node=node, reason=f"{error.code}: {error}"
            )
            self.spawn(self._publish(subjects.PLANNER_SUSPECT, suspect), name="suspect")

    # --- requests of others ---

    def _check_generation(self, generation: Generation) -> None:
        if generation != self.info.generation:
            raise StaleEpoch(
                f"node {self.info.node} has generation {self.info.generation}, not {generation}"
            )

    async def _pong(self, message: Message) -> Message:
        return Ok()

    async def _apply(self, message: Message) -> Message:
        if not isinstance(message, ApplyPlan):
            raise BadInput("an ApplyPlan belongs here")
        self._check_generation(message.generation)
        await self._hosting.apply(message)
        return Ok()

    async def _release(self, message: Message) -> Message:
        if not isinstance(message, ReleaseModel):
            raise BadInput("a ReleaseModel belongs here")
        self._check_generation(message.generation)
        await self._hosting.release(message)
        return Ok()

    async def _submit(self, message: Message) -> Message:
        if not isinstance(message, Submit):
            raise BadInput("a Submit belongs here")
        await self._worker.submit(message)
        return Ok()

    async def _on_cancel(self, message: Message) -> None:
        if isinstance(message, Cancel):
            self._worker.cancel(message)

    async def _import(self, message: Message) -> Message:
        if not isinstance(message, ImportModel):
            raise BadInput("an ImportModel belongs here")
        name = check_model_name(message.name)
        imported = await asyncio.to_thread(
            self._store.import_checkpoint, Path(message.path), blocks=message.blocks
        )
        record = await self._record_of(message, imported)
        self._hosting.on_disk(imported.model_id, imported.manifest)
        await self._bus.publish(subjects.POOL_STATUS, self._status())
        await self._bus.request(
            subjects.REGISTRY_MODEL_ADD, ModelAdd(record=record), Ok, timeout=REGISTRY_TIMEOUT_S
        )
        self.log.info("model imported", model=name, model_id=imported.model_id)
        return ModelImported(record=record)

    async def _record_of(self, message: ImportModel, imported: Imported) -> ModelRecord:
        objects = await self._bus.objects()
        return ModelRecord(
            name=message.name,
            model_id=imported.model_id,
            manifest=await objects.put(encode_manifest(imported.manifest)),
            files={name: await objects.put(data) for name, data in imported.files.items()},
            nbytes=imported.nbytes,
            n_blocks=imported.manifest.n_blocks,
            block_bytes=tuple(block.nbytes for block in imported.manifest.blocks),
            context_length=imported.context_length,
            created_ns=wall_ns(),
            min_instances=message.min_instances,
            max_instances=message.max_instances,
        )

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

    def _status(self) -> NodeStatus:
        self._status_seq += 1
        return NodeStatus(
            node=self.info.node,
            generation=self.info.generation,
            seq=self._status_seq,
            arena_free=self._hosting.arena_free,
            holdings=self._hosting.holdings(),
        )

    async def _publish_status(self) -> None:
        while True:
            self._status_due.clear()
            await self._publish(subjects.POOL_STATUS, self._status())
            try:
                async with asyncio.timeout(STATUS_EVERY_S):
                    await self._status_due.wait()
            except TimeoutError:
                continue

    async def _publish_load(self) -> None:
        while True:
            load = self._worker.load()
            await self._publish(
                subjects.LOAD_NODE,
                NodeLoad(
                    node=self.info.node,
                    generation=self.info.generation,
                    **dataclasses.asdict(load),
                ),
            )
            await asyncio.sleep(LOAD_EVERY_S)
