"""Assets in a JetStream object store, in NATS' own format, so that its tools can read them."""

import asyncio
import hashlib
from typing import Any, Self

import nats.js.errors
from nats.js import api

from shared.bus.nats_connection import Connection, opening
from shared.errors import BusError, NotFound

_TIMEOUT_S = 60.0
"""Seconds for one object of some MB."""


class NatsObjectStore:
    def __init__(self, connection: Connection, bucket: str) -> None:
        self._connection = connection
        self._bucket = bucket
        self._store: Any = None

    @classmethod
    async def open(cls, connection: Connection, bucket: str, *, replicas: int) -> Self:
        """The store, made if it is missing."""

        async def ask() -> None:
            try:
                await connection.led(f"OBJ_{bucket}")
            except nats.js.errors.NotFoundError:
                await connection.jetstream.create_object_store(
                    bucket, config=api.ObjectStoreConfig(replicas=replicas)
                )
                await connection.led_new(f"OBJ_{bucket}")

        await connection.until_answered(f"objects {bucket}", opening(f"OBJ_{bucket}"), ask)
        return cls(connection, bucket)

    async def put(self, data: bytes) -> str:
        name = await asyncio.to_thread(_digest, data)
        async with self._connection.call(f"object {name}", _TIMEOUT_S):
            store = await self._connection.jetstream.object_store(self._bucket)
            try:
                await store.get_info(name)
            except nats.js.errors.NotFoundError:
                await store.put(name, bytes(data))
        return name

    async def get(self, name: str) -> bytes:
        async with self._connection.call(f"object {name}", _TIMEOUT_S):
            store = await self._connection.jetstream.object_store(self._bucket)
            try:
                info = await store.get_info(name)
                data = await self._chunks(str(info.nuid), int(info.chunks or 0))
            except nats.js.errors.NotFoundError as error:
                raise NotFound(f"object {name} is not in the store") from error
        if await asyncio.to_thread(_digest, data) != name:
            raise BusError(f"object {name}: what is stored does not match its name")
        return data

    async def _chunks(self, nuid: str, count: int) -> bytes:
        """Reads chunk after chunk by requests: unlike a consumer's stream, a request cannot stall
        unnoticed. Not by direct requests: NATS would send the bare bytes to whatever subject the
        request names for its answer, so that who may store and ask could forge any message."""
        chunks: list[bytes] = []
        sequence = 0
        for _ in range(count):
            message = await self._connection.jetstream.get_msg(
                f"OBJ_{self._bucket}",
                seq=sequence + 1,
                subject=f"$O.{self._bucket}.C.{nuid}",
                next=True,
            )
            chunks.append(message.data)
            sequence = message.seq
        return b"".join(chunks)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
