"""Listeners made of functions."""

from collections.abc import Callable, Coroutine
from typing import Any

from services.node.moving.events import Arrival, PullFailure
from services.node.transport.base import Brought, NoListener
from shared.errors import TransportError

OnMessage = Callable[[str, memoryview, memoryview], None]
OnPeerLost = Callable[[str, TransportError], None]
Bring = Callable[[str, int, int], Coroutine[Any, Any, Brought]]


class Hears(NoListener):
    def __init__(
        self,
        message: OnMessage = lambda *_: None,
        lost: OnPeerLost = lambda *_: None,
        dialled: Callable[[str], None] = lambda _: None,
        bring: Bring | None = None,
    ) -> None:
        self._message, self._lost, self._dialled = message, lost, dialled
        self._bring = bring or super().bring

    async def bring(self, region: str, offset: int, nbytes: int) -> Brought:
        return await self._bring(region, offset, nbytes)

    def on_message(self, sender: str, header: memoryview, payload: memoryview) -> None:
        self._message(sender, header, payload)

    def on_peer_lost(self, address: str, error: TransportError) -> None:
        self._lost(address, error)

    def on_dialled(self, address: str) -> None:
        self._dialled(address)


class PlaneHears(Hears):
    def __init__(
        self,
        message: OnMessage = lambda *_: None,
        lost: OnPeerLost = lambda *_: None,
        arrived: Callable[[Arrival], None] = lambda _: None,
        failed: Callable[[PullFailure], None] = lambda _: None,
    ) -> None:
        super().__init__(message, lost)
        self._arrived, self._failed = arrived, failed

    def on_arrived(self, arrival: Arrival) -> None:
        self._arrived(arrival)

    def on_kv_copied(self, nbytes: int, seconds: float) -> None:
        """Nobody asks."""

    def on_failed(self, failure: PullFailure) -> None:
        self._failed(failure)
