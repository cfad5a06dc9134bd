"""What a node learns of the pool: models that come and go, and other nodes."""

import asyncio
from collections.abc import Callable
from functools import partial

from services.node.hosting.adapters import Adapters
from services.node.hosting.copying import Copying
from services.node.hosting.hosting import Hosting
from services.node.hosting.library import REGISTRY_TIMEOUT_S, Library
from services.node.peers import Peers, Try
from shared import subjects
from shared.bus.base import Bus, On, Subscription
from shared.errors import LambdaScaleError
from shared.ids import NodeId
from shared.messages.pool import (
    ModelAdded,
    ModelRemoved,
    Models,
    ModelsQuery,
    NodeGone,
    NodeJoined,
)
from shared.pool_pages import read_nodes

RETRY_S = 0.2


class PoolWatch:
    def __init__(
        self,
        node: NodeId,
        bus: Bus,
        peers: Peers,
        library: Library,
        hosting: Hosting,
        copying: Copying,
        adapters: Adapters,
        *,
        attempt: Try,
        declared_gone: Callable[[NodeGone], None],
    ) -> None:
        """`declared_gone` is called if the registry says that this node itself is gone."""
        self._node = node
        self._bus = bus
        self._peers = peers
        self._library = library
        self._hosting = hosting
        self._copying = copying
        self._adapters = adapters
        self._try = attempt
        self._declared_gone = declared_gone

    async def follow(self, own: Callable[[Subscription], None]) -> None:
        """Hears of every change from now on. `own` is given the subscriptions."""
        models = On(ModelAdded, self._on_added), On(ModelRemoved, self._on_removed)
        own(await self._bus.subscribe(subjects.POOL_MODELS, *models))
        nodes = On(NodeJoined, self._on_joined), On(NodeGone, self._on_gone)
        own(await self._bus.subscribe(subjects.POOL_NODES, *nodes))

    async def learn(self) -> None:
        """Learns of the models and peers that were there before this node. Waits for the
        registry."""
        ask = partial(self._bus.request, timeout=REGISTRY_TIMEOUT_S)
        while True:
            try:
                models = await ask(subjects.REGISTRY_MODELS, ModelsQuery(), Models)
                peers = await read_nodes(ask)
                break
            except LambdaScaleError:
                await asyncio.sleep(RETRY_S)
        for record in models.records:
            self._try("learning a model", self._library.learn, record)
        self._peers.meet(*peers)

    async def _on_added(self, message: ModelAdded) -> None:
        self._try("learning a model", self._library.learn, message.record)

    async def _on_removed(self, message: ModelRemoved) -> None:
        stored = self._library.forget(message.model_id)
        self._try("forgetting a model", self._remove, message, stored)

    async def _remove(self, message: ModelRemoved, stored: bool) -> None:
        await self._adapters.forget(message.model_id)
        await self._copying.forget(message.model_id)
        await self._hosting.forget(message.model_id, cause=message.origin)
        if stored:
            await self._library.delete(message.model_id)

    async def _on_joined(self, message: NodeJoined) -> None:
        self._peers.meet(message.info)

    async def _on_gone(self, gone: NodeGone) -> None:
        if gone.node == self._node:
            self._declared_gone(gone)
        else:
            self._peers.gone(gone)
