"""The models in a node's arena: their space, their blocks, and the plans that fill them."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar
from weakref import WeakValueDictionary

from services.node.core.residency import Mode, PlanId, Planners, Residency
from services.node.hosting.demotion import Demotion
from services.node.hosting.host_cache import HostCache
from services.node.hosting.hosted import Hosted
from services.node.hosting.inheritance import ARENA, CACHE, intact
from services.node.hosting.landings import Landings
from services.node.hosting.library import Library
from services.node.hosting.opening import Opening
from services.node.hosting.promotion import Promotion, Spawn
from services.node.hosting.reports import CACHED, DISK, Reports
from services.node.keeper.link import KeeperLink
from services.node.keeper.messages import Space
from services.node.memory.arena import Arena, ModelSpace
from services.node.parts import AnyDataPlane, AnyWorker
from shared import telemetry
from shared.clock import wall_ns
from shared.errors import BadInput, CapacityExceeded, LambdaScaleError, NotFound, NotReady
from shared.ids import ModelId, NodeId
from shared.layout import Manifest
from shared.messages.pool import Holding, Tier
from shared.messages.scaling import ApplyPlan, Pull, ReleaseModel
from shared.parts import Part, whole
from shared.runs import runs
from shared.story import Story
from shared.wording import counted

FIRST_BLOCK_S = 0.8
"""How long a request waits for the first block. It may wait for its adapter, or for KV, after that,
and gateways wait longer than for both together."""
PREPARE_S = 0.1
"""How often it is looked whether the engine has time to pack what will only be needed later."""


class Hosting:
    residency_type: ClassVar[type[Residency]] = Residency
    """Simulations use residencies, and a cache, that are validated after every step."""
    cache_type: ClassVar[type[HostCache]] = HostCache

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
        self._keeper = keeper
        self._changed = changed
        self._spawn = spawn
        self._planners = Planners()
        self.story = Story()
        self._hosted: dict[ModelId, Hosted] = {}
        self._turns: WeakValueDictionary[ModelId, asyncio.Lock] = WeakValueDictionary()
        self._moved = asyncio.Condition()
        """Told of each model that gets space in the arena, or leaves the host cache."""
        self.cache = self.cache_type(
            cache_arena,
            data,
            self.story,
            keeper,
            turn=self._turn,
            in_arena=lambda model: model in self._hosted,
            came=self._copy_came,
        )
        self._opening = Opening(worker, library, keeper, self._log, changed=changed, spawn=spawn)
        self._reports = reports
        self.landings = Landings(
            node,
            self._hosted,
            self._opening,
            keeper,
            reports,
            self._log,
            portion=worker.portion,
        )

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
                    self._prepare(ModelId(space.model))
                else:
                    await self._inherit(space, manifest)
            except LambdaScaleError as error:  # a model's boundary: it is loaded anew
                self._keeper.forget(space.memory, space.model)
                self._log.warning("a model was not taken over", model=space.model, error=str(error))

    async def _inherit(self, left: Space, manifest: Manifest) -> None:
        model = ModelId(left.model)
        span = self._arena.take(left.offset, left.nbytes)
        try:
            part = Part(*left.part) if left.part else None
            space = ModelSpace(manifest, span, part)
            blocks = await intact(manifest, space, left.blocks)
            if not blocks:
                raise NotFound(f"none of its {len(left.blocks)} blocks is as it was")
        except BaseException:
            self._arena.free(span)
            raise
        empty = self.residency_type(model, manifest.n_blocks, self.story, part=part)
        residency = empty.inherit(blocks)
        hosted = self._hosted[model] = Hosted(manifest, span, space, residency)
        hosted.tell("", f"{counted(len(blocks), 'block')} outlived the process before")
        await self._data.host(model, manifest, space, blocks)
        if left.active and residency.complete:
            try:
                await self._opening.activate(hosted)
            except LambdaScaleError as error:
                self._log.warning("a model stays asleep", model=model, error=str(error))
        self._keeper.note(hosted.kept)

    async def damaged(self) -> list[ModelId]:
        """The models of which bytes in the arena are no longer the manifest's. Where a device
        computes, its own memory counts, which cannot be looked at: none."""
        found: list[ModelId] = []
        if self._worker.staging:
            return found
        for model, hosted in list(self._hosted.items()):
            async with hosted.lock:
                held = hosted.residency.held
                there = self._hosted.get(model) is hosted
                if there and await intact(hosted.manifest, hosted.space, held) != held:
                    found.append(model)
        return found

    # --- plans ---

    async def apply(self, plan: ApplyPlan) -> None:
        """Takes up a plan. When this returns, the model has its space, engine and regions, its
        pulls run, and blocks that it held already come to the engine.

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
        span = self._arena.allocate(ModelSpace.size(manifest, plan.part))
        residency = self.residency_type(
            plan.model_id, manifest.n_blocks, self.story, part=plan.part
        )
        hosted = Hosted(manifest, span, ModelSpace(manifest, span, plan.part), residency)
        self._hosted[plan.model_id] = hosted
        try:
            await self._tell_moved()
            if self.cache.lends(plan.model_id):
                await self.cache.withdraw(plan.model_id)
            await self._follow(plan, hosted, hosted.space)
        except BaseException:  # a model that no plan fills gives its space back
            await hosted.stop_promotion()
            async with hosted.lock:
                await self._free(hosted, plan.event)
            raise

    async def _follow(
        self, plan: ApplyPlan, hosted: Hosted, space: ModelSpace | None = None
    ) -> None:
        """`space`: where its blocks are to be readable by peers, if they are not yet."""
        _check_blocks(plan, hosted)
        followed = PlanId(plan.event, plan.revision)
        hosted.residency.follow(followed)  # before anything is changed
        await hosted.stop_promotion()
        async with hosted.lock:
            hosted.residency = hosted.residency.follow(followed)
            hosted.trace, hosted.devices = plan.trace, plan.devices
            hosted.asked_ns = wall_ns()
            hosted.tell(plan.event, f"follows revision {plan.revision}")
            addresses = {peer.node: peer.address for peer in plan.peers}
            held, cached = hosted.residency.held, self.cache.is_stored(plan.model_id)
            asked = {*plan.promote, *(pull.block for pull in plan.pulls)}
            # What lies in this node's own memory need not come over a link.
            own = asked if cached else plan.promote
            pulls = [p for p in plan.pulls if p.block not in held and p.block not in own]
            await self._reports.follow(plan)
            # First: the bytes are on their way while the engine opens the model. The engine's
            # thread holds Python's lock meanwhile.
            await self._data.apply(
                plan.model_id, followed, pulls, addresses, space, capability=plan.capability
            )
            _tell_pulls(hosted, plan, pulls)
            missing = sorted(block for block in own if block not in held)
            if missing:
                self._promote(followed, hosted, missing, pulled=space is None)
                await asyncio.sleep(0)  # it begins
            await self._opening.open(hosted)
            asleep = held - hosted.residency.runnable
        if held:
            self._changed()  # else there is nothing to tell before the first block
        if asleep:
            waking = self.landings.wake(followed, hosted, sorted(asleep))
            self._spawn(waking, f"wake {plan.model_id}")
        for block in sorted(asked & held - asleep):
            await self.landings.report_held(followed, hosted, block)

    async def first_block(self, model: ModelId) -> None:
        """Waits until the engine has the model's first block, by a plan that has come or, if there
        is a copy in memory, is about to come. Returns at once if nothing of the model is in memory.
        NotReady: the block is not there after FIRST_BLOCK_S."""
        hosted = self._hosted.get(model)
        if hosted is not None and hosted.first_block.is_set():
            return
        try:
            async with asyncio.timeout(FIRST_BLOCK_S):
                async with self._moved:
                    await self._moved.wait_for(
                        lambda: model in self._hosted or not self.cache.is_stored(model)
                    )
                async with self._turn(model):
                    hosted = self._hosted.get(model)
                if hosted is not None:
                    await hosted.first_block.wait()
        except TimeoutError as error:
            raise NotReady(
                f"node {self._node} does not have the first block of model {model} yet: try again"
            ) from error

    # --- blocks from this node's host cache or disk ---

    def _promote(
        self, plan: PlanId, hosted: Hosted, blocks: Sequence[int], *, pulled: bool = True
    ) -> None:
        """`pulled`: see `Promotion`."""
        cached = self.cache.is_stored(hosted.model)
        if cached:
            hosted.tell(
                plan.event, f"comes up from the host cache: {counted(len(blocks), 'block')}"
            )
        hosted.promotion = Promotion(
            self._node,
            hosted.model,
            plan,
            blocks,
            hosted.space,
            self.cache.read if cached else self._library.read,
            self._data,
            pulled=pulled,
            way=CACHED if cached else DISK,
            land=self.landings.land,
            spawn=self._spawn,
        )

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
            await hosted.stop_promotion()
            async with hosted.lock:
                if not hosted.residency.complete or self.cache.is_stored(model):
                    keep = None
                if keep is not None:
                    await self._opening.close(hosted, cause, asleep=True)
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
        await self._tell_moved()
        self._changed()

    async def drop_cached(self, model: ModelId, why: str, *, cause: str) -> None:
        """Gives up the copy in the host cache. Conflict: it is being promoted."""
        async with self._turn(model):
            await self.cache.drop(model, why, cause=cause)
        await self._tell_moved()
        for hosted in list(self._hosted.values()):
            async with hosted.lock:
                await self._demote(hosted, cause)
        self._changed()

    async def _tell_moved(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    # --- to the host cache ---

    async def _demote(self, hosted: Hosted, cause: str) -> None:
        """Begins to copy a model that sleeps to the host cache, if it fits there."""
        sleeps = hosted.residency.mode is Mode.STANDBY and hosted.residency.complete
        there = self._hosted.get(hosted.model) is hosted
        # The host cache has whole models: a part of one sleeps in the arena.
        cached = self.cache.nbytes and hosted.residency.part is None
        coming = hosted.demotion is not None or self.cache.expects(hosted.model)
        if not (there and sleeps and cached) or coming:
            return
        try:
            draft = await self.cache.draft(hosted.model, hosted.manifest)
        except CapacityExceeded as error:
            hosted.tell(cause, f"stays in the arena: {error}")
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
            await self._give_way(hosted, cause)
        self._changed()

    def _copy_came(self, model: ModelId) -> None:
        """A copy that the registry ordered is whole."""
        if hosted := self._hosted.get(model):
            self._spawn(self._after_copy(hosted), f"settle {model}")
        else:
            self._prepare(model)

    async def _after_copy(self, hosted: Hosted) -> None:
        async with self._turn(hosted.model), hosted.lock:
            if self._hosted.get(hosted.model) is hosted and hosted.residency.complete:
                await self._give_way(hosted, "")
        self._changed()

    async def _give_way(self, hosted: Hosted, cause: str) -> None:
        """Frees the arena's copy of a model that sleeps, if the host cache has one, too."""
        if self.cache.is_stored(hosted.model) and hosted.residency.mode is Mode.STANDBY:
            await self._free(hosted, cause)

    def _prepare(self, model: ModelId) -> None:
        """Has the engine pack the blocks of a copy in the host cache, so that they only have to be
        copied when the model wakes."""
        self._spawn(self._pack(model), f"prepare {model}")

    async def _pack(self, model: ModelId) -> None:
        """Packs while nothing runs or loads here. Between two blocks, plans and releases have their
        turn."""
        block, more = 0, True
        while more:
            if self._worker.load().running > 0 or self._loads():
                await asyncio.sleep(PREPARE_S)
                continue
            async with self._turn(model):
                if model in self._hosted or not self.cache.is_stored(model):
                    return
                space = self.cache.space(model)
                buffer = space.block(block)
                try:
                    more = await self._worker.prepare(model, space.manifest, block, buffer)
                except LambdaScaleError as error:  # when it wakes, its plan says what is wrong
                    self._log.warning("a model was not packed", model=model, error=str(error))
                    return
            block += 1
            more = more and block < space.manifest.n_blocks

    def _loads(self) -> bool:
        """Whether some model follows a plan, and the engine lacks blocks of it."""
        planned = (h.residency for h in self._hosted.values() if h.residency.plan is not None)
        return any(len(each.runnable) < each.room.size for each in planned)

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
            hosted.tell(cause, f"is in the host cache: {size:.1f} MB")
        else:
            await self.cache.discard(demotion.draft)
            hosted.tell(cause, f"stays out of the host cache: {demotion.why}")

    async def _free(self, hosted: Hosted, cause: str) -> None:
        await self._opening.close(hosted, cause)
        await self._end_demotion(hosted, cause)
        await self._data.drop(hosted.model)
        self._keeper.forget(ARENA, hosted.model)  # before anything else is written there
        del self._hosted[hosted.model]
        self._arena.free(hosted.span)
        hosted.tell(cause, "gives its space back")
        if self.cache.is_stored(hosted.model):
            await self.cache.lend(hosted.model)

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
            await hosted.stop_promotion()
            if hosted.demotion is not None:
                await hosted.demotion.stop()


def _tell_pulls(hosted: Hosted, plan: ApplyPlan, pulls: Iterable[Pull]) -> None:
    blocks: dict[NodeId, list[int]] = {}
    for pull in pulls:
        blocks.setdefault(pull.source, []).append(pull.block)
    for source, wanted in sorted(blocks.items()):
        hosted.tell(plan.event, f"pulls blocks {runs(sorted(wanted))} from {source}", source)


def _check_blocks(plan: ApplyPlan, hosted: Hosted) -> None:
    """BadInput: it asks for a block that the model has not. CapacityExceeded: it is for another
    part of the model than the one that has room here."""
    room, wanted = hosted.residency.room, plan.part or whole(hosted.manifest.n_blocks)
    if wanted != room:
        raise CapacityExceeded(f"there is room for {room} of the model here, not for {wanted}")
    wrong = [block for block in plan.promote if block not in room.blocks]
    if wrong:
        raise BadInput(f"model {plan.model_id} has no block {wrong[0]} to promote")
