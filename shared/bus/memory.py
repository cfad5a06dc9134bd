"""The bus within one process, deterministic and on the loop's clock: the twin of `nats`.

Buses on one `MemoryBroker` talk to each other, like connections to one server. Messages cross it
encoded, so that what could not cross the wire fails here as well.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from shared.bus.base import Handler, KvEntry, KvOp, M, Server
from shared.bus.delivery import Delivery, Inbox, check_key, check_size, check_ttl
from shared.errors import BusError, BusTimeout, KeyExists, NoResponders, NotFound
from shared.messages import Message, encode

Reply = asyncio.Future[bytes]
Receiver = Callable[[bytes, Reply | None], None]
Changes = asyncio.Queue[KvEntry | None]
"""What a watch has still to tell; None: its bus was closed."""


class MemorySubscription:
    def __init__(self, broker: "MemoryBroker", subject: str, receive: Receiver) -> None:
        self.subject = subject
        self.receive = receive
        self._broker = broker

    async def close(self) -> None:
        self._broker.leave(self)


class ListenerSubscription(MemorySubscription):
    def __init__(self, broker: "MemoryBroker", subject: str, inbox: Inbox) -> None:
        super().__init__(broker, subject, lambda data, _: inbox.put(data))
        self._inbox = inbox

    async def close(self) -> None:
        await super().close()
        self._inbox.close()


class MemoryBroker:
    """The server's part: who subscribed, the buckets, the objects."""

    def __init__(self) -> None:
        self._listeners: dict[str, list[MemorySubscription]] = {}
        self._servers: dict[str, list[MemorySubscription]] = {}
        self._buckets: dict[str, Bucket] = {}
        self.blobs: dict[str, bytes] = {}

    def listen(self, subscription: MemorySubscription) -> None:
        self._listeners.setdefault(subscription.subject, []).append(subscription)

    def serve(self, subscription: MemorySubscription) -> None:
        self._servers.setdefault(subscription.subject, []).append(subscription)

    def leave(self, subscription: MemorySubscription) -> None:
        for members in (self._listeners, self._servers):
            if subscription in members.get(subscription.subject, []):
                members[subscription.subject].remove(subscription)

    def deliver(self, subject: str, data: bytes, reply: Reply | None) -> bool:
        """To every listener and, in turn, to one server; False if there is nobody."""
        receivers = list(self._listeners.get(subject, []))
        servers = self._servers.get(subject)
        if servers:
            servers.append(servers.pop(0))
            receivers.append(servers[-1])
        for subscription in receivers:
            subscription.receive(data, reply)
        return bool(receivers)

    def bucket(self, name: str) -> "Bucket":
        return self._buckets.setdefault(name, Bucket(name))


