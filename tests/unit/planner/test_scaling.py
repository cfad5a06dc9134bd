"""Scaling decisions: within limits, once a burst, steady under a steady load."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.planner.core.demand import Demand, Policy, fulls, wanted
from services.planner.core.keeping import Idle, Keep
from services.planner.core.objectives import Objectives, Supply
from services.planner.core.scaling import STRONG, Decision, Scaler, decide
from services.planner.core.traffic import Arrivals

SLOTS = 4


def policy(
    least: int = 0, most: int = 8, fixed: int | None = None, hold: float = 0.2, idle: float = 2.0
) -> Policy:
    return Policy(
        min_instances=least,
        max_instances=most,
        slots=SLOTS,
        kv_tokens=1000,
        queue_per_instance=0.25,
        prefill_wait_s=0.5,
        scale_up_hold_s=hold,
        horizon_s=1.0,
        idle_s=idle,
        fixed=fixed,
    )


def test_replicas_that_are_meant_to_have_room_are_asked_for_before_work_waits() -> None:
    busy = demand(running=3)
    for fill, wanted_then in ((1.0, 1), (0.75, 1), (0.5, 2)):
        rules = replace(policy(), fill=fill)
        scaler, first = decide(Scaler(), busy, rules, have=1, coming=0, now=0.0)
        assert first.replicas == 1  # a blip moves nothing
        _, decision = decide(scaler, busy, rules, have=1, coming=0, now=0.2)
        assert decision.replicas == wanted_then


def test_kv_that_is_not_known_does_not_count() -> None:
    work = demand(queued=1, tokens=2500)
    assert fulls(work, policy()) == 2.5
    assert fulls(work, replace(policy(), kv_tokens=0)) == 1 / SLOTS


def demand(queued: int = 0, running: int = 0, tokens: int = 0) -> Demand:
    return Demand(
        queued_requests=queued, queued_tokens=tokens, running_requests=running, running_tokens=0
    )


def ask(
    load: Demand,
    rules: Policy,
    *,
    have: int = 0,
    coming: int = 0,
    now: float = 0.0,
    scaler: Scaler = Scaler(),  # noqa: B008 - frozen
) -> tuple[Scaler, Decision]:
    return decide(scaler, load, rules, have=have, coming=coming, now=now)


def test_the_first_request_is_answered_at_once() -> None:
    _, decision = ask(demand(queued=1), policy())
    assert decision.replicas == 1
    assert decision.cause == (
        "1 request queued and 0 running fill 1 replica of 4 slots; 0 serve, 0 on their way"
    )


def test_a_blip_moves_nothing_a_queue_that_stays_does() -> None:
    load, rules = demand(queued=4, running=4), policy()
    scaler, decision = ask(load, rules, have=1, now=10.0)
    assert (decision.replicas, decision.cause) == (1, "")
    scaler, decision = ask(demand(running=4), rules, have=1, now=10.05, scaler=scaler)
    assert scaler.short_since is None
    scaler, _ = ask(load, rules, have=1, now=10.2, scaler=scaler)
    scaler, decision = ask(load, rules, have=1, now=10.4, scaler=scaler)
    assert (decision.replicas, decision.detected_at) == (2, 10.2)


def test_a_queue_worth_two_instances_is_no_blip() -> None:
    _, decision = ask(demand(queued=8, running=4), policy(), have=1, now=10.0)
    assert (decision.replicas, decision.detected_at, decision.wake_at) == (3, 10.0, None)


@given(queued=st.integers(2, 20), hold=st.floats(0.01, 2.0))
def test_the_more_waits_the_sooner_it_is_answered_and_when_is_said(
    queued: int, hold: float
) -> None:
    rules = policy(most=50, hold=hold)
    load = demand(queued=queued, running=4)
    scaler, decision = ask(load, rules, have=1, now=5.0)
    if queued >= STRONG * SLOTS:
        assert decision.replicas > 1
        return
    assert decision.replicas == 1
    assert decision.wake_at is not None
    held = hold * (1 - queued / SLOTS / STRONG)
    assert decision.wake_at == pytest.approx(5.0 + held)
    early = 5.0 + (decision.wake_at - 5.0) * 0.9
    assert ask(load, rules, have=1, now=early, scaler=scaler)[1].replicas == 1
    _, answer = ask(load, rules, have=1, now=decision.wake_at, scaler=scaler)
    assert (answer.replicas > 1, answer.wake_at) == (True, None)
    more = demand(queued=queued + 1, running=4)
    _, sooner = ask(more, rules, have=1, now=5.0, scaler=scaler)
    assert sooner.replicas > 1 or (sooner.wake_at or 0.0) <= decision.wake_at


def test_when_less_is_due_is_said() -> None:
    scaler, decision = ask(demand(running=1), policy(), have=3, now=1.0)
    assert (decision.replicas, decision.wake_at) == (3, 3.0)
    _, decision = ask(demand(running=1), policy(), have=3, now=3.0, scaler=scaler)
    assert (decision.replicas, decision.wake_at) == (1, None)


def test_what_is_on_its_way_counts() -> None:
    _, decision = ask(demand(queued=8, running=4), policy(hold=0.0), have=1, coming=2)
    assert decision.replicas == 3
    assert decision.cause == ""


def test_a_short_queue_is_worth_no_replica() -> None:
    _, decision = ask(demand(queued=1, running=4), policy(hold=0.0), have=1)
    assert decision.replicas == 1


def test_a_short_queue_is_worth_one_if_work_waits_when_it_is_there() -> None:
    """A replica is there in a second. Until then one of five requests ends that stay for 4 s, and
    all but two that stay for 1 s."""
    for arrivals, expected in (
        (Arrivals(rate=1.0, stay_s=4.0), 2),
        (Arrivals(rate=0.5, stay_s=1.0), 1),
        (Arrivals(rate=0.5, stay_s=1.0, lately_s=8.0), 2),
    ):
        load = replace(demand(queued=1, running=4), arrivals=arrivals)
        assert ask(load, policy(hold=0.0), have=1)[1].replicas == expected
        assert ask(load, policy(hold=0.0), have=2)[1].replicas == 2


def test_tokens_count_as_well_as_requests() -> None:
    assert fulls(demand(queued=2, tokens=2500), policy()) == 2.5
    _, decision = ask(demand(queued=2, tokens=2500), policy(hold=0.0), have=1)
    assert decision.replicas == 3


def test_prompts_that_wait_for_their_prefill_count() -> None:
    rules = replace(policy(hold=0.0), prefill_s_per_token=1e-3)
    waiting = replace(demand(running=1), prompt_tokens=1400)
    assert fulls(waiting, rules) == pytest.approx(1.4 / rules.prefill_wait_s)
    _, decision = ask(waiting, rules, have=1)
    assert decision.replicas == 3
    assert "1.4 s of prefill due" in decision.cause
    _, decision = ask(replace(waiting, prompt_tokens=400), rules, have=1)
    assert (decision.replicas, decision.cause) == (1, "")


@pytest.mark.parametrize("hold", [0.0, 0.2])
def test_load_that_grows_is_answered_as_it_is(hold: float) -> None:
    """How long it goes on growing is not known, and the event can grow with it."""
    rules = policy(hold=hold)
    scaler, _ = ask(demand(queued=4, running=4), rules, have=1, now=5.0)
    scaler, decision = ask(demand(queued=6, running=4), rules, have=1, now=5.2, scaler=scaler)
    assert decision.replicas == 3, "2.5 instance-fulls"
    _, decision = ask(demand(queued=9, running=4), rules, have=1, coming=2, now=5.21, scaler=scaler)
    assert decision.replicas == 4, "3.25; it is the same burst, and not held again"


def test_each_replica_goes_when_it_was_not_needed_for_the_idle_time() -> None:
    rules = policy()
    scaler, decision = ask(demand(running=12), rules, have=4, now=0.0)
    assert (decision.replicas, decision.wake_at) == (4, 2.0)
    scaler, decision = ask(demand(running=1), rules, have=4, now=1.5, scaler=scaler)
    assert (decision.replicas, decision.wake_at) == (4, 2.0)
    scaler, decision = ask(demand(running=1), rules, have=4, now=2.0, scaler=scaler)
    assert (decision.replicas, decision.detected_at) == (3, 0.0)
    assert decision.cause == (
        "4 replicas serve, 3 are enough for 2.0 s (keep-alive 2 s): 0 requests queued and 1 running"
    )
    scaler, decision = ask(demand(running=5), rules, have=3, now=3.0, scaler=scaler)
    assert (decision.replicas, decision.wake_at) == (3, 3.5)
    scaler, decision = ask(demand(running=1), rules, have=3, now=3.5, scaler=scaler)
    assert (decision.replicas, decision.detected_at) == (2, 1.5), "the second was needed at 3.5"
    scaler, decision = ask(demand(running=1), rules, have=2, now=5.5, scaler=scaler)
    assert decision.replicas == 1
    scaler, decision = ask(demand(running=1), rules, have=1, now=9.0, scaler=scaler)
    assert decision.replicas == 1


def test_replicas_that_came_for_growth_count_as_needed_when_they_were_asked_for() -> None:
    scaler, first = ask(demand(queued=8, running=4), policy(), have=1, now=0.0)
    assert first.replicas == 3
    scaler, decision = ask(demand(running=4), policy(), have=1, coming=2, now=1.0, scaler=scaler)
    assert decision.replicas == 3
    scaler, decision = ask(demand(running=4), policy(), have=3, now=2.9, scaler=scaler)
    assert (decision.replicas, decision.wake_at) == (3, 3.0)


def test_history_says_how_many_copies_sleep_and_the_keep_alive_how_long_replicas_stay() -> None:
    rules = replace(
        policy(), idle_s=0.5, keep_asleep=lambda number: Keep(100.0 if number == 3 else 0.0)
    )
    scaler, decision = ask(demand(running=12), rules, have=3, now=0.0)
    assert decision.in_memory == 3
    scaler, decision = ask(demand(running=1), rules, have=3, now=1.0, scaler=scaler)
    assert decision.wake_at == 1.5
    scaler, decision = ask(demand(running=1), rules, have=3, now=1.5, scaler=scaler)
    assert (decision.replicas, decision.in_memory) == (1, 3)
    assert "1 is enough for 0.5 s (keep-alive 0.5 s)" in decision.cause
    assert decision.cause.endswith("; 3 copies stay in memory, the last for 100 s")
    scaler, decision = ask(demand(running=1), rules, have=1, now=100.9, scaler=scaler)
    assert decision.in_memory == 3
    _, decision = ask(demand(running=1), rules, have=1, now=101.0, scaler=scaler)
    assert decision.in_memory == 1
    _, decision = ask(demand(), replace(rules, fixed=2), have=3, now=50.0, scaler=scaler)
    assert (decision.replicas, decision.in_memory) == (2, 0), "an operator's number is no history"


def test_nothing_goes_while_something_comes() -> None:
    _, decision = ask(demand(), policy(idle=0.0), have=3, coming=1)
    assert decision.replicas == 4


@pytest.mark.parametrize(("have", "want"), [(0, 2), (1, 2), (2, 2), (4, 2)])
def test_the_operators_number_is_followed_at_once(have: int, want: int) -> None:
    _, decision = ask(demand(), policy(fixed=2), have=have)
    assert decision.replicas == want


def test_limits_that_contradict_each_other() -> None:
    assert wanted(0.0, policy(least=3, most=2)) == 2
    assert wanted(25.0, policy(most=0)) == 0


loads = st.builds(
    Demand,
    queued_requests=st.integers(0, 100),
    queued_tokens=st.integers(0, 10_000),
    running_requests=st.integers(0, 100),
    running_tokens=st.integers(0, 10_000),
)
policies = st.builds(
    policy,
    least=st.integers(0, 4),
    most=st.integers(0, 8),
    fixed=st.none() | st.integers(0, 10),
    hold=st.sampled_from([0.0, 0.2]),
    idle=st.sampled_from([0.0, 2.0]),
)


LONG_AGO = Scaler(short_since=-100.0, idle=Idle(0, 16, (-100.0,) * 16))


@given(loads, policies, st.integers(0, 8), st.integers(0, 8), st.booleans())
def test_never_beyond_the_limits(
    load: Demand, rules: Policy, have: int, coming: int, waited: bool
) -> None:
    scaler = LONG_AGO if waited else Scaler()
    _, decision = ask(load, rules, have=have, coming=coming, scaler=scaler)
    total = have + coming
    if decision.replicas > total:
        assert decision.replicas <= rules.max_instances
        assert decision.cause
    elif decision.replicas < total:
        assert coming == 0
        assert decision.cause
        lower = rules.min_instances if rules.fixed is None else rules.fixed
        assert decision.replicas >= min(lower, rules.max_instances)


@given(st.integers(0, 40), st.integers(0, 8), policies)
def test_a_constant_load_is_answered_in_one_direction_and_then_left_alone(
    work: int, have: int, rules: Policy
) -> None:
    """`work` requests are there all the time; replicas come and go as decided."""
    scaler, counts = Scaler(), [have]
    for tick in range(200):
        running = min(work, have * SLOTS)
        load = demand(queued=work - running, running=running)
        scaler, decision = ask(load, rules, have=have, now=tick * 0.1, scaler=scaler)
        have = decision.replicas
        counts.append(have)
    steps = [after - before for before, after in itertools.pairwise(counts)]
    assert min(steps) >= 0 or max(steps) <= 0
    assert not any(steps[-50:])


# --- what is expected ---

SOON = Supply(1.0, horizon_s=0.7)


def test_slots_that_will_be_short_are_asked_for_before_work_waits() -> None:
    full, quiet = demand(running=SLOTS), Arrivals(rate=1.0, prompt_tokens=10.0, stay_s=4.0)
    _, decision = aim(full, policy(), quiet, SOON)
    assert decision.replicas == 1
    scaler, held = aim(full, policy(), replace(quiet, rate=2.5), SOON)
    assert held.replicas == 1, "about five requests: a little too many must last for a while"
    assert held.wake_at is not None
    _, decision = aim(
        full, policy(), replace(quiet, rate=2.5), SOON, scaler=scaler, now=held.wake_at
    )
    assert decision.replicas == 2
    assert decision.cause == (
        "2.5 requests a second: in 0.7 s there will be 5 requests, filling 2 replicas of 4 slots; "
        "1 serve, 0 on their way"
    )
    fast = replace(quiet, rate=20.0)
    _, decision = aim(full, policy(), fast, SOON)
    assert decision.replicas == 2, "four times as many, at once; but no more than twice as many"
    _, decision = aim(demand(running=3 * SLOTS), policy(), fast, SOON, have=2)
    assert decision.replicas == 6


def test_kv_that_will_be_short_is_asked_for_too() -> None:
    long = Arrivals(rate=1.0, prompt_tokens=900.0, stay_s=4.0)
    _, decision = aim(demand(running=2), replace(policy(hold=0.0), kv_tokens=1000), long, SOON)
    assert decision.replicas == 3


@given(
    st.integers(0, 40),
    st.integers(0, 20),
    st.floats(0, 100),
    st.floats(0, 20),
    st.floats(0.1, 10),
    st.floats(0, 3),
)
def test_more_arrivals_never_mean_fewer_replicas(
    queued: int, running: int, rate: float, more: float, stay_s: float, horizon_s: float
) -> None:
    load, rules = demand(queued=queued, running=running), policy(most=50, hold=0.0)
    arrivals, supply = Arrivals(rate, 10.0, stay_s), Supply(1.0, horizon_s=horizon_s)
    _, some = aim(load, rules, arrivals, supply)
    _, many = aim(load, rules, replace(arrivals, rate=rate + more), supply)
    assert 1 <= some.replicas <= many.replicas
    # Work that is there never counts for less because some of it will be over by then.
    assert some.replicas >= min(aim(load, rules, Arrivals(), supply)[1].replicas, 50)


# --- objectives ---


def with_objective(ttft_s: float = 0.5, **changes: Any) -> Policy:
    """A prompt of 1000 tokens takes 50 ms."""
    known = replace(policy(most=20), prefill_s_per_token=5e-5, decode_s=0.02, slots=32, kv_tokens=0)
    return replace(known, objectives=Objectives(ttft_s), **changes)


BURST = Arrivals(rate=60.0, prompt_tokens=1000.0, stay_s=4.0)
WAITING = Demand(10, 0, 15, 0, prompt_tokens=20_000)


def aim(
    load: Demand, rules: Policy, arrivals: Arrivals, supply: Supply, **state: Any
) -> tuple[Scaler, Decision]:
    state = {"have": 1, "coming": supply.coming, "now": 5.0} | state
    scaler = state.pop("scaler", Scaler())
    return decide(scaler, replace(load, arrivals=arrivals), replace(rules, supply=supply), **state)


def test_an_objective_asks_at_once_for_what_a_burst_will_need_when_it_is_there() -> None:
    alone = Supply(1.0, horizon_s=0.7)
    _, decision = aim(WAITING, with_objective(), BURST, alone)
    assert decision.replicas >= 5, "60 requests a second are 3 s of prefill"
    assert decision.detected_at == 5.0
    assert decision.cause.startswith("60.0 requests a second of 0.050 s prefill each; in 0.7 s ")
    assert decision.cause.endswith("to keep TTFT 500 ms; 1.0 serve, 0 are on their way")
    _, loose = aim(WAITING, with_objective(ttft_s=5.0), BURST, alone)
    assert loose.replicas < decision.replicas
    _, far = aim(WAITING, with_objective(), BURST, Supply(1.0, horizon_s=2.0))
    assert far.replicas > decision.replicas


def test_room_for_a_burst_and_for_kv_is_kept_with_an_objective_too() -> None:
    alone = Supply(1.0, horizon_s=0.7)
    steady = Demand(0, 0, 20, 20 * 200)
    quiet = replace(BURST, rate=5.0)
    rules = replace(with_objective(), scale_up_hold_s=0.0)
    assert aim(steady, rules, quiet, alone)[1].replicas == 1
    _, roomy = aim(steady, replace(rules, fill=0.5), quiet, alone)
    assert roomy.replicas == 2
    _, large = aim(steady, replace(rules, kv_tokens=12_000), quiet, alone)
    assert large.replicas == 3, "26 requests of 1000 tokens, and 200 to generate"
    assert "3 replicas of 32 slots and 12000 KV positions" in large.cause


def test_what_is_coming_counts_for_when_it_comes() -> None:
    _, answered = aim(WAITING, with_objective(), BURST, Supply(1.0, horizon_s=0.7))
    coming = answered.replicas - 1
    _, again = aim(WAITING, with_objective(), BURST, Supply(1.0, coming, 0.7, 0.7))
    assert again.replicas == answered.replicas
    _, early = aim(WAITING, with_objective(), BURST, Supply(4.0, coming, 0.1, 0.7))
    assert early.cause == ""


def test_while_nodes_have_measured_nothing_slots_decide() -> None:
    rules = with_objective(prefill_s_per_token=0.0)
    load, alone = demand(queued=80, running=32), Supply(1.0, horizon_s=0.7)
    _, decision = aim(load, rules, replace(BURST, rate=0.0), alone)
    assert decision.cause.startswith("80 requests queued and 32 running fill 4 replicas")
    _, decision = aim(load, rules, BURST, alone)
    assert decision.cause.startswith("60.0 requests a second: in 0.7 s there will be 133 requests,")
    assert decision.replicas == 5


def test_replicas_stay_while_fewer_would_just_keep_the_objective() -> None:
    rules = with_objective()
    busy, quiet = Demand(0, 0, 60, 0), replace(BURST, rate=15.0)
    needs = [aim(busy, rules, quiet, Supply(float(n)), have=n)[1] for n in range(1, 9)]
    enough = next(n for n, decision in enumerate(needs, 1) if decision.replicas <= n)
    surplus = Scaler(idle=LONG_AGO.idle)
    _, decision = aim(busy, rules, quiet, Supply(8.0), have=8, scaler=surplus)
    assert decision.replicas < 8
    assert decision.cause.startswith(f"8 replicas serve, {decision.replicas} are enough for ")
    assert "15.0 requests a second" in decision.cause
    assert "(keep-alive 2 s)" in decision.cause
    _, decision = aim(busy, rules, quiet, Supply(float(enough)), have=enough, scaler=surplus)
    assert decision.cause == ""


@given(
    st.integers(0, 100),
    st.integers(0, 100),
    st.floats(0, 100),
    st.floats(0, 10),
    st.integers(0, 8),
    st.integers(0, 8),
    policies,
    st.floats(0.01, 5),
)
def test_objectives_stay_within_the_limits_too(
    queued: int,
    running: int,
    rate: float,
    stay_s: float,
    have: int,
    coming: int,
    rules: Policy,
    ttft_s: float,
) -> None:
    rules = replace(rules, objectives=Objectives(ttft_s), prefill_s_per_token=1e-4, decode_s=0.02)
    load = Demand(queued, 0, running, 0, prompt_tokens=1000 * queued)
    arrivals = Arrivals(rate, 1000.0, stay_s)
    supply = Supply(float(have), coming, 0.5, 1.0)
    _, decision = aim(load, rules, arrivals, supply, have=have, scaler=LONG_AGO)
    if decision.replicas > have + coming:
        assert decision.replicas <= rules.max_instances
        assert decision.cause
    elif decision.replicas < have + coming:
        assert coming == 0
        assert decision.cause
