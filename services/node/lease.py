"""The node's lease: a key in JetStream that lives only while it is renewed."""

import asyncio
from collections.abc import Collection

import msgspec
from structlog.stdlib import BoundLogger

from shared import subjects
from shared.bus.base import KeyValue, KvEntry
from shared.clock import now
from shared.counters import next_number
from shared.errors import BadMessage, BusError, Conflict, KeyExists
from shared.ids import Generation, NodeId
from shared.messages.pool import NodeInfo
from shared.stored import read_stored

RENEWALS_PER_LEASE = 4
POLL_S = 0.1
EXPIRY_SLACK_S = 1.5
"""How much later than promised a key may be seen to be gone."""


async def next_generation(counters: KeyValue, node: NodeId, above: int = 0) -> Generation:
    """A generation greater than that of every process that has had the node's name, and than
    `above`."""
    return Generation(await next_number(counters, subjects.node_counter(node), above=above))


class Lease:
    """`info` is what the lease says about the node."""

    def __init__(
        self,
        bucket: KeyValue,
        counters: KeyValue,
        info: NodeInfo,
        lease_s: int,
        log: BoundLogger,
        ended: frozenset[Generation] = frozenset(),
    ) -> None:
        """`ended`: generations of processes that are dead for certain. What they have left of a
        lease is this one's to take, at once."""
        self.info = info
        self._bucket = bucket
        self._counters = counters
        self._lease_s = lease_s
        self._log = log
        self._revision = 0
        self._generations = {info.generation}
        """The generations of this process."""
        self._ended = ended
        self._turn = asyncio.Lock()
        """Serialises calls, because a renewal must not bring back a key that was given back."""
        self.over = False
        """Whether it was given back."""

    async def wait_until_free(self) -> None:
        """Waits until a dead process's lease has ended. Conflict if a living process holds the
        node's name."""
        give_up = now() + self._lease_s + EXPIRY_SLACK_S
        while (entry := await self._bucket.get(self.info.node)) is not None:
            if _is_of(entry, self._ended):
                return
            if now() > give_up:
                raise self._taken()
            await asyncio.sleep(POLL_S)

    async def take(self) -> None:
        """Takes the lease. From here on the registry knows the node. Conflict if another process
        was faster."""
        try:
            entry = await self._bucket.get(self.info.node)
            if entry is not None and _is_of(entry, self._ended):
                self._revision = entry.revision
                await self._update()
            else:
                await self._create()
        except KeyExists as error:
            raise self._taken() from error

    async def keep(self) -> None:
        """Renews the lease until it is given back. A key that expired while the bus was away is
        made again.

        Conflict: another process has taken the node's name meanwhile.
        """
        while not self.over:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            async with self._turn:
                if not self.over:
                    await self._renew()

    async def start_over(self, ended: Generation) -> None:
        """Goes on under a new generation, because this one was declared over. The lease says so at
        once.

        If the bus fails now, this is tried again when the registry repeats that the generation is
        over. Conflict: another process has taken the node's name meanwhile.
        """
        async with self._turn:
            if self.over or self.info.generation != ended:
                return  # repeated before it heard of the new generation
            try:
                generation = await next_generation(self._counters, self.info.node, ended)
            except BusError as error:
                self._log.warning("this generation is over, and no new one yet", error=str(error))
                return
            self._generations.add(generation)
            self.info = msgspec.structs.replace(self.info, generation=generation)
            self._log.warning("this generation is over; going on as a new one")
            await self._renew()

    async def give_back(self) -> None:
        """Deletes the key, unless another process has it by now. Runs once."""
        async with self._turn:
            if self.over:
                return
            self.over = True
            try:
                entry = await self._bucket.get(self.info.node)
                if entry is not None and _is_of(entry, self._generations):
                    await self._bucket.delete(self.info.node)
            except BusError as error:
                self._log.warning("lease not given back; it will end by itself", error=str(error))

    async def _renew(self) -> None:
        try:
            try:
                await self._update()
            except KeyExists:
                await self._retake()
        except BusError as error:
            self._log.warning("lease not renewed", error=str(error))

    async def _retake(self) -> None:
        """Takes back a key that is not as we left it: it expired, or a renewal was stored but not
        acknowledged."""
        entry = await self._bucket.get(self.info.node)
        if entry is None:
            await self._create()
        elif _is_of(entry, self._generations):
            self._revision = entry.revision
            await self._update()
        else:
            raise self._taken()

    async def _create(self) -> None:
        self._revision = await self._bucket.create(self.info.node, self._value(), ttl=self._lease_s)

    async def _update(self) -> None:
        self._revision = await self._bucket.update(
            self.info.node, self._value(), self._revision, ttl=self._lease_s
        )

    def _value(self) -> bytes:
        return msgspec.msgpack.encode(self.info)

    def _taken(self) -> Conflict:
        return Conflict(
            f"node id {self.info.node!r} is in use by a running node; give this one another node.id"
        )


def _is_of(entry: KvEntry, generations: Collection[Generation]) -> bool:
    try:
        info = read_stored(entry.value, NodeInfo)
    except BadMessage:
        return False
    return info.generation in generations
