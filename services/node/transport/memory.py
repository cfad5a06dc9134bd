"""The transport within one process: the same contract as `tcp`, without sockets.

Bytes move when both ports grant them, on the loop's clock, so that transfers also take the right
time on a virtual-time loop.
"""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from services.node.transport.base import Buffer, Listener, OnReceived, Permit, ReadResult
from services.node.transport.loans import Loans
from services.node.transport.pacing import Port
from services.node.transport.regions import Region, Regions
from shared.clock import wall_ns
from shared.errors import BadInput, Conflict, PeerLost


class MemoryNetwork:
    """The ends that can be reached. The transports of one test or simulation share it."""

    def __init__(self) -> None:
        self._ends: dict[str, MemoryTransport] = {}

    def join(self, end: "MemoryTransport") -> None:
        if end.address in self._ends:
            raise Conflict(f"{end.address} is taken")
        self._ends[end.address] = end

    def leave(self, end: "MemoryTransport") -> None:
        del self._ends[end.address]

    def find(self, address: str) -> "MemoryTransport":
        end = self._ends.get(address)
        if end is None:
            raise PeerLost(f"{address}: nobody there")
        return end


class MemoryTransport:
    def __init__(
        self,
        network: MemoryNetwork,
        address: str,
        *,
        link_bytes_per_s: int,
        listener: Listener,
    ) -> None:
        """`link_bytes_per_s` paces each direction; 0: as fast as it goes."""
        self._network = network
        self._address = address
        self._hears = listener
        self._regions = Regions()
        self._loans = Loans(listener)
        self._egress = Port(link_bytes_per_s, width=1)
        self._ingress = Port(link_bytes_per_s)
        self._links: set[MemoryTransport] = set()
        """Ends with a standing connection to this one, whoever made it."""
        self._reads: dict[asyncio.Task[ReadResult], MemoryTransport] = {}
        """Reads that this end has in progress, each with the end that it reads from."""
        self._open = False

    @property
    def address(self) -> str:
        return self._address

    async def __aenter__(self) -> Self:
        self._network.join(self)
        self._open = True
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open = False
        self._network.leave(self)
        for read in list(self._reads):
            read.cancel()
        for peer in list(self._links):
            self._links.discard(peer)
            peer._lose(self)
        if self._reads:
            await asyncio.wait(list(self._reads))

    def register(self, region: str, buffer: memoryview, *, ready: int = 0, flow: str = "") -> None:
        self._regions.register(region, buffer, ready, flow)

    def advance(self, region: str, ready: int) -> None:
        self._regions.advance(region, ready)

    async def unregister(self, region: str) -> None:
        await self._regions.unregister(region)

    async def connect(self, address: str) -> None:
        self._link(address)

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
        """Nobody here asks for permits."""
        flat = into.cast("B")
        if not len(flat) or offset < 0:
            raise BadInput(f"read of {len(flat)} bytes at {offset} of region {region}")
        peer = self._link(address)
        copying = asyncio.get_running_loop().create_task(
            self._copy(peer, region, offset, flat, priority, received)
        )
        self._reads[copying] = peer
        try:
            await asyncio.wait([copying])
        except asyncio.CancelledError:
            copying.cancel()
            raise
        finally:
            del self._reads[copying]
        if copying.cancelled():
            raise PeerLost(f"{address}: the connection ended")
        return copying.result()

    async def send(self, address: str, header: Buffer, payload: Sequence[Buffer] = ()) -> None:
        peer = self._link(address)
        body = memoryview(bytearray(header))
        rest = memoryview(bytearray().join(payload))
        self._egress.charge(len(body) + len(rest))
        asyncio.get_running_loop().call_soon(peer._deliver, self._address, body, rest)

    def _deliver(self, sender: str, header: memoryview, payload: memoryview) -> None:
        if self._open:
            self._ingress.charge(len(header) + len(payload))
            self._hears.on_message(sender, header, payload)

    def _link(self, address: str) -> "MemoryTransport":
        if not self._open:
            raise PeerLost("this transport is closed")
        peer = self._network.find(address)
        self._links.add(peer)
        peer._links.add(self)
        return peer

    def _lose(self, peer: "MemoryTransport") -> None:
        self._links.discard(peer)
        for read, source in self._reads.items():
            if source is peer:
                read.cancel()
        self._hears.on_peer_lost(peer.address, PeerLost(f"{peer.address}: the peer closed"))

    async def _copy(
        self,
        peer: "MemoryTransport",
        name: str,
        offset: int,
        into: memoryview,
        priority: int,
        received: OnReceived | None,
    ) -> ReadResult:
        if peer._regions.has(name):
            region = peer._regions.find(name, offset, len(into))
            return await self._copy_of(region, peer, offset, into, priority, received)
        async with peer._loans.region(name, offset, len(into), priority) as loan:
            return await self._copy_of(loan, peer, offset, into, priority, received)

    async def _copy_of(
        self,
        region: Region,
        peer: "MemoryTransport",
        offset: int,
        into: memoryview,
        priority: int,
        received: OnReceived | None,
    ) -> ReadResult:
        sending, receiving = (
            peer._egress.arrive(priority, region.flow),
            self._ingress.arrive(priority),
        )
        first, position, first_byte_ns = offset - region.first, 0, 0
        while position < len(into):
            ready = await region.beyond(first + position) - first
            end = min(ready, position + peer._egress.grant_bytes, len(into))
            async with (
                peer._egress.grant(self, sending, end - position),
                self._ingress.grant(peer, receiving, end - position),
            ):
                with region.use() as buffer:
                    into[position:end] = buffer[first + position : first + end]
            first_byte_ns = first_byte_ns or wall_ns()
            if received is not None:
                received(into[position:end])
            position = end
            await asyncio.sleep(0)
        return ReadResult(position, first_byte_ns, "memory")
