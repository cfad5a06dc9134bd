"""Which instance takes a request: the choices over the instances of one model.

Load is measured in outstanding tokens (to prefill and to generate), those of other gateways
included, per unit of capacity. Two random choices are enough to balance it (Mitzenmacher: the power
of two choices in randomized load balancing, section 3). Where speeds are mixed, candidates are
drawn in proportion to their capacity. An instance without a free slot is no candidate. A request
for which there is no candidate stays in the gateway's queue, where the planner sees it, and a new
instance gets it the moment it appears. A node computes one prompt after the other, so candidates
where no prompt is before this one come first: most of the wait for a first token is spent behind
other prompts, and outstanding tokens do not tell prompts from what is still to be generated.

Nodes say with each token how much KV is free there. Outstanding tokens do not show that: a request
with a long prompt has few of them once that is prefilled, and keeps its KV until its last token. So
of the candidates those count that have KV left for the request. Where none has, it waits inside the
node with the most, which begins it in the very step in which enough comes free, or goes to another
one that has enough earlier (`moves`). One request waits inside a node; all others stay in the
queue, in their order, so that a longer prompt is not overtaken by shorter ones that may use the KV
which comes free.

In the queue the requests of a tenant go in the order in which idle instances would give their first
tokens: by when they came, and what their prefill takes (earliest due date: Jackson, Scheduling a
production line to minimize maximum tardiness, 1955). So where many wait, a prompt lets shorter ones
go first that came a little later. Requests wait less in the mean, and fewer of them wait for long.
And nobody is overtaken by what comes later than its own first token was due, however short that is.
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from services.gateway.core.requests import Request
from services.gateway.core.routes import AHEAD_S, PROMPTS_AHEAD, Route
from services.gateway.core.table import Table
from shared.ids import InstanceId
from shared.messages.instances import InstanceState

FEW = 8
"""All of so few instances with room are looked at."""
PROBES = 16
"""Of more, this many are drawn before all are looked at."""
Draw = Callable[[], float]
"""Uniform numbers in [0, 1)."""


def choose(table: Table, request: Request, now: float, draw: Draw) -> Route | None:
    """The less loaded of two different candidates, each drawn with a probability in proportion to
    its capacity. None: there is no candidate."""
    return _probe(table, request, now, draw) or _survey(table, request, now, draw)


def _probe(table: Table, request: Request, now: float, draw: Draw) -> Route | None:
    """Finds two candidates by a few draws. None: they did not find two.

    A route that is drawn evenly, and taken with a probability of its capacity over the largest, is
    drawn in proportion to its capacity.
    """
    routes, fastest = table.open, table.fastest
    if len(routes) <= FEW:
        return None
    found: Route | None = None
    for _ in range(PROBES):
        route = routes[int(draw() * len(routes))]
        if route is found or draw() * fastest >= route.instance.capacity:
            continue
        if route.begins(now, request.shunned) and route.kv_left(now) >= request.context:
            if found is not None:
                return _lighter(found, route, request)
            found = route
    return None


def _survey(table: Table, request: Request, now: float, draw: Draw) -> Route | None:
    """Looks at all candidates."""
    free = [route for route in table.open if route.begins(now, request.shunned)]
    return _two(free, request, now, draw)


def with_kv(free: Sequence[Route], request: Request, now: float) -> list[Route]:
    """Those of them that have KV left for the request, as far as is known. If none has, those with
    the most left, of those on which none waits for KV."""
    enough = roomy(free, request, now)
    if enough:
        return enough
    waiting = [route for route in free if route.lets_wait]
    most = max((route.kv_left(now) for route in waiting), default=0.0)
    return [route for route in waiting if route.kv_left(now) >= most]


def roomy(free: Iterable[Route], request: Request, now: float) -> list[Route]:
    """Those of them that have KV left for the request."""
    return [route for route in free if route.kv_left(now) >= request.context]


def at_once(routes: list[Route]) -> list[Route]:
    """Those of them where no prompt would be before another, if there are any."""
    return [route for route in routes if route.begins_at_once] or routes


def _two(free: Sequence[Route], request: Request, now: float, draw: Draw) -> Route | None:
    """The less loaded of two with KV left."""
    left = at_once(with_kv(free, request, now))
    if len(left) < 2:
        return left[0] if left else None
    first = left.pop(_drawn(left, draw))
    return _lighter(first, left[_drawn(left, draw)], request)


def _drawn(routes: Sequence[Route], draw: Draw) -> int:
    sums = list(accumulate(route.instance.capacity for route in routes))
    return min(bisect(sums, draw() * sums[-1]), len(sums) - 1)


def _lighter(a: Route, b: Route, request: Request) -> Route:
    return min(at_once([a, b]), key=lambda route: route.load(request.work))


@dataclass(frozen=True, slots=True)
class Routing:
    """How a gateway chooses. Simulations compare other ways."""

    prompts_ahead: float = PROMPTS_AHEAD
    ahead_s: float = AHEAD_S
    """What a node is sent at most: tokens of prompts, and seconds that it takes to prefill them."""
    choose: Callable[[Table, Request, float, Draw], Route | None] = choose
    affinity: bool = True
    """Whether requests go where their KV lies (`affinity`)."""
    by_due_date: bool = True
    """Whether the requests of a tenant go by when their first tokens are due. If not, they go in
    the order in which they came."""
    refuses: bool = True
    """Whether requests are refused that would miss the model's objective."""


