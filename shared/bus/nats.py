"""The bus over NATS: core NATS for messages, JetStream for buckets and objects."""

from types import TracebackType
from typing import Any, Self

import nats.errors
from nats.aio.msg import Msg

from shared import subjects
from shared.bus.base import SERVERS, M, On, Server, Subscription
from shared.bus.delivery import Delivery, Inbox, check_size
from shared.bus.nats_connection import Connection, NatsSubscription
from shared.bus.nats_kv import NatsKeyValue
from shared.bus.nats_log import NatsLog
from shared.bus.nats_objects import NatsObjectStore
from shared.config import BusConfig
from shared.errors import BusError
from shared.messages import Message, encode


class _Listener:
    def __init__(self, inbox: Inbox, subscription: NatsSubscription) -> None:
        self._inbox = inbox
        self._subscription = subscription

    async def close(self) -> None:
        self._inbox.close()
        await self._subscription.close()


class NatsBus(Delivery):
    def __init__(self, config: BusConfig, name: str) -> None:
        super().__init__(name)
        self._replicas = config.replicas
        self._connection = Connection(config, name, self.log)

    async def __aenter__(self) -> Self:
        await self._connection.open()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.tasks.close()
        await self._connection.close()

    @property
    def is_up(self) -> bool:
        """Whether the bus is connected right now."""
        return self._connection.is_up

    async def publish(self, subject: str, message: Message) -> None:
        self._connection.check_open()
        data = check_size(encode(message), subject)
        try:
            await self._connection.client.publish(subject, data)
        except nats.errors.Error as error:
            raise BusError(f"{subject}: {error!r}") from error

    async def request(self, subject: str, message: Message, reply: type[M], *, timeout: float) -> M:
        data = check_size(encode(message), subject)
        async with self._connection.call(subject, timeout, (subject,)):
            answer: Msg = await self._connection.client.request(subject, data, timeout=None)
        return self.expect(subject, answer.data, reply)

    async def subscribe(self, subject: str, *handlers: On[Any]) -> Subscription:
        inbox = self.inbox(subject, handlers)

        async def receive(message: Msg) -> None:
            inbox.put(message.data)

        try:
            return _Listener(inbox, await self._connection.subscribe(subject, receive))
        except BusError:
            inbox.close()
            raise

    async def serve(
        self, subject: str, kind: type[M], server: Server[M], *, group: str = SERVERS
    ) -> Subscription:
        async def receive(message: Msg) -> None:
            work = self._reply(subject, kind, server, message)
            self.tasks.spawn(work, name=f"{self.name}/{subject}/request")

        return await self._connection.subscribe(subject, receive, queue=group)

    async def kv(self, bucket: str) -> NatsKeyValue:
        return await NatsKeyValue.open(self._connection, bucket, replicas=self._replicas)

    async def objects(self) -> NatsObjectStore:
        return await NatsObjectStore.open(
            self._connection, subjects.OBJECTS, replicas=self._replicas
        )

    async def open_log(self, name: str, *, keep_s: float, max_bytes: int) -> NatsLog:
        return await NatsLog.open(
            self._connection, name, keep_s=keep_s, max_bytes=max_bytes, replicas=self._replicas
        )

    async def _reply(self, subject: str, kind: type[M], server: Server[M], request: Msg) -> None:
        answer = await self.answer(subject, kind, server, request.data)
        if request.reply:
            try:
                await self._connection.client.publish(request.reply, answer)
            except nats.errors.Error as error:
                self.log.warning("reply lost", subject=subject, error=repr(error))
