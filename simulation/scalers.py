"""How other systems decide on the number of replicas, and on who takes a request, as their papers
describe it (the table in docs/simulation.md names the sections).

Scalers have the form of `services.planner.core.scaling.decide`. They look at the present load only,
without a hold and without a look ahead. They give each replica back when it was not needed for the
keep-alive time (`Policy.idle_s`), and know no history.
"""

import math
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from services.gateway.core.requests import Request
from services.gateway.core.routes import Route
from services.gateway.core.routing import Draw, Routing, with_kv
from services.gateway.core.table import Table
from services.planner.core.demand import Demand, Policy, fulls
from services.planner.core.scaling import Decide, Decision, Scaler, decide

CACHED_S = 15.0
"""Seconds that a model stays in a host's memory after its last use, as in ServerlessLLM's paper."""


def _follow(
    want: int,
    why: str,
    scaler: Scaler,
    policy: Policy,
    *,
    have: int,
    coming: int,
    now: float,
) -> tuple[Scaler, Decision]:
    """More replicas are asked for at once, fewer after the keep-alive time."""
    want = min(max(want, policy.min_instances), policy.max_instances)
    if policy.fixed is not None:
        want = min(policy.fixed, policy.max_instances)
    total = have + coming
    idle = scaler.idle.after(want, now, max(want, total))
    scaler = Scaler(idle=idle)
    if want > total:
        return scaler, Decision(want, why, now)
    kept = have if coming else idle.kept(have, now, lambda _: policy.idle_s)
    if kept == have:
        ends = None if coming else idle.ends(have, lambda _: policy.idle_s)
        return scaler, Decision(total, "", now, ends)
    since = idle.since[kept]
    return scaler, Decision(kept, f"{have} replicas, {kept} wanted for {now - since:.1f} s", since)


def by_requests(
    target: float,
    scaler: Scaler,
    demand: Demand,
    policy: Policy,
    *,
    have: int,
    coming: int,
    now: float,
) -> tuple[Scaler, Decision]:
    """A replica for every so many requests in the system, as in serverless platforms. `target`: the
    requests that a replica is meant for, as a share of its slots."""
    requests = demand.queued_requests + demand.running_requests
    each = max(1, round(target * policy.slots))
    why = f"{requests} requests, {each} for each replica; {have} serve, {coming} on their way"
    want = math.ceil(requests / each)
    return _follow(want, why, scaler, policy, have=have, coming=coming, now=now)


def by_load(
    target: float,
    scaler: Scaler,
    demand: Demand,
    policy: Policy,
    *,
    have: int,
    coming: int,
    now: float,
) -> tuple[Scaler, Decision]:
    """As many replicas as the present load fills by prefill, KV and slots, each to the share
    `target` (BlitzScale)."""
    load = fulls(demand, policy) / target
    why = f"the load fills {load:.1f} replicas; {have} serve, {coming} on their way"
    return _follow(math.ceil(load), why, scaler, policy, have=have, coming=coming, now=now)


Scaling = Callable[[float], Decide]
"""Makes a rule for a target: the share of a replica that is meant to be used."""


def ours(_: float) -> Decide:
    """Takes its target from `planner.fill`."""
    return decide


def per_request(target: float) -> Decide:
    return partial(by_requests, target)


def per_request_cached(target: float) -> Decide:
    """With copies that stay in host memory for `CACHED_S` (λScale)."""

    def rule(
        scaler: Scaler, demand: Demand, policy: Policy, /, *, have: int, coming: int, now: float
    ) -> tuple[Scaler, Decision]:
        scaler, decision = by_requests(
            target, scaler, demand, policy, have=have, coming=coming, now=now
        )
        cached = scaler.idle.kept(policy.max_instances, now, lambda _: CACHED_S)
        return scaler, replace(decision, in_memory=cached)

    return rule


def per_load(target: float) -> Decide:
    return partial(by_load, target)


def least_requests(table: Table, request: Request, now: float, draw: Draw) -> Route | None:
    """The instance with the fewest requests, among those that have a free slot, and KV."""
    free = [route for route in table.open if route.is_free(now, request.shunned)]
    return min(
        with_kv(free, request, now),
        key=lambda route: len(route.requests) / route.instance.capacity,
        default=None,
    )


def least_tokens(table: Table, request: Request, now: float, draw: Draw) -> Route | None:
    """The instance with the fewest outstanding tokens, among those that have a free slot, and
    KV."""
    free = [route for route in table.open if route.is_free(now, request.shunned)]
    return min(with_kv(free, request, now), key=lambda route: route.load(), default=None)


FEWEST_REQUESTS = Routing(math.inf, math.inf, least_requests, affinity=False, by_due_date=False)
"""Prompts are handed out as long as slots are free, however many wait for their prefill there."""
FEWEST_TOKENS = Routing(math.inf, math.inf, least_tokens, affinity=False, by_due_date=False)
