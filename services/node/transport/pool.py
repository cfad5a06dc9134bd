"""One connection for each address, dialled once however many tasks ask for it at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from shared.errors import LambdaScaleError, PeerLost

T = TypeVar("T")


class Pool(Generic[T]):
    def __init__(
        self,
        dial: Callable[[str], Awaitable[T]],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._dial = dial
        self._spawn = spawn
        self._slots: dict[str, asyncio.Future[T | LambdaScaleError]] = {}
        self._closed = False

    async def get(self, address: str) -> T:
        """The standing connection, or a new one. Dialling goes on if this call is cancelled."""
        if self._closed:
            raise PeerLost(f"{address}: this transport is closed")
        slot = self._slots.get(address)
        if slot is None:
            slot = self._slots[address] = asyncio.get_running_loop().create_future()
            self._spawn(self._fill(address, slot))
        outcome = await asyncio.shield(slot)
        if isinstance(outcome, LambdaScaleError):
            raise type(outcome)(str(outcome))
        return outcome

    def drop(self, address: str) -> None:
        """Forgets a broken connection, so that the next `get` dials again."""
        self._slots.pop(address, None)

    def close(self) -> None:
        """Makes no more connections. Whoever waits for one gets PeerLost."""
        self._closed = True
        for address, slot in self._slots.items():
            if not slot.done():
                slot.set_result(PeerLost(f"{address}: this transport was closed"))

    async def _fill(self, address: str, slot: "asyncio.Future[T | LambdaScaleError]") -> None:
        outcome: T | LambdaScaleError
        try:
            outcome = await self._dial(address)
        except LambdaScaleError as error:
            self.drop(address)
            outcome = error
        except Exception as error:  # a peer's boundary
            self.drop(address)
            outcome = PeerLost(f"{address}: bug: {error!r}")
        if not slot.done():
            slot.set_result(outcome)
