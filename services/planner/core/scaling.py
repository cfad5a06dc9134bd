"""How many replicas a model needs for its load. `decide` is pure, and is called whenever the load
changes, and at `Decision.wake_at`.

More replicas are asked for when work waits, or when sequences are expected to find no slot or no KV
by the time at which a further replica would be there. Replicas on their way count, so a burst is
answered once, and what it has grown by when it has. With a hold, a little work must wait for a
while; a queue worth several instances is answered at once. A model with objectives gets the least
number of replicas that keeps them (`objectives`). Each replica goes when it has not been needed for
the keep-alive time: scaling back up is cheap here (BlitzScale, section 5.4). `keeping` says how
long its copy stays in memory.
"""

from typing import Protocol

import msgspec

from services.planner.core.demand import (
    Demand,
    Policy,
    filled,
    fulls,
    prefill_s,
    wanted,
    work_of,
)
from services.planner.core.keeping import NOT_NEEDED, Idle
from services.planner.core.objectives import (
    Supply,
    Work,
    batch,
    due_s,
    inside,
    needed,
    slack_s,
    wait_s,
)
from shared.wording import counted

STRONG = 2.0
"""A queue of this many instance-fulls is no blip, and is answered at once."""
GROWTH = 1.0
"""The most by which load is expected to grow, in multiples of the present load: a short look at a
burst says little about its length, and an event that runs can still grow."""
MANY = 1_000_000
"""More replicas than anybody has nodes for."""


class Scaler(msgspec.Struct, frozen=True, gc=False):
    """Since when the model has had too few replicas, and which ones are not needed."""

    short_since: float | None = None
    idle: Idle = NOT_NEEDED


class Decision(msgspec.Struct, frozen=True, gc=False):
    replicas: int
    """How many replicas there should be."""
    cause: str
    """The reason in words and numbers. Empty if nothing changes."""
    detected_at: float
    """When the condition began."""
    wake_at: float | None = None
    """When the same demand would be answered differently, because a time has run out."""
    enough: int | None = None
    """How many replicas the load fills, or the objectives need, or the policy keeps. None: what the
    load fills."""
    in_memory: int = 0
    """How many replicas are to be in memory, asleep or not."""


def decide(
    scaler: Scaler,
    demand: Demand,
    policy: Policy,
    *,
    have: int,
    coming: int,
    now: float,
) -> tuple[Scaler, Decision]:
    """`have` replicas serve and `coming` are being loaded; those that drain count as neither. Times
    are in seconds, all of the same clock."""
    scaler, decision = _decide(scaler, demand, policy, have=have, coming=coming, now=now)
    if policy.keep_asleep is None or policy.fixed is not None:
        return scaler, decision
    keep = policy.keep_asleep
    in_memory = scaler.idle.kept(policy.max_instances, now, lambda number: keep(number).seconds)
    cause = decision.cause
    if decision.replicas < min(have, in_memory):
        cause += f"; {_stay(in_memory)} in memory, the last for {keep(in_memory)}"
    return scaler, msgspec.structs.replace(decision, in_memory=in_memory, cause=cause)


def unbounded(demand: Demand, policy: Policy, most: int, *, have: int, coming: int) -> int:
    """How many replicas the work asks for, up to `most`, though the policy allows no more than
    there are nodes for. Where not even MANY keep the objectives, those that it allows."""
    free = msgspec.structs.replace(policy, max_instances=most)
    want = _aim(demand, free, have=have, coming=coming).want
    return want if want < MANY else policy.max_instances


def _decide(
    scaler: Scaler, demand: Demand, policy: Policy, *, have: int, coming: int, now: float
) -> tuple[Scaler, Decision]:
    total = have + coming
    aim = _aim(demand, policy, have=have, coming=coming)
    idle = scaler.idle.after(aim.keep, now, total)
    if aim.want > total and aim.short:
        since = now if scaler.short_since is None else scaler.short_since
        scaler = Scaler(since, idle)
        urgent = policy.fixed is not None or total == 0 or total < policy.min_instances
        answer_at = since if urgent else since + _hold_s(aim, demand, policy)
        if now >= answer_at:
            want = aim.want
            why = aim.why or _cause_up(demand, policy, have, coming, want)
            scaler = msgspec.structs.replace(scaler, idle=idle.after(want, now, want))
            return scaler, Decision(want, why, since, enough=want)
        return scaler, Decision(total, "", now, answer_at, aim.keep)
    kept = have if coming else idle.kept(have, now, policy.keep_s)
    if kept < have:
        first = idle.since[kept]
        cause = _cause_down(demand, policy, have, kept, now - first)
        return Scaler(idle=idle), Decision(kept, cause, first, enough=aim.keep)
    if coming and not demand.idle:  # the burst goes on: what it grows by needs no further hold
        return msgspec.structs.replace(scaler, idle=idle), Decision(total, "", now, enough=aim.keep)
    ends = None if coming else idle.ends(kept, policy.keep_s)
    return Scaler(idle=idle), Decision(total, "", now, ends, aim.keep)


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
        now: float,
    ) -> tuple[Scaler, Decision]: ...


class _Aim(msgspec.Struct, frozen=True, gc=False):
    """What the work asks for."""

    load: float
    """In instance-fulls."""
    want: int
    keep: int
    """Fewer than this are too few, if they are there already."""
    short: bool
    """Whether more replicas would be of use now."""
    looks_ahead: bool = False
    """Whether `want` is for the time when the replicas are there."""
    late: float = 0.0
    """How much longer requests wait than they should, as a share of that."""
    why: str = ""


