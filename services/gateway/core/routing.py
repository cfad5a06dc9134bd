"""Which instance takes a request: the table of one model's instances, and the choices over it.

Load is measured in outstanding tokens (to prefill and to generate) per unit of capacity; two
random choices are enough to balance it (Mitzenmacher: the power of two choices). An instance with
no free slot is no candidate: what finds none stays in the gateway's queue, where the planner sees
it and from where a new instance gets it the moment it appears.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.gateway.core.requests import Request
from shared.ids import InstanceId, NodeId, RequestId
from shared.messages.instances import Instance, InstanceSet, InstanceState

AVOID_S = 0.05
"""How long an instance is left alone after a refusal; doubles with each one that follows. The
request that it refused keeps away twice as long, so that others go first: it may be too large."""
AVOID_MAX_S = 1.0
SMOOTHING = 16
"""Tokens over which the time between two is averaged."""
PROMPTS_AHEAD = 4096
"""Tokens of prompts that an instance of capacity 1 may have before it (one prompt in any case):
enough to keep it busy. More would wait there in vain when another instance appears."""


@dataclass(slots=True, eq=False)
class Route:
    """An instance and what this gateway has running on it."""

    instance: Instance
    trace: str
    """Of the set that brought the instance."""
    requests: dict[RequestId, Request] = field(default_factory=dict)
    tokens: int = 0
    """Outstanding: the sum of its requests' charges."""
    prompts: int = 0
    """Tokens to prefill, of requests that have no token from here yet."""
    avoid_until: float = float("-inf")
    refusals: int = 0
    """In a row."""
    served: bool = False
    """It has given a token."""
    token_s: float = 0.0
    """Time from a request's token to its next one, lately; 0: not known."""
    told: bool = False
    """It moves, and what became of its requests was recorded."""

    def takes(self, now: float) -> bool:
        instance = self.instance
        return (
            instance.state is InstanceState.SERVING
            and len(self.requests) < instance.slots
            and instance.capacity > 0
            and self.prompts <= PROMPTS_AHEAD * instance.capacity
            and now >= self.avoid_until
        )

    @property
    def load(self) -> float:
        return self.tokens / self.instance.capacity

    def measure(self, token_s: float) -> None:
        """A request's token came so long after the one before."""
        before = self.token_s or token_s
        self.token_s = before + (token_s - before) / SMOOTHING

    def avoid(self, now: float) -> None:
        self.avoid_until = now + pause(self.refusals)
        self.refusals += 1


class Table:
    """The instances of one model, as the newest set has them."""

    def __init__(self) -> None:
        self.version: tuple[int, int] = (-1, -1)
        """(epoch, revision) of the newest set."""
        self.routes: dict[InstanceId, Route] = {}
        self.prompts = 0
        """Tokens to prefill, of all requests that have no token from where they are."""
        self.decode_s = self.prefill_s = 0.0
        """Of a pass of one token through the model, 0: not known; and of each token more."""
        self._capacity = 0.0
        """Of all that serve."""

    @property
    def has_room(self) -> bool:
        """For one more prompt. Paths that are no longer used have prompts before them as well."""
        return self.prompts <= PROMPTS_AHEAD * self._capacity

    def apply(self, new: InstanceSet) -> list[Route]:
        """Takes a set over unless a newer one was seen; returns the routes that are gone.

        The version that is already known is applied again: it brings back an instance that was
        dropped for a node which then turned out to live.
        """
        if (new.epoch, new.revision) < self.version:
            return []
        self.version = (new.epoch, new.revision)
        self.decode_s, self.prefill_s = new.decode_s, new.prefill_s_per_token
        old, self.routes = self.routes, {}
        for instance in new.instances:
            route = old.pop(instance.id, None) or Route(instance, new.trace)
            route.instance = instance
            self.routes[instance.id] = route
        self._count()
        return list(old.values())

    def drop_node(self, node: NodeId) -> list[Route]:
        """The routes that led over a node which is gone; they are gone too."""
        gone = [
            route
            for route in self.routes.values()
            if any(stage.node == node for stage in route.instance.stages)
        ]
        for route in gone:
            del self.routes[route.instance.id]
        self._count()
        return gone

    def _count(self) -> None:
        instances = [route.instance for route in self.routes.values()]
        self._capacity = sum(i.capacity for i in instances if i.state is InstanceState.SERVING)


def pause(refusals: int) -> float:
    """How long to keep away after one more refusal."""
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
    candidates = [
        route for route in routes if route.takes(now) and shunned.get(route.instance.id, now) <= now
    ]
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    i = int(first * len(candidates))
    j = int(second * (len(candidates) - 1))
    if j >= i:
        j += 1
    a, b = candidates[i], candidates[j]
    return a if a.load <= b.load else b


def refuge(routes: Iterable[Route], now: float) -> Route | None:
    """Where a request goes that must leave its path: the replica with the least load.

    Paths are taken only where no replica serves at all; None while all that serve are full.
    """
    serving = [route for route in routes if route.instance.state is InstanceState.SERVING]
    replicas = [route for route in serving if route.instance.is_replica]
    free = [route for route in replicas or serving if route.takes(now)]
    return min(free, key=lambda route: (route.load, len(route.requests)), default=None)


@dataclass(frozen=True, slots=True)
class Switch:
    """What a request whose path moves has left to wait for its last token, either way; in s."""

    stay_s: float
    move_s: float

    @property
    def stays(self) -> bool:
        return self.stay_s <= self.move_s


def switch(
    table: Table, path: Route, target: Route, *, remaining: int, context: int
) -> Switch | None:
    """Keeps a request with so many tokens to come its KV, and ends on its path, or does it leave
    for a complete node, where the KV of its context is computed anew? None: not measured yet.

    On the path a token takes what tokens there took lately. On the target the prompts before it and
    its own context are prefilled first; then a token takes a pass with the requests that are there
    and its own. Both are as nodes measured them. That a path keeps its nodes busy costs the others
    nothing that counts: they are the complete nodes, and its rows ride on sweeps that run anyway,
    or would run for the same tokens on the target. What recomputing adds is the prefill.

    lambdaScale (section 4) recomputes always, BlitzScale (section 5.2) lets requests end where
    their KV is: each is right for some rest and context.
    """
    if not (path.token_s and table.decode_s):
        return None
    prefill = target.prompts + context
    token_s = table.decode_s + len(target.requests) * table.prefill_s
    return Switch(remaining * path.token_s, prefill * table.prefill_s + remaining * token_s)
