"""A gateway's id, which it holds by a lease in the durable store.

The lease is a key that expires unless it is renewed: `gateway-2` is the second gateway of those
that run now. The id that other processes see is the key and the revision at which it was taken
(`gateway-2-57`), so no two gateways ever have the same id. A gateway that was paused may find its
lease taken. It then takes another, and whatever it said under its old id concerned nobody else.
"""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count

from structlog.stdlib import BoundLogger

from shared.bus.base import KeyValue
from shared.errors import BusError, KeyExists
from shared.ids import GatewayId, new_id

LEASE_S = 10.0
"""A lease that was not renewed for so long expires."""
RENEW_S = 2.0


class GatewayLease:
    def __init__(self, bucket: KeyValue, name: str, log: BoundLogger) -> None:
        """`name`: what ids begin with."""
        self.id = GatewayId("")
        """Empty: none is held."""
        self._bucket = bucket
        self._name = name
        self._log = log
        self._holder = new_id(name).encode()
        """This process, in the store."""
        self._key = ""
        self._revision = 0

    async def take(self) -> None:
        """Takes the first id that nobody holds. BusError: the store does not answer."""
        for number in count(1):
            self._key = f"{self._name}-{number}"
            held = await self._bucket.get(self._key)
            if held is None:
                try:
                    self._revision = await self._bucket.create(self._key, self._holder, ttl=LEASE_S)
                except KeyExists:
                    continue  # another gateway was faster
                break
            if held.value == self._holder:  # a write that was not acknowledged has happened
                self._revision = held.revision
                break
        self.id = GatewayId(f"{self._key}-{self._revision}")
        self._log.info("holds its id", id=self.id)

    async def keep(self, on_new_id: Callable[[], Awaitable[None]]) -> None:
        """Renews the lease, without end. If it is lost, takes another and calls `on_new_id`, again
        if that fails for want of a bus."""
        told = self.id
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                if not await self._renewed():
                    self._log.warning("its lease was lost, as after a pause", id=self.id)
                    await self.take()
                if told != self.id:
                    await on_new_id()
                    told = self.id
            except BusError as error:
                self._log.warning("lease not renewed", id=self.id, error=str(error))

    async def release(self) -> None:
        """Gives the id back at once."""
        try:
            await self._bucket.delete(self._key, self._revision)
        except BusError as error:
            self._log.warning("lease not given back; it expires", id=self.id, error=str(error))

    async def _renewed(self) -> bool:
        """Renews the lease, unless another gateway holds it."""
        try:
            await self._renew(self._revision)
        except KeyExists:
            entry = await self._bucket.get(self._key)
            if entry is None:  # expired, as when the store was away, and nobody took it
                self._revision = await self._bucket.create(self._key, self._holder, ttl=LEASE_S)
            elif entry.value == self._holder:  # an earlier renewal was not acknowledged
                await self._renew(entry.revision)
            else:
                return False
        return True

    async def _renew(self, revision: int) -> None:
        self._revision = await self._bucket.update(self._key, self._holder, revision, ttl=LEASE_S)
