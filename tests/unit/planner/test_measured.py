"""What nodes measured: relative speeds, and what planner and gateways make of them."""

import pytest

from services.planner.core import commands
from services.planner.core.cluster import Cluster
from services.planner.core.measured import ALIKE, MOST, Measured
from shared.ids import GatewayId, Generation, InstanceId, ModelName, NodeId
from shared.messages.load import GatewayLoad, ModelLoad
from shared.messages.pool import Holding, ModelProfile, NodeStatus, Profile, Tier
from tests.unit.planner.driver import EVERY, Driver
from tests.unit.planner.scripted import MODEL, NAME
from tests.unit.registry.builders import info

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
TOKENS = 4


def timed(decode_s: float, prefill_s: float | None = None) -> Profile:
    more = decode_s / 10 if prefill_s is None else prefill_s
    times = ModelProfile(model_id=MODEL, decode_s=decode_s, prefill_s_per_token=more)
    return Profile(models=(times,))


def measured(**decode_s: float) -> Measured:
    found = Measured()
    for node, seconds in decode_s.items():
        found.on_profile(NodeId(node), timed(seconds))
    return found


def test_a_node_that_takes_twice_as_long_has_half_the_speed() -> None:
    found = measured(a=0.02, b=0.04, c=0.02)
    assert [found.speed(node, MODEL, TOKENS) for node in (A, B, C)] == [1.0, 0.5, 1.0]


def test_every_token_of_a_pass_counts() -> None:
    found = Measured()
    found.on_profile(A, timed(0.01, 0.01))
    found.on_profile(B, timed(0.01, 0.03))
    assert found.speed(B, MODEL, 1) == 1.0
    assert found.speed(B, MODEL, TOKENS) == 0.4


def test_a_speed_that_is_not_known_is_1() -> None:
    assert Measured().speed(A, MODEL, TOKENS) == 1.0
    assert measured(b=0.02).speed(A, MODEL, TOKENS) == 1.0
    assert measured(a=0.02, b=0.0).speed(B, MODEL, TOKENS) == 1.0
    found = measured(a=0.02)
    found.on_profile(B, timed(0.08, 0.0))
    assert found.speed(B, MODEL, TOKENS) == 1.0, "this may be the time of any batch"
    times = ModelProfile(model_id=MODEL, decode_s=0.08, prefill_s_per_token=0.008, share=0.2)
    found.on_profile(B, Profile(models=(times,)))
    assert found.speed(B, MODEL, TOKENS) == 1.0, "a small part looks slow"


def test_noise_changes_no_speed_and_a_clear_change_does() -> None:
    found = measured(a=0.02, b=0.02, c=0.02 * 0.95 * ALIKE)
    assert found.speed(C, MODEL, TOKENS) == 1.0
    found.on_profile(C, timed(0.04))
    assert found.speed(C, MODEL, TOKENS) == 0.5
    found.on_profile(C, timed(0.032))
    assert found.speed(C, MODEL, TOKENS, known=0.5) == 0.5
    found.on_profile(C, timed(0.02))
    assert found.speed(C, MODEL, TOKENS, known=0.5) == 1.0


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e-300, 1e300])
def test_a_measurement_that_cannot_be_ruins_nothing(seconds: float) -> None:
    found = measured(a=0.02, b=0.02, c=seconds)
    assert 1 / MOST <= found.speed(C, MODEL, TOKENS) <= MOST
    assert found.speed(A, MODEL, TOKENS) == 1.0
    assert found.decode_s(MODEL) == 0.02


def test_what_the_node_in_the_middle_measured_stands_for_the_model() -> None:
    assert measured(a=0.09, b=0.02, c=0.04).decode_s(MODEL) == 0.04


def test_another_process_under_the_name_has_measured_nothing() -> None:
    found = Cluster()
    found.on_joined(info("a"))
    found.measured.on_profile(A, timed(0.02))
    found.on_joined(info("a", generation=2))
    assert found.measured.decode_s(MODEL) == 0.0
    found.measured.on_profile(A, timed(0.02))
    found.on_gone(A, Generation(2), 0.0)
    assert found.measured.decode_s(MODEL) == 0.0