OURS = Routing()


def refuge(routes: Iterable[Route], request: Request, now: float) -> Route | None:
    """The instance for a request that is to leave its path: of the replicas and groups with KV left
    the one with the least load.

    Paths are taken only where neither serves at all. None: all that serve are full, or are
    shunned (see `choose`).
    """
    serving = [route for route in routes if route.instance.state is InstanceState.SERVING]
    replicas = [route for route in serving if route.instance.lasts]
    free = [route for route in replicas or serving if route.is_free(now, request.shunned)]
    left = with_kv(free, request, now)
    return min(left, key=lambda route: (route.load(), len(route.requests)), default=None)


def decoding(table: Table, request: Request, now: float, draw: Draw) -> Route | None:
    """The less loaded of two instances that decode, each drawn in proportion to its capacity. None:
    all are full."""
    free = [route for route in table.decoding if route.is_free(now, request.shunned)]
    return _two(free, request, now, draw)


def secluded(
    routes: Iterable[Route], now: float, shunned: Mapping[InstanceId, float]
) -> Route | None:
    """The instance for a suspect: one over whose nodes nothing runs, if there is one, and a replica
    rather than a path, because it brings fewer nodes into danger. None: see `choose`."""
    free = [
        route
        for route in routes
        if route.takes(now, suspect=True) and shunned.get(route.instance.id, now) <= now
    ]
    order = [(not route.idle, len(route.places), route.load()) for route in free]
    return free[order.index(min(order))] if free else None


@dataclass(frozen=True, slots=True)
class Switch:
    """How long a request whose path moves waits for its last token if it stays, and if it moves.
    What others wait longer because of that is added. In seconds."""

    stay_s: float
    move_s: float
    with_kv: bool = False
    """Whether its KV is expected to move with it."""

    @property
    def stays(self) -> bool:
        return self.stay_s <= self.move_s


def switch(
    table: Table,
    path: Route,
    target: Route,
    *,
    remaining: int,
    context: int,
    behind: float,
    bare: bool,
) -> Switch | None:
    """The costs of a request's two ways to its end. It may stay on its path, where its KV is, or
    move to a complete node. None: not measured yet.

    `remaining` is the number of tokens to come, `context` the number of tokens so far. On the path
    each token takes as long as tokens took there lately. On the target each token takes a pass with
    all requests there. All times are as nodes measured them. It is left out that a path keeps its
    nodes busy, because these are the complete nodes: its rows ride on sweeps that run anyway, or
    that would run for the same tokens on the target.

    The target gets the request's KV in one of two ways, as it decides by the same rule
    (`services.node.core.handover`). It computes the KV of the context anew, after the prompts that
    came before. `behind` requests wait for that as well: those that wait for their first token
    there. Or the KV moves, if that is faster and the request is `bare` (see `moves.is_bare`). Then
    the request goes on where it is meanwhile, nobody waits, and what it generates meanwhile is
    computed once more.

    lambdaScale (section 4) always recomputes. BlitzScale (section 5.2) lets requests end where
    their KV is. Which of them is right depends on `remaining` and `context`.
    """
    if not (path.token_s and table.decode_s):
        return None
    stay_s = remaining * path.token_s
    token_s = table.decode_s + len(target.requests) * table.prefill_s
    if bare and 0 < table.kv_s < table.prefill_s:
        meanwhile = min(remaining, context * table.kv_s / path.token_s)
        left_s = meanwhile * table.prefill_s + (remaining - meanwhile) * token_s
        return Switch(stay_s, meanwhile * path.token_s + left_s, with_kv=True)
    prefill = target.prompts + context
    others_s = behind * context * table.prefill_s
    return Switch(stay_s, prefill * table.prefill_s + others_s + remaining * token_s)