def _aim(demand: Demand, policy: Policy, *, have: int, coming: int) -> _Aim:
    total = have + coming
    load = fulls(demand, policy)
    objectives = policy.objectives
    work = work_of(demand, policy)
    supply = policy.supply or Supply(have, coming, policy.horizon_s, policy.horizon_s)
    if policy.fixed is not None or not (objectives.any and policy.prefill_s_per_token):
        return _without_objectives(demand, policy, work, supply, have=have, total=total)
    bound = policy.max_instances
    least = min(policy.min_instances, bound)
    want = max(least, needed(work, supply, objectives, bound))
    keep = max(want, needed(work, supply, objectives.eased(), bound))
    slack = slack_s(work, objectives)
    waits_s = wait_s(work, due_s(work, supply), policy.fill * total) if objectives.ttft_s else 0.0
    return _Aim(
        load,
        want,
        keep,
        short=want > total,
        looks_ahead=True,
        late=waits_s / slack - 1 if slack else 0.0,
        why="" if want <= least else _why_objective(work, policy, want, supply),
    )


def _without_objectives(
    demand: Demand, policy: Policy, work: Work, supply: Supply, *, have: int, total: int
) -> _Aim:
    load = fulls(demand, policy) / policy.fill
    there = min(inside(work, supply.horizon_s, policy.fill * total), (1 + GROWTH) * work.inside)
    soon = filled(there, work, policy) / policy.fill
    if policy.fixed is not None or soon <= load:
        want = wanted(load, policy)
        slow = msgspec.structs.replace(work, stay_s=max(work.stay_s, demand.arrivals.lately_s))
        left = inside(slow, supply.horizon_s, policy.fill * total)
        # What waits now is not gone by then, as far as it is known how long requests stay.
        waits = work.stay_s > 0 and filled(left, work, policy) / policy.fill > total
        short = policy.fill < 1 or waits or _is_short(demand, policy, have, total)
        return _Aim(load, want, want, short)
    want = wanted(soon, policy)
    why = (
        f"{work.rate:.1f} requests a second: in {supply.horizon_s:.1f} s there will be "
        f"{counted(round(there), 'request')}, filling {counted(want, 'replica')} of "
        f"{counted(policy.slots, 'slot')}; {have} serve, {total - have} on their way"
    )
    late = soon / max(1, total) - 1
    return _Aim(soon, want, want, short=True, looks_ahead=True, late=late, why=why)


def _hold_s(aim: _Aim, demand: Demand, policy: Policy) -> float:
    """How long more must be wanted before it is asked for: the more work waits, the shorter."""
    evidence = demand.queued_requests / policy.slots / STRONG
    if aim.looks_ahead:
        evidence = max(0.0, aim.late)
    return policy.scale_up_hold_s * max(0.0, 1.0 - evidence)


def _is_short(demand: Demand, policy: Policy, have: int, total: int) -> bool:
    """Whether more replicas would be of use now: work waits, or a rule asks for them."""
    if policy.fixed is not None or total < policy.min_instances:
        return True
    return (
        demand.queued_requests > policy.queue_per_instance * policy.slots * have
        or prefill_s(demand, policy) > policy.prefill_wait_s * have
    )


def _cause_up(demand: Demand, policy: Policy, have: int, coming: int, want: int) -> str:
    if policy.fixed is not None:
        return f"operator asked for {counted(policy.fixed, 'replica')}, {have + coming} there"
    if have + coming < policy.min_instances and want <= policy.min_instances:
        return policy.floor_why or f"fewer than min_instances={policy.min_instances}"
    return (
        f"{_in_words(demand, policy)} fill {counted(want, 'replica')} of "
        f"{counted(policy.slots, 'slot')}; "
        f"{have} serve, {coming} on their way"
    )


def _cause_down(demand: Demand, policy: Policy, have: int, kept: int, since_s: float) -> str:
    if policy.fixed is not None:
        return f"operator asked for {counted(policy.fixed, 'replica')}, {have} serve"
    arriving = demand.arrivals.rate
    rate = f", {arriving:.1f} requests a second" if arriving >= 0.05 else ""
    return (
        f"{_serve(have)}, {kept} {'is' if kept == 1 else 'are'} enough for {since_s:.1f} s "
        f"(keep-alive {policy.idle_s:g} s): {_in_words(demand, policy).rstrip(',')}{rate}"
    )


def _serve(replicas: int) -> str:
    return counted(replicas, "replica serves", "replicas serve")


def _stay(copies: int) -> str:
    return counted(copies, "copy stays", "copies stay")


def _in_words(demand: Demand, policy: Policy) -> str:
    prefill = prefill_s(demand, policy)
    due = f", {prefill:.1f} s of prefill due," if prefill >= 0.1 else ""
    queued = counted(demand.queued_requests, "request")
    return f"{queued} queued and {demand.running_requests} running{due}"


def _why_objective(work: Work, policy: Policy, want: int, supply: Supply) -> str:
    """What makes an objective ask for so many replicas."""
    objectives = policy.objectives
    aims = [
        f"{name} {1000 * seconds:g} ms"
        for name, seconds in (("TTFT", objectives.ttft_s), ("TPOT", objectives.tpot_s))
        if seconds
    ]
    there = inside(work, supply.horizon_s, work.fill * want)
    size = counted(batch(work, objectives), "slot")
    if work.kv_tokens:
        size += f" and {work.kv_tokens} KV positions"
    return (
        f"{work.rate:.1f} requests a second of {work.prefill_s:.3f} s prefill each; in "
        f"{supply.horizon_s:.1f} s {there:.0f} requests and {due_s(work, supply):.2f} s of prefill "
        f"are expected, which takes {counted(want, 'replica')} of {size} to keep "
        f"{' and '.join(aims)}; "
        f"{supply.now:.1f} serve, {supply.coming} are on their way"
    )