class Bucket:
    """The state of one KV bucket. Live entries are kept in the order of their revisions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.live: dict[str, KvEntry] = {}
        self.watchers: list[Changes] = []
        self._revision = 0
        self._expiries: dict[str, asyncio.TimerHandle] = {}

    def set(self, key: str, value: bytes, ttl: int | None) -> int:
        entry = self._change(key, value, KvOp.PUT)
        self.live[key] = entry
        if ttl is not None:
            loop = asyncio.get_running_loop()
            self._expiries[key] = loop.call_later(ttl, self.drop, key)
        return entry.revision

    def drop(self, key: str) -> None:
        if key in self.live:
            self._change(key, b"", KvOp.DELETE)

    def _change(self, key: str, value: bytes, op: KvOp) -> KvEntry:
        self.live.pop(key, None)
        if expiry := self._expiries.pop(key, None):
            expiry.cancel()
        self._revision += 1
        entry = KvEntry(key, value, self._revision, op)
        for watcher in self.watchers:
            watcher.put_nowait(entry)
        return entry


class MemoryBus(Delivery):
    def __init__(self, broker: MemoryBroker, name: str = "memory") -> None:
        super().__init__(name)
        self._broker = broker
        self._subscriptions: list[MemorySubscription] = []
        self._watches: list[Changes] = []
        self._requests: set[Reply] = set()
        self._open = False

    async def __aenter__(self) -> Self:
        self._open = True
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open = False
        for subscription in self._subscriptions:
            await subscription.close()
        for reply in self._requests:
            if not reply.done():
                reply.set_exception(BusError(f"{self.name}: the bus was closed"))
        for changes in self._watches:
            changes.put_nowait(None)
        await self.tasks.close()

    def check_open(self) -> None:
        if not self._open:
            raise BusError(f"{self.name}: the bus is not open")

    async def publish(self, subject: str, message: Message) -> None:
        self.check_open()
        self._broker.deliver(subject, check_size(encode(message), subject), None)

    async def request(self, subject: str, message: Message, reply: type[M], *, timeout: float) -> M:
        self.check_open()
        answer: Reply = asyncio.get_running_loop().create_future()
        if not self._broker.deliver(subject, check_size(encode(message), subject), answer):
            raise NoResponders(f"{subject}: nobody serves it")
        self._requests.add(answer)
        try:
            async with asyncio.timeout(timeout):
                data = await answer
        except TimeoutError as error:
            raise BusTimeout(f"{subject}: no answer within {timeout} s") from error
        finally:
            self._requests.discard(answer)
        return self.expect(subject, data, reply)

    async def subscribe(self, subject: str, handler: Handler) -> MemorySubscription:
        self.check_open()
        subscription = ListenerSubscription(self._broker, subject, self.inbox(subject, handler))
        self._broker.listen(subscription)
        self._subscriptions.append(subscription)
        return subscription

    async def serve(self, subject: str, server: Server) -> MemorySubscription:
        self.check_open()

        def receive(data: bytes, reply: Reply | None) -> None:
            work = self._reply(subject, server, data, reply)
            self.tasks.spawn(work, name=f"{self.name}/{subject}/request")

        subscription = MemorySubscription(self._broker, subject, receive)
        self._broker.serve(subscription)
        self._subscriptions.append(subscription)
        return subscription

    async def kv(self, bucket: str) -> "MemoryKeyValue":
        self.check_open()
        return MemoryKeyValue(self, self._broker.bucket(bucket))

    async def objects(self) -> "MemoryObjectStore":
        self.check_open()
        return MemoryObjectStore(self, self._broker.blobs)

    async def watch(self, bucket: Bucket) -> AsyncIterator[KvEntry | None]:
        self.check_open()
        changes = Changes()
        bucket.watchers.append(changes)
        self._watches.append(changes)
        try:
            for entry in list(bucket.live.values()):
                yield entry
            yield None
            while change := await changes.get():
                yield change
            self.check_open()
        finally:
            bucket.watchers.remove(changes)
            self._watches.remove(changes)

    async def _reply(self, subject: str, server: Server, data: bytes, reply: Reply | None) -> None:
        answer = await self.answer(subject, server, data)
        if reply is not None and not reply.done():
            reply.set_result(answer)


class MemoryKeyValue:
    """Every call lets other tasks run first, as a server's answer would."""

    def __init__(self, bus: MemoryBus, bucket: Bucket) -> None:
        self._bus = bus
        self._bucket = bucket

    async def get(self, key: str) -> KvEntry | None:
        await self._turn(key)
        return self._bucket.live.get(key)

    async def put(self, key: str, value: bytes) -> int:
        await self._turn(key)
        return self._bucket.set(key, check_size(value, key), None)

    async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
        await self._turn(key)
        if key in self._bucket.live:
            raise KeyExists(f"{self._bucket.name}: {key} exists already")
        return self._set(key, value, ttl)

    async def update(
        self, key: str, value: bytes, revision: int, *, ttl: float | None = None
    ) -> int:
        await self._turn(key)
        last = self._bucket.live.get(key)
        if last is None or last.revision != revision:
            raise KeyExists(f"{self._bucket.name}: {key} is no longer at revision {revision}")
        return self._set(key, value, ttl)

    async def delete(self, key: str) -> None:
        await self._turn(key)
        self._bucket.drop(key)

    async def entries(self) -> list[KvEntry]:
        await self._turn()
        return list(self._bucket.live.values())

    def watch(self) -> AsyncIterator[KvEntry | None]:
        return self._bus.watch(self._bucket)

    def _set(self, key: str, value: bytes, ttl: float | None) -> int:
        lifetime = None if ttl is None else check_ttl(ttl)
        return self._bucket.set(key, check_size(value, key), lifetime)

    async def _turn(self, key: str | None = None) -> None:
        if key is not None:
            check_key(key)
        self._bus.check_open()
        await asyncio.sleep(0)


class MemoryObjectStore:
    def __init__(self, bus: MemoryBus, blobs: dict[str, bytes]) -> None:
        self._bus = bus
        self._blobs = blobs

    async def put(self, data: bytes) -> str:
        self._bus.check_open()
        name = hashlib.sha256(data).hexdigest()
        self._blobs[name] = bytes(data)
        return name

    async def get(self, name: str) -> bytes:
        self._bus.check_open()
        if name not in self._blobs:
            raise NotFound(f"object {name} is not in the store")
        return self._blobs[name]
