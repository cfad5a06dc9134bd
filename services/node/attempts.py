"""The attempts at requests that a node leads: how they begin and end, and where their tokens go."""

import asyncio
from collections.abc import Awaitable, Callable

from services.node.attempt_spans import AttemptSpans
from services.node.core.known_answers import KnownAnswers
from services.node.hosting.adapters import Adapters
from services.node.owners import Owners
from services.node.parts import AnyWorker
from shared import subjects
from shared.bus.base import Bus, On, Subscription
from shared.errors import LambdaScaleError
from shared.ids import GatewayId, ModelId, NodeId
from shared.messages import Message, Ok
from shared.messages.serving import BringAdapter, Cancel, Submit, Tokens

Publish = Callable[[str, Message], Awaitable[None]]


class Attempts:
    def __init__(
        self,
        node: NodeId,
        worker: AnyWorker,
        owners: Owners,
        adapters: Adapters,
        answers: KnownAnswers,
        publish: Publish,
        *,
        first_block: Callable[[ModelId], Awaitable[None]],
    ) -> None:
        """`publish`: sends a message to a subject; a failure is logged. `first_block`: see
        `Hosting.first_block`."""
        self._node = node
        self._worker = worker
        self._owners = owners
        self._adapters = adapters
        self._answers = answers
        self._publish = publish
        self._first_block = first_block
        self._spans = AttemptSpans(node)
        self._tokens: asyncio.Queue[tuple[GatewayId, Tokens]] = asyncio.Queue()

    async def serve(self, bus: Bus, own: Callable[[Subscription], None]) -> None:
        """Answers requests from now on. `own` is given the subscriptions."""
        node = self._node
        own(await bus.subscribe(subjects.node_cancel(node), On(Cancel, self._on_cancel)))
        own(await bus.serve(subjects.node_submit(node), Submit, self._submit))
        own(await bus.serve(subjects.node_adapted(node), Submit, self._submit_adapted))
        own(await bus.serve(subjects.node_adapter(node), BringAdapter, self._bring_adapter))

    async def _submit(self, message: Submit) -> Ok:
        self._owners.begun(message)
        traced = self._spans.begun(message)
        self._answers.asked(message)
        try:
            if message.opening:
                await self._first_block(message.model_id)
            await self._worker.submit(traced)
        except BaseException as error:
            self._spans.refused(message, error)
            self._owners.over(message.gateway, message.request, message.attempt)
            raise
        return Ok()

    async def _submit_adapted(self, message: Submit) -> Ok:
        """A request with an adapter, which every stage has before anything is run. A node can load
        adapters of a model that it has begun to run."""
        if message.opening:
            await self._first_block(message.model_id)
        await self._adapters.everywhere(message)
        return await self._submit(message)

    async def _bring_adapter(self, message: BringAdapter) -> Ok:
        await self._adapters.ready(message.adapter, message.base)
        return Ok()

    async def _on_cancel(self, message: Cancel) -> None:
        self._owners.cancelled(message)
        self._spans.cancelled(message)
        self._worker.cancel(message)

    def tokens_came(self, gateway: GatewayId, tokens: Tokens) -> None:
        self._tokens.put_nowait((gateway, tokens))

    async def publish_tokens(self) -> None:
        """Brings tokens to their gateways, without end."""
        while True:
            gateway, tokens = await self._tokens.get()
            self._owners.told(gateway, tokens)
            await self._publish(subjects.gateway_tokens(gateway), tokens)
            self._spans.told(tokens)
            self._answers.told(tokens)
            self._tokens.task_done()

    async def published(self) -> None:
        """Waits until all tokens are on their way."""
        await self._tokens.join()

    async def fail(self, error: LambdaScaleError) -> None:
        """Tells every gateway that its attempts end with this error."""
        for gateway, tokens in self._owners.failures(error):
            await self._publish(subjects.gateway_tokens(gateway), tokens)
