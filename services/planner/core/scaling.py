"""How many replicas a model needs for its load. `decide` is pure, and is called whenever the load
changes, and at `Decision.wake_at`.

Load is counted in *instance-fulls*: how many instances the work in the system would fill, by
sequences, by KV tokens, or by the prefill that requests wait for, whichever is most. More replicas
are asked for only when work waits, and replicas on their way count, so a burst is answered once. A
little work must wait for a while, so that a blip moves no weights; a queue worth several instances
is answered at once. While the load grows, the expected load at the time when more replicas are
there is answered at once, too. After an idle time fewer are asked for, one replica at a time:
scaling back up is cheap here (BlitzScale, section 5.4).
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol

STRONG = 2.0
"""A queue of this many instance-fulls is no blip, and is answered at once."""
LOOK_S = 0.1
"""Gateways report a changing load at least this often: a load that is the same for as long does not
grow."""
GROWTH = 1.0
"""The most by which load is expected to grow, in multiples of the present load: a short look at a
burst says little about its length, and an event that runs can still grow."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A model's work now, summed over gateways."""

    queued_requests: int
    queued_tokens: int
    running_requests: int
    running_tokens: int
    prompt_tokens: int = 0
    """Tokens to prefill of requests that wait for their first token, wherever they are."""

    @property
    def idle(self) -> bool:
        return self.queued_requests + self.running_requests == 0


@dataclass(frozen=True, slots=True)
class Policy:
    min_instances: int
    max_instances: int
    """The number of nodes, or the model's own limit."""
    slots: int
    """How many sequences one replica runs at once."""
    kv_tokens: int
    """KV positions that one replica holds. 0: not known, and KV does not count."""
    queue_per_instance: float
    prefill_wait_s: float
    """Seconds of prefill that may wait for one replica."""
    scale_up_hold_s: float
    horizon_s: float
    """How far ahead growing load is predicted: about as long as loading takes."""
    idle_s: float
    prefill_s_per_token: float = 0.0
    """As nodes measured it. 0: not known, and prefill does not count."""
    fixed: int | None = None
    """The operator's number of replicas, which overrules the load."""


@dataclass(frozen=True, slots=True)
class Scaler:
    """Since when the model has had too few replicas, and too many."""

    short_since: float | None = None
    short_from: float = 0.0
    """The instance-fulls at that time."""
    surplus_since: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    replicas: int
    """How many replicas there should be."""
    cause: str
    """The reason in words and numbers. Empty if nothing changes."""
    detected_at: float
    """When the condition began."""
    wake_at: float | None = None
    """When the same demand would be answered differently, because a time has run out."""


def fulls(demand: Demand, policy: Policy) -> float:
    """How many replicas the work in the system would fill."""
    tokens = demand.queued_tokens + demand.running_tokens
    return max(
        (demand.queued_requests + demand.running_requests) / policy.slots,
        tokens / policy.kv_tokens if policy.kv_tokens else 0.0,
        _prefill_s(demand, policy) / policy.prefill_wait_s,
    )


def wanted(load: float, policy: Policy) -> int:
    """The replicas for `load` instance-fulls, within the policy's bounds."""
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
    """`have` replicas serve, `coming` are being loaded, and `leaving` drain or are being released
    (and do not count). Times are in seconds, all of the same clock."""
    load = fulls(demand, policy)
    want = wanted(load, policy)
    total = have + coming
    if want > total and _is_short(demand, policy, have, total):
        since, origin = now, load
        if scaler.short_since is not None:
            since, origin = scaler.short_since, scaler.short_from
        scaler = Scaler(short_since=since, short_from=origin)
        urgent = policy.fixed is not None or total == 0 or total < policy.min_instances
        answer_at = since if urgent else since + _hold_s(demand, policy, grown=load > origin)
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
    if coming and not demand.idle:  # the burst goes on: what it has grown by so far still counts
        return replace(scaler, surplus_since=None), Decision(total, "", now)
    return Scaler(), Decision(total, "", now)


class Decide(Protocol):
    """`decide`, or a function like it."""

    def __call__(
        self,
        scaler: Scaler,
        demand: Demand,
        policy: Policy,
        /,
        *,
        have: int,
        coming: int,
        leaving: int,
        now: float,
    ) -> tuple[Scaler, Decision]: ...


def _hold_s(demand: Demand, policy: Policy, *, grown: bool) -> float:
    """How long more must be wanted before it is asked for: the more work waits, the shorter. Weak
    evidence is looked at twice, so that the growth is known."""
    evidence = demand.queued_requests / policy.slots / STRONG
    hold_s = policy.scale_up_hold_s * max(0.0, 1.0 - evidence)
    if hold_s == 0.0 or grown:
        return hold_s
    return max(hold_s, min(LOOK_S, policy.scale_up_hold_s))


def _growth(scaler: Scaler, load: float, policy: Policy, now: float) -> float:
    """Instance-fulls that are added within the horizon, if load grows as it has since it was first
    too much."""
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
    """Seconds that one replica would take for all the prefill that is waited for."""
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
