"""Which instance takes a request: the table of one model's instances, and the choices over it.

Load is measured in outstanding tokens (to prefill and to generate) per unit of capacity. Two
random choices are enough to balance it (Mitzenmacher: the power of two choices). An instance
without a free slot is no candidate. A request for which there is no candidate stays in the
gateway's queue, where the planner sees it, and a new instance gets it the moment it appears.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from services.gateway.core.others import NONE, Work
from services.gateway.core.requests import Request
from shared.ids import InstanceId, NodeId, RequestId
from shared.messages.instances import Instance, InstanceSet, InstanceState
from shared.slots import Account, weight

AVOID_S = 0.05
"""How long an instance is left alone after its first refusal."""
AVOID_MAX_S = 1.0
SMOOTHING = 16
"""The time from one token to the next is averaged over this many tokens."""
PROMPTS_AHEAD = 4096
"""Nothing more is sent to a node, or to an instance of capacity 1, that has more than this many
tokens of prompts left to prefill. They keep it busy, and further requests would wait there in vain
when another instance appears."""


MANY = 64
"""From so many routes on, a few are looked at before all are."""
PROBES = 16
_NOTHING = 1e-6
"""Sums of weights are no less than this, but for what rounding leaves of them."""


class Node:
    """What requests take of a node. Those of other gateways count as slots only."""

    __slots__ = ("account", "prompts", "prompts_ahead", "suspects")

    def __init__(self, slots: int, prompts_ahead: float) -> None:
        self.account = Account(slots)
        self.prompts_ahead = prompts_ahead
        self.prompts = 0.0
        """Tokens to prefill. A token of a path counts by the share of the model that the node's
        stage is."""
        self.suspects = 0
        """Suspects that are tried over this node, at most one."""

    @property
    def idle(self) -> bool:
        """Whether no request of the model runs here, as far as is known."""
        return not self.account.alone and self.account.on_paths < _NOTHING


@dataclass(frozen=True, slots=True)
class Place:
    """A stage of an instance, and what a request there takes of the stage's node."""

    node: Node
    weight: float
    """The share of a slot that a sequence takes (`shared.slots.weight`)."""
    share: float
    """The share of the model that the stage is."""


@dataclass(slots=True, eq=False)
class Route:
    """An instance, and what this gateway has running on it."""

    instance: Instance
    trace: str
    """The trace of the set that brought the instance."""
    requests: dict[RequestId, Request] = field(default_factory=dict)
    others: Work = NONE
    """What other gateways have running on it."""
    tokens: int = 0
    """Outstanding tokens: the sum of its requests' charges."""
    prompts: int = 0
    """Tokens to prefill, for requests that have no token from here yet."""
    avoid_until: float = float("-inf")
    refusals: int = 0
    """How many times in a row it refused."""
    served: bool = False
    """Whether it has given a token."""
    token_s: float = 0.0
    """Mean time from a request's token to its next one, lately. 0: not known."""
    told: bool = False
    """Whether it is moving, and what was decided for its requests was recorded."""
    places: tuple[Place, ...] = ()
    """Its stages."""
    prompts_ahead: float = PROMPTS_AHEAD

    def takes(self, now: float) -> bool:
        instance = self.instance
        return (
            instance.state is InstanceState.SERVING
            and len(self.requests) + self.others.requests < instance.slots
            and instance.capacity > 0
            and self.prompts <= self.prompts_ahead * instance.capacity
            and now >= self.avoid_until
            and all(self._fits(place) for place in self.places)
        )

    def _fits(self, place: Place) -> bool:
        """Whether the stage's node has room. All paths over a node share its slots, including paths
        that get no new requests. A replica has the slots that it was granted. Where a suspect is
        tried, nothing else begins."""
        node, stages = place.node, len(self.places)
        return (
            not node.suspects
            and node.prompts <= node.prompts_ahead
            and (stages == 1 or node.account.has_room(stages, place.weight))
        )

    def runs(self) -> Iterator[Request]:
        """The requests whose attempt runs here. Requests about to move here do not count."""
        return (r for r in self.requests.values() if r.instance == self.instance.id)

    def begin(self, request: Request, charge: int, prefill: int) -> None:
        """The request runs here from now on."""
        self.requests[request.id] = request
        self._try(int(request.suspect))
        self._count(1)
        self.charge(charge)
        self.prefill(prefill)

    def end(self, request: Request, charge: int, prefill: int) -> None:
        """The request runs here no longer. `charge` and `prefill` are what was left of them."""
        del self.requests[request.id]
        self._try(-int(request.suspect))
        self._count(-1)
        self.charge(-charge)
        self.prefill(-prefill)

    def charge(self, tokens: int) -> None:
        self.tokens += tokens

    def prefill(self, tokens: int) -> None:
        self.prompts += tokens
        for place in self.places:
            place.node.prompts += place.share * tokens

    def clear(self, request: Request) -> None:
        """A request that was tried here is a suspect no longer."""
        request.cleared_at = None
        self._try(-1)

    def _try(self, suspects: int) -> None:
        for place in self.places:
            place.node.suspects += suspects

    @property
    def idle(self) -> bool:
        """Whether nothing runs over its nodes, as far as is known."""
        return all(place.node.idle for place in self.places)

    def _count(self, sequences: int) -> None:
        for place in self.places:
            place.node.account.add(len(self.places), place.weight, sequences)

    def hear(self, others: Work) -> None:
        """Takes in what other gateways have running on it now."""
        self._count(others.requests - self.others.requests)
        self.others = others

    @property
    def load(self) -> float:
        return (self.tokens + self.others.tokens) / self.instance.capacity

    def measure(self, token_s: float) -> None:
        """Takes in the time from a request's token to its next one."""
        before = self.token_s or token_s
        self.token_s = before + (token_s - before) / SMOOTHING

    def avoid(self, now: float) -> None:
        """Nothing is sent here for a while, which doubles with each refusal that follows. Refusals
        that come meanwhile answer attempts of before, and say nothing new."""
        if now >= self.avoid_until:
            self.avoid_until = now + pause(self.refusals)
            self.refusals += 1


