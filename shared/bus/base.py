"""The interface of the control bus. `nats` is the real one, `memory` its twin within a process.

Handlers are typed: each names the kind of message that it takes and is called with that kind only.
A request of another kind is answered with BadMessage. A broadcast of another kind is not for this
subscriber: it is counted and dropped. A handler that raises never breaks a subscription: in `serve`
the requester gets the typed error, in `subscribe` the error is logged and counted.

Errors are `shared.errors`: BusTimeout, NoResponders, BadMessage, KeyExists, BusError. A write that
ends in BusTimeout may have happened or not.
"""

import enum
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec

from shared.messages import Message

M = TypeVar("M", bound=Message)
Server = Callable[[M], Awaitable[Message]]
SERVERS = "servers"
"""The group of servers that share their requests."""


@dataclass(frozen=True, slots=True)
class On(Generic[M]):
    """`handler` takes the messages of `kind`; the kind `Message` stands for every message."""

    kind: type[M]
    handler: Callable[[M], Awaitable[None]]


class Subscription(Protocol):
    async def close(self) -> None:
        """No handler call begins after this returns."""


class KvOp(enum.Enum):
    PUT = "put"
    DELETE = "delete"
    """Deleted by somebody, or expired."""


class KvEntry(msgspec.Struct, frozen=True):
    key: str
    value: bytes
    """Empty for a DELETE."""
    revision: int
    op: KvOp = KvOp.PUT


class KeyValue(Protocol):
    """A durable bucket. Keys are dot-separated names; a key may carry its own time to live."""

    async def get(self, key: str) -> KvEntry | None: ...

    async def put(self, key: str, value: bytes) -> int:
        """Sets the key whatever it was; returns the new revision."""

    async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
        """Sets a key that does not exist (KeyExists otherwise). `ttl` in whole seconds, >= 1."""

    async def update(
        self, key: str, value: bytes, revision: int, *, ttl: float | None = None
    ) -> int:
        """Sets the key if its last revision is `revision` (KeyExists otherwise); renews `ttl`."""

    async def delete(self, key: str, revision: int | None = None) -> None:
        """`revision`: only if that is its last revision (KeyExists otherwise)."""

    async def entries(self) -> list[KvEntry]:
        """Every live key, with its value."""

    def watch(self) -> AsyncIterator[KvEntry | None]:
        """The live entries, then None once, then changes, expiries included, as they come.

        The last change of a key is always told. A change that a later one overtakes may be left
        out.
        """


class ObjectStore(Protocol):
    """Immutable blobs of some MB, named by the SHA-256 of their bytes (hex)."""

    async def put(self, data: bytes) -> str:
        """Stores the bytes (once) and returns their name."""

    async def get(self, name: str) -> bytes:
        """NotFound if it is not there; BusError if what is there does not match its name."""


class Log(Protocol):
    """A durable sequence of entries, of which the oldest go after a time."""

    async def append(self, data: bytes, *, id: str) -> None:
        """Adds an entry. An id that came a moment ago changes nothing: so a write that ended in
        BusTimeout may be repeated."""

    def since(self, wall_ns: int) -> AsyncIterator[bytes]:
        """The entries that were added since then and are there now, the oldest first."""


class Bus(Protocol):
    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    @property
    def is_up(self) -> bool:
        """Whether the bus is connected right now."""

    async def publish(self, subject: str, message: Message) -> None:
        """Sends a message that nobody confirms. While the bus is disconnected, messages are
        buffered up to the client's limit; BusError beyond it."""

    async def request(self, subject: str, message: Message, reply: type[M], *, timeout: float) -> M:
        """Returns the answer. Raises the error with which the server replied, BadMessage for an
        answer of another kind, BusTimeout (CutOff: whoever was asked is not why) or
        NoResponders."""

    async def subscribe(self, subject: str, *handlers: On[Any]) -> Subscription:
        """Calls the first handler that takes the message's kind, one message after the other, in
        the order received; kinds that no handler takes are counted and dropped."""

    async def serve(
        self, subject: str, kind: type[M], server: Server[M], *, group: str = SERVERS
    ) -> Subscription:
        """Answers requests of one kind, several at a time; Ping is answered by the bus itself.

        A request of another kind is answered with BadMessage, which names both. Of several servers
        of a subject in one group, one gets each request; each group gets it, and the first answer
        counts.
        """

    async def kv(self, bucket: str) -> KeyValue:
        """The bucket, made if missing."""

    async def objects(self) -> ObjectStore: ...

    async def open_log(self, name: str, *, keep_s: float, max_bytes: int) -> Log:
        """The log, made if missing. Entries are kept for `keep_s`, and as long as all of them take
        no more than `max_bytes`."""
