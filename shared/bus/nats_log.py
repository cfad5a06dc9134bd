"""Logs over JetStream: a stream each, with one subject."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Self

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import api

from shared.bus.delivery import check_size
from shared.bus.nats_connection import Connection, opening
from shared.errors import BusError

_SILENCE_S = 10.0
_INACTIVE_S = 10.0
_TWICE_S = 120.0
"""An id that comes again within this is the same entry."""


def stream_of(log: str) -> str:
    return f"LOG_{log}"


def subject_of(log: str) -> str:
    return f"$LOG.{log}"


class NatsLog:
    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = name

    @classmethod
    async def open(
        cls, connection: Connection, name: str, *, keep_s: float, max_bytes: int, replicas: int
    ) -> Self:
        """The log, made if it is missing."""
        stream = stream_of(name)

        async def ask() -> None:
            try:
                await connection.led(stream)
            except nats.js.errors.NotFoundError:
                config = api.StreamConfig(
                    name=stream,
                    subjects=[subject_of(name)],
                    max_age=keep_s,
                    max_bytes=max_bytes,
                    discard=api.DiscardPolicy.OLD,
                    duplicate_window=_TWICE_S,
                    num_replicas=replicas,
                    deny_delete=True,
                    deny_purge=True,
                )
                await connection.jetstream.add_stream(config)
                await connection.led_new(stream)

        await connection.until_answered(f"log {name}", opening(stream), ask)
        return cls(connection, name)

    async def append(self, data: bytes, *, id: str) -> None:
        subject = subject_of(self._name)
        async with self._connection.call(f"log {self._name}", on=(subject,)):
            await self._connection.jetstream.publish(
                subject, check_size(data, self._name), headers={api.Header.MSG_ID: id}
            )

    async def since(self, wall_ns: int) -> AsyncGenerator[bytes, None]:
        connection, stream = self._connection, stream_of(self._name)
        arrived: asyncio.Queue[Msg] = asyncio.Queue()

        async def receive(message: Msg) -> None:
            arrived.put_nowait(message)

        making = f"$JS.API.CONSUMER.CREATE.{stream}"
        async with connection.call(f"log {self._name}", on=(making,)):
            inbox = connection.client.new_inbox()
            subscription: Any = await connection.client.subscribe(
                inbox, cb=receive, pending_msgs_limit=0, pending_bytes_limit=0
            )
            consumer = await connection.jetstream.add_consumer(
                stream,
                config=api.ConsumerConfig(
                    deliver_policy=api.DeliverPolicy.BY_START_TIME,
                    opt_start_time=_time(wall_ns),
                    deliver_subject=inbox,
                    ack_policy=api.AckPolicy.NONE,
                    inactive_threshold=_INACTIVE_S,
                    mem_storage=True,
                    num_replicas=1,
                ),
            )
        try:
            left, seen = int(consumer.num_pending), 0
            while left:
                try:
                    async with asyncio.timeout(_SILENCE_S):
                        message = await arrived.get()
                except TimeoutError as error:
                    raise BusError(f"log {self._name}: it broke off, try again") from error
                at = message.metadata
                seen += 1
                if at.sequence.consumer != seen:
                    raise BusError(f"log {self._name}: an entry was lost on the way, try again")
                left = int(at.num_pending)
                yield message.data
        finally:
            with suppress(nats.errors.Error):
                await subscription.unsubscribe()


def _time(wall_ns: int) -> str:
    return datetime.fromtimestamp(max(wall_ns, 0) / 1e9, UTC).isoformat().replace("+00:00", "Z")