class Table:
    """The instances of one model, as the newest set has them."""

    def __init__(
        self,
        prompts_ahead: float = PROMPTS_AHEAD,
        others: Callable[[], Mapping[InstanceId, Work]] = dict,
    ) -> None:
        """`others`: what other gateways have running now, by instance."""
        self.version: tuple[int, int] = (-1, -1)
        """(epoch, revision) of the newest set."""
        self.routes: dict[InstanceId, Route] = {}
        self.in_order: list[Route] = []
        """The routes, to be drawn from."""
        self.moving: list[Route] = []
        """Those that move."""
        self.fixed: int | None = None
        """How many replicas an operator keeps the model at. None: the autoscaler decides."""
        self.within_s = 0.0
        """See InstanceSet."""
        self.decode_s = 0.0
        """Seconds of a pass of one token through the model. 0: not known."""
        self.prefill_s = 0.0
        """Seconds that each further token adds to a pass. 0: not known."""
        self.instance_slots = 1
        """The slots of the largest replica."""
        self._prompts_ahead = prompts_ahead
        self._others = others
        self._nodes: dict[NodeId, Node] = {}
        """The nodes that any route leads over."""

    @property
    def slots(self) -> int:
        """Requests that the instances take at once."""
        serving = (route.instance for route in self.routes.values())
        return sum(i.slots for i in serving if i.state is InstanceState.SERVING)

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
        old, self.routes = self.routes, {}
        for instance in new.instances:
            route = old.pop(instance.id, None) or self._route(instance, new)
            route.instance = instance
            self.routes[instance.id] = route
        self._arrange()
        for node, slots in new.node_slots.items():
            if node in self._nodes:
                self._nodes[node].account.slots = slots
        self.hear_others(self.routes)
        self._forget_nodes(old.values())
        replicas = (i.slots for i in new.instances if i.is_replica)
        self.instance_slots = max(replicas, default=1)
        return list(old.values())

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
        return Route(instance, new.trace, places=tuple(places), prompts_ahead=self._prompts_ahead)

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
        self._arrange()
        self._forget_nodes(gone)
        return gone

    def _arrange(self) -> None:
        self.in_order = list(self.routes.values())
        self.moving = [r for r in self.in_order if r.instance.state is InstanceState.MOVING]

    def _forget_nodes(self, gone: Collection[Route]) -> None:
        """Forgets the nodes that no route leads over any more."""
        for route in gone:
            route.hear(NONE)
        over = {stage.node for route in gone for stage in route.instance.stages}
        for route in self.routes.values() if over else ():
            over.difference_update(stage.node for stage in route.instance.stages)
        for node in over:
            del self._nodes[node]


