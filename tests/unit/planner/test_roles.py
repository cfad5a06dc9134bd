"""Who prefills and who decodes."""

from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.planner.core.objectives import Objectives, Supply, Work, busy, more_s, tpot_s
from services.planner.core.roles import (
    FIRST_S,
    HOLD_S,
    Choice,
    _tpot_s,
    assign_roles,
    prefillers,
)
from shared.ids import EventId, InstanceId, NodeId
from shared.messages.instances import Instance, InstanceState, Role, Stage

STATES = st.sampled_from(InstanceState)


def instance(number: int, state: InstanceState, stages: int = 1) -> Instance:
    path = tuple(Stage(NodeId(f"n{number}-{i}"), "tcp://x", i, i + 1) for i in range(stages))
    return Instance(
        id=InstanceId(f"i{number}"),
        stages=path,
        state=state,
        capacity=1.0,
        slots=8,
        event=EventId("ev"),
    )


def serving(count: int) -> tuple[Instance, ...]:
    return tuple(instance(number, InstanceState.SERVING) for number in range(count))


def roles(instances: tuple[Instance, ...]) -> list[Role]:
    return [each.role for each in instances]


@given(
    st.lists(st.tuples(STATES, st.sampled_from([1, 1, 2])), max_size=8),
    st.floats(0, 1, exclude_max=True),
)
def test_both_sides_have_somebody_or_everybody_does_both(
    kinds: list[tuple[InstanceState, int]], share: float
) -> None:
    before = tuple(instance(i, state, stages) for i, (state, stages) in enumerate(kinds))
    after = assign_roles(before, share)
    assert [each.id for each in after] == [each.id for each in before]
    able = [i for i in after if i.is_replica and i.state is InstanceState.SERVING]
    prefill = sum(i.role is Role.PREFILL for i in able)
    decode = sum(i.role is Role.DECODE for i in able)
    if share and len(able) > 1:
        assert prefill + decode == len(able)
        assert prefill
        assert decode
        assert abs(prefill - share * len(able)) <= 1
    else:
        assert prefill == decode == 0
    others = [i for i in after if i not in able]
    assert all(i.role is Role.BOTH for i in others)
    assert assign_roles(after, share) == after
    assert roles(assign_roles(after, 0.0)) == [Role.BOTH] * len(after)


def test_who_joins_last_prefills_and_the_oldest_of_them_turns_to_decode() -> None:
    two = assign_roles(serving(2), 0.5)
    assert roles(two) == [Role.DECODE, Role.PREFILL]
    assert roles(assign_roles((*two, instance(2, InstanceState.SERVING)), 0.4)) == [
        Role.DECODE,
        Role.DECODE,
        Role.PREFILL,
    ]


LONG = Work(
    waiting_s=0.0,
    inside=20,
    rate=18.0,
    prefill_s=0.16,
    token_s=5e-5,
    step_s=0.014,
    stay_s=64 * 0.014,
    slots=64,
    steady=18.0,
    decode_token_s=1e-3,
    stay_so_far_s=64 * 0.014,
)
"""Prompts of 3,072 tokens, 18 a second, and 64 tokens each."""
TIGHT = Objectives(ttft_s=2.0, tpot_s=0.020)


def test_long_prompts_and_a_tight_objective_for_tokens_part_them() -> None:
    assert prefillers(LONG, TIGHT, 8) == 4
    assert prefillers(replace(LONG, steady=12.0), TIGHT, 8) == 3


def test_bursts_change_nothing_in_the_mean() -> None:
    assert prefillers(replace(LONG, rate=40.0), TIGHT, 8) == 4


def test_who_keeps_the_objective_together_stays_together() -> None:
    assert prefillers(LONG, Objectives(tpot_s=0.1), 8) == 0
    assert prefillers(replace(LONG, steady=4.0), TIGHT, 8) == 0
    assert prefillers(LONG, Objectives(ttft_s=2.0), 8) == 0


def test_where_many_decode_they_do_not_part_for_short_prompts() -> None:
    """With so many sequences it is the steps that are slow, and apart fewer replicas share them."""
    short = replace(LONG, prefill_s=0.025, step_s=0.0121, steady=48.0)
    assert (
        prefillers(replace(short, stay_so_far_s=256 * 0.0165, decode_token_s=2e-4), TIGHT, 8) == 0
    )


