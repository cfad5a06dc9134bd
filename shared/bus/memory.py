"""The bus within one process, deterministic and on the loop's clock: the twin of `nats`.

Buses on one `MemoryBroker` talk to each other, like connections to one server. Messages cross it
encoded, so that a message that could not cross the wire fails here as well.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar, TypeVarTuple

from shared.bus.base import SERVERS, KvEntry, M, On, Server
from shared.bus.delivery import Delivery, check_key, check_size, check_ttl
from shared.bus.memory_buckets import Bucket, Watch
from shared.clock import now, wall_ns
from shared.errors import (
    BusError,
    BusTimeout,
    CutOff,
    KeyExists,
    LambdaScaleError,
    NoResponders,
    NotFound,
)
from shared.messages import Message, encode

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Reply:
    """Where an answer goes, at the bus that asked."""

    def __init__(self, bus: "MemoryBus") -> None:
        self.bus = bus
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def give(self, data: bytes) -> None:
        if not self.answer.done():
            self.answer.set_result(data)

    def fail(self, error: LambdaScaleError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


Receiver = Callable[[bytes, Reply | None], None]


class MemorySubscription:
    def __init__(
        self,
        broker: "MemoryBroker",
        subject: str,
        receive: Receiver,
        bus: "MemoryBus | None" = None,
        on_close: Callable[[], None] | None = None,
        group: str = "",
    ) -> None:
        """`bus`: the bus that subscribed. None: the broker itself, which no fault of a connection
        affects. `group`: of servers, for a server."""
        self.subject = subject
        self.group = group
        self.receive = receive
        self.bus = bus
        self._broker = broker
        self._on_close = on_close

    async def close(self) -> None:
        self._broker.leave(self)
        if self._on_close is not None:
            self._on_close()


class MemoryBroker:
    """The server's part: subscriptions, buckets and objects.

    The first methods are the wires between the broker and its clients. Here they are perfect and
    take no time.
    """

    def __init__(self) -> None:
        self._listeners: dict[str, dict[MemorySubscription, None]] = {}
        self._servers: dict[str, dict[str, list[MemorySubscription]]] = {}
        """By subject, then by group."""
        self._buckets: dict[str, Bucket] = {}
        self.blobs: dict[str, bytes] = {}
        self.logs: dict[str, list[Entry]] = {}
        self.decoded: tuple[bytes, Message] | None = None
        """The message decoded last, so that all receivers of a broadcast share it."""

    # --- wires ---

    async def connect(self, bus: "MemoryBus") -> None:
        """Returns once the bus is connected. BusError if it cannot be."""

    def connected_at(self, bus: "MemoryBus") -> float | None:
        """When the client connected for the last time; None: it is not connected now."""
        return 0.0

    def disconnect(self, bus: "MemoryBus") -> None:
        """The bus closed in good order: what it sent before is delivered."""

    def send(self, bus: "MemoryBus", subject: str, data: bytes, reply: Reply | None) -> None:
        """Sends a message from a client to the server."""
        self.deliver(subject, data, reply)

    def answer(self, bus: "MemoryBus", reply: Reply, data: bytes) -> None:
        """Sends an answer from a serving client, through the server, to the client that asked."""
        self.down(reply.bus, "", reply.give, data)

    def down(
        self, bus: "MemoryBus", subject: str, act: Callable[[*Ts], object], *args: *Ts
    ) -> None:
        """Sends from the server to a client. Order is kept for each subject."""
        act(*args)

    def hand(self, subscription: MemorySubscription, data: bytes, reply: Reply | None) -> None:
        """Sends a message from the server to one of its receivers."""
        if subscription.bus is None:
            subscription.receive(data, reply)
        else:
            self.down(subscription.bus, subscription.subject, subscription.receive, data, reply)

    async def exchange(
        self, bus: "MemoryBus", what: str, act: Callable[[], T], *, stored: bool
    ) -> T:
        """Does `act` at the server and returns its result. Other tasks run first. `stored`: whether
        it is about what the server stores."""
        await asyncio.sleep(0)
        return act()

    # --- the server ---

    def listen(self, subscription: MemorySubscription) -> None:
        self._listeners.setdefault(subscription.subject, {})[subscription] = None

    def serve(self, subscription: MemorySubscription) -> None:
        groups = self._servers.setdefault(subscription.subject, {})
        groups.setdefault(subscription.group, []).append(subscription)

    def leave(self, subscription: MemorySubscription) -> None:
        self._listeners.get(subscription.subject, {}).pop(subscription, None)
        servers = self._servers.get(subscription.subject, {}).get(subscription.group, [])
        if subscription in servers:
            servers.remove(subscription)

    def deliver(self, subject: str, data: bytes, reply: Reply | None) -> None:
        """Delivers to every listener and, in turn, to one server of each group."""
        receivers = list(self._listeners.get(subject, ()))
        for servers in self._servers.get(subject, {}).values():
            if servers:
                servers.append(servers.pop(0))
                receivers.append(servers[-1])
        for subscription in receivers:
            self.hand(subscription, data, reply)
        if reply is not None and not receivers:
            error = NoResponders(f"{subject}: nobody serves it")
            self.down(reply.bus, "", reply.fail, error)

    def bucket(self, name: str) -> Bucket:
        return self._buckets.setdefault(name, Bucket(name))


class MemoryBus(Delivery):
    def __init__(self, broker: MemoryBroker, name: str = "memory") -> None:
        super().__init__(name)
        self.subscriptions: list[MemorySubscription] = []
        self.watches: dict[Watch, Bucket] = {}
        self._broker = broker
        self._requests: dict[Reply, None] = {}
        self._open = False

    async def __aenter__(self) -> Self:
        await self._broker.connect(self)
        self._open = True
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open = False
        for subscription in self.subscriptions:
            await subscription.close()
        for reply in self._requests:
            reply.fail(BusError(f"{self.name}: the bus was closed"))
        for watch in self.watches:
            watch.changes.put_nowait(None)  # wakes its reader, who then sees that the bus is closed
        await self.tasks.close()
        self._broker.disconnect(self)

    @property
    def is_up(self) -> bool:
        return self._open and self._broker.connected_at(self) is not None

    def check_open(self) -> None:
        if not self._open:
            raise BusError(f"{self.name}: the bus is not open")

    async def publish(self, subject: str, message: Message) -> None:
        self.check_open()
        self._broker.send(self, subject, check_size(encode(message), subject), None)

    async def request(self, subject: str, message: Message, reply: type[M], *, timeout: float) -> M:
        self.check_open()
        asked_at, place = now(), Reply(self)
        self._requests[place] = None
        try:
            async with asyncio.timeout(timeout):
                self._broker.send(self, subject, check_size(encode(message), subject), place)
                data = await place.answer
        except TimeoutError as error:
            connected_at = self._broker.connected_at(self)
            cut_off = connected_at is None or connected_at > asked_at
            kind = CutOff if cut_off else BusTimeout
            raise kind(f"{subject}: no answer within {timeout} s") from error
        finally:
            place.answer.cancel()
            del self._requests[place]
        return self.expect(subject, data, reply)

    async def subscribe(self, subject: str, *handlers: On[Any]) -> MemorySubscription:
        self.check_open()
        inbox = self.inbox(subject, handlers)
        subscription = MemorySubscription(
            self._broker, subject, lambda data, _: inbox.put(data), self, inbox.close
        )
        try:
            return await self._enlist(subscription, self._broker.listen)
        except BusError:
            inbox.close()
            raise

    async def serve(
        self, subject: str, kind: type[M], server: Server[M], *, group: str = SERVERS
    ) -> MemorySubscription:
        def receive(data: bytes, reply: Reply | None) -> None:
            work = self._serve(subject, kind, server, data, reply)
            self.tasks.spawn(work, name=f"{self.name}/{subject}/request")

        subscription = MemorySubscription(self._broker, subject, receive, self, group=group)
        return await self._enlist(subscription, self._broker.serve)

    async def kv(self, bucket: str) -> "MemoryKeyValue":
        self.check_open()
        return MemoryKeyValue(self, self._broker.bucket(bucket))

    async def objects(self) -> "MemoryObjectStore":
        self.check_open()
        return MemoryObjectStore(self, self._broker.blobs)

    async def open_log(self, name: str, *, keep_s: float, max_bytes: int) -> "MemoryLog":
        self.check_open()
        return MemoryLog(self, name, self._broker.logs.setdefault(name, []), keep_s, max_bytes)

    async def exchange(self, what: str, act: Callable[[], T], *, stored: bool = True) -> T:
        self.check_open()
        return await self._broker.exchange(self, what, act, stored=stored)

    async def watch(self, bucket: Bucket) -> AsyncIterator[KvEntry | None]:
        watch = Watch(lambda tell, change: self._broker.down(self, bucket.name, tell, change))
        self.watches[watch] = bucket
        try:
            await self._begin(watch, bucket)
            while True:
                change = await watch.changes.get()
                self.check_open()
                yield change
        finally:
            bucket.watches.pop(watch, None)
            del self.watches[watch]

    async def _begin(self, watch: Watch, bucket: Bucket) -> None:
        """Waits as long as it takes, because a watch outlives the connection."""

        def follow() -> None:
            if watch in self.watches:
                bucket.follow(watch)

        while watch not in bucket.watches:
            with suppress(BusTimeout):
                await self.exchange(f"watch {bucket.name}", follow)

    async def _enlist(
        self, subscription: MemorySubscription, enlist: Callable[[MemorySubscription], None]
    ) -> MemorySubscription:
        def act() -> None:
            self.check_open()
            enlist(subscription)

        await self.exchange(f"subscribe {subscription.subject}", act, stored=False)
        self.subscriptions.append(subscription)
        return subscription

    async def _serve(
        self, subject: str, kind: type[M], server: Server[M], data: bytes, reply: Reply | None
    ) -> None:
        answer = await self.answer(subject, kind, server, data)
        if reply is not None:
            self._broker.answer(self, reply, answer)

    def _decode(self, subject: str, data: bytes) -> Message:
        """The message. All receivers of a broadcast share one object, since messages are
        immutable."""
        last = self._broker.decoded
        if last is not None and last[0] is data:
            return last[1]
        message = super()._decode(subject, data)
        self._broker.decoded = data, message
        return message


class MemoryKeyValue:
    def __init__(self, bus: MemoryBus, bucket: Bucket) -> None:
        self._bus = bus
        self._bucket = bucket

    async def get(self, key: str) -> KvEntry | None:
        return await self._at(key, lambda: self._bucket.live.get(key))

    async def put(self, key: str, value: bytes) -> int:
        return await self._at(key, lambda: self._bucket.set(key, check_size(value, key), None))

    async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
        def act() -> int:
            if key in self._bucket.live:
                raise KeyExists(f"{self._bucket.name}: {key} exists already")
            return self._set(key, value, ttl)

        return await self._at(key, act)

    async def update(
        self, key: str, value: bytes, revision: int, *, ttl: float | None = None
    ) -> int:
        def act() -> int:
            self._check(key, revision)
            return self._set(key, value, ttl)

        return await self._at(key, act)

    async def delete(self, key: str, revision: int | None = None) -> None:
        def act() -> None:
            if revision is not None:
                self._check(key, revision)
            self._bucket.drop(key)

        await self._at(key, act)

    async def entries(self) -> list[KvEntry]:
        return await self._bus.exchange(
            f"bucket {self._bucket.name}", lambda: list(self._bucket.live.values())
        )

    def watch(self) -> AsyncIterator[KvEntry | None]:
        return self._bus.watch(self._bucket)

    def _check(self, key: str, revision: int) -> None:
        last = self._bucket.live.get(key)
        if last is None or last.revision != revision:
            raise KeyExists(f"{self._bucket.name}: {key} is no longer at revision {revision}")

    def _set(self, key: str, value: bytes, ttl: float | None) -> int:
        lifetime = None if ttl is None else check_ttl(ttl)
        return self._bucket.set(key, check_size(value, key), lifetime)

    async def _at(self, key: str, act: Callable[[], T]) -> T:
        return await self._bus.exchange(f"{self._bucket.name}/{check_key(key)}", act)


class MemoryObjectStore:
    def __init__(self, bus: MemoryBus, blobs: dict[str, bytes]) -> None:
        self._bus = bus
        self._blobs = blobs

    async def put(self, data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        await self._bus.exchange(
            f"object {name}", lambda: self._blobs.setdefault(name, bytes(data))
        )
        return name

    async def get(self, name: str) -> bytes:
        """NotFound if no object of this name was put."""
        data = await self._bus.exchange(f"object {name}", lambda: self._blobs.get(name))
        if data is None:
            raise NotFound(f"object {name} is not in the store")
        return data


class Entry(NamedTuple):
    """Of a log."""

    id: str
    added_ns: int
    data: bytes


class MemoryLog:
    def __init__(
        self, bus: MemoryBus, name: str, entries: list[Entry], keep_s: float, max_bytes: int
    ) -> None:
        self._bus = bus
        self._name = name
        self._entries = entries
        self._keep_s = keep_s
        self._max_bytes = max_bytes

    async def append(self, data: bytes, *, id: str) -> None:
        check_size(data, self._name)

        def act() -> None:
            if all(entry.id != id for entry in self._entries):
                self._entries.append(Entry(id, wall_ns(), data))
                self._forget()

        await self._bus.exchange(f"log {self._name}", act)

    async def since(self, wall_ns: int) -> AsyncGenerator[bytes, None]:
        def act() -> list[Entry]:
            self._forget()
            return [entry for entry in self._entries if entry.added_ns >= wall_ns]

        for entry in await self._bus.exchange(f"log {self._name}", act):
            yield entry.data

    def _forget(self) -> None:
        entries, oldest_ns = self._entries, wall_ns() - int(self._keep_s * 1e9)
        nbytes = sum(len(entry.data) for entry in entries)
        while entries and (entries[0].added_ns < oldest_ns or nbytes > self._max_bytes):
            nbytes -= len(entries.pop(0).data)
