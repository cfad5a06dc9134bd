"""What the planner knows of the cluster: nodes, what they hold, and the load that gateways see.

Reports come every second from every node, and every 100 ms from every gateway, mostly to say what
they said before. What they say is sorted by model when it changes, so that a question about one
model costs what concerns that model.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from services.planner.core.scaling import Demand
from shared.ids import GatewayId, Generation, InstanceId, ModelId, ModelName, NodeId
from shared.messages.load import GatewayLoad, ModelLoad
from shared.messages.pool import Holding, NodeInfo, NodeStatus, Profile, Tier

FRESH_S = 2.0
"""A gateway that is silent for so long, while others are heard, no longer counts."""
BLIND_S = 1.5
"""When nobody is heard for so long it is the planner who is cut off from the bus, and nothing is
known to have ended. Less than FRESH_S, so that no gateway is forgotten for that."""


@dataclass(frozen=True, slots=True)
class _Report:
    at: float
    fresh_from: float
    """Its age counts from here: later than `at` if nobody could be heard for a while."""
    models: dict[ModelName, ModelLoad]


@dataclass(slots=True)
class _Said:
    """A node's last word."""

    status: NodeStatus
    models: dict[ModelId, dict[Tier, frozenset[int]]] = field(default_factory=dict)
    """Its holdings."""


