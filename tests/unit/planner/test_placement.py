"""Who sends, who receives, who loads by itself."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.kv_traffic import Flow
from services.planner.core.links import Links
from services.planner.core.multicast.strategies import STRATEGIES, lower_bound
from services.planner.core.placement import (
    REPAIR,
    Held,
    Plan,
    Roles,
    assign_roles,
    plan_transfers,
    repair_transfers,
)
from shared.errors import PlanError
from shared.ids import NodeId
from shared.messages.pool import Profile, Source, Tier
from shared.messages.scaling import Transfer
from tests.unit.planner.scripted import BLOCKS, record
from tests.unit.registry.builders import info

EVERY = frozenset(range(BLOCKS))
A, B, C, D = (NodeId(name) for name in "abcd")
UNKNOWN = Links({}, {}, 0, 0.0)


def plan(
    roles: Roles, held: Held | None = None, strategy: str = "auto", links: Links = UNKNOWN
) -> Plan:
    return plan_transfers(
        roles,
        held or {},
        record(),
        links,
        strategy=strategy,
        executing=(A, B, C, D),
        max_stages=4,
    )


def rates(**rates: int) -> Links:
    infos = {
        NodeId(name): msgspec.structs.replace(info(NodeId(name)), link_bytes_per_s=rate)
        for name, rate in rates.items()
    }
    return Links(infos, {}, 0, 0.0)


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


def test_copies_are_sorted_by_tier() -> None:
    copies = [source(A, Tier.GPU), source(B, Tier.HOST), source(B, Tier.DISK), source(C, Tier.DISK)]
    roles = assign_roles([*copies, source(D, Tier.GPU, 0, 1)], [D, C, B])
    assert roles == Roles(memory=(A, B), disk=(C,), promoting=(B,), receiving=(D, C))


def test_without_a_complete_copy_there_is_no_plan() -> None:
    with pytest.raises(PlanError, match="no node that could send the model has all of its blocks"):
        assign_roles([source(A, Tier.GPU, 0, 1)], [B])


@pytest.mark.parametrize("strategy", ["auto", *sorted(STRATEGIES.keys() - {"local"})])
def test_every_strategy_fills_the_receivers(strategy: str) -> None:
    made = plan(Roles((A,), (), (A,), (B, C, D)), strategy=strategy)
    done = after(made.transfers, {A: EVERY})
    assert set(map(frozenset, done.values())) == {EVERY}
    assert made.strategy == (strategy if strategy != "auto" else "binomial")
    assert (made.setup_s > 0) == (strategy == "broadcast")


def test_the_multicast_is_the_best_there_is() -> None:
    links = rates(a=400, b=400, c=400, d=400)
    made = plan(Roles((A,), (), (), (B, C, D)), links=links)
    assert max(t.step for t in made.transfers) == lower_bound(4, BLOCKS, 1)
    assert made.considered[0].strategy == "binomial"
    assert {each.strategy for each in made.considered} == {"binomial", "head", "taps", "chain"}


def test_who_receives_nothing_needs_no_transfers() -> None:
    assert plan(Roles((A,), (), (A,), ())).transfers == ()


def test_a_strategy_that_loads_needs_copies_on_disk() -> None:
    roles = Roles((A,), (B, C), (), (B, C))
    made = plan(roles, strategy="local")
    assert (made.transfers, set(made.loading)) == ((), {B, C})
    with pytest.raises(PlanError, match="strategy local: b has no copy of its own to load"):
        plan(Roles((A,), (C,), (), (B, C)), strategy="local")


def test_a_slow_target_is_left_at_the_end() -> None:
    """It relays to nobody: the fast ones are as soon complete as without it."""
    links = rates(a=400, b=400, c=400, d=40)
    made = plan(Roles((A,), (), (), (D, C, B)), links=links)
    assert D not in {t.src for t in made.transfers}
    without = plan(Roles((A,), (), (), (C, B)), links=links)
    first = made.forecast.predicted.first_complete_s
    alone = without.forecast.predicted.first_complete_s
    assert first is not None
    assert alone is not None
    assert first <= alone * 1.3


def test_what_targets_hold_already_is_not_sent_again() -> None:
    held = {B: frozenset({0, 1, 2}), C: frozenset[int]()}
    made = plan(Roles((A,), (), (), (B, C)), held)
    assert made.strategy == REPAIR
    assert [t.block for t in made.transfers if t.dst == B] == [3]
    done = after(made.transfers, {A: EVERY, **held})
    assert done[B] == done[C] == EVERY


holdings = st.dictionaries(
    st.sampled_from([A, B, C, D]), st.frozensets(st.integers(0, BLOCKS - 1)), min_size=1
)


@given(holdings)
def test_repair_completes_its_targets_or_says_what_is_missing(
    held: dict[NodeId, frozenset[int]],
) -> None:
    targets = sorted(held)[:2]
    if any(not frozenset().union(*held.values()) >= EVERY for target in targets):
        with pytest.raises(PlanError, match="no node that may send holds blocks"):
            repair_transfers(held, targets, record(), UNKNOWN)
        return
    done = after(repair_transfers(held, targets, record(), UNKNOWN), held)
    assert all(done[target] == EVERY for target in targets)


def test_who_is_not_trusted_gives_only_what_no_other_has() -> None:
    held = {A: EVERY, B: frozenset({0, 1, 2}), C: frozenset[int]()}
    transfers = repair_transfers(held, [C], record(), UNKNOWN, reluctant=[A])
    assert {t.block: t.src for t in transfers} == {0: B, 1: B, 2: B, 3: A}


def test_a_slow_relay_is_left_out_where_that_is_sooner() -> None:
    held = {A: EVERY, B: EVERY, C: frozenset[int](), D: frozenset[int]()}
    slow = repair_transfers(held, [C, D], record(), rates(a=400, b=20, c=400, d=400))
    assert B not in {t.src for t in slow}
    fair = repair_transfers(held, [C, D], record(), rates(a=400, b=330, c=400, d=400))
    assert B in {t.src for t in fair}


KV_TAKES = Flow(out=80.0)
"""Of a port of 100 bytes/s."""


def beside(links: Links, **kv: Flow) -> Links:
    return replace(links, kv={NodeId(name): flow for name, flow in kv.items()})


def test_a_node_that_prefills_sends_no_weights_while_one_that_decodes_can() -> None:
    links = beside(rates(a=100, b=100, c=100, d=100), a=KV_TAKES, b=Flow(into=80.0))
    made = plan(Roles((A, B), (), (), (C, D)), links=links)
    assert {t.src for t in made.transfers} <= {B, C, D}
    assert made.sources == (B,)
    assert made.ports == ("a sends no weights: KV takes 80 B/s of 100 B/s out of it",)


def test_the_only_source_sends_although_kv_takes_its_way_out() -> None:
    links = beside(rates(a=100, b=100, c=100), a=KV_TAKES)
    made = plan(Roles((A,), (), (), (B, C)), links=links)
    assert made.sources == (A,)
    assert made.ports == (
        "a sends at 20 B/s: KV takes 80 B/s of 100 B/s out of it",
        "nobody but a can send it",
    )
    alone = plan(Roles((A,), (), (), (B, C)), links=rates(a=20, b=100, c=100))
    assert made.forecast.predicted == alone.forecast.predicted


def test_a_taken_port_is_used_if_the_others_are_much_slower() -> None:
    links = beside(rates(a=100, b=10, c=100), a=KV_TAKES)
    made = plan(Roles((A, B), (), (), (C,)), links=links)
    assert A in {t.src for t in made.transfers}
    assert made.ports[-1].startswith("without a loading would take ")


def test_a_target_that_prefills_relays_nothing() -> None:
    links = beside(rates(a=100, b=100, c=100, d=100), c=KV_TAKES)
    made = plan(Roles((A,), (), (), (B, C, D)), strategy="binomial", links=links)
    assert C not in {t.src for t in made.transfers}
    assert C in {t.dst for t in made.transfers}


def test_a_target_that_decodes_is_reckoned_to_be_slow() -> None:
    links = rates(a=100, b=100)
    made, slow = (
        plan(Roles((A,), (), (), (B,)), links=each)
        for each in (links, beside(links, b=Flow(into=80.0)))
    )
    before, after_ = made.forecast.predicted.all_complete_s, slow.forecast.predicted.all_complete_s
    assert before is not None
    assert after_ == pytest.approx(5 * before)
    assert slow.ports == ("b receives at 20 B/s: KV takes 80 B/s of 100 B/s into it",)
    assert slow.forecast.physical_limit_s == made.forecast.physical_limit_s


def test_disks_of_others_come_before_memory_whose_way_out_is_taken() -> None:
    links = beside(rates(a=100, b=100, c=100), a=KV_TAKES)
    disk = replace(links, profiles={B: Profile(load_bytes_per_s=1e9)})
    made = plan(Roles((A,), (B,), (), (C,)), links=disk)
    assert {t.src for t in made.transfers} == {B}