def test_if_nothing_keeps_the_objectives_the_least_late_is_chosen() -> None:
    assert prefillers(replace(LONG, steady=24.0), TIGHT, 8) == 5


def test_near_a_limit_a_choice_stays() -> None:
    chosen = [prefillers(replace(LONG, steady=rate), TIGHT, 8) for rate in (7.0, 12.0)]
    assert chosen == [0, 3]
    assert prefillers(replace(LONG, steady=7.0), TIGHT, 8, now=3) == 3
    assert prefillers(replace(LONG, steady=18.0), TIGHT, 8, now=5) == 5
    assert prefillers(replace(LONG, steady=4.0), TIGHT, 8, now=3) == 0


def test_long_prompts_part_them_though_the_mean_keeps_the_objective() -> None:
    """Half as many prompts of twice the length take as much time, and some meet several."""
    short = replace(LONG, steady=14.0, prefill_s=0.08)
    assert prefillers(short, TIGHT, 8) == 0
    assert prefillers(replace(short, steady=7.0, prefill_s=0.16, inside=10), TIGHT, 8) == 0
    assert prefillers(replace(short, steady=3.5, prefill_s=0.32, inside=5), TIGHT, 8) > 0


@given(st.floats(0.1, 40), st.integers(1, 16), st.sampled_from([0.0, 1e-3]))
def test_who_is_late_together_is_late_for_the_scaler(
    rate: float, replicas: int, decode_token_s: float
) -> None:
    length = 64.0
    work = replace(LONG, rate=rate, decode_token_s=decode_token_s)
    free = 1 - busy(work, replicas)
    assume(free > 0.06)  # beyond that the scaler counts a replica as full
    tpot = _tpot_s(work, length, free, replicas)
    assume(tpot < inf)
    each_s = more_s(work)
    mean_s = max(
        work.step_s / free, (work.step_s - each_s) / (free - rate * length * each_s / replicas)
    )
    there = replace(work, stay_s=length * mean_s * free)
    assert tpot_s(there, Supply(replicas, horizon_s=1e9), replicas) == pytest.approx(tpot)


def test_what_nobody_can_keep_and_what_is_not_known_part_nobody() -> None:
    assert prefillers(replace(LONG, steady=60.0), TIGHT, 8) == 0
    assert prefillers(LONG, Objectives(tpot_s=0.010), 8) == 0
    assert prefillers(replace(LONG, prefill_s=0.0), TIGHT, 8) == 0
    assert prefillers(replace(LONG, stay_so_far_s=0.0), TIGHT, 8) == 0
    assert prefillers(replace(LONG, kv_each=3100.0, kv_tokens=8_000), TIGHT, 8) == 0
    assert prefillers(LONG, TIGHT, 1) == 0


@given(
    st.floats(0, 100),
    st.floats(0, 1),
    st.floats(0, 0.001),
    st.floats(0, 0.1),
    st.floats(0, 20),
    st.floats(0, 0.2),
    st.floats(0, 5),
    st.integers(0, 40),
)
def test_somebody_always_decodes(
    rate: float,
    prefill_s: float,
    token_s: float,
    step_s: float,
    stay_s: float,
    tpot_s: float,
    ttft_s: float,
    replicas: int,
) -> None:
    work = Work(
        *(0.0, 0, rate, prefill_s, token_s, step_s, 0.0, 16), steady=rate, stay_so_far_s=stay_s
    )
    for now in range(replicas):
        assert 0 <= prefillers(work, Objectives(ttft_s, tpot_s), replicas, now) < max(1, replicas)


def test_roles_follow_what_was_mostly_best_for_a_while() -> None:
    choice = Choice()
    for step in range(100):
        number = choice.look((0, 3, 3, 4, 3)[step % 5], step * 0.1)
        assert number == (3 if step * 0.1 >= FIRST_S else 0)
    assert choice.look(5, 10.0) == 3
    assert choice.look(5, 10.0 + HOLD_S) == 5
    assert choice.look(2, 10.1 + HOLD_S) == 5
    assert choice.look(2, 9.9 + 2 * HOLD_S) == 5, "not so soon again"
    assert choice.look(2, 10.1 + 2 * HOLD_S) == 2


def test_the_first_choice_does_not_wait_for_what_was_not_known_before() -> None:
    choice = Choice()
    found = {step / 10: choice.look(3 if step >= 100 else 0, step / 10) for step in range(120)}
    assert 10 < min(at for at, number in found.items() if number) <= 10 + FIRST_S
