"""An event's plans, made from what the cluster says of itself now.

They are made in a thread: on a large cluster of unequal links the choice takes a second, and the
planner has other events, instances and nodes to look after meanwhile. Whoever awaits a plan looks
at the event anew when it is there.
"""

import asyncio
import math
from collections.abc import Callable, Collection

from services.planner.context import Context
from services.planner.core.links import Links
from services.planner.core.multicast.fabric import Fabric
from services.planner.core.placement import (
    Held,
    Plan,
    Roles,
    plan_transfers,
    repair_transfers,
)
from shared.ids import NodeId
from shared.messages.pool import ModelRecord
from shared.messages.scaling import Transfer


class Planning:
    def __init__(self, context: Context, model: ModelRecord) -> None:
        self._context = context
        self._model = model

    @property
    def _links(self) -> Links:
        cluster, config = self._context.cluster, self._context.config
        return Links(
            dict(cluster.nodes),
            {node: cluster.profile(node) for node in cluster.nodes},
            config.link_bytes_per_s,
            config.step_overhead_s,
        )

    async def plan(self, roles: Roles, held: Held, executing: Collection[NodeId]) -> Plan:
        """See `placement.plan_transfers`. What it is given must not change meanwhile."""
        config = self._context.config
        return await asyncio.to_thread(
            plan_transfers,
            roles,
            held,
            self._model,
            self._links,
            strategy=config.strategy,
            executing=executing,
            max_stages=config.max_stages,
        )

    async def repair(
        self, held: Held, targets: Collection[NodeId], reluctant: Collection[NodeId]
    ) -> tuple[Transfer, ...]:
        """See `placement.repair_transfers`. What it is given must not change meanwhile."""
        return await asyncio.to_thread(
            repair_transfers, held, targets, self._model, self._links, reluctant=reluctant
        )

    def expected(self) -> Callable[[Transfer], float]:
        """Seconds of a transfer that has its links for itself; inf where a rate is not known."""
        links, sizes = self._links, self._model.block_bytes
        fabrics: dict[tuple[NodeId, NodeId], Fabric | None] = {}

        def seconds(transfer: Transfer) -> float:
            pair = (transfer.src, transfer.dst)
            if pair not in fabrics:
                fabrics[pair] = links.fabric(pair)
            fabric = fabrics[pair]
            if fabric is None:
                return math.inf
            return fabric.overhead_s + sizes[transfer.block] / fabric.rate(0, 1)

        return seconds
