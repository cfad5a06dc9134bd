"""nats-py's client, which writes at once.

By itself it leaves what is sent to a task of its own, which writes in the loop's next turn. A
request's first token passes that on its way to the node, and on its way back.
"""

import asyncio
from typing import Any

from nats.aio.client import Client
from nats.aio.transport import TcpTransport


class PromptClient(Client):  # type: ignore[misc]
    """The first message of each turn of the loop is written at once, if nothing waits before it.
    Others of that turn are left to the client's task, which writes them together."""

    def __init__(self) -> None:
        super().__init__()
        self._wrote = False
        """Whether it has written in this turn of the loop."""

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        """The client calls this whenever something is to be written."""
        if self._wrote or force_flush or not self.is_connected or not self._is_drained():
            return await super()._flush_pending(force_flush)
        if self._pending:
            self._transport.writelines(self._pending[:])
            self._wrote = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._pending.clear()
        self._pending_data_size = 0
        return None

    def _is_drained(self) -> bool:
        """Whether the socket has taken all that was written before."""
        if not isinstance(self._transport, TcpTransport):
            return False
        writer = self._transport._io_writer
        return not writer.is_closing() and writer.transport.get_write_buffer_size() == 0

    def _next_turn(self) -> None:
        self._wrote = False
