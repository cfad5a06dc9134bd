"""The instances of one model."""

from collections.abc import Callable, Collection, Iterable, Mapping

from services.gateway.core.carriers import Carriers
from services.gateway.core.others import NONE, Work
from services.gateway.core.prefixes import Prefixes
from services.gateway.core.ring import Ring, points_of
from services.gateway.core.routes import AHEAD_S, PROMPTS_AHEAD, Node, Place, Route, Total
from services.gateway.core.sessions import Sessions
from shared.ids import InstanceId, NodeId
from shared.messages.instances import Instance, InstanceSet, InstanceState, Role
from shared.slots import weight

NOTHING: Mapping[InstanceId, float] = {}


class Table:
    """The instances of one model, as the newest set has them."""

    def __init__(
        self,
        prompts_ahead: float = PROMPTS_AHEAD,
        others: Callable[[], Mapping[InstanceId, Work]] = dict,
        ahead_s: float = AHEAD_S,
    ) -> None:
        """`others`: what other gateways have running now, by instance."""
        self.version: tuple[int, int] = (-1, -1)
        """(epoch, revision) of the newest set."""
        self.routes: dict[InstanceId, Route] = {}
        self.open: list[Route] = []
        """The routes that have room, in no order. A node on their way may be full all the same."""
        self.total = Total()
        self.capacity = self.fastest = 0.0
        """Of all instances together, and of the fastest."""
        self.replicas: dict[NodeId, Route] = {}
        """The complete replicas, by node."""
        self.lasting: dict[NodeId, Route] = {}
        """The replicas and groups, by their leaders."""
        self.short: dict[NodeId, Route] = {}
        """Those of them on which a request waits for KV, as their leaders said last."""
        self.prefixes = Prefixes()
        self.carriers = Carriers()
        self.sessions = Sessions()
        self._points: dict[NodeId, int] = {}
        """How many points each replica that serves has on the ring."""
        self._ring: Ring | None = None
        """None: it has to be made anew once it is needed."""
        self.moving: list[Route] = []
        """Those that move."""
        self.prefilling: list[Route] = []
        self.decoding: list[Route] = []
        """Those that do only this (`Role`)."""
        self.pairs: list[Route] = []
        """Those that serve, of a node and another one behind it."""
        self.fixed: int | None = None
        """How many replicas an operator keeps the model at. None: the autoscaler decides."""
        self.within_s = 0.0
        """See InstanceSet."""
        self.decode_s = 0.0
        """Seconds of a pass of one token through the model. 0: not known."""
        self.prefill_s = 0.0
        """Seconds that each further token adds to a pass. 0: not known."""
        self.kv_s = 0.0
        """Seconds in which the KV of a position moves to another node. 0: it does not."""
        self.instance_slots = 1
        """The slots of the largest replica."""
        self._most_ahead, self._ahead_s = prompts_ahead, ahead_s
        self._others = others
        self._nodes: dict[NodeId, Node] = {}
        """The nodes that any route leads over."""

    @property
    def slots(self) -> int:
        """Requests that the instances take at once."""
        serving = (route.instance for route in self.routes.values())
        return sum(i.slots for i in serving if i.state is InstanceState.SERVING)

    @property
    def serves(self) -> bool:
        """Whether any instance takes new requests, now or when others have ended."""
        routes = self.routes.values()
        return any(route.instance.state is InstanceState.SERVING for route in routes)

    def apply(self, new: InstanceSet) -> list[Route]:
        """Takes a set over unless a newer one was seen; returns the routes that are gone.

        The version that is already known is applied again: it brings back an instance that was
        dropped for a node which then turned out to live.
        """
        if (new.epoch, new.revision) < self.version:
            return []
        self.version = (new.epoch, new.revision)
        self.fixed, self.within_s = new.fixed, new.within_s
        self.decode_s, self.prefill_s = new.decode_s, new.prefill_s_per_token
        self.kv_s = new.kv_s_per_token
        ahead = self._prompts_ahead
        for each in self._nodes.values():
            each.prompts_ahead = ahead
        old, self.routes = self.routes, {}
        for instance in new.instances:
            route = old.pop(instance.id, None) or self._route(instance, new)
            route.become(instance, ahead)
            self.routes[instance.id] = route
        self._sum_up()
        for node, slots in new.node_slots.items():
            if node in self._nodes:
                self._nodes[node].account.slots = slots
        self.hear_others(self.routes)
        self._forget(old.values())
        replicas = (i.slots for i in new.instances if i.lasts)
        self.instance_slots = max(replicas, default=1)
        return list(old.values())

    @property
    def _prompts_ahead(self) -> float:
        """Tokens of prompts that keep a node busy."""
        if not self.prefill_s:
            return self._most_ahead
        return min(self._most_ahead, self._ahead_s / self.prefill_s)

    def _route(self, instance: Instance, new: InstanceSet) -> Route:
        stages = instance.stages
        blocks = stages[-1].stop
        places = []
        for stage in stages:
            if (node := self._nodes.get(stage.node)) is None:
                node = self._nodes[stage.node] = Node(
                    new.node_slots.get(stage.node, instance.slots), self._prompts_ahead
                )
            share = (stage.stop - stage.start) / blocks
            places.append(Place(node, weight(stages, stage, blocks), share))
        return Route(
            instance,
            new.trace,
            places=tuple(places),
            prompts_ahead=self._prompts_ahead,
            open=self.open,
            total=self.total,
        )

    def hear_kv(self, node: NodeId, positions: int, now: float) -> bool:
        """A node says how many positions of KV are free there. Returns whether those are more."""
        route = self.lasting.get(node)
        if route is None:
            return False
        before = route.kv_left(now)
        route.hear_kv(positions, now)
        if route.kv_free < 0:
            self.short[node] = route
        else:
            self.short.pop(node, None)
        return route.kv_free > before

    def hear_others(self, changed: Iterable[InstanceId]) -> bool:
        """Takes in what other gateways have running now on these instances. Returns whether that is
        less on any of them."""
        others, less = self._others(), False
        for key in changed:
            if route := self.routes.get(key):
                now = others.get(key, NONE)
                less = less or now.requests < route.others.requests
                route.hear(now)
        return less

    def drop_node(self, node: NodeId) -> list[Route]:
        """Removes the routes that lead over a node which is gone, and returns them."""
        gone = [
            route
            for route in self.routes.values()
            if any(stage.node == node for stage in route.instance.stages)
        ]
        for route in gone:
            del self.routes[route.instance.id]
        self._sum_up()
        self._forget(gone)
        return gone

    def leads_over(self, node: NodeId) -> bool:
        """Whether any route leads over the node."""
        return node in self._nodes

    def has_free(self, now: float, shunned: Mapping[InstanceId, float] = NOTHING) -> bool:
        """Whether a request may begin on any instance now, but for its KV."""
        return any(route.begins(now, shunned) for route in self.open)

    @property
    def ring(self) -> Ring:
        """The homes of sessions: the replicas that serve."""
        if self._ring is None:
            self._ring = Ring(self._points)
        return self._ring

    def _sum_up(self) -> None:
        """To be called when the set of routes, or what it says of an instance, has changed."""
        routes = self.routes.values()
        self.moving = [r for r in routes if r.instance.state is InstanceState.MOVING]
        self.lasting = {r.instance.leader: r for r in routes if r.instance.lasts}
        self.short = {n: r for n, r in self.short.items() if self.lasting.get(n) is r}
        self.replicas = {n: r for n, r in self.lasting.items() if r.instance.is_replica}
        serving = [r for r in routes if r.instance.state is InstanceState.SERVING]
        self.pairs = [r for r in serving if r.is_pair]
        self.prefilling = [r for r in serving if r.instance.role is Role.PREFILL]
        self.decoding = [r for r in serving if r.instance.role is Role.DECODE]
        points = {
            r.instance.leader: points_of(r.instance.capacity)
            for r in serving
            if r.instance.is_replica and r.instance.role is not Role.DECODE
        }
        if points != self._points:
            self._points, self._ring = points, None
        capacities = [route.instance.capacity for route in routes]
        self.capacity, self.fastest = sum(capacities), max(capacities, default=0.0)

    def _forget(self, gone: Collection[Route]) -> None:
        """Forgets routes, and the nodes that no other route leads over."""
        for route in gone:
            route.leave()
        over = {stage.node for route in gone for stage in route.instance.stages}
        for route in self.routes.values() if over else ():
            over.difference_update(stage.node for stage in route.instance.stages)
        for node in over:
            del self._nodes[node]
