"""The models in a node's arena: their space, their blocks, and the plans that fill them."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from services.node.core.residency import Mode, PlanId, Planners, Residency
from services.node.hosting.demotion import Demotion
from services.node.hosting.host_cache import HostCache
from services.node.hosting.inheritance import ARENA, CACHE, whole
from services.node.hosting.library import Library
from services.node.hosting.promotion import Promotion, Spawn
from services.node.hosting.reports import CACHED, DISK, HELD, Reports
from services.node.keeper.link import KeeperLink
from services.node.keeper.messages import Space
from services.node.memory.arena import Arena, ModelSpace, Span
from services.node.moving.events import Arrival, PullFailure
from services.node.parts import AnyDataPlane, AnyWorker
from shared import telemetry
from shared.clock import now, wall_ns
from shared.containment import is_containable
from shared.errors import BadInput, CapacityExceeded, LambdaScaleError, NotFound, as_typed
from shared.ids import ModelId, NodeId
from shared.layout import Manifest
from shared.messages.pool import Holding, Tier
from shared.messages.scaling import ApplyPlan, ReleaseModel
from shared.story import Story
from shared.vision import is_classifier

ENGINE = "engine"
"""User of a span."""
TOKENIZER = "tokenizer.json"
TOKENIZER_RETRY_S = 0.5
"""After a first failure to fetch it; doubles with each that follows."""
TOKENIZER_RETRY_MAX_S = 30.0


@dataclass(slots=True, eq=False)
class Hosted:
    """A model with space in the arena. Whatever changes `residency` holds `lock`: plans and
    releases (which come one at a time, see `Hosting._turn`), promotion, demotion, and blocks that
    land."""

    manifest: Manifest
    span: Span
    space: ModelSpace
    residency: Residency
    trace: str = ""
    """The trace of the plan that is followed."""
    promotion: Promotion | None = None
    demotion: Demotion | None = None
    """Its way into the host cache, while its copy is made there."""
    bringing: asyncio.Task[None] | None = None
    """The task that brings the tokenizer to the engine."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def model(self) -> ModelId:
        return self.residency.model_id