class Cluster:
    """Plain state; every change comes in through one of the `on_` methods."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, NodeInfo] = {}
        self._said: dict[NodeId, _Said] = {}
        self._holders: dict[ModelId, set[NodeId]] = {}
        """Nodes that say they hold something of the model, of whatever generation."""
        self._slots: int | None = None
        self._kv: dict[ModelId, int] = {}
        """KV positions of a replica, as a node that has the model open said last."""
        self._prefill: dict[ModelId, float] = {}
        """Seconds a prompt token takes, as a node that ran the model said last."""
        self._decode: dict[ModelId, float] = {}
        """Seconds a pass of one token takes, as such a node said."""
        self._loads: dict[GatewayId, _Report] = {}
        self.over: dict[NodeId, Generation] = {}
        """The generation of each node that ended last: news of it that comes late is none."""
        self._heard_at = float("-inf")

    # --- what happens ---

    def on_joined(self, info: NodeInfo) -> NodeInfo | None:
        """The node of that name as it was, if this is another generation of it."""
        if self.over.get(info.node) == info.generation:
            return None
        before = self.nodes.get(info.node)
        self.nodes[info.node] = info
        self._slots = None
        return before if before and before.generation != info.generation else None

    def on_gone(self, node: NodeId, generation: Generation) -> bool:
        """Whether that very generation was known."""
        self.over[node] = generation
        info = self.nodes.get(node)
        if info is None or info.generation != generation:
            return False
        del self.nodes[node]
        self._slots = None
        return True

    def on_revived(self, info: NodeInfo) -> None:
        """The registry, asked after it was told that this generation is over, says it lives: one
        that restarted does not know better, and its word counts with all others."""
        if self.over.get(info.node) == info.generation:
            del self.over[info.node]

    def on_status(self, status: NodeStatus, now: float) -> bool:
        """Whether the node has more room than it had."""
        self.on_sign_of_life(now)
        said = self._said.get(status.node)
        known = said.status if said is not None else None
        if known and (status.generation, status.seq) <= (known.generation, known.seq):
            return False
        if known is None or status.profile != known.profile:
            for each in status.profile.models:
                self._prefill[each.model_id] = each.prefill_s_per_token
                self._decode[each.model_id] = each.decode_s
        if said is not None and status.holdings == said.status.holdings:
            said.status = status
        else:
            self._sort(status)
        if status.kv_capacity:
            for model, tiers in self._said[status.node].models.items():
                if Tier.GPU in tiers:
                    self._kv[model] = status.kv_capacity
        return known is None or status.arena_free > known.arena_free

    def _sort(self, status: NodeStatus) -> None:
        node, before = status.node, self._said.get(status.node)
        for model in before.models if before is not None else ():
            self._holders[model].discard(node)
        said = self._said[node] = _Said(status)
        for holding in status.holdings:
            tiers = said.models.setdefault(holding.model_id, {})
            tiers[holding.tier] = tiers.get(holding.tier, frozenset()).union(holding.blocks)
            self._holders.setdefault(holding.model_id, set()).add(node)

    def on_load(self, load: GatewayLoad, now: float) -> None:
        self.on_sign_of_life(now)
        models = {each.model: each for each in load.models}
        self._loads[load.gateway] = _Report(now, now, models)

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
        held = self._models(node).get(model, {})
        return frozenset().union(*(held.get(tier, ()) for tier in tiers))

    def holders(self, model: ModelId, tiers: Iterable[Tier]) -> dict[NodeId, frozenset[int]]:
        """By name."""
        tiers = tuple(tiers)
        nodes = sorted(self._holders.get(model, ()))
        found = {node: self.held(node, model, tiers) for node in nodes}
        return {node: blocks for node, blocks in found.items() if blocks}

    def hosts(self, node: NodeId, model: ModelId) -> bool:
        """Whether the node has device memory set aside for the model, filled or not."""
        return Tier.GPU in self._models(node).get(model, {})

    def hosted(self, node: NodeId) -> list[ModelId]:
        """Models that the node has device memory set aside for."""
        return [model for model, tiers in self._models(node).items() if Tier.GPU in tiers]

    def profile(self, node: NodeId) -> Profile:
        """What a live node has measured itself."""
        said = self._of_node(node)
        return said.status.profile if said is not None else Profile()

    @property
    def slots(self) -> int:
        """The most of any node; at least 1."""
        if self._slots is None:
            self._slots = max((info.slots for info in self.nodes.values()), default=1)
        return self._slots

    def kv_tokens(self, model: ModelId) -> int:
        """KV positions of a complete replica; 0: not known."""
        return self._kv.get(model, 0)

    def prefill_s_per_token(self, model: ModelId) -> float:
        """Of a complete replica; 0: not known."""
        return self._prefill.get(model, 0.0)

    def decode_s(self, model: ModelId) -> float:
        """A pass of one token through a complete replica; 0: not known."""
        return self._decode.get(model, 0.0)

    def in_memory(self) -> Iterator[tuple[NodeId, Holding]]:
        """All that lies in the arenas of live nodes."""
        for node in self.nodes:
            said = self._of_node(node)
            for holding in said.status.holdings if said is not None else ():
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

    def running(self, model: ModelName) -> Mapping[InstanceId, int]:
        """Requests in flight on the model's instances, as the gateways last said."""
        loads = self._of(model)
        if len(loads) == 1:
            return loads[0].instance_requests
        total: Counter[InstanceId] = Counter()
        for load in loads:
            total.update(load.instance_requests)
        return total

    def requests_on(self, model: ModelName, instance: InstanceId) -> int:
        return self.running(model).get(instance, 0)

    def reported_since(self, at: float) -> bool:
        """Whether what gateways say is later than that, of all who still count."""
        return self._heard_at > at and all(report.at > at for report in self._reports())

    def _of_node(self, node: NodeId) -> _Said | None:
        """What the node that lives said."""
        info, said = self.nodes.get(node), self._said.get(node)
        if info is None or said is None or said.status.generation != info.generation:
            return None
        return said

    def _models(self, node: NodeId) -> dict[ModelId, dict[Tier, frozenset[int]]]:
        said = self._of_node(node)
        return said.models if said is not None else {}

    def _counts(self, report: _Report) -> bool:
        return self._heard_at - report.fresh_from <= FRESH_S

    def _reports(self) -> list[_Report]:
        """Of the gateways that still count."""
        return [report for report in self._loads.values() if self._counts(report)]

    def _of(self, model: ModelName) -> list[ModelLoad]:
        loads = (report.models.get(model) for report in self._reports())
        return [load for load in loads if load is not None]
