"""Which instance has the beginning of a request's KV already, if the request may go there.

A request with a session goes to its session's home, the same at every gateway (`ring`), or where
the session was last (`sessions`) if more of the prompt was computed there. Any other goes where
most of its prompt was computed before, as far as this gateway knows (`prefixes`), or else where its
adapter ran last, which then need not be loaded (`carriers`). Either way only if that costs nobody
anything:

- The instance has room (`is_free`): what could begin elsewhere never waits for a prefix.
- It has fewer tokens left to prefill than the request saves there. So the first token comes no
  later than from an instance that is idle and computes the whole prompt.
- It is not loaded above (1 + `BOUND`) times the mean, the request included (consistent hashing with
  bounded loads; Mirrokni et al. 2018). While it runs less than a share of its slots, `LIGHT`, this
  does not matter, since its steps are hardly longer for one request more.

Where this finds nothing, load decides (`routing`). Only replicas keep prefixes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from services.gateway.core.prefixes import marks_of
from services.gateway.core.requests import Request
from services.gateway.core.routes import Route
from services.gateway.core.table import Table
from shared.ids import NodeId
from shared.messages.serving import Pooling

BOUND = 0.25
LIGHT = 0.25
STAND_INS = 8
"""How many nodes are looked at for a session."""


@dataclass(frozen=True, slots=True)
class Kept:
    route: Route
    why: str


def prefer(table: Table, request: Request, now: float) -> Kept | None:
    """The instance that the request's KV speaks for. None: load decides."""
    homes: Iterator[NodeId] = iter(())
    if request.session:
        homes = _homes(table, request)
    return (
        _home(table, request, islice(homes, 1), now)
        or _holder(table, request, now)
        or _home(table, request, homes, now)
        or _carrier(table, request, now)
    )


def learn(table: Table, request: Request, route: Route) -> None:
    """The instance has computed the KV of the request's prompt, and of its tokens so far."""
    if request.session:
        table.sessions.learn(request.session, route.instance.leader)
    if request.adapter:
        table.carriers.learn(request.adapter, route.instance.leader)
    if route.instance.is_replica and _has_prefix(request):
        tokens = (*request.prompt, *request.tokens) if request.tokens else request.prompt
        marks = marks_of(tokens, _marks(request), request.adapter)
        table.prefixes.learn(marks, route.instance.leader)


def _homes(table: Table, request: Request) -> Iterator[NodeId]:
    """The nodes of the request's session, the best first."""
    homes = islice(table.ring.homes(request.session), STAND_INS)
    last = table.sessions.last(request.session)
    home = next(homes, None)
    if home is None:
        return
    if last is not None and last != home and _has_prefix(request):
        saved = {node: n for n, nodes in table.prefixes.find(_marks(request)) for node in nodes}
        if saved.get(last, 0) > saved.get(home, 0):
            yield last
    yield home
    yield from homes


def _home(table: Table, request: Request, nodes: Iterator[NodeId], now: float) -> Kept | None:
    for node in nodes:
        route = table.replicas.get(node)
        if route and _suits(table, route, request, len(request.prompt), now):
            return Kept(route, "for its session")
    return None


def _holder(table: Table, request: Request, now: float) -> Kept | None:
    """Of the instances with most of the prompt the least loaded."""
    if not _has_prefix(request):
        return None
    for saved, nodes in table.prefixes.find(_marks(request)):
        known = (table.replicas[node] for node in nodes if node in table.replicas)
        fit = [route for route in known if _suits(table, route, request, saved, now)]
        if fit:
            least = min(fit, key=lambda route: route.load())
            return Kept(least, f"for {saved} tokens of its prompt")
    return None


def _carrier(table: Table, request: Request, now: float) -> Kept | None:
    """Of the instances on which its adapter ran lately the least loaded."""
    known = (table.replicas.get(node) for node in table.carriers.of(request.adapter))
    saved = len(request.prompt)
    fit = [route for route in known if route and _suits(table, route, request, saved, now)]
    return Kept(min(fit, key=lambda route: route.load()), "for its adapter") if fit else None


def _suits(table: Table, route: Route, request: Request, saved: int, now: float) -> bool:
    instance = route.instance
    if not route.begins(now, request.shunned) or route.prompts > saved * instance.capacity:
        return False
    if route.kv_left(now) < len(request.prompt) - saved:
        return False
    if len(route.requests) + route.others.requests < LIGHT * instance.slots:
        return True
    mean = (table.total.tokens + request.work) / table.capacity
    return route.load() <= (1 + BOUND) * mean


def _has_prefix(request: Request) -> bool:
    """Whether its KV depends on its tokens alone, and is taken from what is cached: no image, and
    no prompt that is scored or averaged, and none of an encoder that is asked as it should be."""
    pooled = request.pooling in (Pooling.MEAN, Pooling.CLS)
    return not (request.image or request.score_from or pooled)


def _marks(request: Request) -> tuple[int, ...]:
    if request.marks is None:
        request.marks = marks_of(request.prompt, adapter=request.adapter)
    return request.marks
