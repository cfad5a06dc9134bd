"""Stage messages on their way out: one queue a peer, so that each peer's keep their order."""

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from services.node.transport.base import Buffer, Listener, Transport
from shared.errors import TransportError


class Outboxes:
    """Everything on the transport's loop. `spawn` owns the tasks that send."""

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
        """Of the peers that something is being sent to."""

    def put(self, address: str, header: bytes, payload: Sequence[Buffer]) -> None:
        outbox = self._waiting.get(address)
        if outbox is None:
            outbox = self._waiting[address] = deque()
            self._spawn(self._send_all(address, outbox))
        outbox.append((header, payload))

    async def _send_all(self, address: str, outbox: deque[tuple[bytes, Sequence[Buffer]]]) -> None:
        """Until nothing is left. After an error the rest is lost too, and the peer with it; what
        is sent because of that goes out anew."""
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
