"""Scalers and gateways of other systems."""

import pytest
from msgspec.structs import replace

from services.gateway.core.routes import PROMPTS_AHEAD
from services.gateway.core.table import Table
from services.planner.core.demand import Demand, Policy
from services.planner.core.keeping import Keep
from services.planner.core.scaling import Decide, Decision, Scaler
from simulation.scalers import (
    FEWEST_REQUESTS,
    FEWEST_TOKENS,
    per_load,
    per_request,
    per_request_cached,
)
from tests.unit.gateway.support import replica
from tests.unit.gateway.test_routing import draw_0, instance_set, request, table_of

POLICY = Policy(
    min_instances=1, max_instances=8, slots=16, kv_tokens=1000, queue_per_instance=0.25,
    prefill_wait_s=0.5, scale_up_hold_s=0.2, horizon_s=1.0, idle_s=15.0, prefill_s_per_token=0.001,
)  # fmt: skip
START = Scaler()


def load(queued: int = 0, running: int = 0, prompt: int = 0) -> Demand:
    return Demand(queued, 0, running, 0, prompt)


def ask(
    rule: Decide,
    demand: Demand,
    *,
    have: int,
    coming: int = 0,
    now: float = 0.0,
    scaler: Scaler = START,
    policy: Policy = POLICY,
) -> tuple[Scaler, Decision]:
    return rule(scaler, demand, policy, have=have, coming=coming, now=now)


def test_a_platform_has_a_replica_for_every_so_many_requests() -> None:
    _, decision = ask(per_request(0.5), load(queued=9, running=8), have=1, coming=1)
    assert decision.replicas == 3
    assert decision.cause == "17 requests, 8 for each replica; 1 serve, 1 on their way"


def test_a_platform_does_not_look_at_prompts_and_blitzscale_does() -> None:
    demand = load(running=2, prompt=2000)  # 2 s of prefill, where 0.5 s may wait for a replica
    assert ask(per_request(0.5), demand, have=1)[1].replicas == 1
    assert ask(per_load(1.0), demand, have=1)[1].replicas == 4
    assert ask(per_load(0.5), demand, have=1)[1].replicas == 8


@pytest.mark.parametrize("rule", [per_request(0.5), per_load(1.0)])
def test_limits_and_the_operator_overrule_the_load(rule: Decide) -> None:
    assert ask(rule, load(queued=1000), have=1)[1].replicas == POLICY.max_instances
    assert ask(rule, load(), have=0)[1].replicas == POLICY.min_instances
    assert ask(rule, load(), have=0, policy=replace(POLICY, fixed=5))[1].replicas == 5


def test_each_replica_goes_after_the_keep_alive_time() -> None:
    rule = per_request(0.5)
    scaler, decision = ask(rule, load(running=20), have=4, now=8.0)
    assert (decision.replicas, decision.wake_at) == (4, 23.0)
    scaler, decision = ask(rule, load(), have=4, now=10.0, scaler=scaler)
    scaler, decision = ask(rule, load(), have=4, now=23.0, scaler=scaler)
    assert (decision.replicas, decision.cause) == (3, "4 replicas, 3 wanted for 15.0 s")
    scaler, decision = ask(rule, load(), have=3, now=24.9, scaler=scaler)
    assert (decision.replicas, decision.wake_at) == (3, 25.0)
    # What is needed again counts anew.
    _, again = ask(rule, load(running=20), have=3, now=24.9, scaler=scaler)
    assert again.replicas == 3
    assert ask(rule, load(), have=3, now=25.0, scaler=scaler)[1].replicas == 1


def test_the_history_is_ours_and_copies_in_memory_are_lambda_scales() -> None:
    learnt = replace(POLICY, keep_asleep=lambda _: Keep(100.0))
    for rule, cached in ((per_request(0.5), 0), (per_request_cached(0.5), 3)):
        scaler, _ = ask(rule, load(running=20), have=3, now=10.0, policy=learnt)
        scaler, decision = ask(rule, load(), have=3, now=24.0, scaler=scaler, policy=learnt)
        assert (decision.replicas, decision.in_memory) == (3, cached)
        _, decision = ask(rule, load(), have=1, now=39.0, scaler=scaler, policy=learnt)
        assert decision.in_memory == min(1, cached)


def test_a_gateway_without_a_limit_on_prompts_takes_the_free_instance_with_the_fewest() -> None:
    full, many, few = replica(3), replica(1), replica(2)
    for routing, first in ((FEWEST_REQUESTS, few), (FEWEST_TOKENS, many)):
        table = table_of((full, 0, 8), (many, 1, 2), (few, 10, 1))
        chosen = routing.choose(table, request("a"), 0.0, draw_0)
        assert chosen is table.routes[first.id]
        table = table_of((full, 0, 8))
        assert routing.choose(table, request("a"), 0.0, draw_0) is None


def test_our_gateway_holds_back_what_others_hand_out() -> None:
    for prompts_ahead, taken in ((FEWEST_REQUESTS.prompts_ahead, True), (PROMPTS_AHEAD, False)):
        table = Table(prompts_ahead)
        table.apply(instance_set(1, 1, replica(1)))
        (found,) = table.routes.values()
        found.prefill(9000)
        assert found.takes(0.0) is taken
