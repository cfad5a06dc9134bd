"""Which replicas prefill and which decode, where a model's operator wants them apart.

The replicas that joined last prefill. So when a replica joins, the oldest one of those that prefill
begins to decode at once, with the requests that it has: no weights and no KV move, and the new
replica prefills in its place (BlitzScale, OSDI 2025, section 5.3). Where replicas go, an instance
that decodes turns to prefill, and its requests move on.

A single replica does both, and so do paths over nodes that still load.

Whether they are apart at all, and how many prefill, follows from the load where the operator leaves
it to the planner (`prefillers`). Together, a replica prefills for the share r of its time, so that
tokens come 1 / (1 - r) times as late, and later for those who meet many prefills. Apart, they come
as fast as a step, but fewer replicas run all the sequences, and the others all the prefills. Either
way the time between tokens counts that nine of ten requests keep (`objectives`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from statistics import median_high

import msgspec

from services.planner.core.objectives import (
    FULL,
    Objectives,
    Work,
    Z,
    busy,
    more_s,
    slack_s,
    tail_s,
    wait_s,
)
from shared.messages.instances import Instance, InstanceState, Role

FIRST_S = 1.0
"""The first choice follows what was best in so many seconds."""
HOLD_S = 3.0
"""Later, roles follow what was best in so many seconds, and change no sooner."""
MOST_BUSY = 0.8
"""The share of its time for which a replica is meant to prefill, if it does nothing else. Who is
short of prefills is late for long."""
HOPELESS = 1.5
"""If everything is this many times as much as it should be, being apart helps nobody."""
SLACK = 0.1
"""As many prefill as before while nothing else is better by this share. Near a limit, chance would
change it over and over, and each change costs."""
BACK = 1.5
"""Who is apart stays so until this many times the load would do together, for the same reason."""


def prefillers(work: Work, objectives: Objectives, replicas: int, now: int = 0) -> int:
    """How many of the replicas should only prefill; `now` do. 0: each does both, because that keeps
    the objective for tokens, or because being apart helps little, or it is not known."""
    known = work.steady and work.prefill_s and work.token_s and work.step_s and work.stay_so_far_s
    if not (objectives.tpot_s and known) or replicas < 2:
        return 0
    work = msgspec.structs.replace(work, rate=work.steady, stay_s=work.stay_so_far_s)
    more, kept = msgspec.structs.replace(work, rate=BACK * work.rate), now if now < replicas else 0
    length = _length(work, replicas, kept)
    scores = [_apart(work, length, objectives, replicas, count) for count in range(1, replicas)]
    scores.insert(0, _together(work, length, objectives, replicas))
    if scores[0] <= 1 and not (kept and _together(more, length, objectives, replicas) > 1):
        return 0
    scores[kept] *= 1 - SLACK
    good = (count for count in range(1, replicas) if scores[count] <= 1)
    best = kept if kept and scores[kept] <= 1 else next(good, scores.index(min(scores)))
    return best if scores[best] <= HOPELESS else 0


def _together(work: Work, length: float, objectives: Objectives, replicas: int) -> float:
    """How late tokens are if each replica does both: 1 is as late as may be."""
    return _tpot_s(work, length, 1 - busy(work, replicas), replicas) / objectives.tpot_s


def _apart(work: Work, length: float, objectives: Objectives, replicas: int, count: int) -> float:
    """The same if `count` of them only prefill, for tokens or prompts, whichever are later. A
    prompt then takes a pass of its own."""
    if not _fit(work, replicas - count):
        return inf
    alone = msgspec.structs.replace(work, prefill_s=work.prefill_s + work.step_s)
    nothing = msgspec.structs.replace(work, prefill_s=0.0)
    tokens = _tpot_s(nothing, length, 1.0, replicas - count) / objectives.tpot_s
    prompts = busy(alone, count) / MOST_BUSY
    if objectives.ttft_s and busy(alone, count) < FULL:
        prompts = max(prompts, wait_s(alone, 0.0, count) / slack_s(alone, objectives))
    return max(tokens, prompts)


def _fit(work: Work, replicas: int) -> bool:
    """Whether so many replicas have slots and KV for all that decode."""
    there = work.rate * work.stay_s
    most = there + Z * sqrt(there)
    kv = work.kv_tokens * replicas
    return most <= work.slots * replicas and (not kv or most * work.kv_each <= kv)


def _length(work: Work, replicas: int, prefill: int) -> float:
    """How many tokens an ordinary request generates, by how long it stays while `prefill` of the
    replicas only prefill."""
    free = 1.0 if prefill else 1 - busy(work, replicas)
    each = work.rate * work.stay_s / max(free, 1 - FULL) / (replicas - prefill)
    return work.stay_s / (work.step_s + max(0.0, each - 1) * more_s(work))


def _tpot_s(work: Work, length: float, free: float, replicas: int) -> float:
    """The time between tokens that nine of ten requests keep on replicas that decode for the share
    `free` of their time. The longer it is in the mean, the more sequences are there, and the longer
    it is: t free = step + (n - 1) more, n = rate x length x t / replicas. inf: ever more would be
    there."""
    each_s = more_s(work)
    left = free - work.rate * length * each_s / replicas
    if left <= 0:
        return inf
    mean_s = max(work.step_s / free, (work.step_s - each_s) / left)
    there = work.rate * length * mean_s
    return mean_s + tail_s(work, length, there / replicas, there, replicas) / free


@dataclass(slots=True)
class Choice:
    """How many replicas prefill. What is best varies with every burst, so the median counts."""

    count: int = 0
    _found: deque[tuple[float, int]] = field(default_factory=deque)
    """What was best at times of the last seconds that count, and once before."""
    _changed_at: float | None = None

    def look(self, found: int, at: float) -> int:
        """Takes in what would be best now. Returns how many prefill from now on."""
        self._found.append((at, found))
        hold_s = FIRST_S if self._changed_at is None else HOLD_S
        while len(self._found) > 1 and self._found[1][0] <= at - hold_s:
            self._found.popleft()
        known = at - self._found[0][0] >= hold_s
        if known and (self._changed_at is None or at - self._changed_at >= hold_s):
            middle = median_high(number for _, number in self._found)
            if middle != self.count:
                self.count, self._changed_at = middle, at
        return self.count


def assign_roles(instances: Sequence[Instance], prefill_share: float) -> tuple[Instance, ...]:
    """The instances with their roles. Replicas come in the order in which they joined.
    `prefill_share`: of the replicas that serve, at least one and not all; 0: each does both."""
    serving = [i.id for i in instances if i.is_replica and i.state is InstanceState.SERVING]
    count = 0
    if prefill_share > 0 and len(serving) > 1:
        count = min(max(1, round(prefill_share * len(serving))), len(serving) - 1)
    prefill = set(serving[len(serving) - count :])
    decode = set(serving) - prefill if count else set()
    return tuple(
        _with(
            instance,
            Role.PREFILL
            if instance.id in prefill
            else Role.DECODE
            if instance.id in decode
            else Role.BOTH,
        )
        for instance in instances
    )


def _with(instance: Instance, role: Role) -> Instance:
    return instance if instance.role is role else msgspec.structs.replace(instance, role=role)
