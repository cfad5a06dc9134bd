"""How many replicas a model needs, from its load; pure, to be asked whenever that changes, and at
`Decision.wake_at`.

Load is counted in *instance-fulls*: how many instances the work in the system would fill, by
sequences, by KV tokens, and by the prefill that requests wait for, whichever is most. More is
asked for only when work waits, and what is already on its way counts, so a burst is answered once.
A little work must wait for a while, so that a blip moves no weights; a queue worth several
instances is answered at once.
While the load grows, what it will have grown to by the time that more replicas are there is asked
for at once. Less is asked for after an idle time, one replica at a time: scaling back up is cheap
here (BlitzScale, section 5.4).
"""

import math
from dataclasses import dataclass

STRONG = 2.0
"""Instance-fulls of queue that are no blip: they are answered at once."""
GROWTH = 2.0
"""Most that load may be expected to grow, in multiples of what there is: a short look at a burst
says little about its length."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A model's work now, summed over gateways."""

    queued_requests: int
    queued_tokens: int
    running_requests: int
    running_tokens: int
    prompt_tokens: int = 0
    """Still to prefill, of requests that wait for their first token, wherever they are."""

    @property
    def idle(self) -> bool:
        return self.queued_requests + self.running_requests == 0


@dataclass(frozen=True, slots=True)
class Policy:
    min_instances: int
    max_instances: int
    """Nodes that there are, or the model's own limit."""
    slots: int
    """Sequences that one replica runs at once."""
    kv_tokens: int
    """KV positions that one replica holds; 0: not known, and they do not count."""
    queue_per_instance: float
    prefill_wait_s: float
    """Prefill that may wait for one replica."""
    scale_up_hold_s: float
    horizon_s: float
    """How far ahead growing load is looked at: about what loading takes."""
    idle_s: float
    prefill_s_per_token: float = 0.0
    """As nodes measured it; 0: not known, and prefill does not count."""
    fixed: int | None = None
    """The operator's word; overrules the load."""


@dataclass(frozen=True, slots=True)
class Scaler:
    """Since when the model has had too little, and too much."""

    short_since: float | None = None
    short_from: float = 0.0
    """Instance-fulls then."""
    surplus_since: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    replicas: int
    """How many there should be."""
    cause: str
    """In words and numbers; empty when nothing changes."""
    detected_at: float
    """When the condition began."""
    wake_at: float | None = None
    """When the same demand would be answered otherwise, because a time has run out."""


def fulls(demand: Demand, policy: Policy) -> float:
    """Replicas that the work in the system would fill."""
    tokens = demand.queued_tokens + demand.running_tokens
    return max(
        (demand.queued_requests + demand.running_requests) / policy.slots,
        tokens / policy.kv_tokens if policy.kv_tokens else 0.0,
        _prefill_s(demand, policy) / policy.prefill_wait_s,
    )


def wanted(load: float, policy: Policy) -> int:
    """Replicas for so many instance-fulls, within the policy's bounds."""
    if policy.fixed is not None:
        return min(policy.fixed, policy.max_instances)
    return min(max(policy.min_instances, math.ceil(load)), policy.max_instances)


def decide(
    scaler: Scaler,
    demand: Demand,
    policy: Policy,
    *,
    have: int,
    coming: int,
    leaving: int,
    now: float,
) -> tuple[Scaler, Decision]:
    """`have` replicas serve, `coming` are being loaded, `leaving` drain or are being released (and
    count as nothing). Times in seconds of any one clock.
    """
    load = fulls(demand, policy)
    want = wanted(load, policy)
    total = have + coming
    if want > total and _is_short(demand, policy, have, total):
        since, origin = now, load
        if scaler.short_since is not None:
            since, origin = scaler.short_since, scaler.short_from
        scaler = Scaler(short_since=since, short_from=origin)
        urgent = policy.fixed is not None or total == 0 or total < policy.min_instances
        answer_at = since if urgent else since + _hold_s(demand, policy)
        if now >= answer_at:
            want = wanted(load + _growth(scaler, load, policy, now), policy)
            return scaler, Decision(want, _cause_up(demand, policy, have, coming, want), since)
        return scaler, Decision(total, "", now, answer_at)
    if want < have and coming == 0:
        since = scaler.surplus_since if scaler.surplus_since is not None else now
        long_enough = policy.fixed is not None or now - since >= policy.idle_s
        if long_enough and leaving == 0:
            cause = f"{have} replicas, {want} wanted for {now - since:.1f} s"
            return Scaler(surplus_since=since), Decision(have - 1, cause, since)
        wake_at = None if long_enough else since + policy.idle_s
        return Scaler(surplus_since=since), Decision(total, "", now, wake_at)
    return Scaler(), Decision(total, "", now)


def _hold_s(demand: Demand, policy: Policy) -> float:
    """How long more must be wanted before it is asked for: the less, the more work waits."""
    evidence = demand.queued_requests / policy.slots / STRONG
    return policy.scale_up_hold_s * max(0.0, 1.0 - evidence)


def _growth(scaler: Scaler, load: float, policy: Policy, now: float) -> float:
    """Instance-fulls that come on top within the horizon, if load grows as it has since it was
    first too much."""
    since = scaler.short_since
    if since is None or now <= since or load <= scaler.short_from:
        return 0.0
    rate = (load - scaler.short_from) / (now - since)
    return min(rate * policy.horizon_s, GROWTH * load)


def _is_short(demand: Demand, policy: Policy, have: int, total: int) -> bool:
    """Whether more replicas would be of use now: work waits, or a rule asks for them."""
    if policy.fixed is not None or total < policy.min_instances:
        return True
    return (
        demand.queued_requests > policy.queue_per_instance * policy.slots * have
        or _prefill_s(demand, policy) > policy.prefill_wait_s * have
    )


def _prefill_s(demand: Demand, policy: Policy) -> float:
    """Time that one replica would take for all the prefill that is waited for."""
    return demand.prompt_tokens * policy.prefill_s_per_token


def _cause_up(demand: Demand, policy: Policy, have: int, coming: int, want: int) -> str:
    if policy.fixed is not None:
        return f"operator asked for {policy.fixed} replicas, {have + coming} there"
    if demand.idle:
        return f"fewer than min_instances={policy.min_instances}"
    prefill = _prefill_s(demand, policy)
    due = f", {prefill:.1f} s of prefill due," if prefill >= 0.1 else ""
    return (
        f"{demand.queued_requests} requests queued and {demand.running_requests} running{due} fill "
        f"{want} replicas of {policy.slots} slots; {have} serve, {coming} on their way"
    )
