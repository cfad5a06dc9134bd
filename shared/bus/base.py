"""The control bus: what services may ask of it. `nats` is the real one, `memory` its twin.

Errors are `shared.errors`: BusTimeout, NoResponders, BadMessage, KeyExists, BusError. A handler
that raises never breaks a subscription: in `serve` the requester gets the typed error, in
`subscribe` it is logged and counted. A write that ends in BusTimeout may have happened or not.
"""

import enum
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Protocol, Self, TypeVar

import msgspec

from shared.messages import Message

M = TypeVar("M", bound=Message)
Handler = Callable[[Message], Awaitable[None]]
Server = Callable[[Message], Awaitable[Message]]


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

    async def delete(self, key: str) -> None: ...

    async def entries(self) -> list[KvEntry]:
        """Every live key, with its value."""

    def watch(self) -> AsyncIterator[KvEntry | None]:
        """The live entries, then None once, then every change, expiries included, as they come."""


class ObjectStore(Protocol):
    """Immutable blobs of some MB, named by the SHA-256 of their bytes (hex)."""

    async def put(self, data: bytes) -> str:
        """Stores the bytes (once) and returns their name."""

    async def get(self, name: str) -> bytes:
        """NotFound if it is not there; BusError if what is there does not match its name."""


class Bus(Protocol):
    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    async def publish(self, subject: str, message: Message) -> None:
        """Fire and forget; while disconnected it is buffered up to the client's limit."""

    async def request(self, subject: str, message: Message, reply: type[M], *, timeout: float) -> M:
        """One answer of the expected kind, or the error that the server replied with."""

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """Calls the handler one message after the other, in the order received."""

    async def serve(self, subject: str, server: Server) -> Subscription:
        """Answers requests, several at a time; Ping is answered by the bus itself.

        Of several servers of a subject, one gets each request.
        """

    async def kv(self, bucket: str) -> KeyValue:
        """The bucket, made if missing."""

    async def objects(self) -> ObjectStore: ...
