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
    """Does something beside everything else, and logs what comes of it."""

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
        """`info`: of this node, as it is now. `mesh`: how many are connected to ahead of need."""
        self._info = info
        self._bus = bus
        self._data = data
        self._worker = worker
        self._mesh = mesh
        self._try = attempt
        self._known: dict[str, NodeInfo] = {}
        """By data-plane address."""
        self._addresses: dict[NodeId, set[str]] = {}
        """Each one's, that of an earlier process included."""
        self._connected: set[str] = set()
        """Those that connections were made to ahead of need."""
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
        """Own host, own rack, and then at random, so that no node is near to all; the same from
        either end."""
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
                continue  # another node has it now
            if peer.generation > gone.generation:
                self.know(peer)
            else:
                del self._known[address]
                self._connected.discard(address)
                self._worker.on_peer_lost(address, error)

    # --- what the data plane says ---------------------------------------------

    def dialled(self, address: str) -> None:
        """Who says that it is a peer we know is dialled back: then the connection tells its loss,
        and it is that peer."""
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
        """Whom reads can be made from, by what carries the bytes."""
        ways: dict[str, set[NodeId]] = {}
        for address, way in self._ways.items():
            if address in self._known:
                ways.setdefault(way, set()).add(self._known[address].node)
        return {way: tuple(sorted(ways[way])) for way in sorted(ways)}
