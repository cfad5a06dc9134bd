"""Which faults a run of `bench chaos` has."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos.faults import LASTING, MOST, NOTICE_S, SIGNALS, Fault, Kind, draw
from benchmarks.chaos.harness import roles


def drawn(seed: int, kinds: tuple[Kind, ...] = tuple(Kind)) -> tuple[Fault, ...]:
    return draw(seed, roles(), kinds=kinds, within_s=4.0, lasting_s=10.0)


@given(st.integers(0, 10**6))
def test_enough_of_each_role_is_left_alone(seed: int) -> None:
    faults = drawn(seed)
    assert 1 <= len(faults) <= MOST
    assert len({fault.process for fault in faults}) == len(faults)
    hit = Counter(fault.role for fault in faults)
    there = Counter(roles().values())
    assert hit["nats"] * 2 < there["nats"]
    assert hit["node"] * 2 <= there["node"]
    assert all(hit[role] < there[role] for role in there)


@given(st.integers(0, 10**6))
def test_a_seed_says_it_all(seed: int) -> None:
    faults = drawn(seed)
    assert faults == drawn(seed)
    assert list(faults) == sorted(faults, key=lambda fault: fault.at_s)
    for fault in faults:
        assert roles()[fault.process] == fault.role
        assert 0 <= fault.at_s <= 4
        lasting = {Kind.NOTICE: NOTICE_S, **dict.fromkeys(LASTING, 10.0)}
        assert fault.for_s == lasting.get(fault.kind, 0.0)


def test_every_kind_hits_every_role() -> None:
    found = {(fault.role, fault.kind) for seed in range(400) for fault in drawn(seed)}
    everything = {(role, kind) for role in roles().values() for kind in Kind}
    of_nodes = Kind.SLOW, Kind.NOTICE
    others = set(roles().values()) - {"node"}
    assert everything - found == {(role, kind) for role in others for kind in of_nodes}


@pytest.mark.parametrize("kind", [Kind.KILL, Kind.NOTICE])
def test_in_some_runs_half_of_the_nodes_go_at_once(kind: Kind) -> None:
    nodes = {name for name, role in roles().items() if role == "node"}
    found = [
        faults
        for faults in map(drawn, range(200))
        if len(faults) == len(nodes) // 2
        and {fault.process for fault in faults} <= nodes
        and {(fault.kind, fault.at_s) for fault in faults} == {(kind, faults[0].at_s)}
    ]
    assert 10 <= len(found) <= 40


@pytest.mark.parametrize("seed", range(20))
def test_without_a_network_there_are_signals_only(seed: int) -> None:
    assert {fault.kind for fault in drawn(seed, SIGNALS)} <= set(SIGNALS)
