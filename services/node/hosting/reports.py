"""What a node tells of its blocks: arrivals and failures, on the bus and as spans.

Every arrival also tells the profiler how fast the node's port and disk are.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from math import inf

from structlog.stdlib import BoundLogger

from services.node.core.gathering import Gathering
from services.node.core.profile import Profiler
from services.node.moving.events import Arrival, PullFailure
from shared import subjects, telemetry
from shared.bus.base import Bus
from shared.clock import now, wall_ns
from shared.containment import is_containable
from shared.errors import BusError, DigestMismatch
from shared.ids import ModelId
from shared.messages import Message
from shared.messages.pool import NodeInfo
from shared.messages.scaling import ApplyPlan, BlockArrived, BlocksArrived, Landed, PullFailed

DISK = "disk"
"""The transport of a promotion from the disk."""
CACHED = "host cache"
"""The transport of a promotion from the host cache."""
HELD = "held"
"""The transport of a block that was there before it was asked for."""


class Reports:
    def __init__(
        self, bus: Bus, log: BoundLogger, info: Callable[[], NodeInfo], profiler: Profiler
    ) -> None:
        self._bus = bus
        self._log = log
        self._info = info
        self._profiler = profiler
        self.blocks: Counter[str] = Counter()
        """Blocks that have come since the start, by transport."""
        self.bytes: Counter[str] = Counter()
        """Their bytes."""
        self.failures: Counter[str] = Counter({DigestMismatch.code: 0})
        """Blocks that could not be had, by the error's code."""
        self._gathering: dict[ModelId, Gathering] = {}
        """For models whose planner asks for few reports."""
        self._more = asyncio.Event()
        """Something was gathered."""

    async def follow(self, plan: ApplyPlan) -> None:
        """Blocks are reported as this plan says from now on."""
        if before := self._gathering.pop(plan.model_id, None):
            await self._report(before, early=True)
        if plan.report_s > 0:
            wanted = {*plan.promote, *(pull.block for pull in plan.pulls)}
            self._gathering[plan.model_id] = Gathering(plan.report_s, wanted)

    async def run(self) -> None:
        """Reports what is gathered, when it is due."""
        while True:
            due = min((each.due for each in self._gathering.values()), default=inf)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due == inf else max(0.0, due - now())):
                    await self._more.wait()
            self._more.clear()
            for model, each in list(self._gathering.items()):
                await self._report(each)
                if each.done:
                    self._gathering.pop(model, None)

    async def say_all(self) -> None:
        """Reports what is gathered, due or not."""
        for each in list(self._gathering.values()):
            await self._report(each, early=True)

    async def _report(self, gathering: Gathering, *, early: bool = False) -> None:
        blocks = gathering.take(now(), early=early)
        if len(blocks) > 1:
            await self._publish(together(blocks, wall_ns()))
        elif blocks:
            await self._publish(blocks[0])

    async def arrived(self, arrival: Arrival, trace: str) -> None:
        info = self._info()
        said = BlockArrived(
            event=arrival.plan.event,
            revision=arrival.plan.revision,
            node=info.node,
            generation=info.generation,
            model_id=arrival.model_id,
            block=arrival.block,
            source=arrival.source,
            transport=arrival.transport,
            nbytes=arrival.nbytes,
            started_ns=arrival.started_ns,
            first_byte_ns=arrival.first_byte_ns,
            finished_ns=arrival.finished_ns,
            ready_ns=wall_ns(),
            trace=trace,
            cause=arrival.plan.event,
        )
        if gathering := self._gathering.get(arrival.model_id):
            gathering.add(said)
            self._more.set()
        else:
            await self._publish(said)
        if arrival.transport == HELD:
            return
        self.blocks[arrival.transport] += 1
        self.bytes[arrival.transport] += arrival.nbytes
        self._measure(arrival)
        seconds = max(arrival.finished_ns - arrival.first_byte_ns, 1) / 1e9
        telemetry.record(
            "block_arrival",
            start_ns=arrival.first_byte_ns,
            end_ns=arrival.finished_ns,
            parent=trace,
            attributes={
                "node": info.node,
                "block": arrival.block,
                "bytes": arrival.nbytes,
                "source": arrival.source,
                "transport": arrival.transport,
                "mb_per_s": round(arrival.nbytes / seconds / 1e6, 2),
                "asked_ms_before": round((arrival.first_byte_ns - arrival.started_ns) / 1e6, 1),
            },
        )

    def _measure(self, arrival: Arrival) -> None:
        asked, first_byte, ended = (
            ns / 1e9 for ns in (arrival.started_ns, arrival.first_byte_ns, arrival.finished_ns)
        )
        if arrival.transport == DISK:
            self._profiler.loaded(asked, ended, arrival.nbytes)
        elif arrival.transport != CACHED:
            self._profiler.pulled(asked, first_byte, ended, arrival.nbytes)

    async def failed(self, failure: PullFailure, trace: str) -> None:
        info, error = self._info(), failure.error
        self.failures[error.code] += 1
        self._log.warning(
            "block not had", block=failure.block, source=failure.source, error=str(error)
        )
        await self._publish(
            PullFailed(
                event=failure.plan.event,
                revision=failure.plan.revision,
                node=info.node,
                generation=info.generation,
                block=failure.block,
                source=failure.source,
                code=error.code,
                message=str(error),
                trace=trace,
                cause=failure.plan.event,
            )
        )

    async def _publish(self, message: Message) -> None:
        try:
            await self._bus.publish(subjects.ARRIVALS, message)
        except BusError as error:
            self._log.warning("report not sent; the next status says it", error=str(error))
        except BaseException as error:  # a report's boundary
            if not is_containable(error):
                raise
            self._log.exception("report not sent; the next status says it")


def together(blocks: tuple[BlockArrived, ...], sent_ns: int) -> BlocksArrived:
    """One report of several blocks of one plan."""
    first = blocks[0]
    return BlocksArrived(
        event=first.event,
        revision=first.revision,
        node=first.node,
        generation=first.generation,
        model_id=first.model_id,
        sent_ns=sent_ns,
        blocks=tuple(
            Landed(
                block=each.block,
                source=each.source,
                transport=each.transport,
                nbytes=each.nbytes,
                started_ns=each.started_ns,
                first_byte_ns=each.first_byte_ns,
                finished_ns=each.finished_ns,
                ready_ns=each.ready_ns,
            )
            for each in blocks
        ),
        trace=first.trace,
        cause=first.cause,
    )
