"""The data plane: what a node may ask of a transport.

`tcp` is the real one, which moves bytes by shared memory or RDMA between peers that have it;
`memory` its twin within a process.

A transport moves registered regions and small messages between nodes. It knows nothing of plans,
models or requests. Pull-based: the reader names a region and a range; the owner answers when the
bytes are there (server-side wait), so a relay forwards a block that it is still receiving.

Every method is called on the transport's own event loop; none of them blocks it. Addresses look
like `tcp://127.0.0.1:7001`. Connections are pooled, one per peer and purpose, made by `connect`
before they are needed or on first use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from shared.errors import TransportError

Buffer = bytes | bytearray | memoryview

OnMessage = Callable[[str, memoryview, memoryview], None]
"""(sender's address, header, payload); both views belong to the receiver. Must not block."""
OnReceived = Callable[[memoryview], object]
"""The next part of a read's bytes, which are there. Called once a part, in order, possibly in
another thread."""
OnPeerLost = Callable[[str, TransportError], None]
"""(peer's address, why): a connection that had stood broke. Once per break."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    nbytes: int
    first_byte_ns: int
    """Wall clock when the first byte of the answer arrived."""
    way: str
    """What carried the bytes: `shm`, `rdma`, `tcp`, ..."""


class Transport(Protocol):
    @property
    def address(self) -> str:
        """Where others reach this end; known once entered."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def register(self, region: str, buffer: memoryview, *, ready: int = 0, flow: str = "") -> None:
        """Makes the first `ready` bytes of `buffer` readable by peers under the name `region`.

        Reads of regions of different flows share the outgoing port evenly, whatever their
        priorities. Conflict if the name is taken. The buffer must outlive `unregister`.
        """

    def advance(self, region: str, ready: int) -> None:
        """The first `ready` bytes are there now (never less than before); wakes waiting reads."""

    async def unregister(self, region: str) -> None:
        """Ends waiting reads with RegionUnknown; returns once nothing touches the buffer."""

    async def connect(self, address: str) -> None:
        """Makes sure that the pooled connections to a peer stand. PeerLost if it can't be had."""

    async def read(
        self,
        address: str,
        region: str,
        offset: int,
        into: memoryview,
        *,
        priority: int,
        received: OnReceived | None = None,
    ) -> ReadResult:
        """Fills `into` with the peer's bytes [offset, offset + len(into)) of the region.

        `received` gets each part while it is in the processor's cache: checking bytes later costs
        reading them from memory once more.

        Waits until the peer holds them. Lower `priority` goes first, within the region's flow, on
        the peer's outgoing and on our incoming port. Once it has ended, in whatever way
        (cancellation included), nothing writes to `into` any more. Errors: PeerLost,
        RegionUnknown, ProtocolViolation, TransportTimeout (the peer holds the bytes but stopped
        sending them).
        """

    async def send(self, address: str, header: Buffer, payload: Sequence[Buffer] = ()) -> None:
        """Delivers one message, in order with others to the same peer, ahead of region reads."""
