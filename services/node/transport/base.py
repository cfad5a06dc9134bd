"""The interface between a node and its transport.

A transport moves named regions and small messages between two nodes. It knows nothing of plans,
models or requests. `tcp` is the real transport, and moves bytes by shared memory or RDMA between
peers that have them; `memory` is its twin within one process.

Reads are pull-based: the reader names a region and a range, and the owner answers once it holds the
bytes. So a relay can forward a block that it is still receiving.

Every method is called on the transport's own event loop and does not block it. Addresses look like
`tcp://127.0.0.1:7001`. Connections are pooled, one for each peer and purpose. `connect` makes them
ahead of time; otherwise the first use does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from shared.errors import RegionUnknown, TransportError

Buffer = bytes | bytearray | memoryview

OnReceived = Callable[[memoryview], object]
"""Called with each part of a read's bytes once it has arrived, in order, possibly on another
thread."""


class Chunks(ABC):
    """An OnReceived that says what the bytes have to be. A transport may check them itself: then it
    calls `found`, and shows each chunk that is right, and the next of the region of our own, to
    others."""

    chunk_bytes: int
    """The last chunk may be shorter."""
    digests: bytes
    """The chunks' digests (BLAKE3), one after the other."""
    region: str
    """The region of our own in which the bytes land, at the same offset as they have at the
    peer."""

    @abstractmethod
    def __call__(self, part: memoryview) -> None: ...

    @abstractmethod
    def found(self, count: int, *, right: bool) -> None:
        """The next `count` chunks have come, all right or all wrong. Called on the transport's
        loop."""


@dataclass(frozen=True, slots=True)
class Brought:
    """The bytes of one read, in a buffer of their own."""

    flow: str
    """See `Transport.register`."""
    buffer: memoryview


class Listener(Protocol):
    """Who hears what happens on a transport. Called on the transport's loop; must not block."""

    async def bring(self, region: str, offset: int, nbytes: int) -> Brought:
        """A peer reads these bytes of a region that is not registered here. RegionUnknown if they
        are not to be had by other means either."""

    def on_message(self, sender: str, header: memoryview, payload: memoryview) -> None:
        """`sender`: the address at which the peer says that it listens; nothing proves it. Both
        views belong to the receiver."""

    def on_peer_lost(self, address: str, error: TransportError) -> None:
        """Called once when an established connection to an address breaks. Only a connection that
        this end dialled counts: what the other end of an accepted one says of itself is no proof
        that the peer at that address is lost."""

    def on_dialled(self, address: str) -> None:
        """A peer that says it listens at the address has connected. To see its loss, dial it."""

    def on_connected(self, address: str, way: str) -> None:
        """A connection for reads from the peer stands; the way of that name will carry them."""

    def on_sent(self, began: float, ended: float, nbytes: int) -> None:
        """A read of a peer was answered (seconds on the loop's clock)."""


class NoListener:
    """A listener that does nothing: for a transport of which nobody wants to hear, and as a base
    for listeners that want to hear only some of it."""

    async def bring(self, region: str, offset: int, nbytes: int) -> Brought:
        raise RegionUnknown(f"no region {region} here")

    def on_message(self, sender: str, header: memoryview, payload: memoryview) -> None:
        pass

    def on_peer_lost(self, address: str, error: TransportError) -> None:
        pass

    def on_dialled(self, address: str) -> None:
        pass

    def on_connected(self, address: str, way: str) -> None:
        pass

    def on_sent(self, began: float, ended: float, nbytes: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Permit:
    """What a reader shows its peer before it reads. The transport does not know what it says."""

    subject: str
    """What it is about. Of several about the same, the peer goes by the last."""
    data: bytes


class Visitor(Protocol):
    """One peer that reads."""

    def show(self, data: bytes) -> None:
        """It shows a permit. One that is not good is remembered, and refuses its reads."""

    def check(self, region: str) -> None:
        """ReadRefused: it has shown nothing that lets it read the region now."""


class Gate(Protocol):
    """Decides what peers may read."""

    def visitor(self, certified: str | None) -> Visitor:
        """A peer that has connected. `certified`: who it is by its certificate; None: it has shown
        none."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    nbytes: int
    first_byte_ns: int
    """Wall clock, in nanoseconds, when the first byte of the answer arrived."""
    way: str
    """The way that carried the bytes: `shm`, `rdma`, `tcp`, ..."""


class Transport(Protocol):
    @property
    def address(self) -> str:
        """The address at which others reach this end. Known once the transport is entered."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def register(self, region: str, buffer: memoryview, *, ready: int = 0, flow: str = "") -> None:
        """Makes the first `ready` bytes of `buffer` readable by peers under the name `region`.

        Reads of regions of different flows share the outgoing port (`pacing`), whatever their
        priorities. Conflict if the name is taken. The buffer must outlive `unregister`.
        """

    def advance(self, region: str, ready: int) -> None:
        """Declares that the first `ready` bytes have arrived (never fewer than before), and wakes
        the reads that wait for them."""

    async def unregister(self, region: str) -> None:
        """Ends waiting reads with RegionUnknown. Returns once nothing touches the buffer."""

    async def connect(self, address: str) -> None:
        """Makes sure that the pooled connections to a peer are up. PeerLost if they cannot be
        made."""

    async def read(
        self,
        address: str,
        region: str,
        offset: int,
        into: memoryview,
        *,
        priority: int,
        received: OnReceived | None = None,
        permit: Permit | None = None,
    ) -> ReadResult:
        """Fills `into` with the peer's bytes [offset, offset + len(into)) of the region, and waits
        until the peer holds them.

        `received` gets each part while it is still in the processor's cache: whoever checks bytes
        later has to read them from memory again. A lower `priority` goes first, among reads of the
        same flow, on the peer's outgoing port and on our incoming port.

        Once the read has ended, in whatever way (cancellation included), nothing writes to `into`
        any more. `permit` is shown to a peer that asks for one, once on each connection.
        Errors: PeerLost, ReadRefused, RegionUnknown, ProtocolViolation, TransportTimeout (the peer
        holds the bytes but stopped sending them).
        """

    async def send(self, address: str, header: Buffer, payload: Sequence[Buffer] = ()) -> None:
        """Delivers one message. Messages to one peer keep their order, and go ahead of region
        reads."""