def report(driver: Driver, node: str, seq: int, times: Profile, *, holds: bool = True) -> None:
    status = NodeStatus(
        node=NodeId(node),
        generation=Generation(1),
        seq=seq,
        arena_free=500,
        holdings=(Holding(MODEL, Tier.GPU, EVERY),) if holds else (),
        profile=times,
    )
    driver.feed(status)


def test_a_slow_replica_is_given_its_speed_as_capacity_and_all_its_slots() -> None:
    driver = Driver()
    driver.join("a", "b", "c")
    driver.publish()
    for node in ("a", "b", "c"):
        driver.holds(node)
    driver.wait(0.1)
    for node, seconds in (("a", 0.02), ("b", 0.04), ("c", 0.02)):
        report(driver, node, 1000, timed(seconds))
    driver.wait(0.1)
    (found,) = driver.core.sets()
    assert {i.leader: (i.capacity, i.slots) for i in found.instances} == {
        A: (1.0, 4),
        B: (0.5, 4),
        C: (1.0, 4),
    }
    assert driver.sets[-1].instances == found.instances
    report(driver, "b", 1001, timed(0.021))
    driver.wait(0.1)
    assert {i.capacity for i in driver.sets[-1].instances} == {1.0}


def test_prompts_fill_more_replicas_where_these_are_slow() -> None:
    """The prompts take an ordinary node 0.4 s, which is less than `prefill_wait_s`."""
    begun: dict[float, bool] = {}
    for slow in (1.0, 4.0):
        driver = Driver()
        driver.join("a", "b", "c", "d")
        driver.publish()
        driver.holds("a")
        driver.wait(0.1)
        times = timed(0.01, 0.001)
        for node in ("b", "c"):
            report(driver, node, 1000, times, holds=False)
        report(driver, "a", 1000, timed(0.01 * slow, 0.001 * slow))
        waiting = ModelLoad(
            model=ModelName(NAME),
            queued_requests=0,
            queued_tokens=0,
            running_requests=1,
            running_tokens=10,
            prompt_tokens=400,
            instance_requests={InstanceId("replica-a"): 1},
        )
        found = driver.feed(GatewayLoad(gateway=GatewayId("gateway-0"), models=(waiting,)))
        begun[slow] = any(isinstance(c, commands.Reserve) for c in found)
    assert begun == {1.0: False, 4.0: True}


def test_a_replica_has_the_kv_of_an_ordinary_node_and_a_group_that_of_its_poorest() -> None:
    found = Measured()
    assert found.kv_tokens(MODEL) == 0
    for node, positions in ((A, 640), (B, 320), (C, 960), (A, 656)):
        found.on_kv(node, {MODEL: positions})
    assert found.kv_tokens(MODEL) == 656, "whoever speaks last decides nothing"
    assert found.kv_tokens(MODEL, group=True) == 320


def test_only_nodes_that_have_the_model_open_say_what_kv_it_has() -> None:
    found = Measured()
    for node, positions in ((A, 640), (B, 320)):
        found.on_kv(node, {MODEL: positions})
    found.on_kv(B, {})
    assert found.kv_tokens(MODEL, group=True) == 640
    found.on_kv(A, {})
    assert found.kv_tokens(MODEL) == 640, "what is known last, for the next one"
    found.on_kv(B, {MODEL: 320})
    assert found.kv_tokens(MODEL) == 320
    found.on_gone(B)
    assert found.kv_tokens(MODEL) == 320
    found.on_kv(C, {MODEL: 960})
    assert found.kv_tokens(MODEL) == 960


def test_gateways_are_told_how_long_kv_takes_to_move() -> None:
    driver = Driver()
    driver.join("a", "b")
    driver.publish()
    for node, kv_s in (("a", 2e-6), ("b", 0.0)):
        ran = ModelProfile(
            model_id=MODEL, decode_s=0.02, prefill_s_per_token=1e-4, kv_s_per_token=kv_s
        )
        driver.status(node, Holding(MODEL, Tier.GPU, tuple(EVERY)), ran=(ran,))
    driver.wait(1.0)
    assert driver.sets[-1].kv_s_per_token == 2e-6, "of those where it moves"
