"""Who sends, who receives, who loads by itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.multicast.strategies import STRATEGIES, lower_bound
from services.planner.core.placement import (
    Held,
    Roles,
    assign_roles,
    plan_transfers,
    repair_transfers,
)
from shared.errors import PlanError
from shared.ids import NodeId
from shared.messages.pool import Source, Tier
from shared.messages.scaling import Transfer
from tests.unit.registry.builders import info

BLOCKS = 4
EVERY = frozenset(range(BLOCKS))
A, B, C, D = (NodeId(name) for name in "abcd")


def source(node: NodeId, tier: Tier, *blocks: int) -> Source:
    held = blocks or tuple(range(BLOCKS))
    return Source(info(node), tier, held, complete=len(held) == BLOCKS)


def after(transfers: tuple[Transfer, ...], held: Held) -> dict[NodeId, set[int]]:
    """Carries the transfers out, each of which must be possible in its step."""
    have = {node: set(blocks) for node, blocks in held.items()}
    for step in sorted({t.step for t in transfers}):
        now = [t for t in transfers if t.step == step]
        assert len({t.src for t in now}) == len({t.dst for t in now}) == len(now)
        assert all(t.block in have[t.src] for t in now)
        for t in now:
            have.setdefault(t.dst, set()).add(t.block)
    return have


def test_memory_feeds_and_targets_with_a_copy_promote_it() -> None:
    roles = assign_roles([source(A, Tier.GPU), source(B, Tier.HOST)], [B, C])
    assert roles == Roles(sources=(A, B), promoting=(B,), receiving=(C,), from_disk=False)


def test_a_disk_is_read_only_when_no_memory_has_a_copy() -> None:
    both = [source(A, Tier.GPU), source(B, Tier.DISK)]
    assert assign_roles(both, [B, C]) == Roles((A,), (), (B, C), from_disk=False)
    assert assign_roles(both[1:], [C, B]) == Roles((B,), (B,), (C,), from_disk=True)


def test_a_node_with_copies_in_two_tiers_is_one_source() -> None:
    assert assign_roles([source(A, Tier.GPU), source(A, Tier.HOST)], [B]).sources == (A,)


def test_without_a_complete_copy_there_is_no_plan() -> None:
    with pytest.raises(PlanError, match="no node that could send the model has all of its blocks"):
        assign_roles([source(A, Tier.GPU, 0, 1)], [B])
    with pytest.raises(PlanError, match="its only copies are on the disks of a"):
        assign_roles([source(A, Tier.DISK)], [B])


@pytest.mark.parametrize("strategy", sorted(STRATEGIES.keys() - {"local"}))
def test_every_strategy_fills_the_receivers(strategy: str) -> None:
    roles = Roles((A,), (A,), (B, C, D), from_disk=True)
    transfers = plan_transfers(roles, {}, BLOCKS, strategy)
    assert set(map(frozenset, after(transfers, {A: EVERY}).values())) == {EVERY}


def test_the_multicast_is_the_best_there_is() -> None:
    transfers = plan_transfers(Roles((A,), (), (B, C, D), False), {}, BLOCKS, "binomial")
    assert max(t.step for t in transfers) == lower_bound(4, BLOCKS, 1)


def test_who_receives_nothing_needs_no_transfers() -> None:
    assert plan_transfers(Roles((A,), (A,), (), True), {}, BLOCKS, "binomial") == ()


def test_what_targets_hold_already_is_not_sent_again() -> None:
    held = {B: frozenset({0, 1, 2}), C: frozenset[int]()}
    transfers = plan_transfers(Roles((A,), (), (B, C), False), held, BLOCKS, "binomial")
    assert [t.block for t in transfers if t.dst == B] == [3]
    done = after(transfers, {A: EVERY, **held})
    assert done[B] == done[C] == EVERY


holdings = st.dictionaries(
    st.sampled_from([A, B, C, D]), st.frozensets(st.integers(0, BLOCKS - 1)), min_size=1
)


@given(holdings, st.sets(st.sampled_from([A, B, C, D])))
def test_repair_completes_its_targets_from_its_senders_or_says_what_is_missing(
    held: dict[NodeId, frozenset[int]], senders: set[NodeId]
) -> None:
    targets = sorted(held)[:2]
    there: frozenset[int] = frozenset().union(*(held.get(s, frozenset()) for s in senders))
    if any(not EVERY - held[target] <= there for target in targets):
        with pytest.raises(PlanError, match="no node that may send holds blocks"):
            repair_transfers(held, targets, BLOCKS, senders)
        return
    transfers = repair_transfers(held, targets, BLOCKS, senders)
    assert {t.src for t in transfers} <= senders
    done = after(transfers, held)
    assert all(done[target] == EVERY for target in targets)
