"""Nodes, observers and a bus that fails to write: what surrounds a registry in its tests."""

import asyncio

import msgspec

from shared import subjects
from shared.bus.base import Bus, On
from shared.bus.memory import MemoryBroker, MemoryBus, MemoryKeyValue
from shared.errors import BusTimeout
from shared.messages import Message
from shared.messages.pool import Holding, NodeInfo, NodeStatus, ReportStatus
from tests.unit.registry.builders import status

WAIT_S = 100.0


class Node:
    """Holds a lease and answers ReportStatus, as node services do."""

    def __init__(self, bus: Bus, info: NodeInfo, *holdings: Holding, ttl: int = 60) -> None:
        self.info = info
        self._bus = bus
        self._holdings = holdings
        self._ttl = ttl
        self._seq = 0
        self._revision = 0

    async def join(self) -> None:
        await self._bus.subscribe(subjects.POOL_REPORT, On(ReportStatus, self._report))
        self._leases = await self._bus.kv(subjects.KV_LEASES)
        value = msgspec.msgpack.encode(self.info)
        self._revision = await self._leases.create(self.info.node, value, ttl=self._ttl)
        await self.report()

    async def renew(self) -> None:
        self._revision = await self._leases.update(
            self.info.node, msgspec.msgpack.encode(self.info), self._revision, ttl=self._ttl
        )

    async def leave(self) -> None:
        await self._leases.delete(self.info.node)

    async def report(self) -> None:
        await self._bus.publish(subjects.POOL_STATUS, self._status())

    def _status(self) -> NodeStatus:
        self._seq += 1
        generation = self.info.generation
        return status(self.info.node, *self._holdings, generation=generation, seq=self._seq)

    async def _report(self, message: ReportStatus) -> None:
        await self.report()


class Observer:
    """What was broadcast on a subject, in order."""

    def __init__(self) -> None:
        self._heard: asyncio.Queue[Message] = asyncio.Queue()

    @classmethod
    async def of(cls, bus: Bus, subject: str) -> "Observer":
        observer = cls()
        await bus.subscribe(subject, On(Message, observer._hear))
        return observer

    async def _hear(self, message: Message) -> None:
        self._heard.put_nowait(message)

    async def next(self) -> Message:
        async with asyncio.timeout(WAIT_S):
            return await self._heard.get()

    @property
    def quiet(self) -> bool:
        return self._heard.empty()


class Outage:
    """While it is on, no bucket takes writes."""

    def __init__(self) -> None:
        self.on = False
        self.refused = asyncio.Event()

    def check(self) -> None:
        if self.on:
            self.refused.set()
            raise BusTimeout("no JetStream leader")


class FailingKeyValue(MemoryKeyValue):
    outage: Outage

    async def put(self, key: str, value: bytes) -> int:
        self.outage.check()
        return await super().put(key, value)

    async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
        self.outage.check()
        return await super().create(key, value, ttl=ttl)

    async def update(
        self, key: str, value: bytes, revision: int, *, ttl: float | None = None
    ) -> int:
        self.outage.check()
        return await super().update(key, value, revision, ttl=ttl)

    async def delete(self, key: str, revision: int | None = None) -> None:
        self.outage.check()
        await super().delete(key, revision)


class FailingBus(MemoryBus):
    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.outage = Outage()

    async def kv(self, bucket: str) -> MemoryKeyValue:
        failing = FailingKeyValue(self, self._broker.bucket(bucket))
        failing.outage = self.outage
        return failing
