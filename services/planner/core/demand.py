"""A model's load, and how many replicas it fills; pure.

Load is counted in *instance-fulls*: how many instances the work in the system would fill, by
sequences, by KV tokens, or by the prefill that requests wait for, whichever is most.
"""

import math
from collections.abc import Callable

import msgspec

from services.planner.core.keeping import Keep
from services.planner.core.objectives import NO_OBJECTIVES, Objectives, Supply, Work, needed
from services.planner.core.traffic import NO_ARRIVALS, Arrivals


class Demand(msgspec.Struct, frozen=True, gc=False):
    """A model's work now, summed over gateways."""

    queued_requests: int
    queued_tokens: int
    running_requests: int
    running_tokens: int
    prompt_tokens: int = 0
    """Tokens to prefill of requests that wait for their first token, wherever they are."""
    arrivals: Arrivals = NO_ARRIVALS
    """What is expected of the next requests."""

    @property
    def idle(self) -> bool:
        return self.queued_requests + self.running_requests == 0


class Policy(msgspec.Struct, frozen=True):
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
    """How many seconds ahead the scaler looks: about as long as loading takes."""
    idle_s: float
    prefill_s_per_token: float = 0.0
    """Seconds, as nodes measured them. 0: not known, and prefill does not count."""
    keep_asleep: Callable[[int], Keep] | None = None
    """How long the copy of the replica of a number is kept in memory, asleep, when the replica is
    not needed. None: not at all."""
    fixed: int | None = None
    """The operator's number of replicas, which overrules the load."""
    fill: float = 1.0
    """The share of a replica that the load is meant to fill. Less than 1: more are asked for before
    work waits."""
    floor_why: str = ""
    """Why `min_instances` is more than the model's own, in words."""
    objectives: Objectives = NO_OBJECTIVES
    decode_s: float = 0.0
    """Seconds that a pass takes which makes one token of a sequence, as nodes measured it. 0: not
    known."""
    decode_s_per_token: float = 0.0
    """The same for each further sequence of the pass."""
    supply: Supply | None = None
    """The replicas that serve and that are loading, for objectives. None: those that load are
    expected to serve after `horizon_s`."""

    def keep_s(self, _: int) -> float:
        """How long the replica of a number is kept that is not needed."""
        return 0.0 if self.fixed is not None else self.idle_s


def fulls(demand: Demand, policy: Policy) -> float:
    """How many replicas the work in the system would fill."""
    tokens = demand.queued_tokens + demand.running_tokens
    return max(
        (demand.queued_requests + demand.running_requests) / policy.slots,
        tokens / policy.kv_tokens if policy.kv_tokens else 0.0,
        prefill_s(demand, policy) / policy.prefill_wait_s,
    )


def wanted(load: float, policy: Policy) -> int:
    """The replicas for `load` instance-fulls, within the policy's bounds."""
    if policy.fixed is not None:
        return min(policy.fixed, policy.max_instances)
    return min(max(policy.min_instances, math.ceil(load)), policy.max_instances)


def filled(requests: float, work: Work, policy: Policy) -> float:
    """How many replicas so many requests fill by their slots and KV."""
    kv = requests * work.kv_each / policy.kv_tokens if policy.kv_tokens else 0.0
    return max(requests / policy.slots, kv)


def work_of(demand: Demand, policy: Policy) -> Work:
    """The model's work in seconds of one replica."""
    arrivals = demand.arrivals
    tokens = demand.queued_tokens + demand.running_tokens - demand.prompt_tokens
    inside = demand.queued_requests + demand.running_requests
    return Work(
        waiting_s=prefill_s(demand, policy),
        inside=inside,
        rate=arrivals.rate,
        prefill_s=arrivals.prompt_tokens * policy.prefill_s_per_token,
        token_s=policy.prefill_s_per_token,
        step_s=policy.decode_s,
        stay_s=arrivals.stay_s,
        slots=policy.slots,
        kv_each=arrivals.prompt_tokens + max(0, tokens) / max(1, inside),
        kv_tokens=policy.kv_tokens,
        fill=policy.fill,
        steady=arrivals.steady,
        decode_token_s=policy.decode_s_per_token,
        stay_so_far_s=arrivals.stay_so_far_s,
    )


def steady(work: Work, policy: Policy) -> float:
    """How many replicas the load needs, as far as it is known, without what has piled up."""
    usual = work.rate * work.stay_s
    there = min(work.inside, usual) if usual else work.inside
    if policy.objectives.any and work.prefill_s:
        ready = msgspec.structs.replace(work, waiting_s=0.0, inside=math.ceil(there))
        return needed(ready, Supply(0.0), policy.objectives, policy.max_instances)
    return max(filled(there, work, policy), work.rate * work.prefill_s) / policy.fill


def prefill_s(demand: Demand, policy: Policy) -> float:
    """Seconds that one replica would take for all the prefill that is waited for."""
    return demand.prompt_tokens * policy.prefill_s_per_token
