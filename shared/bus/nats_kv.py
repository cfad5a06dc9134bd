"""Buckets over JetStream, in NATS' key-value layout, with a time to live for single keys.

Writes carry `Nats-TTL`. When that runs out, the server puts a marker in the key's place, which
watchers see. Markers, also those of deletions, disappear after `_MARKER_TTL_S`.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Self

import nats.js.errors
from nats.js import api

from shared.bus.base import KvEntry, KvOp
from shared.bus.delivery import check_key, check_size, check_ttl
from shared.bus.nats_connection import CALL_TIMEOUT_S, LEADER_S, Connection, opening
from shared.bus.nats_feed import Feed, FeedLost, is_marker
from shared.errors import BusError, KeyExists, NoResponders

_MARKER_TTL_S = 60
_RETRY_S = 0.2
_TAKEN_S = 1.0
"""How long a server may need to hear where a bucket's leader is."""
_WRONG_SEQUENCE = (10071, 10164)
"""JetStream's error codes where a write expects another revision than the key's last."""
_EXPECT = api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE


class NatsKeyValue:
    def __init__(self, connection: Connection, bucket: str, created: object) -> None:
        self._connection = connection
        self._bucket = bucket
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."
        self._created = created

    @classmethod
    async def open(cls, connection: Connection, bucket: str, *, replicas: int) -> Self:
        """The bucket, made if it is missing."""

        async def ask() -> Any:
            try:
                return await connection.led(f"KV_{bucket}")
            except nats.js.errors.NotFoundError:
                config = api.KeyValueConfig(
                    bucket, direct=True, limit_marker_ttl=_MARKER_TTL_S, replicas=replicas
                )
                await connection.jetstream.create_key_value(config)
                return await connection.led_new(f"KV_{bucket}")

        info = await connection.until_answered(f"bucket {bucket}", opening(f"KV_{bucket}"), ask)
        if not (info.config.allow_msg_ttl and info.config.subject_delete_marker_ttl):
            raise BusError(f"bucket {bucket} was made without expiry of single keys: delete it")
        return cls(connection, bucket, info.created)

    async def get(self, key: str) -> KvEntry | None:
        entry = await self._last(check_key(key))
        return entry if entry and entry.op is KvOp.PUT else None

    async def put(self, key: str, value: bytes) -> int:
        return await self._write(key, value, {}, None)

    async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
        try:
            return await self._write(key, value, {_EXPECT: "0"}, ttl)
        except KeyExists:
            marker = await self._last(key)
            if marker is None or marker.op is KvOp.PUT:
                raise
            return await self._write(key, value, {_EXPECT: str(marker.revision)}, ttl)

    async def update(
        self, key: str, value: bytes, revision: int, *, ttl: float | None = None
    ) -> int:
        return await self._write(key, value, {_EXPECT: str(revision)}, ttl)

    async def delete(self, key: str, revision: int | None = None) -> None:
        headers: dict[str, str] = {"KV-Operation": "PURGE", api.Header.ROLLUP: "sub"}
        if revision is not None:
            headers[_EXPECT] = str(revision)
        await self._write(key, b"", headers, _MARKER_TTL_S)

    async def entries(self) -> list[KvEntry]:
        what = f"bucket {self._bucket}"
        async with self._connection.call(what):
            pass  # the connection is up
        async with self._connection.call(what, LEADER_S), aclosing(self.watch()) as watch:
            found: list[KvEntry] = []
            async for entry in watch:
                if entry is None:
                    break
                found.append(entry)
            return found

    async def watch(self) -> AsyncGenerator[KvEntry | None, None]:
        """Survives the loss of the connection: changes made meanwhile are told when it is back."""
        told: dict[str, int] = {}
        began = False
        while True:
            try:
                async with aclosing(self._follow(told)) as changes:
                    async for change in changes:
                        if change is not None or not began:
                            yield change
                        began = began or change is None
            except FeedLost as lost:
                self._connection.log.info("watch resumes", bucket=self._bucket, reason=str(lost))
                await asyncio.sleep(_RETRY_S)

    async def _follow(self, told: dict[str, int]) -> AsyncGenerator[KvEntry | None, None]:
        """One feed's entries, without those told already. Keeps `told` (key -> revision)."""
        missing = set(told)
        async with (
            Feed(self._connection, self._bucket, self._created) as feed,
            aclosing(feed.entries()) as entries,
        ):
            async for entry in entries:
                if entry is None:
                    for key in missing:  # deleted while nobody listened, and its marker went too
                        yield KvEntry(key, b"", told.pop(key), KvOp.DELETE)
                    missing = set()
                    yield None
                    continue
                missing.discard(entry.key)
                last = told.get(entry.key, 0)
                if entry.op is KvOp.PUT and entry.revision > last:
                    told[entry.key] = entry.revision
                    yield entry
                elif entry.op is KvOp.DELETE and entry.revision > last > 0:
                    del told[entry.key]
                    yield entry

    async def _last(self, key: str) -> KvEntry | None:
        """The last entry of the key, which may be a marker."""

        async def ask() -> Any:
            try:
                return await self._connection.jetstream.get_msg(
                    self._stream, subject=f"{self._prefix}{key}"
                )
            except nats.js.errors.NotFoundError:
                return None

        # A stream that has just been made may name its leader and still answer nothing.
        message = await self._connection.until_answered(
            f"{self._bucket}/{key}",
            (f"$JS.API.STREAM.MSG.GET.{self._stream}",),
            ask,
            CALL_TIMEOUT_S,
        )
        if message is None:
            return None
        op = KvOp.DELETE if is_marker(message.headers) else KvOp.PUT
        return KvEntry(key, message.data or b"", message.seq, op)

    async def _write(
        self, key: str, value: bytes, headers: dict[str, str], ttl: float | None
    ) -> int:
        """If no server takes the write, none has it, and it can be written again. It can't if no
        answer comes."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _TAKEN_S
        while True:
            try:
                return await self._write_once(key, value, headers, ttl)
            except NoResponders:
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def _write_once(
        self, key: str, value: bytes, headers: dict[str, str], ttl: float | None
    ) -> int:
        subject = f"{self._prefix}{check_key(key)}"
        lifetime = None if ttl is None else check_ttl(ttl)
        async with self._connection.call(f"{self._bucket}/{key}", on=(subject,)):
            try:
                ack: Any = await self._connection.jetstream.publish(
                    subject, check_size(value, key), headers=headers or None, msg_ttl=lifetime
                )
            except nats.js.errors.APIError as error:
                if error.err_code in _WRONG_SEQUENCE:
                    raise KeyExists(f"{self._bucket}: {key} is at another revision") from error
                raise
        return int(ack.seq)