def pause(refusals: int) -> float:
    """How long to keep away after a refusal that `refusals` others came before."""
    return min(AVOID_S * float(1 << min(refusals, 16)), AVOID_MAX_S)


def choose(
    routes: Iterable[Route],
    now: float,
    first: float,
    second: float,
    shunned: Mapping[InstanceId, float],
) -> Route | None:
    """The less loaded of two candidates drawn at random; None if there is no candidate.

    `first` and `second` are uniform in [0, 1); `shunned` names instances that are no candidates
    before some time.
    """
    candidates = [route for route in routes if is_free(route, now, shunned)]
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    i = int(first * len(candidates))
    j = int(second * (len(candidates) - 1))
    if j >= i:
        j += 1
    a, b = candidates[i], candidates[j]
    return a if a.load <= b.load else b


def probe(
    routes: Sequence[Route],
    now: float,
    draw: Callable[[], float],
    shunned: Mapping[InstanceId, float],
) -> Route | None:
    """What `choose` would choose, found by looking at a few of many routes. None: those were no
    candidates, and all have to be looked at.

    Two different candidates, each the first that a series of draws over all routes meets, are two
    candidates drawn at random.
    """
    if len(routes) < MANY:
        return None
    found: Route | None = None
    for _ in range(PROBES):
        route = routes[int(draw() * len(routes))]
        if route is found or not is_free(route, now, shunned):
            continue
        if found is not None:
            return found if found.load <= route.load else route
        found = route
    return None


@dataclass(frozen=True, slots=True)
class Routing:
    """How a gateway chooses. Simulations compare other ways."""

    prompts_ahead: float = PROMPTS_AHEAD
    choose: Callable[
        [Iterable[Route], float, float, float, Mapping[InstanceId, float]], Route | None
    ] = choose
    refuses: bool = True
    """Whether requests are refused that would miss the model's objective."""


OURS = Routing()


def refuge(
    routes: Iterable[Route], now: float, shunned: Mapping[InstanceId, float]
) -> Route | None:
    """The instance for a request that is to leave its path: the replica with the least load.

    Paths are taken only where no replica serves at all. None: all that serve are full, or are
    shunned (see `choose`).
    """
    serving = [route for route in routes if route.instance.state is InstanceState.SERVING]
    replicas = [route for route in serving if route.instance.is_replica]
    free = [route for route in replicas or serving if is_free(route, now, shunned)]
    return min(free, key=lambda route: (route.load, len(route.requests)), default=None)


def secluded(
    routes: Iterable[Route], now: float, shunned: Mapping[InstanceId, float]
) -> Route | None:
    """The instance for a suspect: one over whose nodes nothing runs, if there is one, and a replica
    rather than a path, because it brings fewer nodes into danger. None: see `choose`."""
    free = [route for route in routes if is_free(route, now, shunned)]
    order = [(not route.idle, len(route.places), route.load) for route in free]
    return free[order.index(min(order))] if free else None


def is_free(route: Route, now: float, shunned: Mapping[InstanceId, float]) -> bool:
    return route.takes(now) and shunned.get(route.instance.id, now) <= now


@dataclass(frozen=True, slots=True)
class Switch:
    """How long a request whose path moves waits for its last token if it stays, and if it moves.
    In seconds."""

    stay_s: float
    move_s: float

    @property
    def stays(self) -> bool:
        return self.stay_s <= self.move_s


def switch(
    table: Table, path: Route, target: Route, *, remaining: int, context: int
) -> Switch | None:
    """The costs of a request's two ways to its end. It may stay on its path, where its KV is, or
    move to a complete node, which computes the KV of its context anew. None: not measured yet.

    `remaining` is the number of tokens to come, `context` the number of tokens so far. On the path
    each token takes as long as tokens took there lately. On the target the prompts that came before
    are prefilled first, and then the request's context. After that each token takes a pass with all
    requests there. Both times are as nodes measured them. It is left out that a path keeps its
    nodes busy, because these are the complete nodes: its rows ride on sweeps that run anyway, or
    that would run for the same tokens on the target. What a move adds is the prefill.

    lambdaScale (section 4) always recomputes. BlitzScale (section 5.2) lets requests end where
    their KV is. Which of them is right depends on `remaining` and `context`.
    """
    if not (path.token_s and table.decode_s):
        return None
    prefill = target.prompts + context
    token_s = table.decode_s + len(target.requests) * table.prefill_s
    return Switch(remaining * path.token_s, prefill * table.prefill_s + remaining * token_s)
