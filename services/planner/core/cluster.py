"""What the planner knows of the cluster: nodes, what they hold, and the load that gateways see."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from services.planner.core.scaling import Demand
from shared.ids import GatewayId, Generation, InstanceId, ModelId, ModelName, NodeId
from shared.messages.load import GatewayLoad, ModelLoad
from shared.messages.pool import Holding, NodeInfo, NodeStatus, Tier

FRESH_S = 2.0
"""A gateway that is silent for so long, while others are heard, no longer counts."""
BLIND_S = 1.5
"""When nobody is heard for so long it is the planner who is cut off from the bus, and nothing is
known to have ended. Less than FRESH_S, so that no gateway is forgotten for that."""


@dataclass(frozen=True, slots=True)
class _Report:
    load: GatewayLoad
    at: float
    fresh_from: float
    """Its age counts from here: later than `at` if nobody could be heard for a while."""


class Cluster:
    """Plain state; every change comes in through one of the `on_` methods."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, NodeInfo] = {}
        self._status: dict[NodeId, NodeStatus] = {}
        self._loads: dict[GatewayId, _Report] = {}
        self._over: dict[NodeId, Generation] = {}
        """The generation of each node that ended last: news of it that comes late is none."""
        self._heard_at = float("-inf")

    # --- what happens ---

    def on_joined(self, info: NodeInfo) -> NodeInfo | None:
        """The node of that name as it was, if this is another generation of it."""
        if self._over.get(info.node) == info.generation:
            return None
        before = self.nodes.get(info.node)
        self.nodes[info.node] = info
        return before if before and before.generation != info.generation else None

    def on_gone(self, node: NodeId, generation: Generation) -> bool:
        """Whether that very generation was known."""
        self._over[node] = generation
        info = self.nodes.get(node)
        if info is None or info.generation != generation:
            return False
        del self.nodes[node]
        return True

    def on_status(self, status: NodeStatus, now: float) -> bool:
        """Whether the node has more room than it had."""
        self.on_sign_of_life(now)
        known = self._status.get(status.node)
        if known and (status.generation, status.seq) <= (known.generation, known.seq):
            return False
        self._status[status.node] = status
        return known is None or status.arena_free > known.arena_free

    def on_load(self, load: GatewayLoad, now: float) -> None:
        self.on_sign_of_life(now)
        self._loads[load.gateway] = _Report(load, at=now, fresh_from=now)

    def on_sign_of_life(self, now: float) -> None:
        """Something came over the bus."""
        live = {gateway: r for gateway, r in self._loads.items() if self._counts(r)}
        if self.blind(now):
            live = {gateway: replace(r, fresh_from=now) for gateway, r in live.items()}
        self._loads = live
        self._heard_at = now

    # --- what is known ---

    def blind(self, now: float) -> bool:
        """Nothing was heard from anybody: what is known may be long over."""
        return now - self._heard_at > BLIND_S

    def held(self, node: NodeId, model: ModelId, tiers: Iterable[Tier]) -> frozenset[int]:
        """Blocks that a live node says it holds in any of the tiers."""
        wanted = set(tiers)
        return frozenset(
            block
            for holding in self._holdings(node)
            if holding.model_id == model and holding.tier in wanted
            for block in holding.blocks
        )

    def holders(self, model: ModelId, tiers: Iterable[Tier]) -> dict[NodeId, frozenset[int]]:
        tiers = tuple(tiers)
        found = {node: self.held(node, model, tiers) for node in self.nodes}
        return {node: blocks for node, blocks in found.items() if blocks}

    def hosts(self, node: NodeId, model: ModelId) -> bool:
        """Whether the node has device memory set aside for the model, filled or not."""
        return any(h.model_id == model and h.tier is Tier.GPU for h in self._holdings(node))

    def in_memory(self) -> Iterator[tuple[NodeId, Holding]]:
        """All that lies in the arenas of live nodes."""
        for node in self.nodes:
            for holding in self._holdings(node):
                if holding.tier is not Tier.DISK:
                    yield node, holding

    def demand(self, model: ModelName) -> Demand:
        loads = self._of(model)
        return Demand(
            queued_requests=sum(load.queued_requests for load in loads),
            queued_tokens=sum(load.queued_tokens for load in loads),
            running_requests=sum(load.running_requests for load in loads),
            running_tokens=sum(load.running_tokens for load in loads),
            prompt_tokens=sum(load.prompt_tokens for load in loads),
        )

    def requests_on(self, model: ModelName, instance: InstanceId) -> int:
        """Requests in flight on an instance, as the gateways last said."""
        return sum(load.instance_requests.get(instance, 0) for load in self._of(model))

    def reported_since(self, at: float) -> bool:
        """Whether what gateways say is later than that, of all who still count."""
        return self._heard_at > at and all(report.at > at for report in self._reports())

    def _holdings(self, node: NodeId) -> tuple[Holding, ...]:
        info, status = self.nodes.get(node), self._status.get(node)
        if info is None or status is None or status.generation != info.generation:
            return ()
        return status.holdings

    def _counts(self, report: _Report) -> bool:
        return self._heard_at - report.fresh_from <= FRESH_S

    def _reports(self) -> list[_Report]:
        """Of the gateways that still count."""
        return [report for report in self._loads.values() if self._counts(report)]

    def _of(self, model: ModelName) -> list[ModelLoad]:
        return [
            load for report in self._reports() for load in report.load.models if load.model == model
        ]
