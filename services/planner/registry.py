"""What the planner asks of the registry for its events."""

from services.planner.context import Context
from shared import subjects
from shared.bus.base import M
from shared.errors import BusError
from shared.ids import EventId, NodeId
from shared.messages import Message, Ok
from shared.messages.pool import (
    ModelRecord,
    NodeInfo,
    Reserve,
    Reserved,
    Source,
    Sources,
    SourcesQuery,
    Unreserve,
)

TIMEOUT_S = 2.0


class Registry:
    """Its answers name nodes that the planner may not have heard of yet: it meets them here."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def reserve(
        self, event: EventId, model: ModelRecord, count: int, exclude: tuple[NodeId, ...]
    ) -> list[NodeInfo]:
        """Up to `count` targets, best first."""
        reserve = Reserve(
            event=event,
            model_id=model.model_id,
            nbytes=model.nbytes,
            count=count,
            exclude=exclude,
        )
        reserved = await self._ask(subjects.REGISTRY_RESERVE, reserve, Reserved)
        return [info for info in reserved.targets if self._meet(info)]

    async def sources(self, model: ModelRecord) -> list[Source]:
        query = SourcesQuery(model_id=model.model_id)
        found = await self._ask(subjects.REGISTRY_SOURCES, query, Sources)
        return [source for source in found.sources if self._meet(source.info)]

    async def unreserve(self, event: EventId) -> None:
        """What fails here is noticed, and tried again, when the planner next looks at the pool."""
        try:
            await self._ask(subjects.REGISTRY_UNRESERVE, Unreserve(event=event), Ok)
        except BusError as error:
            self._context.log.warning("unreserve failed", event_id=event, error=str(error))

    def _meet(self, info: NodeInfo) -> bool:
        """Whether the node is there, for all that is known: one that ended stays so."""
        cluster = self._context.cluster
        if info.node not in cluster.nodes:
            cluster.on_joined(info)
        known = cluster.nodes.get(info.node)
        return known is not None and known.generation == info.generation

    async def _ask(self, subject: str, message: Message, reply: type[M]) -> M:
        return await self._context.bus.request(subject, message, reply, timeout=TIMEOUT_S)
