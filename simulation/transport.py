"""The transport over modelled links: real bytes, moved when the network says that they arrive.

It has the contract of `tcp` and `memory` (`services/node/transport/base.py`). Regions are real
buffers and are really copied, so that digests are checked and wrong bytes are found. A model may be
simulated in a small part of its size: one real byte of a region then stands for `unit` bytes.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from services.node.transport.base import Buffer, Listener, OnReceived, Permit, ReadResult
from services.node.transport.loans import Loans
from services.node.transport.regions import Region, Regions
from shared.clock import now, wall_ns
from shared.errors import (
    BadInput,
    Conflict,
    PeerLost,
    RegionUnknown,
    TransportError,
    TransportTimeout,
)
from simulation.network import Network
from simulation.streams import Transfer

ONE_CHUNK = 1
"""The value of movers' `read_bytes`: they read one chunk at a time, because the bytes of a modelled
read arrive all at once, so that chunks read together would only be forwarded together."""
MESSAGES = -1
"""The priority of messages, which bypass all reads. A read's is a step of its flow's plan."""


class Ends:
    """The transports of one network, by address."""

    def __init__(self, network: Network, *, unit: int = 1, silence_s: float = 1.0) -> None:
        """`unit`: bytes that one byte of a region stands for. `silence_s`: a peer that cannot be
        reached for this long is lost."""
        self.network = network
        self.unit = unit
        self.silence_s = silence_s
        self._ends: dict[str, ModelledTransport] = {}
        network.on_change[self._look_after] = None

    def join(self, end: "ModelledTransport") -> None:
        if end.address in self._ends:
            raise Conflict(f"{end.address} is taken")
        self._ends[end.address] = end

    def leave(self, end: "ModelledTransport") -> None:
        if self._ends.get(end.address) is end:
            del self._ends[end.address]

    def find(self, address: str) -> "ModelledTransport":
        end = self._ends.get(address)
        if end is None:
            raise PeerLost(f"{address}: nobody there")
        return end

    def _look_after(self, node: str) -> None:
        """Looks after the node's connections, because it now reaches other nodes than before, or is
        dead."""
        end = self._ends.get(address_of(node))
        if end is None:
            return
        if node not in self.network:
            end.end(f"{node} died")
            return
        for peer, link in end.links.items():
            reachable = self.network.reachable(node, peer.node)
            if reachable and link.silence is not None:
                link.silence.cancel()
                link.silence = None
            elif not reachable and link.silence is None:
                loop = asyncio.get_running_loop()
                link.silence = loop.call_later(self.silence_s, self._silent, end, peer)

    def _silent(self, one: "ModelledTransport", other: "ModelledTransport") -> None:
        for end, peer in ((one, other), (other, one)):
            end.lose(peer, f"{peer.address}: silent for {self.silence_s} s", silent=True)


@dataclass(slots=True, eq=False)
class Link:
    """A connection between two ends."""

    messages: dict[Transfer, None] = field(default_factory=dict)
    """Messages on their way, in either direction."""
    silence: asyncio.TimerHandle | None = None
    """Breaks the connection, unless the ends reach each other before."""


@dataclass(slots=True, eq=False)
class _Read:
    reader: "ModelledTransport"
    source: "ModelledTransport"
    region: str
    offset: int
    into: memoryview
    priority: int
    done: "asyncio.Future[ReadResult]"
    transfer: Transfer | None = None
    """None while the source has not begun to send."""
    asking: asyncio.TimerHandle | None = None
    lending: asyncio.Task[None] | None = None
    """At the source, brings the bytes that are in no region there, and keeps them until the read
    has ended."""

    @property
    def end(self) -> int:
        return self.offset + len(self.into)

    def fail(self, error: TransportError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class ModelledTransport:
    def __init__(self, ends: Ends, node: str, *, listener: Listener) -> None:
        """`node`: its name in the network."""
        self.node = node
        self.links: dict[ModelledTransport, Link] = {}
        self._ends = ends
        self._network = ends.network
        self._hears = listener
        self._regions = Regions()
        self._loans = Loans(listener)
        self._reads: dict[_Read, None] = {}
        """Reads that this end makes."""
        self._asked: dict[str, dict[_Read, None]] = {}
        """Reads that others make of this end's regions."""
        self._open = False

    @property
    def address(self) -> str:
        return address_of(self.node)

    async def __aenter__(self) -> Self:
        self._ends.join(self)
        self._open = True
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end(f"{self.address}: the peer closed")

    def end(self, why: str) -> None:
        """Closes this end, and tells peers why. It may be closed already."""
        self._open = False
        self._ends.leave(self)
        for read in list(self._reads):
            read.fail(PeerLost("this transport is closed"))
        for peer in list(self.links):
            self._unlink(peer)
            peer.lose(self, why)

    def lose(self, peer: "ModelledTransport", why: str, *, silent: bool = False) -> None:
        """Breaks the connection to the peer. `silent`: the peer only stopped sending."""
        self._unlink(peer)
        for read in [read for read in self._reads if read.source is peer]:
            within = silent and read.transfer is not None
            read.fail(TransportTimeout(why) if within else PeerLost(why))
        self._hears.on_peer_lost(peer.address, PeerLost(why))

    def _unlink(self, peer: "ModelledTransport") -> None:
        link = self.links.pop(peer, None)
        if link is None:
            return
        for message in link.messages:
            self._network.abort(message)
        if link.silence is not None:
            link.silence.cancel()

    # --- regions ---

    def register(self, region: str, buffer: memoryview, *, ready: int = 0, flow: str = "") -> None:
        self._regions.register(region, buffer, ready, flow)

    def advance(self, region: str, ready: int) -> None:
        self._regions.advance(region, ready)
        for read in list(self._asked.get(region, ())):
            if read.transfer is None and read.end <= ready:
                self._serve(read)

    async def unregister(self, region: str) -> None:
        for read in self._asked.pop(region, {}):
            self._abort(read)
            read.fail(RegionUnknown(f"region {region} was unregistered"))
        await self._regions.unregister(region)

    # --- to peers ---

    async def connect(self, address: str) -> None:
        await self._link(address)

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
        flat = into.cast("B")
        if not len(flat) or offset < 0:
            raise BadInput(f"read of {len(flat)} bytes at {offset} of region {region}")
        peer = await self._link(address)
        loop = asyncio.get_running_loop()
        read = _Read(self, peer, region, offset, flat, priority, loop.create_future())
        self._reads[read] = None
        try:
            read.asking = loop.call_later(self._network.latency_s, peer._ask, read)
            result = await read.done
            if received is not None:
                received(flat)
            return result
        finally:
            del self._reads[read]
            read.done.cancel()
            peer._forget(read)

    async def send(self, address: str, header: Buffer, payload: Sequence[Buffer] = ()) -> None:
        peer = await self._link(address)
        link = self.links[peer]
        body = memoryview(bytearray(header))
        rest = _joined(payload)

        def arrived(error: TransportError | None) -> None:
            link.messages.pop(message, None)
            if error is None and peer._open:
                peer._hears.on_message(self.address, body, rest)

        nbytes = len(body) + len(rest)
        message = self._network.begin(self.node, peer.node, nbytes, MESSAGES, arrived)
        link.messages[message] = None

    async def _link(self, address: str) -> "ModelledTransport":
        """The peer, once a connection to it stands."""
        if not self._open:
            raise PeerLost("this transport is closed")
        peer = self._ends.find(address)
        if peer in self.links:
            return peer
        if not self._network.reachable(self.node, peer.node):
            await asyncio.sleep(self._ends.silence_s)
            raise PeerLost(f"{address}: no connection within {self._ends.silence_s} s")
        if self._network.latency_s:
            await asyncio.sleep(2 * self._network.latency_s)
        if not self._open or not peer._open:
            raise PeerLost(f"{address}: not connected")
        if peer not in self.links:
            self.links[peer] = peer.links[self] = Link()
        return peer

    # --- reads of this end's regions ---

    def _ask(self, read: _Read) -> None:
        if not self._regions.has(read.region):
            read.lending = asyncio.get_running_loop().create_task(self._lend(read))
            return
        try:
            region = self._regions.find(read.region, read.offset, len(read.into))
        except RegionUnknown as error:
            asyncio.get_running_loop().call_later(self._network.latency_s, read.fail, error)
            return
        self._asked.setdefault(read.region, {})[read] = None
        if read.end <= region.ready:
            self._serve(read)

    async def _lend(self, read: _Read) -> None:
        try:
            asked = read.region, read.offset, len(read.into), read.priority
            async with self._loans.region(*asked) as region:
                self._serve(read, region)
                await asyncio.wait([read.done])
        except RegionUnknown as error:
            asyncio.get_running_loop().call_later(self._network.latency_s, read.fail, error)

    def _serve(self, read: _Read, loan: Region | None = None) -> None:
        def arrived(error: TransportError | None) -> None:
            if error is None:
                self._copy(read, loan)
            else:
                read.fail(error)

        nbytes = len(read.into) * self._ends.unit
        flow = (loan or self._regions.find(read.region, read.offset, len(read.into))).flow
        read.transfer = self._network.begin(
            self.node, read.reader.node, nbytes, read.priority, arrived, flow
        )

    def _copy(self, read: _Read, loan: Region | None) -> None:
        """Copies the bytes of a read, all of which have arrived."""
        if read.done.done() or read.transfer is None:
            return
        region = loan or self._regions.find(read.region, read.offset, len(read.into))
        read.into[:] = region.buffer[read.offset - region.first : read.end - region.first]
        if self._network.spoils(self.node):
            read.into[-1] ^= 0xFF
        ago = now() - read.transfer.first_byte_s
        read.done.set_result(ReadResult(len(read.into), wall_ns() - round(ago * 1e9), "modelled"))

    def _forget(self, read: _Read) -> None:
        self._abort(read)
        asked = self._asked.get(read.region)
        if asked is not None:
            asked.pop(read, None)

    def _abort(self, read: _Read) -> None:
        if read.asking is not None:
            read.asking.cancel()
        if read.lending is not None:
            read.lending.cancel()
        if read.transfer is not None:
            self._network.abort(read.transfer)


def address_of(node: str) -> str:
    return f"sim://{node}"


def _joined(payload: Sequence[Buffer]) -> memoryview:
    """The payload as the receiver's own copy; a single part is not copied, because modelled hidden
    states are never written to and copying them would take long."""
    if len(payload) == 1:
        return memoryview(payload[0]).cast("B")
    return memoryview(bytearray().join(payload))
