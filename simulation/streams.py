"""Nodes, and the streams between them. A stream has one transfer under way, while others wait
behind it."""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.errors import TransportError
from simulation.sharing import Lane, Port

OnEnd = Callable[[TransportError | None], None]
"""Called once: with None when the last byte has arrived, with an error if it never will."""


@dataclass(slots=True, eq=False)
class Node:
    name: str
    rack: str
    host: str
    out: Port
    into: Port
    local_out: Port
    local_into: Port
    streams: "dict[Stream, None]" = field(default_factory=dict)
    """All streams from and to the node."""
    side: int = 0
    """The side of a partition that it is on. Nodes on other sides cannot be reached."""
    paused: bool = False
    corrupt: int = 0
    """How many further reads from it will be wrong."""
    sent_bytes: float = 0.0
    received_bytes: float = 0.0


@dataclass(slots=True, eq=False)
class Transfer:
    nbytes: float
    stream: "Stream"
    on_end: OnEnd
    first_byte_s: float = math.nan
    """When its first byte arrived or will arrive. NaN before that byte was sent."""
    landing: asyncio.TimerHandle | None = None
    """Set while everything was sent and the last byte is on its way."""


class Stream(Lane):
    """Open while it has a transfer that may pass. Its rate is set from outside."""

    __slots__ = ("_latency_s", "_left", "_on_sent", "_since", "_timer", "dst", "queue", "src")

    def __init__(
        self,
        src: Node,
        dst: Node,
        ports: tuple[Port, ...],
        priority: int,
        flow: str,
        latency_s: float,
        on_sent: "Callable[[Stream, Transfer], None]",
    ) -> None:
        """`on_sent` is called when the last byte of the first transfer has left, after it was taken
        from the queue."""
        super().__init__(ports, priority, flow)
        self.src, self.dst = src, dst
        self.queue: deque[Transfer] = deque()
        self._latency_s = latency_s
        self._on_sent = on_sent
        self._left = 0.0
        """Bytes of the first transfer that were not sent at `_since`."""
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, transfer: Transfer) -> None:
        self.queue.append(transfer)
        if len(self.queue) == 1:
            self._begin_first()

    def remove(self, transfer: Transfer) -> None:
        """Removes a transfer from the queue. If it is the first, what was sent of it is dropped
        too."""
        first = self.queue[0] is transfer
        self.queue.remove(transfer)
        if first:
            self._begin_first()

    def set_rate(self, rate: float) -> None:
        """Sets the rate from now on."""
        if rate == self.rate:
            return
        now = asyncio.get_running_loop().time()
        self._left -= self.rate * (now - self._since)
        self._since = now
        self.rate = rate
        self._schedule()

    def _begin_first(self) -> None:
        if self.queue:
            self._left = self.queue[0].nbytes
            self._since = asyncio.get_running_loop().time()
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.rate <= 0 or not self.queue:
            return
        first = self.queue[0]
        if math.isnan(first.first_byte_s):
            first.first_byte_s = self._since + self._latency_s
        at = self._since + max(0.0, self._left) / self.rate
        self._timer = asyncio.get_running_loop().call_at(at, self._sent)

    def _sent(self) -> None:
        self._timer = None
        transfer = self.queue.popleft()
        self._begin_first()
        self._on_sent(self, transfer)
