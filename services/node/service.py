"""The node's shell: from the bus to the models it hosts, the engine and the data plane."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVarTuple

from services.node.artefacts import Artefacts
from services.node.attempts import Attempts
from services.node.core.handover import KvWorth
from services.node.core.known_answers import KnownAnswers
from services.node.core.profile import Profiler, token_s
from services.node.core.view import NodeView
from services.node.core.watchdog import LOOK_S, Watchdog
from services.node.doubt import Doubt
from services.node.hosting.adapters import Adapters
from services.node.hosting.copying import Copying
from services.node.hosting.evacuation import evacuate
from services.node.hosting.hosting import Hosting
from services.node.hosting.inheritance import ARENA, CACHE
from services.node.hosting.lending import Lending
from services.node.hosting.library import Library
from services.node.hosting.memories import Memories
from services.node.hosting.reports import Reports
from services.node.keeper.link import Estate, KeeperLink
from services.node.lease import Lease, next_generation
from services.node.memory.device import DeviceArena
from services.node.memory.views import Memory
from services.node.moving.events import Arrival, PullFailure
from services.node.notice import NoticeWatch
from services.node.owners import Owners
from services.node.parts import Parts
from services.node.peers import Peers
from services.node.pool_watch import PoolWatch
from services.node.statuses import Statuses
from services.node.threads import Threads
from shared import subjects
from shared.bus.base import Bus, On
from shared.clock import now, wall_ns
from shared.config import NodeConfig
from shared.errors import BusError, EngineFailed, LambdaScaleError, StaleEpoch, TransportError
from shared.ids import GatewayId, Generation, ModelId, NodeId, check_name
from shared.messages import Message, Ok, Ping
from shared.messages.copies import DropCopy, KeepCopy, Leave
from shared.messages.pool import (
    CopyProgress,
    Holding,
    NodeGone,
    NodeInfo,
    Profile,
    ReportStatus,
)
from shared.messages.scaling import (
    ApplyPlan,
    ImportModel,
    ModelImported,
    ReleaseModel,
)
from shared.messages.serving import Distrust, GatewayGone, Tokens
from shared.messages.story import StoryQuery, Told
from shared.service import Service
from shared.story import Transition

if TYPE_CHECKING:
    from shared.metrics import Metrics

Args = TypeVarTuple("Args")


class NodeService(Service):
    role: ClassVar[str] = "node"
    hosting_type: ClassVar[type[Hosting]] = Hosting

    def __init__(
        self,
        bus: Bus,
        config: NodeConfig,
        parts: Parts,
        *,
        keep_s: float = 0.0,
        shares_compiled: bool = False,
        hung: Callable[[], None] = lambda: None,
    ) -> None:
        """`keep_s`: how long a keeper keeps the weights after this process (`node.keep_weights_s`);
        0: there is none. `shares_compiled`: whether compiled libraries come from other nodes, and
        go to them. Both concern the whole process. `hung` is called when the engine hangs, before
        the node ends."""
        check_name("node.id", config.id)
        super().__init__(config.id)
        self._evacuate_s = config.evacuate_s
        self.drain_s += self._evacuate_s
        self._bus = bus
        self._config = config
        self._parts = parts
        self._shares_compiled = shares_compiled
        self._hung = hung
        self._unfit = ""
        """Why it takes nothing new; empty: it is fit."""
        self._profiler = Profiler()
        self._kv_worth = KvWorth(config.link_bytes_per_s)
        self._statuses = Statuses(self._look, self._profiler, self._kv_s)
        self._engine_s: defaultdict[ModelId, float] = defaultdict(float)
        """Seconds that the engine has spent in sweeps."""
        self._sent_bytes = 0
        self.node = NodeId(config.id)
        directory = Path(config.data_dir).absolute()
        self._keeper = KeeperLink(directory, self.node, keep_s)
        self._notice: NoticeWatch | None = None
        if config.notice:
            self._notice = NoticeWatch(config.notice, directory, self.log)

    @property
    def info(self) -> NodeInfo:
        return self._lease.info

    def metrics(self) -> "Metrics":
        from services.node.metrics import NodeMetrics

        metrics = super().metrics()
        NodeMetrics(metrics, self._view)
        return metrics

    async def open(self) -> None:
        config = self._config
        if self._notice is not None:
            await self._notice.over()
        estate = await self._claim()
        self.resources.callback(estate.close)
        self._library = Library(self._bus, self._parts.store(), changed=self._statuses.changed)
        await self._library.read_store()
        self._lending = Lending(self._library, self._profiler)
        if self._shares_compiled:
            await self.resources.enter_async_context(Artefacts(self._bus, self._spawn_one))
        memories = Memories(estate, self._keeper, self.log)
        arena = await memories.take(ARENA, config.arena_bytes, "node.arena_bytes")
        self.resources.callback(arena.close)
        cache = None
        if config.host_bytes:
            cache = await memories.take(CACHE, config.host_bytes, "node.host_bytes")
            self.resources.callback(cache.close)
        device = self._parts.device(arena.memory)
        if device is not None:
            await asyncio.to_thread(device.__enter__)
            self.resources.push(device)
        self._shelf = memories.shelf()
        taken = [each.memory for each in (arena, cache) if each is not None]
        await self._start_threads(taken, device)
        leases = await self._bus.kv(subjects.KV_LEASES)
        counters = await self._bus.kv(subjects.KV_COUNTERS)
        info = self._describe(await next_generation(counters, self.node))
        self._keeper.works_as(info.generation)
        self._lease = Lease(
            leases, counters, info, config.lease_s, self.log, ended=estate.generations
        )
        self._reports = Reports(self._bus, self.log, lambda: self._lease.info, self._profiler)
        self._hosting = self.hosting_type(
            self.node,
            arena,
            cache,
            self._library,
            self._data,
            self._worker,
            self._reports,
            keeper=self._keeper,
            changed=self._statuses.changed,
            spawn=lambda work, name: self.spawn(work, name=name),
        )
        self.resources.push_async_callback(self._hosting.close)
        await self._hosting.inherit(estate.spaces)
        self._shelf.clear()
        self._adapters = Adapters(
            self.info,
            config.adapter_bytes,
            self._bus,
            self._library,
            self._data,
            self._worker,
            self.log,
            spawn=self._spawn_one,
        )
        self._copying = Copying(
            self.node,
            self._library,
            (self._library, self._hosting.cache),
            self._data,
            self._hosting.story,
            self.log,
            changed=self._statuses.changed,
            spawn=self._spawn_one,
        )
        await self._copying.read_drafts()
        answers = KnownAnswers()
        self._doubt = Doubt(answers, self._hosting, self._spawn_one, self.log)
        self._attempts = Attempts(
            self.node,
            self._worker,
            self._owners,
            self._adapters,
            answers,
            self._publish,
            first_block=self._hosting.first_block,
        )
        self._pool = PoolWatch(
            self.node,
            self._bus,
            self._peers,
            self._library,
            self._hosting,
            self._copying,
            self._adapters,
            attempt=self._try,
            declared_gone=self._declared_gone,
        )
        await self._connect_to_bus()

    async def _claim(self) -> Estate:
        """Waits until no other process of this node can touch what is kept of it."""

        def stand_by() -> None:
            self.stands_by = True

        try:
            estate = await self._keeper.claim(stand_by)
        finally:
            self.stands_by = False
        self.resources.callback(self._keeper.close)
        self.spawn(self._keeper.stay(), name="keeper")
        return estate

    def _spawn_one(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """For one copy: the node goes on without it."""
        return self.spawn(work, name=name, contained=True)

    async def _start_threads(self, memories: Sequence[Memory], device: DeviceArena | None) -> None:
        """`memories`: the arena first."""
        threads = self._threads = Threads(self, self.contain)
        self._worker = threads.worker = self._parts.worker(
            memories[0], device, self._shelf, threads
        )
        self._owners = Owners(self.node, self._bus, self._worker.cancel, self.log)
        self._data = threads.data = self._parts.data_plane(memories, device, threads)
        self._peers = Peers(
            lambda: self._lease.info,
            self._bus,
            self._data,
            self._worker,
            mesh=self._config.mesh_peers,
            attempt=self._try,
        )
        await self.resources.enter_async_context(self._data)
        self.spawn(self._data.wait(), name="data plane")
        self._worker.start()
        self.resources.push_async_callback(self._worker.stop)
        self.spawn(self._worker.wait(), name="engine")
        await self._worker.ready()

    async def _heed(self, watch: NoticeWatch) -> None:
        """Leaves, as after SIGTERM, when the machine is about to be taken away."""
        notice = await watch.come()
        if notice.left_s is not None:
            self.expect_end(notice.left_s)
        self.log.warning("leaves: the machine is about to be taken away", left_s=notice.left_s)
        self.stop.set()

    def expect_end(self, left_s: float) -> None:
        """The machine is there for `left_s` more: what takes longest when the node leaves, the
        hand-over of durable copies, may take nearly as long."""
        self._evacuate_s = max(0.0, left_s - Service.drain_s)
        self.drain_s = Service.drain_s + self._evacuate_s

    async def drain(self) -> None:
        """Other nodes take over what it serves, and what only its machine keeps. It serves on
        meanwhile, for `evacuate_s` at most. What runs then ends, and gateways resume it
        elsewhere."""
        leave = Leave(
            node=self.node,
            generation=self.info.generation,
            within_s=self._evacuate_s,
            cause="stop",
        )
        await evacuate(self._bus, leave, lambda: self._worker.load().running, self.log)
        await self._lease.give_back()
        await self._worker.stop()
        await self._attempts.published()

    # --- what the other threads say: see `Threads` ---

    def tokens_came(self, gateway: GatewayId, tokens: Tokens) -> None:
        self._attempts.tokens_came(gateway, tokens)

    def worth(self, model: ModelId, positions: int, nbytes: int) -> bool:
        if self._config.kv_moves == "auto":
            return self._kv_worth.worth(self._statuses.profile, model, positions, nbytes)
        return self._config.kv_moves == "always"

    def _kv_s(self, profile: Profile, nbytes: int) -> float:
        return 0.0 if self._config.kv_moves == "never" else self._kv_worth.seconds(profile, nbytes)

    def kv_copied(self, nbytes: int, seconds: float) -> None:
        self._kv_worth.copied(nbytes, seconds)

    def token_s(self, model: ModelId) -> float:
        return token_s(self._statuses.profile, model)

    def swept(self, model: ModelId, share: float, tokens: float, seconds: float) -> None:
        self._profiler.ran(model, share, tokens, seconds)
        self._engine_s[model] += seconds

    def block_landed(self, landed: Arrival | PullFailure) -> None:
        self._hosting.landings.land(landed)

    def bytes_sent(self, began: float, ended: float, nbytes: int) -> None:
        self._profiler.sent(began, ended, nbytes)
        self._sent_bytes += nbytes

    def peer_dialled(self, address: str) -> None:
        self._peers.dialled(address)

    def peer_connected(self, address: str, way: str) -> None:
        self._peers.connected(address, way)

    def peer_lost(self, address: str, error: TransportError) -> None:
        self._peers.lost(address, error)

    async def piece(self, model: ModelId, block: int, offset: int, nbytes: int) -> memoryview:
        return await self._lending.piece(model, block, offset, nbytes)

    # --- whether it is fit ---

    async def _watch_engine(self) -> None:
        """If the engine hangs or is broken, says so, gives its requests back, and ends the node: no
        thread can be ended from outside, but the next process goes on with the weights."""
        watchdog, why = Watchdog(self._config.engine_timeout_s), ""
        while not why:
            await asyncio.sleep(LOOK_S)
            why = self._doubt.why or watchdog.look(self._worker.pulse(), now())
        self._unfit = why
        self.log.error("unfit", why=why)
        self._hung()
        error = EngineFailed(f"node {self.node} is unfit: {why}")
        await self._publish(subjects.POOL_STATUS, self._statuses.next())
        await self._attempts.fail(error)
        self._worker.give_up(error)

    # --- its place in the cluster ---

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
            host_bytes=config.host_bytes,
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
        await self._pool.follow(self.own)
        for subject in (subjects.POOL_REPORT, subjects.node_report(node)):
            self.own(await bus.subscribe(subject, On(ReportStatus, self._on_report)))
        distrust = On(Distrust, self._doubt.hear)
        self.own(await bus.subscribe(subjects.node_distrust(node), distrust))
        gone = On(GatewayGone, self._owners.hear)
        self.own(await bus.subscribe(subjects.GATEWAYS_GONE, gone))
        self.own(await bus.serve(subjects.node_plan(node), ApplyPlan, self._apply))
        self.own(await bus.serve(subjects.node_release(node), ReleaseModel, self._release))
        self.own(await bus.serve(subjects.node_import(node), ImportModel, self._import))
        self.own(await bus.serve(subjects.node_keep(node), KeepCopy, self._keep))
        self.own(await bus.serve(subjects.node_drop(node), DropCopy, self._drop))
        await self._attempts.serve(bus, self.own)
        self.own(await bus.serve(subjects.node_ping(node), Ping, self._pong))
        self.own(await bus.serve(subjects.node_story(node), StoryQuery, self._told))
        await self._lease.take()  # last: whoever sees the node may call it
        self.resources.push_async_callback(self._lease.give_back)
        self.spawn(self._lease.keep(), name="lease")
        self.spawn(self._hosting.landings.run(), name="landings")
        self.spawn(self._reports.run(), name="reports")
        self.spawn(self._attempts.publish_tokens(), name="tokens")
        self.spawn(self._owners.watch(), name="owners")
        self.spawn(self._watch_engine(), name="watchdog")
        self.spawn(self._statuses.run(self._publish_status), name="status")
        self.spawn(self._pool.learn(), name="learn pool")
        if self._notice is not None:
            self.spawn(self._heed(self._notice), name="notice")

    def _try(self, what: str, action: Callable[[*Args], Awaitable[object]], *args: *Args) -> None:
        """Runs an action in a task of its own. If it fails, that is logged."""

        async def work() -> None:
            with self.contain(what):
                try:
                    await action(*args)
                except LambdaScaleError as error:
                    self.log.warning(f"{what} failed", code=error.code, error=str(error))

        self.spawn(work(), name=what)

    # --- the pool ---

    def _declared_gone(self, gone: NodeGone) -> None:
        if gone.generation == self.info.generation and not self._lease.over:
            self.spawn(self._start_over(gone.generation), name="new generation")

    async def _start_over(self, ended: Generation) -> None:
        await self._lease.start_over(ended)
        self._keeper.works_as(self.info.generation)
        self._statuses.everything()

    async def _on_report(self, message: ReportStatus) -> None:
        self._statuses.everything(message.origin)

    # --- requests of others ---

    def _check_generation(self, generation: Generation) -> None:
        if generation != self.info.generation:
            raise StaleEpoch(
                f"node {self.info.node} has generation {self.info.generation}, not {generation}"
            )

    async def _pong(self, message: Ping) -> Ok:
        return Ok()

    async def _told(self, query: StoryQuery) -> Told:
        return Told.of(await self.story(query.subject), now(), wall_ns())

    async def _apply(self, message: ApplyPlan) -> Ok:
        self._check_generation(message.generation)
        for peer in message.peers:
            self._peers.know(peer)
        await self._hosting.apply(message)
        return Ok()

    async def _release(self, message: ReleaseModel) -> Ok:
        self._check_generation(message.generation)
        await self._hosting.obey(message)
        return Ok()

    async def _keep(self, message: KeepCopy) -> Ok:
        self._check_generation(message.generation)
        for source in message.sources:
            self._peers.know(source.info)
        await self._copying.keep(message)
        return Ok()

    async def _drop(self, message: DropCopy) -> Ok:
        self._check_generation(message.generation)
        await self._hosting.drop_cached(message.model_id, message.why, cause=message.origin)
        return Ok()

    async def _import(self, message: ImportModel) -> ModelImported:
        record = await self._library.pack(message)
        status = self._statuses.next(message.origin)
        await self._bus.publish(subjects.POOL_STATUS, status)  # before the model is announced
        await self._library.publish(record, cause=message.origin)
        self.log.info("model imported", model=record.name, model_id=record.model_id)
        return ModelImported(record=record, cause=message.origin)

    # --- reports ---

    async def _publish(self, subject: str, message: Message) -> None:
        with self.contain("publishing", subject=subject):
            try:
                await self._bus.publish(subject, message)
            except BusError as error:
                self.log.warning("not published", subject=subject, error=str(error))

    async def story(self, subject: str) -> tuple[Transition, ...]:
        """What happened here lately to a model, an event, a request or a sequence, and why; oldest
        first."""
        told = (*self._hosting.story.of(subject), *await self._worker.story(subject))
        return tuple(sorted(told, key=lambda transition: transition.at))

    def validate(self) -> None:
        """For tests: raises if what it keeps cannot be."""
        self._hosting.validate()

    def in_memory(self) -> list[Holding]:
        """What it holds in its arena and its host cache."""
        return self._hosting.holdings()

    def holdings(self) -> tuple[Holding, ...]:
        """What it holds now, in every tier."""
        return (*self.in_memory(), *self._library.holdings())

    def copying(self) -> tuple[CopyProgress, ...]:
        """The copies that it has begun."""
        return self._copying.progress()

    def _view(self) -> NodeView | None:
        """None while it is not open."""
        return self._look() if self.ready else None

    def _look(self) -> NodeView:
        self._threads.catch_up()
        disk_free, disk_bytes = self._library.room()
        return NodeView(
            info=self.info,
            names=self._library.names,
            load=self._worker.load(),
            engine_s=self._engine_s,
            holdings=self.holdings(),
            arena_free=self._hosting.arena_free,
            host_free=self._hosting.cache.free,
            disk_bytes=disk_bytes,
            disk_free=disk_free,
            peers=self._peers.by_way(),
            blocks=self._reports.blocks,
            received_bytes=self._reports.bytes,
            failures=self._reports.failures,
            sent_bytes=self._sent_bytes,
            copying=self.copying(),
            unfit=self._unfit,
        )

    async def _publish_status(self) -> None:
        if self._lease.over:
            return
        with self.contain("the status"):
            # When blocks came is said before that they are there: the planner then learns of each
            # block once, and the status is no news.
            await self._reports.say_all()
            await self._publish(subjects.POOL_STATUS, self._statuses.next())
