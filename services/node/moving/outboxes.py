"""Stage messages on their way out: a queue for each peer, so that its messages keep their order."""

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from services.node.transport.base import Buffer, Listener, Transport
from shared.errors import TransportError


class Outboxes:
    """Called on the transport's loop only. `spawn` owns the tasks that send."""

    def __init__(
        self,
        transport: Transport,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        listener: Listener,
    ) -> None:
        self._transport = transport
        self._spawn = spawn
        self._hears = listener
        self._waiting: dict[str, deque[tuple[bytes, Sequence[Buffer]]]] = {}
        """The messages that wait, by address of a peer to which something is being sent."""

    def put(self, address: str, header: bytes, payload: Sequence[Buffer]) -> None:
        outbox = self._waiting.get(address)
        if outbox is None:
            outbox = self._waiting[address] = deque()
            self._spawn(self._send_all(address, outbox))
        outbox.append((header, payload))

    async def _send_all(self, address: str, outbox: deque[tuple[bytes, Sequence[Buffer]]]) -> None:
        """Sends until nothing is left. After an error the rest is lost too, and the peer counts as
        lost. What is sent to it because of that begins a new queue."""
        lost: TransportError | None = None
        try:
            while outbox:
                header, payload = outbox.popleft()
                await self._transport.send(address, header, payload)
        except Exception as error:  # a peer's boundary
            lost = error if isinstance(error, TransportError) else TransportError(repr(error))
        finally:
            del self._waiting[address]
        if lost is not None:
            self._hears.on_peer_lost(address, lost)
