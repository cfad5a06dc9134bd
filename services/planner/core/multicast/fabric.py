"""The links that move blocks: nodes' ports, racks' trunks, and local links within a host.

A node has one port in each direction (full duplex). Nodes of one rack reach those of others through
the rack's trunk. Nodes of one host reach each other over a local link (NVLink, shared memory),
which takes nothing from the ports.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Port:
    """One node's connection. Rates in bytes/s."""

    out: float
    """0: the node sends nothing, because its out-link carries serving traffic (the KV of a prefill
    node: BlitzScale, section 5.1)."""
    into: float
    rack: str = ""
    host: str = ""
    """Nodes with the same host (not empty) share a local link."""


@dataclass(frozen=True, slots=True)
class Fabric:
    ports: tuple[Port, ...]
    """The port of each node, 0..N-1."""
    overhead_s: float
    """alpha: paid for every hop, and for every change of partner at a port (see `costs`)."""
    trunks: Mapping[str, float] = field(default_factory=dict)
    """Rack -> bytes/s in each direction between it and all others. A rack that is missing has no
    limit."""
    local_bytes_per_s: float = 0.0
    """The rate between nodes of one host. 0: no faster than their ports."""

    def is_local(self, src: int, dst: int) -> bool:
        """Whether the move goes over a local link, so that it takes no port."""
        host = self.ports[src].host
        return self.local_bytes_per_s > 0 and host != "" and host == self.ports[dst].host

    def crosses(self, src: int, dst: int) -> tuple[str, str] | None:
        """The racks whose trunks the move takes (out of, into); None within a rack."""
        out, into = self.ports[src].rack, self.ports[dst].rack
        return None if out == into else (out, into)

    def tight_racks(self) -> frozenset[str]:
        """Racks whose trunk is slower than their nodes' ports together, so that it can be the
        bottleneck."""
        needs: dict[str, float] = {}
        for port in self.ports:
            needs[port.rack] = needs.get(port.rack, 0.0) + max(port.out, port.into)
        return frozenset(rack for rack, rate in self.trunks.items() if rate < needs.get(rack, 0.0))

    def rate(self, src: int, dst: int) -> float:
        """bytes/s of a move that does not share its links."""
        if self.is_local(src, dst):
            return self.local_bytes_per_s
        racks = self.crosses(src, dst) or ()
        limits = [self.trunks[rack] for rack in racks if rack in self.trunks]
        return min(self.ports[src].out, self.ports[dst].into, *limits)


def uniform(nodes: int, bytes_per_s: float = 1.0, overhead_s: float = 0.0) -> Fabric:
    """N equal nodes in one rack. The default is the step model: one step moves a block of one
    byte."""
    return Fabric((Port(bytes_per_s, bytes_per_s),) * nodes, overhead_s)


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a multicast: take every block of a model from the sources to every node of a
    fabric."""

    fabric: Fabric
    block_bytes: tuple[int, ...]
    sources: tuple[int, ...]
    """Nodes that hold every block, best first."""
    chunk_bytes: int = 0
    """Relays forward a block chunk by chunk while they receive it. 0: only when it is complete."""
    group_setup_s: float = 0.3
    """How long a collective library takes to form a group (NCCL: hundreds of ms)."""

    @property
    def nodes(self) -> int:
        return len(self.fabric.ports)

    @property
    def blocks(self) -> int:
        return len(self.block_bytes)

    @property
    def first_chunks(self) -> tuple[int, ...]:
        """For each block, the bytes that a relay must have of it before it forwards any."""
        return tuple(min(self.chunk_bytes or size, size) for size in self.block_bytes)

    @property
    def destinations(self) -> tuple[int, ...]:
        sources = set(self.sources)
        return tuple(node for node in range(self.nodes) if node not in sources)


def step_task(nodes: int, blocks: int, sources: Sequence[int]) -> Task:
    """The step model's task: equal blocks, equal links, no overhead."""
    return Task(uniform(nodes), (1,) * blocks, tuple(sources))
