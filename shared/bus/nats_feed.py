"""One consumer's run over a bucket: what it holds, then its changes, and never a silent gap.

An ephemeral consumer dies with its server, and may be cut off in other ways. A feed notices all of
them (reconnection, a jump in the sequence, missing heartbeats) and ends with FeedLost. Its reader
then begins another feed.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Any, Self

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import api

from shared.bus.base import KvEntry, KvOp
from shared.bus.nats_connection import Connection
from shared.errors import BusError, NotPermitted

_HEARTBEAT_S = 2.0
_SILENCE_S = 3 * _HEARTBEAT_S
_INACTIVE_S = 10.0
"""The server forgets a consumer to which nobody has listened for this long."""


class FeedLost(Exception):
    """This feed is over, but the bucket is not."""


def is_marker(headers: Mapping[str, str] | None) -> bool:
    """Whether the message is no value, but the note that the key was deleted or expired."""
    return headers is not None and ("KV-Operation" in headers or "Nats-Marker-Reason" in headers)


class Feed:
    """One consumer of a bucket. `created`: when the bucket was made. BusError if another bucket
    has its name now."""

    def __init__(self, connection: Connection, bucket: str, created: object) -> None:
        self._connection = connection
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."
        self._created = created
        self._arrived: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._subscription: Any = None
        self._pending = 0
        self._last = 0

    async def __aenter__(self) -> Self:
        self._connection.on_change.add(self._interrupt)
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stop()

    async def entries(self) -> AsyncGenerator[KvEntry | None, None]:
        """The last entry of every key, markers included; then None; then every later entry.

        All that was written before `__aenter__` comes before None, even if the server that has the
        consumer is not the leader, and lags behind.
        """
        listing = self._pending > 0 or self._last > 0
        if not listing:
            yield None
        seen = reached = 0
        while True:
            message = await self._next()
            heard = _last_heard(message)
            if heard is None:
                at = message.metadata
                if at.sequence.consumer != seen + 1:
                    raise FeedLost("the sequence has a gap")
                seen += 1
                reached = at.sequence.stream
                yield self._entry(message)
                listed = reached >= self._last and (seen >= self._pending or at.num_pending == 0)
            else:
                if heard != seen:
                    raise FeedLost("the last messages are missing")
                if listing and reached < self._last:
                    raise FeedLost("the last messages are not there yet")
                listed = True  # a consumer that idles has delivered everything
            if listing and listed:
                listing = False
                yield None

    async def _start(self) -> None:
        connection = self._connection
        gone = False
        try:
            making = f"$JS.API.CONSUMER.CREATE.{self._stream}"
            async with connection.call(f"watch {self._stream}", on=(making,)):
                inbox = connection.client.new_inbox()
                self._subscription = await connection.client.subscribe(inbox, cb=self._receive)
                try:
                    stream = await connection.jetstream.stream_info(self._stream)
                    gone = stream.created != self._created
                    self._last = await self._last_sequence()
                    consumer = await connection.jetstream.add_consumer(
                        self._stream, config=self._consumer(inbox)
                    )
                    self._pending = int(consumer.num_pending)
                except nats.js.errors.NotFoundError:
                    gone = True
        except NotPermitted:
            raise
        except BusError as error:
            connection.check_open()
            raise FeedLost(str(error)) from error
        if gone:
            raise BusError(f"{self._stream}: the bucket that was watched is gone")

    async def _last_sequence(self) -> int:
        """The sequence of the last message that the bucket's leader has; 0 if it has none."""
        try:
            last = await self._connection.jetstream.get_msg(
                self._stream, subject=f"{self._prefix}>"
            )
        except nats.js.errors.NotFoundError:
            return 0
        return int(last.seq)

    async def _stop(self) -> None:
        self._connection.on_change.discard(self._interrupt)
        if self._subscription is not None:
            try:
                await self._subscription.unsubscribe()
            except nats.errors.Error as error:  # the connection is gone, and the feed with it
                self._connection.log.debug("unsubscribe", bucket=self._stream, error=str(error))

    def _consumer(self, inbox: str) -> api.ConsumerConfig:
        return api.ConsumerConfig(
            deliver_policy=api.DeliverPolicy.LAST_PER_SUBJECT,
            filter_subject=f"{self._prefix}>",
            deliver_subject=inbox,
            ack_policy=api.AckPolicy.NONE,
            idle_heartbeat=_HEARTBEAT_S,
            inactive_threshold=_INACTIVE_S,
            mem_storage=True,
            num_replicas=1,
        )

    async def _receive(self, message: Msg) -> None:
        self._arrived.put_nowait(message)

    def _interrupt(self) -> None:
        self._arrived.put_nowait(None)

    async def _next(self) -> Msg:
        try:
            async with asyncio.timeout(_SILENCE_S):
                message = await self._arrived.get()
        except TimeoutError as error:
            raise FeedLost(f"no heartbeat for {_SILENCE_S} s") from error
        if message is None:
            self._connection.check_open()
            raise FeedLost("the connection was lost")
        return message

    def _entry(self, message: Msg) -> KvEntry:
        key = message.subject.removeprefix(self._prefix)
        op = KvOp.DELETE if is_marker(message.headers) else KvOp.PUT
        return KvEntry(key, message.data, message.metadata.sequence.stream, op)


def _last_heard(message: Msg) -> int | None:
    """The number of messages that the consumer has sent, if this is a heartbeat; None for a
    message."""
    headers = message.headers or {}
    if headers.get(api.Header.STATUS) != api.StatusCode.CONTROL_MESSAGE:
        return None
    return int(headers[api.Header.LAST_CONSUMER])
