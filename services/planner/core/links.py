"""The network, the disks and the engines, in the form that the cost model takes."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from services.planner.core.cluster import DISK_BYTES_PER_S
from services.planner.core.kv_traffic import NO_FLOW, Flow, is_taken, left, words
from services.planner.core.multicast.fabric import Fabric, Port
from services.planner.core.tiers import machine
from shared.ids import ModelId, NodeId
from shared.messages.pool import NodeInfo, Profile
from shared.messages.scaling import Transfer

PROMPT_TOKENS = 512
"""The length of the prompt whose first token is predicted."""
_UNMEASURED = Profile()


@dataclass(frozen=True, slots=True)
class Links:
    """What is known of the network between nodes."""

    nodes: Mapping[NodeId, NodeInfo]
    profiles: Mapping[NodeId, Profile]
    default_bytes_per_s: int
    """The rate of nodes that do not say; 0: not known."""
    default_overhead_s: float
    disks: frozenset[NodeId] = frozenset()
    """Nodes that send from their disks, and so no faster than these are read."""
    kv: Mapping[NodeId, Flow] = field(default_factory=dict)
    """The KV that is expected at nodes' ports."""
    disk_bytes_per_s: int = DISK_BYTES_PER_S
    """The rate of disks that were not measured."""
    reading_s: Mapping[str, float] = field(default_factory=dict)
    """For how many seconds other loads read disks, by the names of machines."""
    spares: bool = False
    """Whether nodes whose way out KV takes send nothing else."""

    def reading(self, disks: Collection[NodeId]) -> "Links":
        """The same links, with these nodes sending from their disks."""
        return replace(self, disks=frozenset(disks))

    def sparing(self) -> "Links":
        """The same links, on which nodes send nothing whose way out KV takes."""
        return replace(self, spares=True)

    def alone(self) -> "Links":
        """The same links without KV."""
        return replace(self, kv={}, spares=False)

    def taken(self, nodes: Iterable[NodeId]) -> frozenset[NodeId]:
        """Those of the nodes whose way out KV takes."""
        flows = [(node, self.kv.get(node, NO_FLOW).out) for node in nodes]
        return frozenset(node for node, kv in flows if kv and self._is_taken(node, kv))

    def _is_taken(self, node: NodeId, kv: float) -> bool:
        out, _ = self._rates(node)
        return out > 0 and is_taken(out, kv)

    def words(self, nodes: Iterable[NodeId], *, receives: Collection[NodeId]) -> Iterator[str]:
        """What KV does to the ports of these nodes, some of which receive."""
        for node in nodes:
            out, into = self._rates(node)
            into = into if node in receives else 0.0
            kv = self.kv.get(node, NO_FLOW)
            yield from words(node, kv, out=out, into=into, spares=self.spares)

    def disk_rate(self, node: NodeId) -> float:
        """bytes/s of the node's disk: what is assumed of disks if it has not been measured."""
        return self.profiles.get(node, _UNMEASURED).load_bytes_per_s or self.disk_bytes_per_s

    def busy_s(self, node: NodeId) -> float:
        """For how many seconds the node's disk is read for other loads."""
        return self.reading_s.get(machine(self.nodes, node), 0.0)

    def are_timed(self, nodes: Iterable[NodeId]) -> bool:
        """Whether the rates of these nodes' disks have been measured."""
        return all(self.profiles.get(n, _UNMEASURED).load_bytes_per_s for n in nodes)

    def disk_beats_link(self, node: NodeId) -> bool:
        """Whether the node is known to read its disk faster than anything can come to it."""
        port = self.port(node)
        return port is not None and self.are_timed([node]) and self.disk_rate(node) > port.into

    def port(self, node: NodeId) -> Port | None:
        """The node's port; None if a rate is not known. A node keeps to the rate that it states for
        its link, although the link may be able to do more. So the rates that it measured count only
        if it states none."""
        out, into = self._rates(node)
        if not out or not into:
            return None
        info, kv = self.nodes.get(node), self.kv.get(node, NO_FLOW)
        out, into = left(out, kv.out, spares=self.spares), left(into, kv.into, spares=False)
        if node in self.disks:
            out = min(out, self.disk_rate(node))
        return Port(out, into, info.rack if info else "", info.host if info else "")

    def assumed(self) -> "Links":
        """The same links, with a rate for every node. A direction that is not known is taken to be
        as fast as the node's other one, or else as the slowest that is known of any node: the links
        of a cluster are alike, and nobody is to wait for one that is not. Where no rate at all is
        known, none is assumed."""
        known = [
            rate
            for node in {**self.nodes, **self.profiles}
            for rate in self._rates(node)
            if 0 < rate < math.inf
        ]
        if not known:
            return self
        profiles = dict(self.profiles)
        for node, profile in self.profiles.items():
            out, into = self._rates(node)
            profiles[node] = msgspec.structs.replace(
                profile, out_bytes_per_s=out or into, in_bytes_per_s=into or out
            )
        return replace(self, profiles=profiles, default_bytes_per_s=max(1, int(min(known))))

    def _rates(self, node: NodeId) -> tuple[float, float]:
        """Out of the node and into it; 0: not known."""
        info, profile = self.nodes.get(node), self.profiles.get(node, _UNMEASURED)
        stated = float(info.link_bytes_per_s) if info else 0.0
        return (
            stated or profile.out_bytes_per_s or self.default_bytes_per_s,
            stated or profile.in_bytes_per_s or self.default_bytes_per_s,
        )

    def fabric(self, nodes: Sequence[NodeId]) -> Fabric | None:
        """The fabric of these nodes; None if some node's rate is not known."""
        ports = [port for port in map(self.port, nodes) if port is not None]
        if len(ports) < len(nodes):
            return None
        infos = [self.nodes[node] for node in nodes if node in self.nodes]
        trunks = {i.rack: float(i.trunk_bytes_per_s) for i in infos if i.trunk_bytes_per_s}
        local = min((i.local_bytes_per_s for i in infos if i.local_bytes_per_s), default=0)
        return Fabric(tuple(ports), self.overhead_s(nodes), trunks, float(local))

    def overhead_s(self, nodes: Iterable[NodeId]) -> float:
        """alpha: the least of what is assumed and what the nodes measured. A node that asks ahead
        of time, as pipelines do, also waits for the block before, so that it measures alpha or
        more."""
        profiles = (self.profiles.get(node, _UNMEASURED) for node in nodes)
        measured = (profile.overhead_s for profile in profiles if profile.overhead_s)
        return min([self.default_overhead_s, *measured])

    def block_s(self, nodes: Sequence[NodeId], model: ModelId, blocks: int) -> dict[int, float]:
        """By index of node, seconds in which a prompt of PROMPT_TOKENS runs through one of the
        model's blocks."""
        return {
            index: (timed.decode_s + (PROMPT_TOKENS - 1) * timed.prefill_s_per_token) / blocks
            for index, node in enumerate(nodes)
            for timed in self.profiles.get(node, _UNMEASURED).models
            if timed.model_id == model and timed.decode_s
        }

    def load_rates(self, nodes: Sequence[NodeId]) -> dict[int, float]:
        """By index of node, bytes/s from the node's own lower tiers."""
        return {index: self.disk_rate(node) for index, node in enumerate(nodes)}

    def expected(self, block_bytes: Sequence[int]) -> Callable[[Transfer], float]:
        """Seconds of a transfer that has its links for itself; inf where a rate is not known."""
        fabrics: dict[tuple[NodeId, NodeId], Fabric | None] = {}

        def seconds(transfer: Transfer) -> float:
            pair = (transfer.src, transfer.dst)
            if pair not in fabrics:
                fabrics[pair] = self.fabric(pair)
            fabric = fabrics[pair]
            if fabric is None:
                return math.inf
            return fabric.overhead_s + block_bytes[transfer.block] / fabric.rate(0, 1)

        return seconds
