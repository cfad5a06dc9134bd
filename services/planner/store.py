"""What a planner that restarts must know, in JetStream: events, the operators' numbers, and
when load comes.

Writes are coalesced and never waited for: an event goes on while the bus cannot store it.
"""

import asyncio
from typing import TypeVar

import msgspec
from structlog.stdlib import BoundLogger

from services.planner.core.archive import Archive
from services.planner.core.commands import StoreEvent, StoreFixed, StoreHistory
from services.planner.core.rhythm import History
from shared import subjects
from shared.bus.base import Bus, KeyValue
from shared.containment import is_containable
from shared.errors import BadMessage, MessageTooLarge, Superseded
from shared.ids import ModelId
from shared.messages.scaling import EventRecord
from shared.stored import read_stored

RETRY_S = 1.0
Value = EventRecord | History | int
_T = TypeVar("_T")


class Store:
    def __init__(self, bus: Bus, log: BoundLogger) -> None:
        self._bus = bus
        self._log = log
        self._buckets: dict[str, KeyValue] = {}
        self._unwritten: dict[tuple[str, str], Value | None] = {}
        """(bucket, key) -> the value to write; None: to delete."""
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()

    async def load(self) -> Archive:
        """Loads what an earlier planner stored."""
        events = await self._read(subjects.KV_EVENTS, EventRecord)
        fixed = await self._read(subjects.KV_SCALE, int)
        histories = await self._read(subjects.KV_RHYTHMS, History)
        return Archive(
            events.values(),
            {ModelId(key): count for key, count in fixed.items()},
            {ModelId(key): history for key, history in histories.items()},
        )

    async def _read(self, bucket: str, kind: type[_T]) -> dict[str, _T]:
        found: dict[str, _T] = {}
        self._buckets[bucket] = await self._bus.kv(bucket)
        for entry in await self._buckets[bucket].entries():
            try:
                found[entry.key] = read_stored(entry.value, kind)
            except BadMessage as error:
                self._log.warning(
                    "stored value ignored", bucket=bucket, key=entry.key, error=str(error)
                )
        return found

    def write(self, change: StoreEvent | StoreFixed | StoreHistory) -> None:
        """Has a change written soon."""
        if isinstance(change, StoreEvent):
            self._put(subjects.KV_EVENTS, change.event, change.record)
        elif isinstance(change, StoreHistory):
            self._put(subjects.KV_RHYTHMS, change.model, change.history)
        else:
            self._put(subjects.KV_SCALE, change.model, change.count)

    def _put(self, bucket: str, key: str, value: Value | None) -> None:
        self._unwritten[bucket, key] = value
        self._wake.set()

    async def settled(self) -> None:
        """Returns when everything is written."""
        while self._unwritten:
            self._settled.clear()
            await self._settled.wait()

    async def run(self) -> None:
        """Writes changes, without end. Tries again whatever goes wrong, except with what is too
        large for the bus: that is left out, and logged."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._unwritten:
                place, value = next(iter(self._unwritten.items()))
                try:
                    await self._save(*place, value)
                except MessageTooLarge as error:
                    self._log.error("not stored", key=place[1], error=str(error))
                except Superseded:
                    raise  # this process has lost its role, and ends
                except BaseException as error:
                    if not is_containable(error):
                        raise
                    self._log.warning("not stored yet", key=place[1], error=repr(error))
                    self._unwritten[place] = self._unwritten.pop(place)  # others first
                    await asyncio.sleep(RETRY_S)
                    continue
                if self._unwritten[place] is value:
                    del self._unwritten[place]
            self._settled.set()

    async def _save(self, bucket: str, key: str, value: Value | None) -> None:
        if value is None:
            await self._buckets[bucket].delete(key)
        else:
            await self._buckets[bucket].put(key, msgspec.msgpack.encode(value))
