"""Follows the bucket of leases, and begins again when the watch of it ends."""

import asyncio
from collections.abc import Callable, Iterable

from services.registry.core.pool import Effect, Pool
from shared import clock
from shared.bus.base import KeyValue, KvEntry, KvOp
from shared.errors import BadInput, BadMessage, BusError
from shared.ids import NodeId, check_name
from shared.messages.pool import NodeInfo
from shared.service import Service
from shared.stored import read_stored

RETRY_S = 0.5
"""Seconds between two watches."""


class LeaseWatch:
    def __init__(
        self, service: Service, pool: Pool, follow: Callable[[Iterable[Effect]], None]
    ) -> None:
        """A lease that makes no sense is logged, and one that meets a bug contained, by
        `service`."""
        self.complete = asyncio.Event()
        """Every lease that there was at the beginning is in the pool."""
        self._service = service
        self._pool = pool
        self._follow = follow
        self._read: dict[str, tuple[bytes, NodeInfo]] = {}
        """What each lease was last, and what that means: nearly every renewal says the same."""

    async def run(self, leases: KeyValue) -> None:
        log = self._service.log
        while True:
            try:
                await self._watch(leases)
                log.warning("the watch of the leases ended, beginning it again")
            except BusError as error:
                log.warning("the watch of the leases broke", error=str(error))
            await asyncio.sleep(RETRY_S)

    async def _watch(self, leases: KeyValue) -> None:
        first: set[NodeId] = set()
        self._read.clear()
        async for entry in leases.watch():
            now = clock.now()
            if entry is None:
                with self._service.contain("following the list of leases"):
                    self._follow(self._pool.leases_are(first, now))
                self.complete.set()
                continue
            with self._service.contain("following a lease", node=entry.key):
                if entry.op is KvOp.DELETE:
                    self._read.pop(entry.key, None)
                    self._follow(self._pool.lease_dropped(NodeId(entry.key), now))
                elif info := self._value(entry):
                    first.add(info.node)
                    self._follow(self._pool.lease_put(info, now))

    def _value(self, entry: KvEntry) -> NodeInfo | None:
        value, info = self._read.get(entry.key, (None, None))
        if value == entry.value:
            return info
        found = self._decoded(entry)
        if found is not None:
            self._read[entry.key] = entry.value, found
        return found

    def _decoded(self, entry: KvEntry) -> NodeInfo | None:
        log = self._service.log
        try:
            info = read_stored(entry.value, NodeInfo)
            check_name("node", info.node)
        except (BadMessage, BadInput) as error:
            log.warning("lease ignored", key=entry.key, error=str(error))
            return None
        if info.node != entry.key:
            log.warning("lease ignored", key=entry.key, error=f"it names node {info.node}")
            return None
        return info