class Hosting:
    def __init__(
        self,
        node: NodeId,
        arena: Arena,
        cache_arena: Arena | None,
        library: Library,
        data: AnyDataPlane,
        worker: AnyWorker,
        reports: Reports,
        *,
        keeper: KeeperLink,
        changed: Callable[[], None],
        spawn: Spawn,
    ) -> None:
        """`cache_arena`: the host cache's memory; None: the node has none. `keeper` is told what
        lies in both. `changed` is called when what is held has changed."""
        self._node = node
        self._log = telemetry.logger("hosting", node=node)
        self._arena = arena
        self._library = library
        self._data = data
        self._worker = worker
        self._reports = reports
        self._keeper = keeper
        self._changed = changed
        self._spawn = spawn
        self._planners = Planners()
        self.story = Story()
        self._hosted: dict[ModelId, Hosted] = {}
        self._turns: WeakValueDictionary[ModelId, asyncio.Lock] = WeakValueDictionary()
        self.cache = HostCache(
            cache_arena,
            data,
            self.story,
            keeper,
            turn=self._turn,
            in_arena=lambda model: model in self._hosted,
        )
        self._landed: asyncio.Queue[tuple[Hosted, Arrival | PullFailure]] = asyncio.Queue()

    def holdings(self) -> list[Holding]:
        """What lies in the arena, and in the host cache."""
        arena = [h for hosted in self._hosted.values() for h in hosted.residency.holdings()]
        return [*arena, *self.cache.holdings()]

    @property
    def arena_free(self) -> int:
        return self._arena.free_bytes

    def _turn(self, model: ModelId) -> asyncio.Lock:
        """Plans and releases of a model are taken up one after the other, in the order of their
        coming."""
        return self._turns.setdefault(model, asyncio.Lock())

    # --- what outlived the process before ---

    async def inherit(self, left: Iterable[Space]) -> None:
        """Takes over what a process before has left in the arena and the host cache, if it is
        right: nothing is copied. What was whole and open runs again once this returns. To be called
        before any plan can come."""
        for space in left:
            try:
                manifest = await self._library.manifest(ModelId(space.model))
                if space.memory == CACHE:
                    await self.cache.inherit(space, manifest)
                else:
                    await self._inherit(space, manifest)
            except LambdaScaleError as error:  # a model's boundary: it is loaded anew
                self._keeper.forget(space.memory, space.model)
                self._log.warning("a model was not taken over", model=space.model, error=str(error))

    async def _inherit(self, left: Space, manifest: Manifest) -> None:
        model = ModelId(left.model)
        span = self._arena.take(left.offset, left.nbytes)
        try:
            space = ModelSpace(manifest, span)
            blocks = await whole(manifest, space, left.blocks)
            if not blocks:
                raise NotFound(f"none of its {len(left.blocks)} blocks is as it was")
        except BaseException:
            self._arena.free(span)
            raise
        residency = Residency(model, manifest.n_blocks, self.story).inherit(blocks)
        hosted = self._hosted[model] = Hosted(manifest, span, space, residency)
        self._tell(hosted, "", f"{len(blocks)} blocks outlived the process before")
        await self._data.host(model, manifest, space, blocks)
        if left.active and residency.complete:
            try:
                await self._activate(hosted)
            except LambdaScaleError as error:
                self._log.warning("a model stays asleep", model=model, error=str(error))
        self._note(hosted)

    def _note(self, hosted: Hosted) -> None:
        """Tells the keeper what is there of a model."""
        span, residency = hosted.span, hosted.residency
        active = residency.mode is Mode.ACTIVE
        held = tuple(sorted(residency.held))
        self._keeper.note(Space(ARENA, hosted.model, span.offset, span.nbytes, held, active))

    # --- plans ---

    async def apply(self, plan: ApplyPlan) -> None:
        """Takes up a plan. When this returns, the model has its space, engine and regions, and its
        pulls run.

        StaleEpoch, BadInput: nothing was changed. CapacityExceeded: no room in the arena.
        """
        self._planners.obey(plan.epoch)
        attributes: dict[str, telemetry.Attribute] = {"node": plan.node, "pulls": len(plan.pulls)}
        with telemetry.span("apply_plan", parent=plan.trace, attributes=attributes):
            async with self._turn(plan.model_id):
                self._planners.obey(plan.epoch)  # another may have spoken while it waited
                await self._take_up(plan)

    async def _take_up(self, plan: ApplyPlan) -> None:
        hosted = self._hosted.get(plan.model_id)
        if hosted is not None:
            await self._follow(plan, hosted)
            return
        manifest = await self._library.manifest(plan.model_id)
        span = self._arena.allocate(ModelSpace.size(manifest))
        residency = Residency(plan.model_id, manifest.n_blocks, self.story)
        hosted = Hosted(manifest, span, ModelSpace(manifest, span), residency)
        self._hosted[plan.model_id] = hosted
        try:
            if self.cache.lends(plan.model_id):
                await self.cache.withdraw(plan.model_id)
            await self._follow(plan, hosted, hosted.space)
        except BaseException:  # a model that no plan fills gives its space back
            await self._stop_promotion(hosted)
            async with hosted.lock:
                await self._free(hosted, plan.event)
            raise

    async def _follow(
        self, plan: ApplyPlan, hosted: Hosted, space: ModelSpace | None = None
    ) -> None:
        """`space`: where its blocks are to be readable by peers, if they are not yet."""
        _check_blocks(plan, hosted.manifest)
        followed = PlanId(plan.event, plan.revision)
        hosted.residency.follow(followed)  # before anything is changed
        await self._stop_promotion(hosted)
        async with hosted.lock:
            hosted.residency = hosted.residency.follow(followed)
            hosted.trace = plan.trace
            self._tell(hosted, plan.event, f"follows revision {plan.revision}")
            addresses = {peer.node: peer.address for peer in plan.peers}
            held, cached = hosted.residency.held, self.cache.is_stored(plan.model_id)
            asked = {*plan.promote, *(pull.block for pull in plan.pulls)}
            # What lies in this node's own memory need not come over a link.
            own = asked if cached else plan.promote
            pulls = [p for p in plan.pulls if p.block not in held and p.block not in own]
            # First: the bytes are on their way while the engine opens the model.
            await self._data.apply(plan.model_id, followed, pulls, addresses, space)
            await self._activate(hosted)
        if held:
            self._changed()  # else there is nothing to tell before the first block
        missing = sorted(block for block in own if block not in held)
        if missing:
            self._promote(followed, hosted, missing)
        for block in sorted(asked & held):
            await self._report_held(followed, hosted, block)

    async def _activate(self, hosted: Hosted) -> None:
        """Opens the model for the engine, with every block that is held."""
        if hosted.residency.mode is Mode.STANDBY:
            hosted.span.hold(ENGINE)
            try:
                await self._worker.open_model(hosted.model, hosted.manifest)
            except BaseException:
                hosted.span.release(ENGINE)
                raise
            hosted.residency = hosted.residency.activate()
            self._note(hosted)
            self._tell(hosted, _event_of(hosted), "active")
        for block in sorted(hosted.residency.held - hosted.residency.runnable):
            await self._attach(hosted, block)

    async def _bring_tokenizer(self, model: ModelId) -> None:
        """Brings the model's tokenizer, which requests with grammars need. Tries again until the
        asset store answers. If the model has no tokenizer, that is logged once."""
        pause_s = TOKENIZER_RETRY_S
        while True:
            try:
                data = await self._library.file(model, TOKENIZER)
                if data is not None:
                    self._worker.use_tokenizer(model, data)
                break
            except BaseException as error:  # its boundary: only grammars wait for it
                if not is_containable(error):
                    raise
                self._log.warning("no tokenizer yet", model=model, error=repr(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, TOKENIZER_RETRY_MAX_S)
        if data is None:
            self._log.warning("no structured output: the model has no tokenizer", model=model)

    async def _attach(self, hosted: Hosted, block: int) -> None:
        """Has the engine run a block that is held."""
        await self._worker.attach(hosted.model, block, hosted.space.block(block))
        if not hosted.residency.runnable and not is_classifier(hosted.manifest.config):
            # Not before the first block has come: nothing may hold up the first reads of a plan,
            # and nothing is generated without a block.
            work = self._bring_tokenizer(hosted.model)
            hosted.bringing = self._spawn(work, f"tokenizer of {hosted.model}")
        hosted.residency = hosted.residency.run(block)
        self._tell(hosted, _event_of(hosted), f"runs block {block}")
        if hosted.residency.complete:
            self._changed()  # before that, each block is reported by itself

    # --- blocks from this node's host cache or disk ---

    def _promote(self, plan: PlanId, hosted: Hosted, blocks: Sequence[int]) -> None:
        cached = self.cache.is_stored(hosted.model)
        if cached:
            self._tell(hosted, plan.event, f"comes up from the host cache: {len(blocks)} blocks")
        hosted.promotion = Promotion(
            self._node,
            hosted.model,
            plan,
            blocks,
            hosted.space,
            self.cache.read if cached else self._library.read,
            self._data,
            way=CACHED if cached else DISK,
            land=self.land,
            spawn=self._spawn,
        )

    async def _stop_promotion(self, hosted: Hosted) -> None:
        if hosted.promotion is not None:
            await hosted.promotion.stop()
            hosted.promotion = None

    # --- blocks that land ---

    def land(self, item: Arrival | PullFailure) -> None:
        """A block came, or cannot come. Called on the control loop, in the order of the events.

        All pulls and the promotion of a model end before the model is dropped. So nothing that
        comes late is taken for a block of the same model when it is hosted again.
        """
        hosted = self._hosted.get(item.model_id)
        if hosted is not None:
            self._landed.put_nowait((hosted, item))

    async def run(self) -> None:
        """Attaches blocks as they land, and reports them."""
        while True:
            hosted, item = await self._landed.get()
            try:
                await self._on_landed(hosted, item)
            except BaseException as error:  # a block's boundary
                if not is_containable(error):
                    raise
                self._log.exception("a landing failed", model=item.model_id, block=item.block)

    async def _on_landed(self, hosted: Hosted, item: Arrival | PullFailure) -> None:
        if isinstance(item, Arrival):
            await self._on_arrived(hosted, item)
        elif self._hosted.get(item.model_id) is hosted:
            await self._reports.failed(item, hosted.trace)

    async def _on_arrived(self, hosted: Hosted, item: Arrival) -> None:
        """Attaches a block. It is reported under the plan that is followed now, even if it came for
        an older plan."""
        async with hosted.lock:
            if self._hosted.get(item.model_id) is not hosted:
                return  # released meanwhile
            if hosted.residency.mode is Mode.STANDBY:
                return  # the engine did not open the model: it is about to be freed
            if item.block in hosted.residency.held:
                return  # asked for again before it had landed: both landed
            plan = hosted.residency.plan
            assert plan is not None  # it follows one while it is active
            hosted.residency = hosted.residency.hold(item.block)
            self._note(hosted)
            try:
                await self._attach(hosted, item.block)
            except BaseException as error:  # the block's boundary: the planner is told of it
                if not is_containable(error):
                    raise
                self._log.exception(
                    "a block was not attached", model=hosted.model, block=item.block
                )
                failure = PullFailure(plan, hosted.model, item.block, self._node, as_typed(error))
                await self._reports.failed(failure, hosted.trace)
                return
        await self._reports.arrived(replace(item, plan=plan), hosted.trace)

    # --- reports ---

    async def _report_held(self, plan: PlanId, hosted: Hosted, block: int) -> None:
        at = wall_ns()
        arrival = Arrival(
            plan=plan,
            model_id=hosted.model,
            block=block,
            source=self._node,
            transport=HELD,
            nbytes=hosted.manifest.blocks[block].nbytes,
            started_ns=at,
            first_byte_ns=at,
            finished_ns=at,
        )
        await self._reports.arrived(arrival, hosted.trace)

    # --- giving back ---

    async def obey(self, release: ReleaseModel) -> None:
        """StaleEpoch: a newer planner has spoken, and nothing was changed."""
        self._planners.obey(release.epoch)
        await self.release(release.model_id, release.keep, cause=release.origin)

    async def release(self, model: ModelId, keep: Tier | None, *, cause: str) -> None:
        """Frees the device's memory. The model's running sequences end, as their gateways are
        told.

        `keep`: HOST: a copy stays in memory; it moves to the host cache once it fits there. CACHE:
        the copy moves to the host cache now, and is given up if it does not fit. A copy that is in
        the host cache already stays there in any case.
        """
        async with self._turn(model):
            hosted = self._hosted.get(model)
            if hosted is None:
                return
            await self._stop_promotion(hosted)
            async with hosted.lock:
                if not hosted.residency.complete or self.cache.is_stored(model):
                    keep = None
                if keep is not None:
                    await self._close_engine(hosted, cause)
                    await self._demote(hosted, cause)
                if keep is Tier.CACHE:
                    await self._hurry(hosted, cause)
                if keep is not Tier.HOST:
                    await self._free(hosted, cause)
        self._changed()

    async def forget(self, model: ModelId, *, cause: str) -> None:
        """Gives up every copy in memory: the model was removed."""
        await self.release(model, keep=None, cause=cause)
        async with self._turn(model):
            await self.cache.drop(model, "the model was removed", cause=cause)
        self._changed()

    async def drop_cached(self, model: ModelId, why: str, *, cause: str) -> None:
        """Gives up the copy in the host cache. Conflict: it is being promoted."""
        async with self._turn(model):
            await self.cache.drop(model, why, cause=cause)
        for hosted in list(self._hosted.values()):
            async with hosted.lock:
                await self._demote(hosted, cause)
        self._changed()

    # --- to the host cache ---

    async def _demote(self, hosted: Hosted, cause: str) -> None:
        """Begins to copy a model that sleeps to the host cache, if it fits there."""
        sleeps = hosted.residency.mode is Mode.STANDBY and hosted.residency.complete
        there = self._hosted.get(hosted.model) is hosted
        if not (there and sleeps and self.cache.nbytes) or hosted.demotion is not None:
            return
        try:
            draft = await self.cache.draft(hosted.model, hosted.manifest)
        except CapacityExceeded as error:
            self._tell(hosted, cause, f"stays in the arena: {error}")
            return
        hosted.demotion = demotion = Demotion(
            draft, hosted.space, busy=lambda: self._worker.load().running > 0, spawn=self._spawn
        )
        self._spawn(self._settle(hosted, demotion, cause), f"settle {hosted.model}")

    async def _settle(self, hosted: Hosted, demotion: Demotion, cause: str) -> None:
        """Once the copy is whole, the arena's room is free, unless the model woke meanwhile."""
        await demotion.ended()
        async with self._turn(hosted.model), hosted.lock:
            if hosted.demotion is not demotion:
                return  # somebody else has taken care of it
            await self._end_demotion(hosted, cause)
            stored = self.cache.is_stored(hosted.model)
            if stored and hosted.residency.mode is Mode.STANDBY:
                await self._free(hosted, cause)
        self._changed()

    async def _hurry(self, hosted: Hosted, cause: str) -> None:
        """Waits for the copy, since the arena's room is needed."""
        if hosted.demotion is not None:
            hosted.demotion.hurry()
            await hosted.demotion.ended()
            await self._end_demotion(hosted, cause)

    async def _end_demotion(self, hosted: Hosted, cause: str) -> None:
        """Once this returns, nothing copies from the model's space to the host cache."""
        demotion, hosted.demotion = hosted.demotion, None
        if demotion is None:
            return
        await demotion.stop()
        if demotion.whole:
            self.cache.complete(demotion.draft)
            size = hosted.manifest.nbytes / 1e6
            self._tell(hosted, cause, f"is in the host cache: {size:.1f} MB")
        else:
            await self.cache.discard(demotion.draft)
            self._tell(hosted, cause, f"stays out of the host cache: {demotion.why}")

    async def _close_engine(self, hosted: Hosted, cause: str) -> None:
        """Once it returns, the engine has no view of the model's bytes."""
        if hosted.bringing is not None:
            hosted.bringing.cancel()
        await self._worker.close_model(hosted.model)
        if hosted.residency.mode is Mode.ACTIVE:
            hosted.span.release(ENGINE)
            hosted.residency = hosted.residency.stand_by()
            self._note(hosted)
            self._tell(hosted, cause, "stands by")

    async def _free(self, hosted: Hosted, cause: str) -> None:
        await self._close_engine(hosted, cause)
        await self._end_demotion(hosted, cause)
        await self._data.drop(hosted.model)
        self._keeper.forget(ARENA, hosted.model)  # before anything else is written there
        del self._hosted[hosted.model]
        self._arena.free(hosted.span)
        self._tell(hosted, cause, "gives its space back")
        if self.cache.is_stored(hosted.model):
            await self.cache.lend(hosted.model)

    # --- what is known of a model ---

    def _tell(self, hosted: Hosted, cause: str, text: str) -> None:
        self.story.tell(now(), cause, text, hosted.model)

    def validate(self) -> None:
        """For tests. IllegalTransition, AssertionError: what is kept here cannot be."""
        self.cache.validate()
        for model, hosted in self._hosted.items():
            hosted.residency.validate()
            assert hosted.model == model
            assert not self.cache.lends(model)
            active = hosted.residency.mode is Mode.ACTIVE
            assert active or hosted.residency.plan is None or hosted.lock.locked()

    async def close(self) -> None:
        for hosted in list(self._hosted.values()):
            await self._stop_promotion(hosted)
            if hosted.demotion is not None:
                await hosted.demotion.stop()


def _event_of(hosted: Hosted) -> str:
    return hosted.residency.plan.event if hosted.residency.plan else ""


def _check_blocks(plan: ApplyPlan, manifest: Manifest) -> None:
    wrong = [block for block in plan.promote if not 0 <= block < manifest.n_blocks]
    if wrong:
        raise BadInput(f"model {plan.model_id} has no block {wrong[0]} to promote")
