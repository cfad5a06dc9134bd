"""Shares of several tiers, and the ways between which a plan chooses."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.planner.core.forecast import NO_FORECAST
from services.planner.core.links import Links
from services.planner.core.placement import SHARES, Held, Plan, Roles, plan_transfers
from services.planner.core.tiers import apart, load_times, shares
from shared.ids import NodeId
from shared.messages.pool import Profile
from tests.unit.planner.scripted import record
from tests.unit.registry.builders import info

MODEL = replace(record(), n_blocks=12, block_bytes=(100,) * 12, nbytes=1200)
EVERY = frozenset(range(12))
A, B, C, D, E = (NodeId(name) for name in "abcde")
NODES = (A, B, C, D, E)


def links(disk: dict[NodeId, float], rate: int = 1000, **rates: int) -> Links:
    """Machines of their own."""
    infos = {
        node: replace(info(node), link_bytes_per_s=rates.get(node, rate), host=f"host of {node}")
        for node in NODES
    }
    return Links(infos, {n: Profile(load_bytes_per_s=r) for n, r in disk.items()}, 0, 0.0)


def plan(roles: Roles, known: Links, held: Held | None = None) -> Plan:
    executing = (*roles.memory, *roles.promoting, *roles.receiving)
    return plan_transfers(
        roles, held or {}, MODEL, known, strategy="auto", executing=executing, max_stages=4
    )


def over(made: Plan) -> float:
    seconds = made.forecast.predicted.all_complete_s
    assert seconds is not None
    return seconds


def after(made: Plan, roles: Roles, held: Held | None = None) -> dict[NodeId, set[int]]:
    """Carries a plan out: loads come first, and each transfer must be possible in its step."""
    have = {node: set(EVERY) for node in (*roles.memory, *roles.disk)}
    have |= {node: set((held or {}).get(node, ())) for node in roles.receiving}
    for node, blocks in made.loading.items():
        assert node in roles.promoting or node in roles.disk
        have.setdefault(node, set()).update(blocks)
    for step in sorted({t.step for t in made.transfers}):
        now = [t for t in made.transfers if t.step == step]
        assert len({t.src for t in now}) == len({t.dst for t in now}) == len(now)
        for t in now:
            assert t.block in have[t.src]
            assert t.block not in have[t.dst], "twice"
        for t in now:
            have[t.dst].add(t.block)
    return have


def test_shares_are_as_the_rates() -> None:
    dealt = shares({A: 2.0, B: 1.0}, MODEL.block_bytes, {A: EVERY, B: EVERY}, {})
    assert dealt == {A: EVERY - {2, 5, 8, 11}, B: {2, 5, 8, 11}}
    partly = shares({A: 1.0, B: 1.0}, MODEL.block_bytes, {A: {0, 1}, B: {1, 2}}, {})
    assert partly == {A: {0}, B: {1, 2}}


def test_large_blocks_are_dealt_first() -> None:
    dealt = shares({A: 1.0, B: 1.0}, (1, 1, 1, 3), {A: {0, 1, 2, 3}, B: {0, 1, 2, 3}}, {})
    assert dealt == {A: {3}, B: {0, 1, 2}}


def test_who_is_busy_first_gets_less() -> None:
    there = {A: EVERY, B: EVERY}
    sizes = MODEL.block_bytes
    assert len(shares({A: 100.0, B: 100.0}, sizes, there, {A: 4.0})[A]) == 4
    assert not shares({A: 100.0, B: 100.0}, sizes, there, {A: 12.0})[A]
    assert len(shares({A: 100.0, B: 100.0}, sizes, there, {A: 9.0, B: 9.0})[A]) == 6


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.lists(st.tuples(st.floats(0.5, 4), st.floats(0, 20)), min_size=1, max_size=5),
)
def test_no_supplier_is_over_later_than_it_must_by_more_than_a_block(
    sizes: list[int], suppliers: list[tuple[float, float]]
) -> None:
    rates = {node: rate for node, (rate, _) in zip(NODES, suppliers, strict=False)}
    busy_s = {node: busy for node, (_, busy) in zip(NODES, suppliers, strict=False)}
    every = frozenset(range(len(sizes)))
    dealt = shares(rates, sizes, dict.fromkeys(rates, every), busy_s)
    assert sorted(block for blocks in dealt.values() for block in blocks) == sorted(every)
    over = {n: busy_s[n] + sum(sizes[b] for b in dealt[n]) / rates[n] for n in rates}
    for node, blocks in dealt.items():
        if blocks:  # the smallest of its blocks was dealt last, and nobody would be over sooner
            last = min(sizes[block] for block in blocks)
            others = (over[n] + last / rates[n] for n in rates if n != node)
            assert over[node] <= min(others, default=over[node]) + 1e-9


def test_a_disk_that_is_read_for_others_supplies_less() -> None:
    roles, known = Roles((), (A, B), (), (C,)), links({A: 100.0, B: 100.0})
    made = plan(roles, dataclasses.replace(known, reading_s={"host of a": 4.0}))
    assert Counter(t.src for t in made.transfers) == {A: 4, B: 8}
    alone = plan(roles, dataclasses.replace(known, reading_s={"host of a": 99.0}))
    assert {t.src for t in alone.transfers} == {B}


def test_a_disk_reads_one_block_after_the_other() -> None:
    times = load_times({A: {2, 0}, B: ()}, {A: 10.0, B: 1.0}, MODEL.block_bytes)
    assert times == {(A, 0): 10.0, (A, 2): 20.0}


def test_nodes_of_one_machine_have_one_disk() -> None:
    infos = {n: replace(info(n), host="h" if n in "ac" else "") for n in (A, B, C)}
    assert apart(infos, (C, B, A, D, E)) == (C, B, D, E)


def test_a_disk_elsewhere_feeds_and_its_rate_is_the_limit() -> None:
    made = plan(Roles((), (A,), (), (B, C)), links({A: 100.0}))
    assert made.sources == (A,)
    assert not made.loading
    assert made.forecast.physical_limit_s == pytest.approx(12.0)
    assert over(made) == pytest.approx(12.0, rel=0.1)


def test_two_disks_elsewhere_feed_one_target_in_half_the_time() -> None:
    made = plan(Roles((), (A, B), (), (C,)), links({A: 100.0, B: 100.0}))
    assert (made.strategy, made.sources) == (SHARES, (A, B))
    assert [t.src for t in made.transfers] == [A, B] * 6
    assert over(made) == pytest.approx(6.0, rel=0.1)


def test_two_targets_read_a_half_each_and_exchange() -> None:
    roles = Roles((), (A, B), (), (A, B))
    made = plan(roles, links({A: 100.0, B: 100.0}))
    assert made.strategy == SHARES
    assert sorted(map(len, made.loading.values())) == [6, 6]
    assert over(made) == pytest.approx(6.0, rel=0.1)
    assert [c.strategy for c in made.considered] == [SHARES, "auto"]
    assert made.considered[1].verdict.startswith("is over 5.9")
    slow = plan(roles, links({A: 100.0, B: 100.0}, rate=10))
    assert slow.loading == {A: EVERY, B: EVERY}
    assert not slow.transfers
    assert over(slow) == 12.0


def test_memory_and_the_own_disk_together_beat_either() -> None:
    roles = Roles((A,), (B,), (), (B,))
    made = plan(roles, links({B: 100.0}, rate=100))
    assert made.strategy == SHARES
    assert over(made) == pytest.approx(6.0, rel=0.1)
    assert {t.block for t in made.transfers} == EVERY - made.loading[B]


def test_a_slow_disk_is_left_alone_where_memory_has_a_copy() -> None:
    made = plan(Roles((A,), (B,), (), (B, C)), links({B: 1.0}))
    assert made.sources == (A,)
    assert not made.loading
    untimed = plan(Roles((A,), (B,), (), (B, C)), links({}))
    assert untimed.sources == (A,)
    assert len({c.strategy for c in untimed.considered}) == 4


def test_a_fast_own_disk_comes_before_a_slow_network() -> None:
    made = plan(Roles((A,), (B,), (), (B,)), links({B: 1e6}, rate=10))
    assert made.loading == {B: EVERY}
    assert not made.transfers


def test_tiers_supply_shares_where_some_links_were_never_measured() -> None:
    """B has sent and A has received; C and D have done neither."""
    infos = {node: replace(info(node), link_bytes_per_s=0, host=node) for node in NODES}
    measured = {
        A: Profile(in_bytes_per_s=200.0, load_bytes_per_s=100.0),
        B: Profile(out_bytes_per_s=200.0),
        C: Profile(load_bytes_per_s=100.0),
    }
    known = Links(infos, measured, 0, 0.0)
    own = plan(Roles((B,), (A,), (), (A,)), known)
    assert (own.strategy, len(own.loading[A]), len(own.transfers)) == (SHARES, 4, 8)
    away = plan(Roles((), (A, C), (), (D,)), known)
    assert (away.strategy, Counter(t.src for t in away.transfers)) == (SHARES, {A: 6, C: 6})
    assert own.forecast == away.forecast == NO_FORECAST


def test_where_no_link_is_known_nobody_relies_on_one_who_need_not() -> None:
    """The own disk comes alone. If all has to come over links, both disks read."""
    infos = {node: replace(info(node), link_bytes_per_s=0, host=node) for node in NODES}
    disks = {A: Profile(load_bytes_per_s=100.0), B: Profile(load_bytes_per_s=200.0)}
    unknown = Links(infos, disks, 0, 0.0)
    own = plan(Roles((), (A, B), (), (A,)), unknown)
    assert (own.loading, own.transfers) == ({A: EVERY}, ())
    away = plan(Roles((), (A, B), (), (C,)), unknown)
    assert Counter(t.src for t in away.transfers) == {A: 4, B: 8}
    assert (away.strategy, away.forecast) == (SHARES, NO_FORECAST)


roles_ = st.tuples(st.permutations(NODES), st.integers(0, 2), st.integers(0, 3), st.integers(1, 4))


@given(
    roles_,
    st.lists(st.sampled_from([0.0, 1.0, 50.0, 100.0, 1e6]), min_size=5, max_size=5),
    st.dictionaries(st.sampled_from(NODES), st.frozensets(st.integers(0, 11), max_size=11)),
    st.sampled_from([0, 10, 100, 1000]),
)
def test_every_way_completes_every_target_and_the_best_is_taken(
    drawn: tuple[list[NodeId], int, int, int],
    disk: list[float],
    partly: dict[NodeId, frozenset[int]],
    rate: int,
) -> None:
    order, in_memory, on_disk, targets = drawn
    memory, disks = tuple(order[:in_memory]), tuple(order[in_memory : in_memory + on_disk])
    wanted = order[-targets:]
    if not memory and not disks:
        return
    promoting = tuple(n for n in wanted if n in memory)
    receiving = tuple(n for n in wanted if n not in memory)
    roles = Roles(memory, disks, promoting, receiving)
    held = {node: partly.get(node, frozenset[int]()) for node in receiving}
    made = plan(roles, links(dict(zip(NODES, disk, strict=True)), rate=rate), held)
    have = after(made, roles, held)
    assert all(have[node] == EVERY for node in wanted)
    assert {t.src for t in made.transfers} <= {*made.sources, *receiving}
    scores = [each.score for each in made.considered]
    assert not scores or scores[0] == min(scores)
