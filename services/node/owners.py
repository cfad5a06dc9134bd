"""Which gateway each attempt on this node belongs to. When a gateway is gone, its attempts are
cancelled: nobody would read their tokens, and they would hold slots that other requests need."""

import asyncio
from collections.abc import Callable, Iterator

import structlog

from shared import subjects
from shared.bus.base import Bus
from shared.errors import BusError, LambdaScaleError, NoResponders
from shared.ids import GatewayId, NodeId, RequestId
from shared.messages import Ok, Ping
from shared.messages.serving import AttemptFailed, Cancel, GatewayGone, Submit, Tokens

LOOK_S = 5.0
"""Seconds between looks at the gateways. One that was not connected at two looks is gone: a
connection that breaks for a moment costs nothing."""
AGAIN_S = 0.5
"""Seconds between two looks at a gateway that others miss. A broken connection is back sooner if
there is a server."""
ASK_TIMEOUT_S = 0.5


class Owners:
    def __init__(
        self,
        node: NodeId,
        bus: Bus,
        cancel: Callable[[Cancel], None],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._node = node
        self._bus = bus
        self._cancel = cancel
        self._log = log
        self._attempts: dict[GatewayId, set[tuple[RequestId, int]]] = {}
        self._absent: set[GatewayId] = set()
        """Not connected at the last look."""

    def begun(self, submit: Submit) -> None:
        self._attempts.setdefault(submit.gateway, set()).add((submit.request, submit.attempt))

    def over(self, gateway: GatewayId, request: RequestId, attempt: int) -> None:
        if attempts := self._attempts.get(gateway):
            attempts.discard((request, attempt))

    def cancelled(self, cancel: Cancel) -> None:
        for attempts in self._attempts.values():
            attempts.discard((cancel.request, cancel.attempt))

    def told(self, gateway: GatewayId, tokens: Tokens) -> None:
        """Tokens go to the gateway; the last one of an attempt ends it."""
        for token in tokens.tokens:
            if token.finish:
                self.over(gateway, token.request, token.attempt)
        for failed in tokens.failed:
            self.over(gateway, failed.request, failed.attempt)

    def failures(self, error: LambdaScaleError) -> Iterator[tuple[GatewayId, Tokens]]:
        """What each gateway is to be told if all its attempts fail with this error."""
        for gateway, attempts in self._attempts.items():
            failed = tuple(
                AttemptFailed(request, attempt, error.code, str(error))
                for request, attempt in sorted(attempts)
            )
            if failed:
                yield gateway, Tokens(node=self._node, tokens=(), failed=failed)

    async def hear(self, message: GatewayGone) -> None:
        """Another gateway has not heard it for a while. It may have been cut off itself, and be
        back first: so there are two looks here, too."""
        gateway = message.gateway
        if gateway not in self._attempts or await self._listens(gateway):
            return
        await asyncio.sleep(AGAIN_S)
        if gateway in self._attempts and not await self._listens(gateway):
            self._give_up(gateway)

    async def watch(self) -> None:
        """Cancels what belongs to gateways that are gone, without end."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._attempts = {key: found for key, found in self._attempts.items() if found}
            gateways = list(self._attempts)
            listens = await asyncio.gather(*map(self._listens, gateways))
            absent = {key for key, there in zip(gateways, listens, strict=True) if not there}
            for gateway in absent & self._absent:
                self._give_up(gateway)
            self._absent = absent

    def _give_up(self, gateway: GatewayId) -> None:
        attempts = self._attempts.pop(gateway, set())
        self._log.info("gateway is gone", gateway=gateway, attempts=len(attempts))
        for request, attempt in attempts:
            self._cancel(Cancel(request=request, attempt=attempt, cause=gateway))

    async def _listens(self, gateway: GatewayId) -> bool:
        """Whether somebody is there to hear the gateway's tokens, for all that is known."""
        try:
            await self._bus.request(
                subjects.gateway_tokens(gateway), Ping(), Ok, timeout=ASK_TIMEOUT_S
            )
        except NoResponders:
            return False
        except BusError:  # nobody answers there, but somebody listens; or the bus is away
            pass
        return True
