"""The other nodes that a node knows: their addresses, connections ahead of need, and losses."""

import zlib
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVarTuple

from services.node.parts import AnyDataPlane, AnyWorker
from shared import subjects
from shared.bus.base import Bus
from shared.errors import PeerLost, TransportError
from shared.ids import NodeId
from shared.messages.pool import NodeGone, NodeInfo
from shared.messages.scaling import PeerSuspect

Args = TypeVarTuple("Args")


class Try(Protocol):
    """Runs an action in a task of its own, and logs its failure."""

    def __call__(
        self, what: str, action: Callable[[*Args], Awaitable[object]], *args: *Args
    ) -> None: ...


class Peers:
    def __init__(
        self,
        info: Callable[[], NodeInfo],
        bus: Bus,
        data: AnyDataPlane,
        worker: AnyWorker,
        *,
        mesh: int,
        attempt: Try,
    ) -> None:
        """`info` describes this node as it is now. `mesh`: to how many peers connections are made
        before they are needed."""
        self._info = info
        self._bus = bus
        self._data = data
        self._worker = worker
        self._mesh = mesh
        self._try = attempt
        self._known: dict[str, NodeInfo] = {}
        """By data-plane address."""
        self._addresses: dict[NodeId, set[str]] = {}
        """The addresses of each node, including those of its earlier processes."""
        self._connected: set[str] = set()
        """The addresses to which connections were made before they were needed."""
        self._ways: dict[str, str] = {}
        """Address -> what carries the bytes of reads from it."""

    def meet(self, *infos: NodeInfo) -> None:
        """Makes the connections to peers before a plan needs them, the nearest first."""
        for info in sorted(infos, key=self._distance):
            if info.node == self._info().node:
                continue
            self.know(info)
            if len(self._connected) < self._mesh:
                self._connected.add(info.address)
                self._try(f"connecting to {info.node}", self._data.connect, info.address)

    def know(self, info: NodeInfo) -> None:
        if info.node != self._info().node:
            self._known[info.address] = info
            self._addresses.setdefault(info.node, set()).add(info.address)

    def _distance(self, other: NodeInfo) -> tuple[bool, bool, int]:
        """Nodes of the own host are nearest, then those of the own rack. Among equals a hash of
        both names decides, so that no node is near to all others, and both ends agree."""
        own = self._info()
        apart = zlib.crc32(own.node.encode()) ^ zlib.crc32(other.node.encode())
        return other.host != own.host, other.rack != own.rack, apart

    def gone(self, gone: NodeGone) -> None:
        """A peer is no more: what the engine keeps for its paths is freed."""
        error = PeerLost(f"node {gone.node} is gone: {gone.reason}")
        addresses = self._addresses.pop(gone.node, set())
        for address in sorted(addresses):
            peer = self._known.get(address)
            if peer is None or peer.node != gone.node:
                continue  # another node has the address now
            if peer.generation > gone.generation:
                self.know(peer)
            else:
                del self._known[address]
                self._connected.discard(address)
                self._worker.on_peer_lost(address, error)

    # --- what the data plane says ---------------------------------------------

    def dialled(self, address: str) -> None:
        """A peer has connected to this node and says that it has this address. It is dialled back
        there: that proves the address, and the connection will tell if the peer is lost."""
        if (peer := self._known.get(address)) and address not in self._ways:
            self._try(f"connecting to {peer.node}", self._data.connect, address)

    def connected(self, address: str, way: str) -> None:
        self._ways[address] = way

    def lost(self, address: str, error: TransportError) -> None:
        self._ways.pop(address, None)
        if peer := self._known.get(address):
            suspect = PeerSuspect(
                reporter=self._info().node,
                node=peer.node,
                reason=f"{error.code}: {error}",
                cause=error.code,
            )
            self._try("reporting a peer", self._bus.publish, subjects.PLANNER_SUSPECT, suspect)

    def by_way(self) -> dict[str, tuple[NodeId, ...]]:
        """The nodes that can be read from, by what carries the bytes."""
        ways: dict[str, set[NodeId]] = {}
        for address, way in self._ways.items():
            if address in self._known:
                ways.setdefault(way, set()).add(self._known[address].node)
        return {way: tuple(sorted(ways[way])) for way in sorted(ways)}
