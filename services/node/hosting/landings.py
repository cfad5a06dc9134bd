"""Blocks that land in the arena: the engine is given them, and they are reported."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby, pairwise

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
        *,
        portion: int,
    ) -> None:
        """`hosted`: the models that have space in the arena now. `portion`: the most bytes of
        blocks that go to the engine together; a larger block goes alone. Plans and releases have
        their turns between two portions."""
        self._node = node
        self._hosted = hosted
        self._opening = opening
        self._keeper = keeper
        self._reports = reports
        self._log = log
        self._portion = portion
        self._landed: asyncio.Queue[tuple[Hosted, Arrival | PullFailure]] = asyncio.Queue()

    def land(self, item: Arrival | PullFailure) -> None:
        """A block came, or cannot come. Called on the control loop, in the order of the events.

        All pulls and the promotion of a model end before the model is dropped. So nothing that
        comes late is taken for a block of the same model when it is hosted again.
        """
        hosted = self._hosted.get(item.model_id)
        if hosted is None:
            return
        if isinstance(item, Arrival) and item.block not in hosted.residency.held:
            self._opening.lift(hosted, item.block)
        self._landed.put_nowait((hosted, item))

    async def run(self) -> None:
        """Attaches blocks as they land, and reports them: those together that have come by then."""
        while True:
            landed = [await self._landed.get()]
            while not self._landed.empty():
                landed.append(self._landed.get_nowait())
            for (hosted, _), group in groupby(landed, lambda each: (each[0], type(each[1]))):
                items = [item for _, item in group]
                try:
                    await self._on_landed(hosted, items)
                except BaseException as error:  # the boundary of these blocks
                    if not is_containable(error):
                        raise
                    blocks = [item.block for item in items]
                    self._log.exception("a landing failed", model=hosted.model, blocks=blocks)

    async def _on_landed(self, hosted: Hosted, items: Iterable[Arrival | PullFailure]) -> None:
        """`items`: all of one kind."""
        arrivals: dict[int, Arrival] = {}
        for item in items:
            if isinstance(item, Arrival):
                arrivals.setdefault(item.block, item)  # asked for again before it had landed
            elif self._hosted.get(item.model_id) is hosted:
                hosted.tell(item.plan.event, _failed(item), item.source)
                await self._reports.failed(item, hosted.trace)
        for portion in self._portions(hosted, arrivals):
            await self._on_arrived(hosted, [arrivals[block] for block in portion])

    async def _on_arrived(self, hosted: Hosted, items: Iterable[Arrival]) -> None:
        """Attaches blocks. They are reported under the plan that is followed now, even if they came
        for an older plan."""
        async with hosted.lock:
            if self._hosted.get(hosted.model) is not hosted:
                return  # released meanwhile
            if hosted.residency.mode is Mode.STANDBY:
                return  # the engine did not open the model: it is about to be freed
            plan = hosted.residency.plan
            assert plan is not None  # it follows one while it is active
            # Those that are held were asked for again before they had landed: both landed.
            items = [item for item in items if item.block not in hosted.residency.held]
            for item in items:
                hosted.residency = hosted.residency.hold(item.block)
                hosted.tell(plan.event, _arrived(item), item.source)
            self._keeper.note(hosted.kept)
            await self._attach(plan, hosted, [item.block for item in items])
            there = [item for item in items if item.block in hosted.residency.runnable]
        for item in there:
            await self._reports.arrived(replace(item, plan=plan), hosted.trace)

    async def wake(self, plan: PlanId, hosted: Hosted, blocks: Iterable[int]) -> None:
        """Attaches and reports held blocks, some at a time: where they have to go to a device
        first, requests run over those that are there already."""
        for portion, following in _with_the_next(self._portions(hosted, blocks)):
            async with hosted.lock:
                there = self._hosted.get(hosted.model) is hosted
                if not there or hosted.residency.mode is Mode.STANDBY:
                    return  # released meanwhile
                for block in (*portion, *following):
                    if block not in hosted.residency.runnable:
                        self._opening.lift(hosted, block)
                asleep = [block for block in portion if block not in hosted.residency.runnable]
                await self._attach(plan, hosted, asleep)
                runs = [block for block in portion if block in hosted.residency.runnable]
            for block in runs:
                await self.report_held(plan, hosted, block)

    async def _attach(self, plan: PlanId, hosted: Hosted, blocks: Sequence[int]) -> None:
        """The planner is told of blocks that the engine cannot run. The first one goes ahead, since
        requests wait for it."""
        first, others = [b for b in blocks if b == 0], [b for b in blocks if b != 0]
        for some in filter(None, (first, others)):
            await self._attach_together(plan, hosted, some)

    async def _attach_together(self, plan: PlanId, hosted: Hosted, blocks: Sequence[int]) -> None:
        failed: Mapping[int, BaseException]
        try:
            failed = await self._opening.attach(hosted, blocks)
        except BaseException as why:  # the boundary of these blocks
            failed = dict.fromkeys(blocks, why)
        for block, error in failed.items():
            if not is_containable(error):
                raise error
            self._log.error(
                "a block was not attached", model=hosted.model, block=block, exc_info=error
            )
            failure = PullFailure(plan, hosted.model, block, self._node, as_typed(error))
            await self._reports.failed(failure, hosted.trace)

    def _portions(self, hosted: Hosted, blocks: Iterable[int]) -> Iterator[list[int]]:
        portion, nbytes = list[int](), 0
        for block in blocks:
            size = hosted.manifest.blocks[block].nbytes
            if portion and nbytes + size > self._portion:
                yield portion
                portion, nbytes = [], 0
            portion.append(block)
            nbytes += size
        if portion:
            yield portion

    async def report_held(self, plan: PlanId, hosted: Hosted, block: int) -> None:
        at = wall_ns()
        arrival = Arrival(
            plan=plan,
            model_id=hosted.model,
            block=block,
            source=self._node,
            transport=HELD,
            nbytes=hosted.manifest.blocks[block].nbytes,
            started_ns=hosted.asked_ns,
            first_byte_ns=at,
            finished_ns=at,
        )
        await self._reports.arrived(arrival, hosted.trace)


def _with_the_next(portions: Iterable[list[int]]) -> Iterator[tuple[list[int], list[int]]]:
    """Each portion, and the one after it."""
    return pairwise(chain(portions, [[]]))


def _arrived(item: Arrival) -> str:
    ms = (item.finished_ns - item.started_ns) / 1e6
    size = f"{item.nbytes / 1e6:.1f} MB in {ms:.0f} ms"
    return f"block {item.block} came from {item.source} ({item.transport}): {size}"


def _failed(item: PullFailure) -> str:
    return f"block {item.block} does not come from {item.source}: {item.error}"
