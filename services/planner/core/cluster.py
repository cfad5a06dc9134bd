"""What the planner knows of the cluster: nodes, what they hold, and the load that gateways see."""

from collections.abc import Iterable

from services.planner.core.scaling import Demand
from shared.ids import GatewayId, Generation, InstanceId, ModelId, ModelName, NodeId
from shared.messages.load import GatewayLoad, ModelLoad
from shared.messages.pool import NodeInfo, NodeStatus, Tier

LOAD_FRESH_S = 2.0
"""A gateway that is silent for longer no longer counts."""


class Cluster:
    """Plain state; every change comes in through one of the `on_` methods."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, NodeInfo] = {}
        self._status: dict[NodeId, NodeStatus] = {}
        self._loads: dict[GatewayId, tuple[float, GatewayLoad]] = {}

    def on_joined(self, info: NodeInfo) -> None:
        self.nodes[info.node] = info
        status = self._status.get(info.node)
        if status is not None and status.generation != info.generation:
            del self._status[info.node]

    def on_gone(self, node: NodeId, generation: Generation) -> bool:
        """Whether that very generation was known."""
        info = self.nodes.get(node)
        if info is None or info.generation != generation:
            return False
        del self.nodes[node]
        self._status.pop(node, None)
        return True

    def on_status(self, status: NodeStatus) -> None:
        known = self._status.get(status.node)
        if known is None or (status.generation, status.seq) > (known.generation, known.seq):
            self._status[status.node] = status

    def on_load(self, load: GatewayLoad, now: float) -> None:
        self._loads[load.gateway] = (now, load)

    def held(self, node: NodeId, model: ModelId, tiers: Iterable[Tier]) -> frozenset[int]:
        """Blocks that a live node says it holds in any of the tiers."""
        info, status = self.nodes.get(node), self._status.get(node)
        if info is None or status is None or status.generation != info.generation:
            return frozenset()
        wanted = set(tiers)
        return frozenset(
            block
            for holding in status.holdings
            if holding.model_id == model and holding.tier in wanted
            for block in holding.blocks
        )

    def holders(self, model: ModelId, tiers: Iterable[Tier]) -> dict[NodeId, frozenset[int]]:
        tiers = tuple(tiers)
        found = {node: self.held(node, model, tiers) for node in self.nodes}
        return {node: blocks for node, blocks in found.items() if blocks}

    def demand(self, model: ModelName, now: float) -> Demand:
        loads = self._fresh(model, now)
        return Demand(
            queued_requests=sum(load.queued_requests for load in loads),
            queued_tokens=sum(load.queued_tokens for load in loads),
            running_requests=sum(load.running_requests for load in loads),
            running_tokens=sum(load.running_tokens for load in loads),
        )

    def requests_on(self, model: ModelName, instance: InstanceId, now: float) -> int:
        """Requests in flight on an instance, as the gateways last said."""
        return sum(load.instance_requests.get(instance, 0) for load in self._fresh(model, now))

    def _fresh(self, model: ModelName, now: float) -> list[ModelLoad]:
        return [
            load
            for at, report in self._loads.values()
            if now - at <= LOAD_FRESH_S
            for load in report.models
            if load.model == model
        ]
