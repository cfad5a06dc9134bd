"""Which replicas prefill and which decode, where a model's operator wants them apart.

The replicas that joined last prefill. So when a replica joins, the oldest one of those that prefill
begins to decode at once, with the requests that it has: no weights and no KV move, and the new
replica prefills in its place (BlitzScale, OSDI 2025, section 5.3). Where replicas go, an instance
that decodes turns to prefill, and its requests move on.

A single replica does both, and so do paths over nodes that still load.

Whether they are apart at all, and how many prefill, follows from the load where the operator leaves
it to the planner (`prefillers`). Together, a replica prefills for the share r of its time, so that
tokens come 1 / (1 - r) times as late (`objectives`). Apart, they come as fast as a step, but fewer
replicas run all the sequences, and the others all the prefills.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from statistics import median_high

import msgspec

from services.planner.core.objectives import Objectives, Work, Z, busy, slack_s, wait_s
from shared.messages.instances import Instance, InstanceState, Role

HOLD_S = 3.0
"""Roles follow what was best in so many seconds, and change no sooner."""
CLOSE = 0.9
"""Requests differ in how many others they run beside. If their mean time between tokens is more
than this share of the objective, too many of them miss it."""
MOST_BUSY = 0.7
"""The share of its time for which a replica is meant to prefill, if it does nothing else. What
comes is known to a sixth or so, and who is short of prefills is late for long."""


def prefillers(work: Work, objectives: Objectives, replicas: int) -> int:
    """How many of the replicas should only prefill. 0: each does both, because that keeps the
    objective for tokens, or because nothing does, or it is not known."""
    known = work.rate and work.prefill_s and work.token_s and work.step_s and work.stay_s
    if not (objectives.tpot_s and known) or replicas < 2:
        return 0
    most_s, free = CLOSE * objectives.tpot_s, 1 - busy(work, replicas)
    together_s = _token_s(work, free, replicas) if free > 0 else inf
    if together_s <= most_s:
        return 0
    for count in range(1, replicas):
        late = wait_s(work, 0.0, count) > slack_s(work, objectives) if objectives.ttft_s else False
        if busy(work, count) > MOST_BUSY or late:
            continue
        apart_s = _token_s(work, 1.0, replicas - count)
        better = apart_s <= most_s and apart_s < together_s
        return count if better and _fit(work, replicas - count) else 0
    return 0


def _fit(work: Work, replicas: int) -> bool:
    """Whether so many replicas have slots and KV for all that decode."""
    there = work.rate * work.stay_s
    most = there + Z * sqrt(there)
    kv = work.kv_tokens * replicas
    return most <= work.slots * replicas and (not kv or most * work.kv_each <= kv)


def _token_s(work: Work, free: float, replicas: int) -> float:
    """The time between two tokens on replicas that decode for the share `free` of their time."""
    each = work.rate * work.stay_s / free / replicas
    return (work.step_s + max(0.0, each - 1) * work.token_s) / free


@dataclass(slots=True)
class Choice:
    """How many replicas prefill. What is best varies with every burst, so the median counts."""

    count: int = 0
    _found: deque[tuple[float, int]] = field(default_factory=deque)
    """What was best at times of the last HOLD_S seconds, and once before."""
    _changed_at: float = 0.0

    def look(self, found: int, at: float) -> int:
        """Takes in what would be best now. Returns how many prefill from now on."""
        self._found.append((at, found))
        while len(self._found) > 1 and self._found[1][0] <= at - HOLD_S:
            self._found.popleft()
        known = at - self._found[0][0] >= HOLD_S
        if known and at - self._changed_at >= HOLD_S:
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
