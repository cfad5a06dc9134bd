"""The node's lease: a key in JetStream that lives only while it is renewed."""

import asyncio

import msgspec
from structlog.stdlib import BoundLogger

from shared import subjects
from shared.bus.base import Bus, KeyValue
from shared.clock import now, wall_ns
from shared.errors import BusError, Conflict, KeyExists
from shared.ids import Generation
from shared.messages.pool import NodeInfo

RENEWALS_PER_LEASE = 4
POLL_S = 0.1


class Lease:
    """`info` is what the lease says of the node."""

    def __init__(self, bus: Bus, info: NodeInfo, lease_s: int, log: BoundLogger) -> None:
        self.info = info
        self._bus = bus
        self._lease_s = lease_s
        self._log = log
        self._revision = 0

    async def wait_until_free(self) -> None:
        """Waits out a dead process's lease. Conflict if a living one holds the node's name."""
        bucket = await self._bus.kv(subjects.KV_LEASES)
        give_up = now() + self._lease_s + 1.5
        while await bucket.get(self.info.node) is not None:
            if now() > give_up:
                raise self._taken()
            await asyncio.sleep(POLL_S)

    async def take(self) -> None:
        """From here on the registry knows the node. Conflict if another process was faster."""
        bucket = await self._bus.kv(subjects.KV_LEASES)
        try:
            await self._create(bucket)
        except KeyExists as error:
            raise self._taken() from error

    def _taken(self) -> Conflict:
        return Conflict(
            f"node id {self.info.node!r} is in use by a running node; give this one another node.id"
        )

    async def keep(self) -> None:
        """Renews for ever; a key that expired while the bus was away is made again."""
        bucket = await self._bus.kv(subjects.KV_LEASES)
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            try:
                self._revision = await bucket.update(
                    self.info.node, self._value(), self._revision, ttl=self._lease_s
                )
            except KeyExists:
                await self._retake(bucket)
            except BusError as error:
                self._log.warning("lease not renewed", error=str(error))

    async def _retake(self, bucket: KeyValue) -> None:
        """The key is not as we left it: expired, or a renewal was stored but not acknowledged."""
        try:
            entry = await bucket.get(self.info.node)
            if entry is None:
                await self._create(bucket)
            elif msgspec.msgpack.decode(entry.value, type=NodeInfo).address == self.info.address:
                self._revision = entry.revision
            else:
                raise self._taken()
        except BusError as error:
            self._log.warning("lease not retaken yet", error=str(error))

    def start_over(self) -> None:
        """This generation was declared over: the next renewal says a new one."""
        self.info = msgspec.structs.replace(self.info, generation=Generation(wall_ns()))
        self._log.warning("this generation is over; going on as a new one")

    async def give_back(self) -> None:
        try:
            bucket = await self._bus.kv(subjects.KV_LEASES)
            await bucket.delete(self.info.node)
        except BusError as error:
            self._log.warning("lease not given back; it will end by itself", error=str(error))

    async def _create(self, bucket: KeyValue) -> None:
        self._revision = await bucket.create(self.info.node, self._value(), ttl=self._lease_s)

    def _value(self) -> bytes:
        return msgspec.msgpack.encode(self.info)
