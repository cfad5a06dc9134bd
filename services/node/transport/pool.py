"""One connection an address, dialled once however many ask for it at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from shared.errors import TransportError

T = TypeVar("T")
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Pool(Generic[T]):
    def __init__(self, dial: Callable[[str], Awaitable[T]], spawn: Spawn) -> None:
        self._dial = dial
        self._spawn = spawn
        self._slots: dict[str, asyncio.Future[T | TransportError]] = {}

    async def get(self, address: str) -> T:
        """The standing connection or a new one; the dialling goes on if this is cancelled."""
        slot = self._slots.get(address)
        if slot is None:
            slot = self._slots[address] = asyncio.get_running_loop().create_future()
            self._spawn(self._fill(address, slot))
        outcome = await asyncio.shield(slot)
        if isinstance(outcome, TransportError):
            raise type(outcome)(str(outcome))
        return outcome

    def drop(self, address: str) -> None:
        """The connection broke: whoever asks next dials again."""
        self._slots.pop(address, None)

    async def _fill(self, address: str, slot: "asyncio.Future[T | TransportError]") -> None:
        try:
            slot.set_result(await self._dial(address))
        except TransportError as error:
            self.drop(address)
            slot.set_result(error)
        except asyncio.CancelledError:
            slot.cancel()
            raise
