"""The registry's durable state: models, tenants and keys, reservations, the nodes that are not yet
gone, and what operators have said of nodes.

Memory is the truth while the process lives, and the store follows it. Writes are *behind*: one
writer works through the slots that changed, several at a time, with the newest value only, and
tries again for as long as the durable store refuses (for some seconds, while it elects a leader).
That can cost only durability: a registry killed meanwhile starts from the older state.
"""

import asyncio
from collections.abc import Callable
from itertools import islice
from typing import TypeVar

import msgspec
import structlog

from services.registry.core.access import slot_of
from services.registry.core.duties import NodeDuty
from services.registry.core.reservations import Reservation
from shared.bus.base import Bus, KeyValue
from shared.clock import wall_ns
from shared.containment import is_containable
from shared.errors import BadMessage, BusTimeout
from shared.ids import KeyId, ModelId, NodeId
from shared.messages.access import DEFAULT_TENANT, AccessRecord, KeyRecord
from shared.messages.pool import ModelRecord, NodeInfo
from shared.stored import read_stored
from shared.subjects import KV_ACCESS, KV_DUTIES, KV_MODELS, KV_NODES, KV_RESERVATIONS

MODEL_WAIT_S = 4.0
"""Seconds that publishing or removing a model waits until it is durable, before it is refused."""
RETRY_S = 0.1
RETRY_MAX_S = 1.0

AT_A_TIME = 64
"""The number of writes under way."""

Slot = tuple[str, str]
"""(bucket, key)."""
Item = ModelRecord | NodeInfo | NodeDuty | Reservation
T = TypeVar("T", bound=Item)


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    models: list[ModelRecord]
    nodes: list[NodeInfo]
    duties: list[NodeDuty]
    reservations: list[Reservation]
    access: list[tuple[AccessRecord, int]]
    """With their revisions."""


class Store:
    def __init__(self, bus: Bus, log: structlog.stdlib.BoundLogger) -> None:
        self._bus = bus
        self._log = log
        self._buckets: dict[str, KeyValue] = {}
        self._stored: dict[Slot, bytes | None] = {}
        """What is known to be stored. No entry: not known."""
        self._wanted: dict[Slot, bytes | None] = {}
        """What is still to be written. None: to be deleted."""
        self._wake = asyncio.Event()
        self._landed = asyncio.Condition()

    async def load(self) -> Saved:
        """Opens the buckets and reads them. Entries that make no sense are logged and left."""
        for bucket in (KV_MODELS, KV_NODES, KV_DUTIES, KV_RESERVATIONS, KV_ACCESS):
            self._buckets[bucket] = await self._bus.kv(bucket)
        return Saved(
            models=await self._read(KV_MODELS, ModelRecord),
            nodes=await self._read(KV_NODES, NodeInfo),
            duties=await self._read(KV_DUTIES, NodeDuty),
            reservations=await self._read(KV_RESERVATIONS, Reservation),
            access=await self._read_access(),
        )

    def node(self, node: NodeId, info: NodeInfo | None) -> None:
        self._want((KV_NODES, node), info)

    def duty(self, node: NodeId, duty: NodeDuty | None) -> None:
        self._want((KV_DUTIES, node), duty)

    def reservation(self, node: NodeId, reservation: Reservation | None) -> None:
        self._want((KV_RESERVATIONS, node), reservation)

    async def model(
        self, model_id: ModelId, record: ModelRecord | None, before: ModelRecord | None
    ) -> None:
        """Returns once `record` (None: its removal) is durable. BusTimeout, and nothing changed, if
        that fails. `before` is the value to go back to then."""
        slot = (KV_MODELS, model_id)
        self._want(slot, record)
        if not await self._until(lambda: slot not in self._wanted, MODEL_WAIT_S):
            self._want(slot, before)  # the failed write may have got through
            raise BusTimeout(
                f"model {model_id}: the durable store took no write for {MODEL_WAIT_S} s; "
                "nothing was changed, try again when JetStream has a leader"
            )

    async def access(self, record: AccessRecord) -> int:
        """Returns the record's revision once it is durable. BusTimeout: it may be or not."""
        bucket = self._buckets[KV_ACCESS]
        return await bucket.put(slot_of(record), msgspec.msgpack.encode(record))

    async def settled(self, timeout: float) -> bool:
        """Waits until everything is durable. False if that takes longer than `timeout` seconds."""
        return await self._until(lambda: not self._wanted, timeout)

    async def write(self) -> None:
        """The writer. It runs for the life of the service."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            delay = RETRY_S
            while self._wanted:
                slots = islice(self._wanted, AT_A_TIME)
                if all(await asyncio.gather(*map(self._write_one, slots))):
                    delay = RETRY_S
                else:
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, RETRY_MAX_S)

    async def _write_one(self, slot: Slot) -> bool:
        bucket, key = slot
        value = self._wanted[slot]
        try:
            if value is None:
                await self._buckets[bucket].delete(key)
            else:
                await self._buckets[bucket].put(key, value)
        except BaseException as error:
            if not is_containable(error):
                raise
            self._stored.pop(slot, None)
            self._wanted[slot] = self._wanted.pop(slot)  # to the end: others may fare better
            self._log.warning("write failed, will retry", bucket=bucket, key=key, error=repr(error))
            return False
        self._stored[slot] = value
        if self._wanted[slot] == value:
            del self._wanted[slot]
        async with self._landed:
            self._landed.notify_all()
        return True

    def _want(self, slot: Slot, item: Item | None) -> None:
        value = None if item is None else msgspec.msgpack.encode(item)
        if slot not in self._wanted and slot in self._stored and self._stored[slot] == value:
            return
        self._wanted[slot] = value
        self._wake.set()

    async def _until(self, done: Callable[[], bool], timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout), self._landed:
                await self._landed.wait_for(done)
        except TimeoutError:
            return False
        return True

    async def _read_access(self) -> list[tuple[AccessRecord, int]]:
        """What cannot be read of a key counts as a key that was revoked: were it left out, an API
        that has keys could seem to have none, and be open."""
        found: list[tuple[AccessRecord, int]] = []
        for entry in await self._buckets[KV_ACCESS].entries():
            try:
                record: AccessRecord = read_stored(entry.value, AccessRecord)
            except BadMessage as error:
                self._log.error("stored access cannot be read", key=entry.key, error=str(error))
                kind, _, name = entry.key.partition(".")
                if kind != "key":
                    continue
                record = KeyRecord(
                    id=KeyId(name), tenant=DEFAULT_TENANT, digest=b"", revoked_ns=wall_ns()
                )
            found.append((record, entry.revision))
        return found

    async def _read(self, bucket: str, kind: type[T]) -> list[T]:
        found = []
        for entry in await self._buckets[bucket].entries():
            self._stored[bucket, entry.key] = entry.value
            try:
                found.append(read_stored(entry.value, kind))
            except BadMessage as error:
                self._log.warning(
                    "stored entry ignored", bucket=bucket, key=entry.key, error=str(error)
                )
        return found
