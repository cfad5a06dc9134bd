"""How many replicas keep a model's objectives with the least device time; pure.

What is decided now helps only when it has been loaded, a *horizon* later. So the question is how
long a request waits that arrives then. Work is counted in seconds of one replica. At the horizon

    due    = waiting + rate x horizon x prefill - what serves until then     (not below 0)
    inside = rate x stay + (inside now - rate x stay) exp(-horizon / stay)

where `prefill` is what an ordinary prompt takes. What serves until then is what instances carry now
(a half-loaded node counts for what its paths carry), and the replicas on their way, from when they
are there. With n replicas, nine of ten requests wait at most

    wait(n) = due / n + prefill ln(10 r) / (2 (1 - r)),    r = rate x prefill / n

(the second part: the tail of a queue whose services take equally long, M/D/1, in heavy traffic), if
they find a slot and room for their KV: inside + Z sqrt(inside) <= n x slots, and as many times the
tokens of an ordinary request <= n x KV positions. A replica is busy with prefills for r of its
time. So its tokens come every step / (1 - r) seconds in the mean, and a request stays 1 / (1 - r)
times as long as without. Some requests meet more prefills, or run beside more others, than most.
So the mean time between the tokens of a request is, for nine of ten requests, at most

    tpot(n) = (step + Z sqrt(d1^2 + d2^2)) / (1 - r),
    d1 = prefill sqrt(prefills in a stay) / tokens,    d2 = more sqrt(inside) / n

where `more` is what a further sequence adds to a step.

The least n is taken for which all hold. Of each replica only the share `fill` is
counted; the rest is room for a burst.
"""

from bisect import bisect_left
from math import exp, hypot, inf, log, sqrt

import msgspec

TAIL = 10.0
"""One of this many requests may wait for longer."""
Z = 1.28
"""The same in standard deviations of the number of requests that are there."""
LEAST_WAIT = 0.5
"""An objective that leaves less than this many prefills for waiting cannot be kept. Then requests
wait for no longer than that."""
LEAST_STEP = 1.25
"""The same for tokens: prefills may always take so much of a replica's time that a step takes this
many times as long."""
FULL = 0.95
"""The share of its time that a replica can be busy with prefills."""
EASE, TPOT_EASE = 0.8, 0.95
"""Replicas leave only if the others keep these shares of the objectives, for the first token and
between tokens, so that they do not come back at once. Waits grow with load faster than steps do."""


class Objectives(msgspec.Struct, frozen=True, gc=False):
    ttft_s: float = 0.0
    """For the first token. 0: none."""
    tpot_s: float = 0.0
    """Between tokens: the mean of each request. 0: none."""

    @property
    def any(self) -> bool:
        return self.ttft_s > 0 or self.tpot_s > 0

    def eased(self) -> "Objectives":
        return Objectives(EASE * self.ttft_s, TPOT_EASE * self.tpot_s)


NO_OBJECTIVES = Objectives()


class Work(msgspec.Struct, frozen=True, gc=False):
    """A model's work, in seconds of one replica. 0: not known, and does not count."""

    waiting_s: float
    """Prefill of all requests without a first token."""
    inside: int
    """Requests that wait or run."""
    rate: float
    """Arrivals a second. A burst counts at once."""
    prefill_s: float
    """Prefill of an ordinary prompt."""
    token_s: float
    """Of each further token of a pass."""
    step_s: float
    """A pass of one token."""
    stay_s: float
    """How long a request is on an instance that does no prefills."""
    slots: int
    """Sequences that a replica runs at once."""
    kv_each: float = 0.0
    """KV positions of an ordinary request."""
    kv_tokens: int = 0
    """KV positions of a replica."""
    fill: float = 1.0
    """The share of a replica that the work is meant to fill."""
    steady: float = 0.0
    """Arrivals a second, in the mean."""
    decode_token_s: float = 0.0
    """Of each further sequence of a pass in which all decode."""
    stay_so_far_s: float = 0.0
    """As `stay_s`, by those that run now, while few have ended."""


class Supply(msgspec.Struct, frozen=True, gc=False):
    """What serves, in replicas."""

    now: float
    """What instances carry now, paths over nodes that still load included, but no replica that
    opens: it may have no block yet."""
    coming: int = 0
    """Replicas that are on their way."""
    coming_s: float = 0.0
    """When they are there."""
    horizon_s: float = 0.0
    """How long a replica takes that is asked for now."""


