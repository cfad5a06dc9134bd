"""Gives the targets of an event their parts of its plan."""

import asyncio
from collections.abc import Callable, Collection

from services.planner.context import Context
from shared import subjects
from shared.clock import now
from shared.errors import LambdaScaleError, NotFound, PlanError
from shared.ids import NodeId
from shared.messages import Ok
from shared.messages.scaling import ApplyPlan, EventRecord, Pull

APPLY_TIMEOUT_S = 5.0
MANIFEST_WAIT_S = 2.0
"""A node that joined, or a model that was published, a moment ago: the one may not know the other
yet."""


class Orders:
    def __init__(self, context: Context) -> None:
        self.sent: dict[NodeId, int] = {}
        """The revision that each target follows."""
        self._context = context

    async def send(
        self,
        record: EventRecord,
        targets: Collection[NodeId],
        promote: Callable[[NodeId], tuple[int, ...]],
    ) -> dict[NodeId, LambdaScaleError]:
        """The current revision to each of the targets; returns those that did not take it.

        `promote`: the blocks that a target brings up from its own lower tiers.
        """
        results = await asyncio.gather(
            *(self._send_one(record, node, promote(node)) for node in targets),
            return_exceptions=True,
        )
        refused: dict[NodeId, LambdaScaleError] = {}
        for node, result in zip(targets, results, strict=True):
            if isinstance(result, LambdaScaleError):
                refused[node] = result
            elif isinstance(result, BaseException):
                raise result
        return refused

    async def _send_one(self, record: EventRecord, node: NodeId, promote: tuple[int, ...]) -> None:
        nodes = self._context.cluster.nodes
        if node not in nodes:
            raise PlanError(f"node {node} is gone")
        # A sender that went a moment ago is left out; the revision that follows replaces it.
        pulls = tuple(
            Pull(t.step, t.block, t.src)
            for t in record.transfers
            if t.dst == node and t.src in nodes
        )
        plan = ApplyPlan(
            event=record.id,
            revision=record.revision,
            node=node,
            generation=nodes[node].generation,
            model_id=record.model_id,
            pulls=pulls,
            promote=promote,
            peers=tuple(nodes[peer] for peer in sorted({pull.source for pull in pulls})),
            trace=record.trace,
        )
        self.sent[node] = record.revision
        await self._apply(plan)

    async def _apply(self, plan: ApplyPlan) -> None:
        give_up = now() + MANIFEST_WAIT_S
        subject = subjects.node_plan(plan.node)
        while True:
            try:
                await self._context.bus.request(subject, plan, Ok, timeout=APPLY_TIMEOUT_S)
                return
            except NotFound:
                if now() >= give_up:
                    raise
                await asyncio.sleep(self._context.config.tick_s)
