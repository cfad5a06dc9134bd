"""One process of a role is active, the others stand by: a lease in the durable store says which.

Each holder has a term, a number that never comes twice and grows. Everything that an active process
says carries its term (`ActiveBus`), and whoever has heard of a later term refuses it. So a process
that was paused, lost its role meanwhile and wakes up can do no harm.

Not everybody has heard of the later term at once, though, and a holder that is cut off from the
store does not know whether it alone is, and another has the role, or all are, and nobody can have
it. So those that stand by tell the holder so. If its lease may have run out, it goes on only while
each of them promises to keep off. One that wins keeps its last promise first.
"""

import asyncio
import os
import socket
from dataclasses import replace
from math import inf
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
    KNOWN_S,
    OVERDUE_S,
    PAUSE_S,
    PROMISE_S,
    RENEW_S,
    SILENT_S,
    LeaseRecord,
    Sighting,
    sighted,
    silence,
)
from shared.errors import (
    BadMessage,
    BusError,
    BusTimeout,
    Conflict,
    KeyExists,
    LambdaScaleError,
    NoResponders,
    Superseded,
)
from shared.ids import new_id
from shared.messages import Message, Ok, Ping
from shared.messages.election import HoldOff, StandsBy
from shared.stored import read_stored

LOOK_S = 0.1
"""Seconds between a standby's looks at the lease."""
CALL_S = 0.5
"""Seconds that a call of the store, or a question to another process of the role, may take."""
TELL_S = 1.0
"""Seconds after which a process says again that it stands by."""


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
        self._told = ("", -inf)
        """Whom this process has told that it stands by, and when."""
        self._won = False
        """Whether it has the role, and promises nothing any more."""
        self._keeps_off_until = -inf
        """What it has promised while it stood by."""
        self._others: dict[str, float] = {}
        """When each process that stands by said so last."""
        self._promised_until = -inf
        """Until when all of them keep off."""
        self._beat = 0.0
        """When this process last looked at the clock."""
        self._renewed = -inf
        """When the last renewal that was acknowledged was sent."""
        self._begun = self._acknowledged = self._doubted = 0
        """The numbers of the last renewal that was sent, of the last that was acknowledged, and of
        the last that says nothing any more."""
        self._unheard_of: tuple[int, float] | None = None
        """The first renewal since the last acknowledgement of which nothing was heard: its number,
        and when it was sent. If the store has a renewal that was not acknowledged, it is this one
        or a later one."""
        self._news = asyncio.Event()
        """Set by whatever may make this process sure of its role, or show that it is lost."""
        self._lost = ""
        """Why this process has lost the role. Empty: it has not."""

    async def win(self) -> int:
        """Waits, possibly for ever, until this process is the active one. Returns its term.

        BusError: the bus is not there at the beginning.
        """
        self._bucket = await self._bus.kv(subjects.KV_ACTIVE)
        counters = await self._bus.kv(subjects.KV_COUNTERS)
        presence = subjects.candidate(self._holder)
        self._presence = await self._bus.serve(presence, Message, self._on_said)
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
                if record is not None:
                    if told != record.holder:
                        told = record.holder
                        self._log.info("stands by", active=record.holder, term=record.term)
                    await self._tell(record.holder)
            except KeyExists:
                continue  # another standby was faster
            except BusError as error:
                self._seen = None  # the holder cannot renew it either
                self._log.warning("the lease cannot be read or taken", error=str(error))
            await asyncio.sleep(LOOK_S)
        self._won = True
        await asyncio.sleep(max(0.0, self._keeps_off_until - now()))
        self._beat = now()
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

    async def _tell(self, holder: str) -> None:
        """Tells the active process now and then that this one stands by."""
        if self._told[0] == holder and now() - self._told[1] < TELL_S:
            return
        self._told = holder, now()
        try:
            saying = StandsBy(holder=self._holder)
            await self._bus.request(subjects.candidate(holder), saying, Ok, timeout=CALL_S)
        except LambdaScaleError as error:  # it is gone, or of a release that does not ask
            self._log.debug("not told that this process stands by", error=str(error))

    async def _on_said(self, message: Message) -> Message:
        match message:
            case StandsBy(holder=holder):
                self._others[holder] = now()
                return Ok()
            case HoldOff() if self._won:
                raise Conflict(f"{self._holder} is the active {self._role}, in term {self.term}")
            case HoldOff():
                self._keeps_off_until = now() + PROMISE_S
                return Ok()
        raise BadMessage(f"{type(message).__name__} is nothing that candidates tell each other")

    async def _take(self, entry: KvEntry | None, term: int) -> None:
        self.term, sent = term, self._begin()
        if entry is None:
            self._revision = await self._bucket.create(self._role, self._value())
        else:
            self._revision = await self._bucket.update(self._role, self._value(), entry.revision)
        self._acknowledge(*sent)

    def _begin(self) -> tuple[int, float]:
        """The number of a renewal that is sent now, and when that is."""
        self._begun += 1
        return self._begun, now()

    def _acknowledge(self, number: int, sent_at: float) -> None:
        self._acknowledged, self._renewed = number, sent_at
        self._news.set()

    async def keep(self) -> None:
        """Renews the lease, without end. Superseded: another process has the role now, or the store
        has taken no renewal for too long."""
        asking = asyncio.create_task(self._ask_to_hold_off())
        try:
            while True:
                await asyncio.sleep(RENEW_S)
                await self._renew()
        finally:
            asking.cancel()

    async def _ask_to_hold_off(self) -> None:
        """While a renewal is overdue, asks those that stand by to keep off."""
        silent: list[str] = []
        while True:
            overdue_in_s = self._renewed + OVERDUE_S - now()
            if overdue_in_s > 0:
                silent = []
                await asyncio.sleep(overdue_in_s)
                continue
            asked_at, others = now(), list(self._others)
            answers = await asyncio.gather(*map(self._holds_off, others))
            if all(answers):
                self._promised_until = asked_at + PROMISE_S
                self._news.set()
            answered = zip(others, answers, strict=True)
            before, silent = silent, [other for other, holds in answered if not holds]
            if silent and not before:
                self._log.warning("gives no orders until its lease is renewed", no_word_of=silent)
            await asyncio.sleep(RENEW_S)

    async def _holds_off(self, holder: str) -> bool:
        try:
            await self._bus.request(subjects.candidate(holder), HoldOff(), Ok, timeout=RENEW_S)
        except LambdaScaleError:
            return False
        return True

    @property
    def is_sure(self) -> bool:
        """Whether `confirm` would return at once: nobody else can have the role."""
        at = now()
        self._doubt_after_pause(at)
        if self._lost or self._acknowledged <= self._doubted:
            return False
        if at - self._renewed < ABSENT_S:  # nobody may take it so soon
            return True
        if self._others:
            return at < self._promised_until
        return at - self._renewed <= GRACE_S

    async def confirm(self, *, anew: bool = False) -> None:
        """Returns when it is sure that no other process has the role: at once, unless this process
        was paused, or is cut off from the store and from those that stand by. Superseded if another
        has it.

        `anew`: by a renewal that begins after this call.
        """
        if anew:
            self._doubted = self._begun
        while not self.is_sure:
            if self._lost:
                raise Superseded(self._lost)
            self._news.clear()
            await self._news.wait()

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

    def _tick(self) -> None:
        at = now()
        self._doubt_after_pause(at)
        self._beat = at

    def _doubt_after_pause(self, at: float) -> None:
        if at - self._beat > PAUSE_S:
            self._doubted = self._begun

    async def _renew(self) -> None:
        try:
            if self._unheard_of:
                await self._look_again()
            try:
                await self._update()
            except KeyExists:
                await self._look_again()
                await self._update()
        except (BusError, TimeoutError) as error:
            silent = now() - self._renewed
            self._log.warning("lease not renewed", error=str(error), for_s=round(silent, 1))
            if silent > GRACE_S:
                self._lose(f"the store has taken no renewal of its lease for {silent:.0f} s")
            return
        self._others = {o: at for o, at in self._others.items() if now() - at < KNOWN_S}

    async def _update(self) -> None:
        self._tick()
        sent = self._begin()
        try:
            async with asyncio.timeout(CALL_S):
                revision = await self._bucket.update(self._role, self._value(), self._revision)
        except KeyExists:
            raise
        except (BusError, TimeoutError):
            self._unheard_of = self._unheard_of or sent
            raise
        self._revision, self._unheard_of = revision, None
        self._acknowledge(*sent)

    async def _look_again(self) -> None:
        """The lease may not be as it was left: lost, or renewed without an acknowledgement."""
        self._tick()
        async with asyncio.timeout(CALL_S):
            entry = await self._bucket.get(self._role)
        record = _decoded(entry)
        if entry is None or record is None or record.holder != self._holder:
            term = record.term if record else "unknown"
            self._lose(f"another process has the role, in term {term}")
        if entry.revision > self._revision and self._unheard_of:
            self._acknowledge(*self._unheard_of)
        self._revision, self._unheard_of = entry.revision, None

    def _lose(self, why: str) -> NoReturn:
        self._lost = f"this {self._role} (term {self.term}) is not active now: {why}"
        self._news.set()
        raise Superseded(self._lost)

    def _value(self) -> bytes:
        record = LeaseRecord(self._holder, self.term, socket.gethostname(), os.getpid())
        return msgspec.msgpack.encode(record)


def _decoded(entry: KvEntry | None) -> LeaseRecord | None:
    """The lease in an entry. None where there is none, or what is there makes no sense."""
    if entry is None:
        return None
    try:
        return read_stored(entry.value, LeaseRecord)
    except BadMessage:
        return None
