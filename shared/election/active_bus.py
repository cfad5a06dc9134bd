"""An active process's bus, which receives, sends and writes only while the process has its role."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import msgspec

from shared.bus.base import Bus, KeyValue, KvEntry, Log, M, ObjectStore, On, Server, Subscription
from shared.election.election import Election
from shared.errors import CutOff, KeyExists, Superseded
from shared.messages import Message
from shared.messages.base import Term


class ActiveBus:
    """A face of a bus that is open. Messages and answers carry the term."""

    def __init__(self, bus: Bus, election: Election, role: str) -> None:
        self._bus = bus
        self._election = election
        self._term = Term(role, election.term)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Whoever opened the bus closes it."""

    @property
    def is_up(self) -> bool:
        return self._bus.is_up

    async def publish(self, subject: str, message: Message) -> None:
        await self._election.confirm()
        await self._bus.publish(subject, self._stamped(message))

    async def request(self, subject: str, message: Message, reply: type[M], *, timeout: float) -> M:
        """Nothing is sent once the time is over: whoever asks has gone on without it by then."""
        if not self._election.is_sure:
            try:
                async with asyncio.timeout(timeout):
                    await self._election.confirm()
            except TimeoutError as error:
                raise CutOff(f"{subject}: this {self._term.role} may not be active") from error
        return await self._bus.request(subject, self._stamped(message), reply, timeout=timeout)

    async def subscribe(self, subject: str, *handlers: On[Any]) -> Subscription:
        return await self._bus.subscribe(subject, *map(self._heard_by_active, handlers))

    async def serve(
        self, subject: str, kind: type[M], server: Server[M], *, group: str = ""
    ) -> Subscription:
        """Serves as the only one of its term. A process that was paused gets the requests too, but
        takes none away from its successor, and says nothing."""

        async def serve_if_active(message: M) -> Message:
            await self._confirm_or_hang()
            return self._stamped(await server(message))

        group = group or f"{self._term.role}-{self._term.number}"
        return await self._bus.serve(subject, kind, serve_if_active, group=group)

    async def kv(self, bucket: str) -> "FencedKeyValue":
        return FencedKeyValue(await self._bus.kv(bucket), self._election)

    async def objects(self) -> ObjectStore:
        return await self._bus.objects()

    async def open_log(self, name: str, *, keep_s: float, max_bytes: int) -> Log:
        return await self._bus.open_log(name, keep_s=keep_s, max_bytes=max_bytes)

    def _stamped(self, message: M) -> M:
        return msgspec.structs.replace(message, term=self._term)

    def _heard_by_active(self, on: On[Any]) -> On[Any]:
        async def handle_if_active(message: Any) -> None:
            if not self._election.is_sure:
                await self._confirm_or_hang()
            await on.handler(message)

        return On(on.kind, handle_if_active)

    async def _confirm_or_hang(self) -> None:
        """An answer, even an error, might come before the successor's. So there is none: this
        process is about to end."""
        try:
            await self._election.confirm()
        except Superseded:
            await asyncio.get_running_loop().create_future()


class FencedKeyValue:
    """A bucket that only a role's active process writes. A write by a process that has lost the
    role, even one that was paused in its midst, changes nothing: it names the revision that it
    replaces."""

    def __init__(self, bucket: KeyValue, election: Election) -> None:
        self._bucket = bucket
        self._election = election
        self._revisions: dict[str, int] = {}
        """The last known revision of each key; 0: it is not there."""

    async def get(self, key: str) -> KvEntry | None:
        return await self._bucket.get(key)

    async def put(self, key: str, value: bytes) -> int:
        while True:
            revision = await self._last(key)
            try:
                if revision:
                    new = await self._bucket.update(key, value, revision)
                else:
                    new = await self._bucket.create(key, value)
            except KeyExists:  # written by an active process since, or by this one unacknowledged
                await self._election.confirm(anew=True)
                continue
            self._revisions[key] = new
            return new

    async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
        await self._election.confirm()
        return await self._bucket.create(key, value, ttl=ttl)

    async def update(
        self, key: str, value: bytes, revision: int, *, ttl: float | None = None
    ) -> int:
        await self._election.confirm()
        return await self._bucket.update(key, value, revision, ttl=ttl)

    async def delete(self, key: str, revision: int | None = None) -> None:
        while revision := await self._last(key):
            try:
                await self._bucket.delete(key, revision)
            except KeyExists:
                await self._election.confirm(anew=True)
                continue
            break
        self._revisions[key] = 0

    async def entries(self) -> list[KvEntry]:
        found = await self._bucket.entries()
        self._revisions = {entry.key: entry.revision for entry in found}
        return found

    def watch(self) -> AsyncIterator[KvEntry | None]:
        return self._bucket.watch()

    async def _last(self, key: str) -> int:
        """The revision to replace. This process has the role after it was read: a successor's write
        can only come later, and then the revision is no longer the last.

        It is forgotten until the write is acknowledged, because one that is not may have happened.
        """
        revision = self._revisions.pop(key, None)
        if revision is None:
            entry = await self._bucket.get(key)
            revision = entry.revision if entry else 0
        await self._election.confirm()
        return revision
