"""One process of a role is active, the others stand by: a lease in the durable store says which.

Each holder has a term, a number that never comes twice and grows. Everything that an active process
says carries its term (`ActiveBus`), and whoever has heard of a later term refuses it. So a process
that was paused, lost its role meanwhile and wakes up can do no harm.
"""

import asyncio
import os
import socket
from dataclasses import replace
from typing import NoReturn

import msgspec
from structlog.stdlib import BoundLogger

from shared import subjects
from shared.bus.base import Bus, KeyValue, KvEntry, Subscription
from shared.clock import now
from shared.counters import next_number
from shared.election.lease import (
    ABSENT_S,
    GRACE_S,
    PAUSE_S,
    RENEW_S,
    SILENT_S,
    LeaseRecord,
    Sighting,
    sighted,
    silence,
)
from shared.errors import BadMessage, BusError, BusTimeout, KeyExists, NoResponders, Superseded
from shared.ids import new_id
from shared.messages import Message, Ok, Ping
from shared.stored import read_stored

LOOK_S = 0.1
"""Seconds between a standby's looks at the lease."""
CALL_S = 0.5
"""Seconds that a renewal, a look at the lease, or a question whether the holder is there, may
take."""


class Election:
    """`win` returns when this process is the active one, and `keep` keeps it so."""

    def __init__(self, bus: Bus, role: str, log: BoundLogger) -> None:
        self.term = 0
        """Set by `win`."""
        self._bus = bus
        self._role = role
        self._log = log
        self._holder = new_id(role)
        self._revision = 0
        self._bucket: KeyValue
        self._presence: Subscription
        self._seen: Sighting | None = None
        self._beat = 0.0
        """When this process last looked at the clock."""
        self._renewed = 0.0
        self._sure = asyncio.Event()
        """Set while nobody else can have the role, and also once it is lost."""
        self._lost = ""
        """Why this process has lost the role. Empty: it has not."""

    async def win(self) -> int:
        """Waits, possibly for ever, until this process is the active one. Returns its term.

        BusError: the bus is not there at the beginning.
        """
        self._bucket = await self._bus.kv(subjects.KV_ACTIVE)
        counters = await self._bus.kv(subjects.KV_COUNTERS)
        presence = subjects.candidate(self._holder)
        self._presence = await self._bus.serve(presence, Ping, _never)
        told = ""
        while True:
            try:
                asked = now()
                entry = await self._bucket.get(self._role)
                if self._seen and (waited := now() - asked) > CALL_S:
                    # The holder may have been cut off for as long.
                    self._seen = replace(self._seen, at=self._seen.at + waited)
                record = _decoded(entry)
                if record is not None and record.holder == self._holder:
                    break  # a write that was not acknowledged has happened
                if await self._is_free(entry, record):
                    await self._take(entry, await next_number(counters, self._role))
                    break
                if record is not None and told != record.holder:
                    told = record.holder
                    self._log.info("stands by", active=record.holder, term=record.term)
            except KeyExists:
                continue  # another standby was faster
            except BusError as error:
                self._seen = None  # the holder cannot renew it either
                self._log.warning("the lease cannot be read or taken", error=str(error))
            await asyncio.sleep(LOOK_S)
        self._log.info("active", term=self.term, holder=self._holder)
        return self.term

    async def _is_free(self, entry: KvEntry | None, record: LeaseRecord | None) -> bool:
        if entry is None or record is None or not record.holder:
            return True
        self._seen = sighted(self._seen, entry.revision, now())
        silent = silence(self._seen, now())
        if silent < ABSENT_S:
            return False
        return silent >= SILENT_S or not await self._is_there(record.holder)

    async def _is_there(self, holder: str) -> bool:
        """Whether the holder's process is connected to the bus, for all that is known."""
        try:
            await self._bus.request(subjects.candidate(holder), Ping(), Ok, timeout=CALL_S)
        except NoResponders:
            return False
        except BusTimeout:
            pass
        return True

    async def _take(self, entry: KvEntry | None, term: int) -> None:
        self.term = term
        if entry is None:
            self._revision = await self._bucket.create(self._role, self._value())
        else:
            self._revision = await self._bucket.update(self._role, self._value(), entry.revision)
        self._beat = self._renewed = now()
        self._sure.set()

    async def keep(self) -> None:
        """Renews the lease, without end. Superseded: another process has the role now, or the store
        has taken no renewal for too long."""
        while True:
            await asyncio.sleep(RENEW_S)
            self._doubt_after_pause()
            self._beat = now()
            await self._renew()

    @property
    def is_sure(self) -> bool:
        """Whether `confirm` would return at once."""
        self._doubt_after_pause()
        return self._sure.is_set() and not self._lost

    async def confirm(self, *, anew: bool = False) -> None:
        """Returns when it is sure that no other process has the role: at once, unless this process
        was paused. Superseded if another has it.

        `anew`: by a renewal that begins after this call.
        """
        self._doubt_after_pause()
        if anew:
            self._sure.clear()
        await self._sure.wait()
        if self._lost:
            raise Superseded(self._lost)

    async def resign(self) -> None:
        """Gives the role to a standby at once, unless it is lost. It must have been won."""
        await self._presence.close()
        if self._lost:
            return
        try:
            record = LeaseRecord("", self.term)
            await self._bucket.update(self._role, msgspec.msgpack.encode(record), self._revision)
        except BusError as error:
            self._log.warning("role not given back; a standby takes it", error=str(error))

    def _doubt_after_pause(self) -> None:
        if not self._lost and now() - self._beat > PAUSE_S:
            self._sure.clear()

    async def _renew(self) -> None:
        try:
            async with asyncio.timeout(CALL_S):
                try:
                    await self._update()
                except KeyExists:
                    await self._look_again()
        except (BusError, TimeoutError) as error:
            silent = now() - self._renewed
            self._log.warning("lease not renewed", error=str(error), for_s=round(silent, 1))
            if silent > GRACE_S:
                self._lose(f"the store has taken no renewal of its lease for {silent:.0f} s")
            return
        self._renewed = now()
        self._sure.set()

    async def _update(self) -> None:
        self._revision = await self._bucket.update(self._role, self._value(), self._revision)

    async def _look_again(self) -> None:
        """The lease is not as it was left: lost, or renewed without an acknowledgement."""
        entry = await self._bucket.get(self._role)
        record = _decoded(entry)
        if entry is None or record is None or record.holder != self._holder:
            term = record.term if record else "unknown"
            self._lose(f"another process has the role, in term {term}")
        self._revision = entry.revision
        await self._update()

    def _lose(self, why: str) -> NoReturn:
        self._lost = f"this {self._role} (term {self.term}) is not active now: {why}"
        self._sure.set()
        raise Superseded(self._lost)

    def _value(self) -> bytes:
        record = LeaseRecord(self._holder, self.term, socket.gethostname(), os.getpid())
        return msgspec.msgpack.encode(record)


async def _never(message: Message) -> Message:
    raise AssertionError("the bus itself answers Ping")


def _decoded(entry: KvEntry | None) -> LeaseRecord | None:
    """The lease in an entry. None where there is none, or what is there makes no sense."""
    if entry is None:
        return None
    try:
        return read_stored(entry.value, LeaseRecord)
    except BadMessage:
        return None
