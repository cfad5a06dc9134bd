"""The models on a node: their space in the arena, their blocks, and the plans that fill them."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from structlog.stdlib import BoundLogger

from services.node.core.residency import Mode, Residency
from services.node.data_plane import DataPlane
from services.node.memory.arena import Arena, ModelSpace, Span
from services.node.model.store import Store
from services.node.mover import Arrival, Failure
from services.node.worker import Worker
from shared import subjects, telemetry
from shared.bus.base import Bus
from shared.clock import wall_ns
from shared.errors import BusError, LambdaScaleError, NotFound
from shared.ids import EventId, ModelId, NodeId
from shared.layout import Manifest, decode_manifest
from shared.messages import Message
from shared.messages.pool import Holding, ModelRecord, NodeInfo, Tier
from shared.messages.scaling import ApplyPlan, BlockArrived, PullFailed, ReleaseModel


@dataclass(slots=True)
class Hosted:
    """A model with space in the arena.

    Plans and releases take `plans`, one at a time; whatever changes `residency` takes `lock`, the
    landing of blocks too.
    """

    manifest: Manifest
    span: Span
    space: ModelSpace
    residency: Residency
    trace: str = ""
    promotion: asyncio.Task[None] | None = None
    promoting: bool = False
    """Cleared to end the promotion: a read from disk cannot be cancelled, only waited for."""
    plans: asyncio.Lock = field(default_factory=asyncio.Lock)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


class Hosting:
    def __init__(
        self,
        bus: Bus,
        arena: Arena,
        store: Store,
        data: DataPlane,
        worker: Worker,
        log: BoundLogger,
        *,
        info: Callable[[], NodeInfo],
        changed: Callable[[], None],
        spawn: Spawn,
    ) -> None:
        """`info`: the node as it is now; `changed`: what it holds is not what it was."""
        self._bus = bus
        self._arena = arena
        self._store = store
        self._data = data
        self._worker = worker
        self._log = log
        self._info = info
        self._changed = changed
        self._spawn = spawn
        self._manifests: dict[ModelId, Manifest] = {}
        self._on_disk: set[ModelId] = set()
        self._hosted: dict[ModelId, Hosted] = {}
        self._opening = asyncio.Lock()
        self._landed: asyncio.Queue[Arrival | Failure] = asyncio.Queue()

    # --- what is held ---

    def holdings(self) -> tuple[Holding, ...]:
        disk = [
            Holding(model, Tier.DISK, tuple(range(self._manifests[model].n_blocks)))
            for model in sorted(self._on_disk)
        ]
        memory = [h for hosted in self._hosted.values() for h in hosted.residency.holdings()]
        return (*memory, *disk)

    @property
    def arena_free(self) -> int:
        return self._arena.free_bytes

    async def read_store(self) -> None:
        """Finds the packed models on this node's disk."""
        found = await asyncio.to_thread(self._store.manifests)
        self._manifests.update(found)
        self._on_disk = set(found)

    def on_disk(self, model: ModelId, manifest: Manifest) -> None:
        self._manifests[model] = manifest
        self._on_disk.add(model)
        self._changed()

    async def learn(self, record: ModelRecord) -> None:
        """Fetches a published model's manifest ahead of any plan."""
        if record.model_id not in self._manifests:
            objects = await self._bus.objects()
            manifest = decode_manifest(await objects.get(record.manifest))
            self._manifests.setdefault(record.model_id, manifest)

    # --- plans ---

    async def apply(self, plan: ApplyPlan) -> None:
        """Takes up a plan: space, engine and regions stand and pulls run when this returns."""
        with telemetry.span(
            "apply_plan",
            parent=plan.trace,
            attributes={"node": plan.node, "pulls": len(plan.pulls)},
        ):
            hosted = await self._open(plan.model_id)
            held = await self._take_up(plan, hosted)
        self._changed()
        asked = {*plan.promote, *(pull.block for pull in plan.pulls)}
        for block in sorted(asked & held):
            await self._report_held(plan, hosted, block)

    async def _take_up(self, plan: ApplyPlan, hosted: Hosted) -> frozenset[int]:
        """Returns the blocks that were held already."""
        async with hosted.plans:
            await self._stop_promotion(hosted)
            async with hosted.lock:
                held = await self._follow(plan, hosted)
            missing = [block for block in plan.promote if block not in held]
            if missing:
                hosted.promoting = True
                work = self._promote(plan, hosted, missing)
                hosted.promotion = self._spawn(work, f"promote {plan.model_id}")
        return held

    async def _follow(self, plan: ApplyPlan, hosted: Hosted) -> frozenset[int]:
        """Runs what is held, pulls what is not; returns the blocks that are held."""
        hosted.residency = hosted.residency.follow(plan.event, plan.revision)
        hosted.trace = plan.trace
        for block in sorted(hosted.residency.held - hosted.residency.runnable):
            await self._worker.attach(plan.model_id, block, hosted.space.block(block))
            hosted.residency = hosted.residency.with_block(block)
        held = hosted.residency.held
        addresses = {peer.node: peer.address for peer in plan.peers}
        pulls = [pull for pull in plan.pulls if pull.block not in held]
        await self._data.apply(plan.model_id, plan.event, plan.revision, pulls, addresses)
        return held

    async def _open(self, model: ModelId) -> Hosted:
        async with self._opening:
            hosted = self._hosted.get(model)
            if hosted is None:
                hosted = self._hosted[model] = await self._allocate(model)
            elif hosted.residency.mode is Mode.STANDBY:
                await self._worker.open_model(model, hosted.manifest)
                hosted.residency = hosted.residency.activate()
            return hosted

    async def _allocate(self, model: ModelId) -> Hosted:
        manifest = self._manifests.get(model)
        if manifest is None:
            raise NotFound(f"the manifest of model {model} has not reached this node yet")
        await self._worker.open_model(model, manifest)
        try:
            span = self._arena.allocate(ModelSpace.size(manifest))
        except LambdaScaleError:
            await self._worker.close_model(model)
            raise
        space = ModelSpace(manifest, span)
        await self._data.host(model, manifest, space, ())
        return Hosted(manifest, span, space, Residency(model, manifest.n_blocks))

    async def _promote(self, plan: ApplyPlan, hosted: Hosted, blocks: Iterable[int]) -> None:
        """Reads blocks from this node's disk; each is runnable and readable by peers at once."""
        for block in blocks:
            if not hosted.promoting:
                return
            started = wall_ns()
            try:
                await asyncio.to_thread(
                    self._store.read_block, plan.model_id, block, hosted.space.block(block)
                )
            except LambdaScaleError as error:
                await self._publish_failure(
                    plan.event, plan.revision, block, self._info().node, error, plan.trace
                )
                return
            async with hosted.lock:
                await self._data.mark_held(plan.model_id, block)
                await self._take_in(plan.model_id, hosted, block)
            arrival = BlockArrived(
                event=plan.event,
                revision=plan.revision,
                node=self._info().node,
                generation=self._info().generation,
                model_id=plan.model_id,
                block=block,
                source=self._info().node,
                transport="disk",
                nbytes=hosted.manifest.blocks[block].nbytes,
                started_ns=started,
                first_byte_ns=started,
                finished_ns=wall_ns(),
                trace=plan.trace,
            )
            await self._publish_arrival(arrival)

    async def _take_in(self, model: ModelId, hosted: Hosted, block: int) -> None:
        await self._worker.attach(model, block, hosted.space.block(block))
        hosted.residency = hosted.residency.with_block(block)
        self._changed()

    async def _stop_promotion(self, hosted: Hosted) -> None:
        if hosted.promotion is not None:
            hosted.promoting = False
            await asyncio.wait([hosted.promotion])
            hosted.promotion = None

    # --- what the data plane delivers ---

    def land(self, item: Arrival | Failure) -> None:
        """A pull ended. Called on the control loop."""
        self._landed.put_nowait(item)

    async def run(self) -> None:
        """Attaches blocks as they land, and reports them."""
        while True:
            item = await self._landed.get()
            hosted = self._hosted.get(item.model_id)
            if hosted is None:
                continue  # released while it was landing
            if isinstance(item, Failure):
                await self._publish_failure(
                    item.event, item.revision, item.block, item.source, item.error, hosted.trace
                )
            else:
                await self._on_landed(hosted, item)

    async def _on_landed(self, hosted: Hosted, item: Arrival) -> None:
        async with hosted.lock:
            if self._hosted.get(item.model_id) is not hosted:
                return
            await self._take_in(item.model_id, hosted, item.block)
        info = self._info()
        await self._publish_arrival(
            BlockArrived(
                event=item.event,
                revision=item.revision,
                node=info.node,
                generation=info.generation,
                model_id=item.model_id,
                block=item.block,
                source=item.source,
                transport=item.transport,
                nbytes=item.nbytes,
                started_ns=item.started_ns,
                first_byte_ns=item.first_byte_ns,
                finished_ns=item.finished_ns,
                trace=hosted.trace,
            )
        )

    # --- reports ---

    async def _report_held(self, plan: ApplyPlan, hosted: Hosted, block: int) -> None:
        """A block that a plan asks for is here already."""
        info, at = self._info(), wall_ns()
        await self._publish(
            BlockArrived(
                event=plan.event,
                revision=plan.revision,
                node=info.node,
                generation=info.generation,
                model_id=plan.model_id,
                block=block,
                source=info.node,
                transport="held",
                nbytes=hosted.manifest.blocks[block].nbytes,
                started_ns=at,
                first_byte_ns=at,
                finished_ns=at,
                trace=plan.trace,
            )
        )

    async def _publish_arrival(self, arrival: BlockArrived) -> None:
        await self._publish(arrival)
        seconds = max(arrival.finished_ns - arrival.first_byte_ns, 1) / 1e9
        telemetry.record(
            "block_arrival",
            start_ns=arrival.first_byte_ns,
            end_ns=arrival.finished_ns,
            parent=arrival.trace,
            attributes={
                "node": arrival.node,
                "block": arrival.block,
                "bytes": arrival.nbytes,
                "source": arrival.source,
                "transport": arrival.transport,
                "mb_per_s": round(arrival.nbytes / seconds / 1e6, 2),
                "asked_ms_before": round((arrival.first_byte_ns - arrival.started_ns) / 1e6, 1),
            },
        )

    async def _publish_failure(
        self,
        event: EventId,
        revision: int,
        block: int,
        source: NodeId,
        error: LambdaScaleError,
        trace: str,
    ) -> None:
        self._log.warning("block not had", block=block, source=source, error=str(error))
        await self._publish(
            PullFailed(
                event=event,
                revision=revision,
                node=self._info().node,
                generation=self._info().generation,
                block=block,
                source=source,
                code=error.code,
                message=str(error),
                trace=trace,
            )
        )

    async def _publish(self, message: Message) -> None:
        try:
            await self._bus.publish(subjects.ARRIVALS, message)
        except BusError as error:
            self._log.warning("report not sent; the next status says it", error=str(error))

    # --- giving back ---

    async def release(self, message: ReleaseModel) -> None:
        """Frees the device's memory; the model's running sequences end (their gateway knows)."""
        hosted = self._hosted.get(message.model_id)
        if hosted is None:
            return
        async with self._opening, hosted.plans:
            await self._stop_promotion(hosted)
            async with hosted.lock:
                await self._give_back(message, hosted)
        self._changed()

    async def _give_back(self, message: ReleaseModel, hosted: Hosted) -> None:
        await self._worker.close_model(message.model_id)
        complete = len(hosted.residency.held) == hosted.residency.n_blocks
        if message.keep is Tier.HOST and complete:
            hosted.residency = hosted.residency.stand_by()
        else:
            await self._data.drop(message.model_id)
            del self._hosted[message.model_id]
            self._arena.free(hosted.span)

    async def forget(self, model: ModelId) -> None:
        """The model was removed: out of every tier."""
        info = self._info()
        await self.release(
            ReleaseModel(node=info.node, generation=info.generation, model_id=model, keep=None)
        )
        if model in self._on_disk:
            self._on_disk.discard(model)
            await asyncio.to_thread(self._store.remove, model)
        self._manifests.pop(model, None)
        self._changed()

    async def close(self) -> None:
        for hosted in self._hosted.values():
            await self._stop_promotion(hosted)
