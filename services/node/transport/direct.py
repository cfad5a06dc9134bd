"""One-sided reads: the reader takes bytes directly out of its peer's memory.

Every connection for reads is a TCP connection, which carries the requests, the errors and the
heartbeats. Its handshake agrees on what carries the bytes, the best that both ends have: `cuda-ipc`
(their devices share a machine), `shm` (they share a machine), `rdma` (they share a fabric), or else
the connection itself.

On a direct way the source answers a read by telling where the bytes lie, as they arrive (GRANT),
and the reader takes them from there. So the peers of a relay wait for a message instead of polling,
and the source decides whose turn it is, as on TCP.

Everything here runs on the transport's loop and does not block it.
"""

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self


@dataclass(frozen=True, slots=True)
class Place:
    """The place of some bytes at the source: everything that a reader needs to take them."""

    key: int
    """32 bits. rdma: the remote key. shm, cuda-ipc: the index of the source's memory."""
    address: int
    """64 bits. rdma: the virtual address. shm, cuda-ipc: the offset."""


class DirectReader(Protocol):
    """The dialler's end of one connection."""

    name: str
    """What carries the bytes: the name of the way, or of a lesser way that it falls back to."""

    def reaches(self, into: memoryview) -> bool:
        """Whether this buffer lies in one of our memories, so that bytes can be taken right into
        it."""

    async def take(self, place: Place, into: memoryview) -> None:
        """Fills `into`, and for some ways also the same part of the device's arena. If `into` has a
        twin on the device, and the bytes lie on the peer's device, it fills only the twin. Several
        takes may run at a time.

        Once a take has ended, in whatever way (cancellation included), nothing writes to `into` any
        more; a cancelled take ends within a bounded time. PeerLost: the way is broken, for all
        takes. TransportError: the peer's memory at that place could not be read.
        """

    def close(self) -> None:
        """Ends running takes with PeerLost. Later calls do nothing."""


class DirectSource(Protocol):
    """The listener's end of one connection."""

    def place(self, buffer: memoryview) -> Place | None:
        """The place where the peer finds these bytes; None if they are not all in one of our
        memories.

        Called for the whole range of a read before its bytes have arrived, and for each part once
        it has.
        """

    def close(self) -> None:
        """Ends the peer's access through this connection."""


class Offer(Protocol):
    """The dialler's side of a handshake."""

    data: bytes
    """Sent to the listener; at most 1 KiB."""

    async def complete(self, answer: bytes) -> DirectReader:
        """Finishes the handshake with the listener's answer, and uses the offer up. TransportError
        if the way does not work after all."""

    def withdraw(self) -> None:
        """Drops the offer, because the listener chose another way."""


class Direct(Protocol):
    """One way of carrying bytes. A process has one object of each way, for all of its memories,
    each of which is registered once."""

    name: str
    bytes_per_s: int
    """Paces each direction; 0: as fast as it goes."""

    async def __aenter__(self) -> Self:
        """ConfigError if the configuration asks for this way and the machine does not have it."""

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def offer(self) -> Offer: ...

    def accept(self, offer: bytes) -> tuple[bytes, DirectSource] | None:
        """Returns the listener's answer to an offer and its end of the connection. None if this way
        does not exist between the two nodes.

        ProtocolViolation: the offer is malformed.
        """
