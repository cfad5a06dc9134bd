"""Scaling events in JetStream: what a planner that starts again needs, and operators look back on.

Writes are coalesced and never waited for: an event goes on while the bus cannot store it.
"""

import asyncio

import msgspec
from structlog.stdlib import BoundLogger

from services.planner.core import events
from shared import subjects
from shared.bus.base import Bus
from shared.clock import wall_ns
from shared.errors import BusError
from shared.ids import EventId
from shared.messages.scaling import EventRecord, EventState

KEEP = 200
"""Finished events that stay in the store."""
RETRY_S = 1.0


class EventStore:
    def __init__(self, bus: Bus, log: BoundLogger) -> None:
        self.records: dict[EventId, EventRecord] = {}
        """Oldest first."""
        self._bus = bus
        self._log = log
        self._dirty: dict[EventId, None] = {}
        self._wake = asyncio.Event()

    async def load(self) -> None:
        """Reads what an earlier planner stored; events it left unfinished are failed."""
        bucket = await self._bus.kv(subjects.KV_EVENTS)
        found: list[EventRecord] = []
        for entry in await bucket.entries():
            try:
                found.append(msgspec.msgpack.decode(entry.value, type=EventRecord))
            except msgspec.DecodeError as error:
                self._log.warning("stored event ignored", key=entry.key, error=str(error))
        for record in sorted(found, key=lambda r: r.decided_ns):
            if record.state not in events.TERMINAL:
                record = events.advance(
                    record, EventState.FAILED, wall_ns(), error="the planner was restarted"
                )
                self.put(record)
            self.records[record.id] = record

    def put(self, record: EventRecord) -> None:
        self.records[record.id] = record
        self._dirty[record.id] = None
        self._wake.set()

    async def run(self) -> None:
        """Writes what changed, for ever; tries again while the bus refuses."""
        bucket = await self._bus.kv(subjects.KV_EVENTS)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._dirty:
                event = next(iter(self._dirty))
                del self._dirty[event]
                try:
                    await bucket.put(event, msgspec.msgpack.encode(self.records[event]))
                    await self._forget_oldest()
                except BusError as error:
                    self._log.warning("event not stored yet", event_id=event, error=str(error))
                    self._dirty[event] = None
                    await asyncio.sleep(RETRY_S)

    async def _forget_oldest(self) -> None:
        bucket = await self._bus.kv(subjects.KV_EVENTS)
        over = [r.id for r in self.records.values() if r.state in events.TERMINAL][:-KEEP]
        for event in over:
            await bucket.delete(event)
            del self.records[event]
