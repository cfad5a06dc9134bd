"""Blocks that land in the arena: the engine is given them, and they are reported."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace

from structlog.stdlib import BoundLogger

from services.node.core.residency import Mode, PlanId
from services.node.hosting.hosted import Hosted
from services.node.hosting.opening import Opening
from services.node.hosting.reports import HELD, Reports
from services.node.keeper.link import KeeperLink
from services.node.moving.events import Arrival, PullFailure
from shared.clock import wall_ns
from shared.containment import is_containable
from shared.errors import as_typed
from shared.ids import ModelId, NodeId


class Landings:
    def __init__(
        self,
        node: NodeId,
        hosted: Mapping[ModelId, Hosted],
        opening: Opening,
        keeper: KeeperLink,
        reports: Reports,
        log: BoundLogger,
    ) -> None:
        """`hosted`: the models that have space in the arena now."""
        self._node = node
        self._hosted = hosted
        self._opening = opening
        self._keeper = keeper
        self._reports = reports
        self._log = log
        self._landed: asyncio.Queue[tuple[Hosted, Arrival | PullFailure]] = asyncio.Queue()

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
            hosted.tell(item.plan.event, _failed(item), item.source)
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
            hosted.tell(plan.event, _arrived(item), item.source)
            self._keeper.note(hosted.kept)
            if not await self._attach(plan, hosted, item.block):
                return
        await self._reports.arrived(replace(item, plan=plan), hosted.trace)

    async def wake(self, plan: PlanId, hosted: Hosted, blocks: Iterable[int]) -> None:
        """Attaches and reports held blocks one after the other: where they have to go to a device
        first, requests run over those that are there already."""
        for block in blocks:
            async with hosted.lock:
                there = self._hosted.get(hosted.model) is hosted
                if not there or hosted.residency.mode is Mode.STANDBY:
                    return  # released meanwhile
                runs = block in hosted.residency.runnable
                if not runs and not await self._attach(plan, hosted, block):
                    continue
            await self.report_held(plan, hosted, block)

    async def _attach(self, plan: PlanId, hosted: Hosted, block: int) -> bool:
        """Whether the engine has the block now. If not, the planner is told."""
        try:
            await self._opening.attach(hosted, block)
        except BaseException as error:  # the block's boundary
            if not is_containable(error):
                raise
            self._log.exception("a block was not attached", model=hosted.model, block=block)
            failure = PullFailure(plan, hosted.model, block, self._node, as_typed(error))
            await self._reports.failed(failure, hosted.trace)
            return False
        return True

    async def report_held(self, plan: PlanId, hosted: Hosted, block: int) -> None:
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


def _arrived(item: Arrival) -> str:
    ms = (item.finished_ns - item.started_ns) / 1e6
    size = f"{item.nbytes / 1e6:.1f} MB in {ms:.0f} ms"
    return f"block {item.block} came from {item.source} ({item.transport}): {size}"


def _failed(item: PullFailure) -> str:
    return f"block {item.block} does not come from {item.source}: {item.error}"
