"""The registry's answers about the whole pool, page by page: for a large pool they are many
times larger than a message may be.

Pages are cut by the nodes' names, so a node that is there all the time is on exactly one of them.
A node that comes or goes meanwhile may be on one, or on none, as if it had been asked for a moment
earlier or later.
"""

from typing import Protocol

import msgspec

from shared import subjects
from shared.bus.base import M
from shared.messages import Message
from shared.messages.pool import (
    Models,
    ModelsQuery,
    NodeInfo,
    Nodes,
    NodesQuery,
    NodeView,
    PoolPage,
    PoolQuery,
    PoolState,
)


class Ask(Protocol):
    """Sends a request to a subject, and returns the answer: `Bus.request`, with a time limit."""

    async def __call__(self, subject: str, message: Message, reply: type[M], /) -> M: ...


async def read_pool(ask: Ask, query: PoolQuery | None = None) -> PoolState:
    """Reads all pages, and then the models. Raises what `ask` raises."""
    query = query or PoolQuery()
    nodes = list[NodeView]()
    while True:
        page = await ask(subjects.REGISTRY_POOL, query, PoolPage)
        nodes += page.nodes
        if not page.more:
            break
        query = msgspec.structs.replace(query, after=page.nodes[-1].info.node)
    models = await ask(subjects.REGISTRY_MODELS, ModelsQuery(cause=query.cause), Models)
    return PoolState(nodes=tuple(nodes), models=models.records)


async def read_nodes(ask: Ask) -> tuple[NodeInfo, ...]:
    """Who is there, without what they hold. Raises what `ask` raises."""
    nodes, query = list[NodeInfo](), NodesQuery()
    while True:
        page = await ask(subjects.REGISTRY_NODES, query, Nodes)
        nodes += page.nodes
        if not page.more:
            return tuple(nodes)
        query = NodesQuery(after=nodes[-1].node)