def due_s(work: Work, supply: Supply) -> float:
    """Prefill that is due at the horizon."""
    horizon = supply.horizon_s
    served = supply.now * horizon + supply.coming * max(0.0, horizon - supply.coming_s)
    return max(0.0, work.waiting_s + work.rate * horizon * work.prefill_s - served)


def inside(work: Work, horizon_s: float, replicas: float) -> float:
    """How many requests are there at the horizon, if this many replicas serve."""
    if work.stay_s <= 0:
        return work.inside + work.rate * horizon_s
    stay_s = work.stay_s / (1 - min(busy(work, replicas), FULL))
    steady = work.rate * stay_s
    return max(0.0, steady + (work.inside - steady) * exp(-horizon_s / stay_s))


def busy(work: Work, replicas: float) -> float:
    """The share of a replica's time that prefills take; more than 1 if they do not fit."""
    due = work.rate * work.prefill_s
    return due / replicas if replicas > 0 else inf if due else 0.0


def wait_s(work: Work, due: float, replicas: float) -> float:
    """How long nine of ten requests wait for their turn, at most, if `due` is due."""
    if replicas <= 0:
        return inf if work.rate or work.inside or due else 0.0
    share = busy(work, replicas)
    if share >= FULL:
        return inf
    tail = work.prefill_s * log(TAIL * share) / (2 * (1 - share)) if TAIL * share > 1 else 0.0
    return due / replicas + tail


def more_s(work: Work) -> float:
    """What a further sequence adds to a step of decoding: its KV is read, beside what a token of
    a prompt takes too."""
    return max(work.token_s, work.decode_token_s)


def tail_s(work: Work, tokens: float, prefills: float, there: float, replicas: float) -> float:
    """How much longer than the mean the steps of nine of ten requests take, at most, which have so
    many tokens and meet so many prefills in the mean, while so many requests are on `replicas`."""
    late = work.prefill_s * sqrt(prefills) / max(1.0, tokens)
    crowd = more_s(work) * sqrt(there) / replicas
    return Z * hypot(late, crowd)


def step_limit_s(work: Work, objectives: Objectives) -> float:
    """How long a step of decoding may take: as the objective says, if that can be kept."""
    return max(objectives.tpot_s, LEAST_STEP * work.step_s)


def batch(work: Work, objectives: Objectives) -> int:
    """How many sequences a replica may run at once, so that a step of decoding takes no longer than
    the objective. At least 1."""
    if not (objectives.tpot_s and work.step_s and work.token_s):
        return work.slots
    more = (step_limit_s(work, objectives) - work.step_s) / more_s(work)
    return 1 + int(max(0.0, min(work.slots - 1.0, more)))


def tpot_s(work: Work, supply: Supply, replicas: float) -> float:
    """The mean time between tokens that nine of ten requests keep on this many replicas."""
    free = 1 - busy(work, replicas)
    if free <= 0:
        return inf
    there = inside(work, supply.horizon_s, replicas)
    step_s = work.step_s + max(0.0, there / replicas - 1) * more_s(work)
    if not (work.stay_s and work.step_s):
        return step_s / free
    prefills = work.rate / replicas * work.stay_s / free
    return (step_s + tail_s(work, work.stay_s / step_s, prefills, there, replicas)) / free


def met(work: Work, supply: Supply, objectives: Objectives, replicas: int) -> bool:
    """Whether this many replicas keep the objectives. If they do, more of them do."""
    counted = work.fill * replicas
    there = inside(work, supply.horizon_s, counted)
    most = there + Z * sqrt(there)
    if there > 0 and most > batch(work, objectives) * counted:
        return False
    if work.kv_tokens and most * work.kv_each > work.kv_tokens * counted:
        return False
    limit_s = step_limit_s(work, objectives)
    if objectives.tpot_s and replicas and tpot_s(work, supply, counted) > limit_s:
        return False
    if not objectives.ttft_s:
        return True
    return wait_s(work, due_s(work, supply), counted) <= slack_s(work, objectives)


def slack_s(work: Work, objectives: Objectives) -> float:
    """How long a request may wait before its own prefill begins."""
    own = work.prefill_s + work.step_s
    return max(objectives.ttft_s - own, LEAST_WAIT * work.prefill_s)


def needed(work: Work, supply: Supply, objectives: Objectives, most: int) -> int:
    """The least number of replicas that keeps the objectives; `most` if none does."""
    return bisect_left(range(most), True, key=lambda n: met(work, supply, objectives, n))
