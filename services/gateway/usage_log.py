"""Writes down what calls used, behind the calls: none waits for it.

What is not written yet is lost if the gateway is killed: the calls that ended in the last FLUSH_S,
or while the store took nothing. A batch whose write was not acknowledged is written again under the
same id, which the store takes once.
"""

from collections import deque

import msgspec
import structlog

from services.gateway.core.latencies import Latencies
from services.gateway.metrics import Metrics
from shared import subjects
from shared.bus.base import Bus, Log
from shared.errors import BusError
from shared.ids import GatewayId, new_id
from shared.usage import KEEP_S, MAX_BYTES, CallUsage, UsageBatch

FLUSH_S = 1.0
MOST = 100_000
"""Calls that wait to be written; beyond that the oldest are lost, and counted."""
AT_A_TIME = 1000


class UsageLog:
    def __init__(self, bus: Bus, metrics: Metrics, log: structlog.stdlib.BoundLogger) -> None:
        self._bus = bus
        self._metrics = metrics
        self._log = log
        self.latencies = Latencies()
        self._stored: Log
        self._waiting: deque[CallUsage] = deque()
        self._batch: tuple[str, bytes] | None = None
        """What is being written, with its id."""

    async def open(self) -> None:
        self._stored = await self._bus.open_log(
            subjects.LOG_USAGE, keep_s=KEEP_S, max_bytes=MAX_BYTES
        )

    def note(self, call: CallUsage) -> None:
        self.latencies.note(call)
        if len(self._waiting) >= MOST:
            self._waiting.popleft()
            self._metrics.usage_lost.inc()
        self._waiting.append(call)

    async def flush(self, gateway: GatewayId) -> None:
        """Writes what waits. What cannot be written now stays."""
        while self._batch or self._waiting:
            if self._batch is None:
                count = min(AT_A_TIME, len(self._waiting))
                calls = tuple(self._waiting.popleft() for _ in range(count))
                data = msgspec.msgpack.encode(UsageBatch(gateway=gateway, calls=calls))
                self._batch = new_id("usage"), data
            try:
                await self._stored.append(self._batch[1], id=self._batch[0])
            except BusError as error:
                self._log.warning("usage not written yet", error=str(error))
                return
            self._batch = None
