"""Objectives: the least replicas that keep them, more where more waits, none for nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.planner.core.objectives import (
    FULL,
    Objectives,
    Supply,
    Work,
    batch,
    busy,
    due_s,
    inside,
    met,
    needed,
    tpot_s,
    wait_s,
)

IDLE = Work(
    waiting_s=0.0,
    inside=0,
    rate=0.0,
    prefill_s=0.05,
    token_s=5e-5,
    step_s=0.02,
    stay_s=3.0,
    slots=32,
)
HALF_SECOND = Objectives(ttft_s=0.5)
MOST = 40


def test_nothing_needs_nothing() -> None:
    assert needed(IDLE, Supply(0), HALF_SECOND, MOST) == 0
    assert needed(IDLE, Supply(3, 2, 0.5, 1.0), Objectives(0.5, 0.05), MOST) == 0


def test_what_waits_and_what_arrives_meanwhile_is_due_less_what_serves_meanwhile() -> None:
    burst = replace(IDLE, waiting_s=2.0, inside=40, rate=60.0)
    assert due_s(burst, Supply(1, horizon_s=1.0)) == 2.0 + 60 * 0.05 - 1.0
    assert due_s(burst, Supply(1, 3, coming_s=0.4, horizon_s=1.0)) == 2.0 + 3.0 - 1.0 - 3 * 0.6
    half_loaded = Supply(1.8, 3, coming_s=0.4, horizon_s=1.0)
    assert due_s(burst, half_loaded) < due_s(burst, Supply(1, 3, coming_s=0.4, horizon_s=1.0))
    assert needed(burst, Supply(1, horizon_s=1.0), HALF_SECOND, MOST) > needed(
        burst, half_loaded, HALF_SECOND, MOST
    )


def test_a_full_slot_is_a_wait_although_no_prefill_is_due() -> None:
    """Long answers: 2 requests a second that stay 30 s fill 60 slots."""
    long = replace(IDLE, inside=60, rate=2.0, stay_s=27.0)
    assert needed(long, Supply(3), HALF_SECOND, MOST) == 3
    assert needed(replace(long, slots=8), Supply(3), HALF_SECOND, MOST) == 9


def test_requests_stay_longer_on_replicas_that_prefill() -> None:
    steady = replace(IDLE, inside=100, rate=30.0)
    assert inside(steady, 1e9, 2) == 30 * 3.0 / (1 - 30 * 0.05 / 2)
    assert inside(steady, 1e9, 100) < inside(steady, 1e9, 4) < inside(steady, 1e9, 2)


def test_a_tighter_tpot_is_a_smaller_batch_and_less_prefill_beside_it() -> None:
    slow = replace(IDLE, token_s=0.004, rate=4.0, inside=12, prefill_s=0.05)
    loose, tight = Objectives(0, 0.2), Objectives(0, 0.03)
    assert (batch(slow, loose), batch(slow, tight)) == (32, 3)
    assert needed(slow, Supply(1), tight, MOST) > needed(slow, Supply(1), loose, MOST)
    assert batch(slow, Objectives(0, 0.001)) == 2, "nothing keeps it: a quarter more than a step"
    assert needed(slow, Supply(1), Objectives(0, 0.001), MOST) < MOST


def test_a_sequence_that_decodes_takes_what_was_measured_of_those() -> None:
    """Its KV is read: on accelerators that takes many times as long as one more prompt token."""
    aims, slow = Objectives(0, 0.04), replace(IDLE, decode_token_s=0.002, rate=8.0, inside=24)
    assert (batch(IDLE, aims), batch(slow, aims)) == (32, 11)
    supply = Supply(2, horizon_s=1.0)
    prompts = replace(slow, decode_token_s=0.0)
    assert tpot_s(slow, supply, 2) > 1.5 * tpot_s(prompts, supply, 2)
    assert tpot_s(replace(prompts, token_s=0.002), supply, 2) == tpot_s(slow, supply, 2)
    assert needed(slow, supply, aims, MOST) > needed(prompts, supply, aims, MOST)


LONG_PROMPTS = replace(IDLE, rate=12.0, inside=23, prefill_s=0.098, step_s=0.013, stay_s=1.9)
"""Llama-2-13B on H800s, simulated: 12 requests a second of 2,048 + 128 tokens."""


def test_tpot_is_kept_for_nine_of_ten_requests_and_not_only_in_the_mean() -> None:
    aims, supply = Objectives(0, 0.020), Supply(5, horizon_s=0.6)
    assert LONG_PROMPTS.step_s / (1 - busy(LONG_PROMPTS, 5)) < 0.018, "the mean keeps it"
    assert tpot_s(LONG_PROMPTS, supply, 5) > 0.020
    assert not met(LONG_PROMPTS, supply, aims, 5)
    assert needed(LONG_PROMPTS, supply, aims, MOST) == 6


def test_the_same_prefill_in_longer_pieces_is_later_for_some() -> None:
    supply = Supply(4, horizon_s=0.6)
    pieces = replace(LONG_PROMPTS, rate=1.2, prefill_s=0.98, inside=2)
    assert busy(pieces, 4) == pytest.approx(busy(LONG_PROMPTS, 4))
    assert tpot_s(pieces, supply, 4) > 1.3 * tpot_s(LONG_PROMPTS, supply, 4)
    alone = replace(LONG_PROMPTS, prefill_s=0.0, inside=0, rate=0.0)
    assert tpot_s(alone, supply, 4) == alone.step_s


def test_requests_need_room_for_their_kv_beside_a_slot() -> None:
    long = replace(IDLE, inside=20, rate=4.0, stay_s=5.0, kv_each=4000.0, kv_tokens=20_000)
    assert needed(replace(long, kv_tokens=0), Supply(1), HALF_SECOND, MOST) == 1
    # 20 requests and 1.28 standard deviations, with 4000 positions each
    assert needed(long, Supply(1), HALF_SECOND, MOST) == 6
    assert needed(replace(long, kv_each=400.0), Supply(1), HALF_SECOND, MOST) == 1


def test_half_of_each_replica_takes_about_twice_as_many() -> None:
    busy_ = replace(IDLE, inside=60, rate=15.0, kv_each=100.0, kv_tokens=10_000)
    for aims in (HALF_SECOND, Objectives(0.5, 0.04)):
        whole = needed(busy_, Supply(4), aims, MOST)
        half = needed(replace(busy_, fill=0.5), Supply(4), aims, MOST)
        assert 2 * whole - 1 <= half <= 2 * whole
    assert needed(replace(IDLE, fill=0.5), Supply(0), HALF_SECOND, MOST) == 0


def test_an_objective_that_no_number_keeps_does_not_take_every_node() -> None:
    light = replace(IDLE, rate=2.0, inside=1)
    assert needed(light, Supply(1), Objectives(ttft_s=0.001), MOST) == 1


works = st.builds(
    Work,
    waiting_s=st.floats(0, 50),
    inside=st.integers(0, 500),
    rate=st.floats(0, 200),
    prefill_s=st.floats(0, 1),
    token_s=st.floats(0, 0.01),
    step_s=st.floats(0, 0.2),
    stay_s=st.floats(0, 60),
    slots=st.integers(1, 64),
    kv_each=st.floats(0, 10_000),
    kv_tokens=st.just(0) | st.integers(1000, 100_000),
    fill=st.floats(0.1, 1),
)
supplies = st.builds(
    Supply, st.floats(0, 20), st.integers(0, 20), st.floats(0, 10), st.floats(0, 10)
)
objectives = st.builds(Objectives, st.floats(0, 5), st.floats(0, 0.5))


@given(works, supplies, objectives, st.integers(0, MOST))
def test_the_least_number_is_found(
    work: Work, supply: Supply, aims: Objectives, replicas: int
) -> None:
    """Whatever keeps the objectives is enough, and what is enough keeps them."""
    least = needed(work, supply, aims, MOST)
    assert 0 <= least <= MOST
    assert met(work, supply, aims, replicas) == (replicas >= least) or least == MOST
    assert needed(work, supply, aims.eased(), MOST) >= least


@given(works, supplies, st.floats(0, 10), st.integers(0, 100), st.floats(0, 100))
def test_more_work_never_takes_fewer(
    work: Work, supply: Supply, waiting_s: float, more: int, rate: float
) -> None:
    heavier = replace(
        work, waiting_s=work.waiting_s + waiting_s, inside=work.inside + more, rate=work.rate + rate
    )
    assert needed(heavier, supply, HALF_SECOND, MOST) >= needed(work, supply, HALF_SECOND, MOST)


@given(works, supplies, st.integers(0, MOST))
def test_waits_and_loads_are_never_negative(work: Work, supply: Supply, replicas: int) -> None:
    assert due_s(work, supply) >= 0
    assert inside(work, supply.horizon_s, replicas) >= 0
    assert wait_s(work, due_s(work, supply), replicas) >= 0
    if replicas and busy(work, replicas) >= FULL:
        assert wait_s(work, 0.0, replicas) == float("inf")
