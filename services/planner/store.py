"""What a planner that starts again must know, in JetStream: events, and the operator's word.

Writes are coalesced and never waited for: an event goes on while the bus cannot store it.
"""

import asyncio
from collections.abc import Iterable
from typing import TypeVar

import msgspec
from structlog.stdlib import BoundLogger

from services.planner.core import events
from shared import subjects
from shared.bus.base import Bus, KeyValue
from shared.bus.delivery import MAX_PAYLOAD
from shared.clock import wall_ns
from shared.errors import BusError
from shared.ids import EventId, ModelId
from shared.messages.scaling import EventRecord, EventState

KEEP = 200
"""Finished events that stay in the store."""
RETRY_S = 1.0
_T = TypeVar("_T")
LARGEST = MAX_PAYLOAD * 3 // 4
"""Bytes of a record, or of several in one answer, that surely go into a message."""


def fitting(records: Iterable[EventRecord]) -> tuple[EventRecord, ...]:
    """The first records, as many as one message can carry; large ones without their schedules."""
    fitted: list[EventRecord] = []
    room = LARGEST
    for record in records:
        size = len(msgspec.msgpack.encode(record))
        if size > room // 2:
            record = msgspec.structs.replace(record, transfers=())
            size = len(msgspec.msgpack.encode(record))
        room -= size
        if room < 0:
            break
        fitted.append(record)
    return tuple(fitted)


class Store:
    def __init__(self, bus: Bus, log: BoundLogger) -> None:
        self.events: dict[EventId, EventRecord] = {}
        """Oldest first."""
        self.fixed: dict[ModelId, int] = {}
        """Replicas that the operator asked for."""
        self._bus = bus
        self._log = log
        self._buckets: dict[str, KeyValue] = {}
        self._unwritten: dict[tuple[str, str], bytes | None] = {}
        """(bucket, key) -> what is to be there; None: nothing."""
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()

    # --- the start ---

    async def load(self) -> None:
        """Reads what an earlier planner stored; events it left unfinished are failed."""
        found = await self._read(subjects.KV_EVENTS, EventRecord)
        for record in sorted(found.values(), key=lambda r: r.decided_ns):
            self.events[record.id] = record
            if record.state not in events.TERMINAL:
                reason = "the planner was restarted"
                self.put(events.advance(record, EventState.FAILED, wall_ns(), error=reason))
        fixed = await self._read(subjects.KV_SCALE, int)
        self.fixed = {ModelId(key): count for key, count in fixed.items()}

    async def _read(self, bucket: str, kind: type[_T]) -> dict[str, _T]:
        found: dict[str, _T] = {}
        self._buckets[bucket] = await self._bus.kv(bucket)
        for entry in await self._buckets[bucket].entries():
            try:
                found[entry.key] = msgspec.msgpack.decode(entry.value, type=kind)
            except msgspec.MsgspecError as error:
                self._log.warning(
                    "stored value ignored", bucket=bucket, key=entry.key, error=str(error)
                )
        return found

    # --- changes ---

    def put(self, record: EventRecord) -> None:
        self.events[record.id] = record
        stored = fitting([record])[0]
        self._write(subjects.KV_EVENTS, record.id, msgspec.msgpack.encode(stored))
        over = [r.id for r in self.events.values() if r.state in events.TERMINAL]
        for event in over[:-KEEP]:
            del self.events[event]
            self._write(subjects.KV_EVENTS, event, None)

    def fix(self, model: ModelId, count: int | None) -> None:
        """The operator's number of replicas for a model; None: there is none."""
        if self.fixed.get(model) == count:
            return
        if count is None:
            del self.fixed[model]
        else:
            self.fixed[model] = count
        value = None if count is None else msgspec.msgpack.encode(count)
        self._write(subjects.KV_SCALE, model, value)

    def _write(self, bucket: str, key: str, value: bytes | None) -> None:
        self._unwritten[bucket, key] = value
        self._wake.set()

    # --- writing ---

    async def settled(self) -> None:
        """Returns when everything is written."""
        while self._unwritten:
            self._settled.clear()
            await self._settled.wait()

    async def run(self) -> None:
        """Writes what changed, for ever; tries again while the bus refuses."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._unwritten:
                place, value = next(iter(self._unwritten.items()))
                try:
                    await self._save(*place, value)
                except BusError as error:
                    self._log.warning("not stored yet", key=place[1], error=str(error))
                    self._unwritten[place] = self._unwritten.pop(place)  # others first
                    await asyncio.sleep(RETRY_S)
                    continue
                if self._unwritten[place] is value:
                    del self._unwritten[place]
            self._settled.set()

    async def _save(self, bucket: str, key: str, value: bytes | None) -> None:
        if value is None:
            await self._buckets[bucket].delete(key)
        else:
            await self._buckets[bucket].put(key, value)
