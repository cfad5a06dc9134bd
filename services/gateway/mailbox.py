"""What has come for one reader."""

import asyncio
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Items for one reader, in order. A token of a stream passes here, so a wait takes neither a
    lock nor a timer of its own, as a queue with a time limit for each wait does."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0
        """When the wait that is under way began."""
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        self._items.append(item)
        self.wake()

    def fail(self, error: Exception) -> None:
        """The reader gets the error instead of what comes from now on."""
        self._error = error
        self.wake()

    async def take(self, patience_s: float | None) -> list[Item]:
        """Everything that came since the last time. Waits for the first item; returns an empty list
        if none comes within `patience_s`, which is the same at every call, or if it is woken."""
        if not self._items and self._error is None:
            if patience_s is not None:
                self._since = self._loop.time()
                if self._timer is None:
                    self._timer = self._loop.call_later(patience_s, self._look, patience_s)
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error
        items, self._items = self._items, []
        return items

    def close(self) -> None:
        """No more is taken."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, patience_s: float) -> None:
        """Ends the wait if it has lasted long enough. One timer serves all waits: it is set anew
        only when it fires."""
        left = self._since + patience_s - self._loop.time()
        if self._waiter is None or left <= 0:
            self.wake()
            left = patience_s
        self._timer = self._loop.call_later(left, self._look, patience_s)

    def wake(self) -> None:
        """Ends a wait."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
