"""One-sided reads: the reader takes bytes right out of its peer's memory.

Every connection for reads stands on TCP, which carries the asking, the errors and the heartbeats.
What carries the bytes is agreed in its handshake, the best of what both ends have: `cuda-ipc`
(their devices share a machine), `shm` (they do), `rdma` (they share a fabric), else the connection
itself. With a direct way the
source answers a read by telling, as the bytes come, where they lie (GRANT), and the reader takes
them from there: a relay's peers wait for a message, not in a polling loop, and the source decides
when it is whose turn, as it does on TCP.

Everything here runs on the transport's loop and does not block it.
"""

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self


@dataclass(frozen=True, slots=True)
class Place:
    """Where bytes lie at the source: all that the reader needs to take them."""

    key: int
    """rdma: the remote key; shm, cuda-ipc: which of the source's memories. 32 bits."""
    address: int
    """rdma: the virtual address; shm, cuda-ipc: the offset. 64 bits."""


class DirectReader(Protocol):
    """The dialler's end of one connection."""

    name: str
    """What carries the bytes: the way's name, or that of a lesser one which it does without."""

    def reaches(self, into: memoryview) -> bool:
        """Whether bytes can be taken right into this buffer: it lies in one of our memories."""

    async def take(self, place: Place, into: memoryview) -> None:
        """Fills `into`, and perhaps the same part of the device's arena. Several may run at a time.

        Once it has ended, in whatever way (cancellation included), nothing writes to `into` any
        more; that takes a bounded time. PeerLost: the way is broken, for all takes; TransportError:
        the peer's memory could not be had at that place.
        """

    def close(self) -> None:
        """Takes under way end with PeerLost. Later calls do nothing."""


class DirectSource(Protocol):
    """The listener's end of one connection."""

    def place(self, buffer: memoryview) -> Place | None:
        """Where the peer finds these bytes; None if they lie in none of our memories.

        Asked of a whole read before its bytes are there, and of each part when they are."""

    def close(self) -> None:
        """The peer can take nothing through this connection any more."""


class Offer(Protocol):
    """What the dialler brings to a handshake."""

    data: bytes
    """For the listener; at most 1 KiB."""

    async def complete(self, answer: bytes) -> DirectReader:
        """With the listener's answer; the offer is used up. TransportError: this way is not to be
        had after all."""

    def withdraw(self) -> None:
        """The listener took another way."""


class Direct(Protocol):
    """One way; one a process, over all of its memories, each registered once."""

    name: str
    bytes_per_s: int
    """Paces each direction; 0: as fast as it goes."""

    async def __aenter__(self) -> Self:
        """ConfigError: it is asked for and this machine does not have it."""

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def offer(self) -> Offer: ...

    def accept(self, offer: bytes) -> tuple[bytes, DirectSource] | None:
        """The listener's answer to an offer; None: there is no such way between the two.

        ProtocolViolation: the offer is malformed.
        """
