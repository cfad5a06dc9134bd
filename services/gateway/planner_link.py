"""What the planner says of instances: sets, what has changed of them, and its answers about what
was missed."""

import asyncio
from math import inf

import structlog

from services.gateway.core.dispatch import Dispatch
from services.gateway.frontend import Frontend
from shared import subjects
from shared.bus.base import Bus, On, Subscription
from shared.clock import now
from shared.errors import LambdaScaleError
from shared.ids import ModelName
from shared.messages.instances import InstanceChange, InstanceSet, InstanceSets, InstancesQuery

RETRY_S = 0.2
"""Seconds between questions to a planner that does not answer."""
ASK_TIMEOUT_S = 2.0


class PlannerLink:
    def __init__(
        self, bus: Bus, dispatch: Dispatch, frontend: Frontend, log: structlog.stdlib.BoundLogger
    ) -> None:
        self.heard_at = -inf
        """When the planner was last heard."""
        self._bus = bus
        self._dispatch = dispatch
        self._frontend = frontend
        self._log = log
        self._knows = False
        """Whether the planner has answered once, with the sets of all models."""
        self._missed: set[ModelName] = set()
        """Models of which a change was missed since then."""
        self._asks = asyncio.Event()
        """Set while there is something to ask."""
        self._asks.set()

    async def follow(self) -> Subscription:
        sets = On(InstanceSet, self._on_set), On(InstanceChange, self._on_change)
        return await self._bus.subscribe(subjects.INSTANCES, *sets)

    async def learn(self) -> float:
        """Asks for the sets of all models until the planner has answered once, and from then on for
        those of which a change was missed. Returns after how many seconds to call it again."""
        await self._asks.wait()
        query = InstancesQuery(names=tuple(sorted(self._missed)) if self._knows else ())
        try:
            answer = await self._bus.request(
                subjects.PLANNER_INSTANCES, query, InstanceSets, timeout=ASK_TIMEOUT_S
            )
        except LambdaScaleError as error:
            self._log.debug("planner does not answer", error=str(error))
            return RETRY_S
        self.heard_at = now()
        self._knows = True
        self._missed.difference_update(query.names)
        if not self._missed:
            self._asks.clear()
        for found in answer.sets:
            await self._on_set(found)
        return 0.0

    async def _on_set(self, message: InstanceSet) -> None:
        self.heard_at = now()
        await self._frontend.on_instances(message)

    async def _on_change(self, message: InstanceChange) -> None:
        found = self._dispatch.after(message)
        if found is not None:
            await self._on_set(found)
            return
        self.heard_at = now()
        if self._knows:
            self._missed.add(message.now.name)
            self._asks.set()
