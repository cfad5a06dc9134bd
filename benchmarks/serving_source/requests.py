"""A steady batch of requests at one node, submitted as a gateway submits them."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from benchmarks.multicast.model import CONTEXT
from benchmarks.multicast.nodes import REQUEST_S, BenchFailed
from shared import subjects
from shared.bus.base import Bus, On, Subscription
from shared.errors import CapacityExceeded
from shared.ids import GatewayId, InstanceId, RequestId, new_id
from shared.messages import Ok
from shared.messages.instances import Stage
from shared.messages.pool import ModelRecord, NodeInfo
from shared.messages.serving import Cancel, Sampling, Submit, Tokens

PROMPT = tuple(range(10, 26))
ANSWER = CONTEXT - len(PROMPT)
RETRY_S = 0.01
"""After a refusal: what was cancelled a moment ago may have its place still."""
STEADY_S = 60.0
T = TypeVar("T")


class Requests:
    """While it is entered, the node has `batch` sequences to decode at every step.

    They began at different times, so that at any time their lengths are spread alike.
    """

    def __init__(self, bus: Bus, node: NodeInfo, record: ModelRecord, batch: int) -> None:
        self.tokens = 0
        """Tokens that have come so far."""
        self._bus = bus
        self._node = node
        self._record = record
        self._batch = batch
        self._gateway = GatewayId(new_id("bench"))
        self._awaited = 0
        """`_steady` is set once this many tokens have come."""
        self._steady = asyncio.Event()
        self._answers: dict[RequestId, asyncio.Future[None]] = {}
        self._users: list[asyncio.Task[None]] = []
        self._subscription: Subscription | None = None

    async def __aenter__(self) -> Self:
        subject = subjects.gateway_tokens(self._gateway)
        self._subscription = await self._bus.subscribe(subject, On(Tokens, self._hear))
        self._users = [
            asyncio.create_task(self._use(ANSWER * (number + 1) // self._batch))
            for number in range(self._batch)
        ]
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for user in self._users:
            user.cancel()
        await asyncio.gather(*self._users, return_exceptions=True)
        if self._subscription is not None:
            await self._subscription.close()

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result. Raises what ended a request that should not have ended."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, *self._users], return_when=asyncio.FIRST_COMPLETED)
            for user in self._users:
                if user.done():
                    user.result()
            return await task
        finally:
            task.cancel()

    async def steady(self) -> None:
        """Returns when every place of the batch has been through a whole answer's tokens."""
        await self.more(self._batch * ANSWER)

    async def more(self, tokens: int) -> None:
        """Returns when this number of further tokens has come."""
        self._awaited = self.tokens + tokens
        self._steady.clear()
        try:
            await asyncio.wait_for(self._steady.wait(), STEADY_S)
        except TimeoutError:
            raise BenchFailed(
                f"{self.tokens} of {self._awaited} tokens in {STEADY_S:.0f} s: use a smaller "
                f"model (--mib)"
            ) from None

    async def _use(self, first: int) -> None:
        """Sends request after request; the first asks for `first` tokens."""
        length = first
        while True:
            await self._ask(length)
            length = ANSWER

    async def _ask(self, length: int) -> None:
        request = RequestId(new_id("req"))
        answer = self._answers[request] = asyncio.get_running_loop().create_future()
        submit = Submit(
            request=request,
            attempt=1,
            gateway=self._gateway,
            model_id=self._record.model_id,
            instance=InstanceId("bench"),
            stages=(Stage(self._node.node, self._node.address, 0, self._record.n_blocks),),
            tokens=PROMPT,
            prompt_tokens=len(PROMPT),
            max_tokens=length,
            stop_ids=(),
            sampling=Sampling(),
        )
        try:
            subject = subjects.node_submit(self._node.node)
            while True:
                try:
                    await self._bus.request(subject, submit, Ok, timeout=REQUEST_S)
                    break
                except CapacityExceeded:
                    await asyncio.sleep(RETRY_S)
            await answer
        except asyncio.CancelledError:
            cancel = Cancel(request=request, attempt=1)
            await self._bus.publish(subjects.node_cancel(self._node.node), cancel)
            raise
        finally:
            del self._answers[request]

    async def _hear(self, message: Tokens) -> None:
        self.tokens += len(message.tokens)
        if self.tokens >= self._awaited:
            self._steady.set()
        for token in message.tokens:
            if token.finish and (answer := self._answers.get(token.request)):
                answer.set_result(None)
        for failed in message.failed:
            if answer := self._answers.get(failed.request):
                answer.set_exception(BenchFailed(f"{self._node.node}: {failed.message}"))
