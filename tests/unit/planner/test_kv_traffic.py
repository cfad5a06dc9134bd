"""What KV leaves of ports, and how much KV is expected where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.kv_traffic import (
    BUSY,
    NO_FLOW,
    WINDOW_S,
    Flow,
    KvTraffic,
    is_taken,
    left,
    words,
)
from shared.ids import ModelId, NodeId
from shared.messages.instances import Role
from shared.port_shares import WEIGHTS_LEAST

A, B, C, D = (NodeId(name) for name in "abcd")
LLAMA, QWEN = ModelId("llama"), ModelId("qwen")
APART = {A: Role.PREFILL, B: Role.PREFILL, C: Role.DECODE, D: Role.DECODE}

rates = st.floats(1.0, 1e12)


@given(rates, st.floats(0.0, 2.0), st.booleans())
def test_weights_get_what_kv_leaves_and_slow_it_by_their_least_share_at_most(
    rate: float, load: float, spares: bool
) -> None:
    kv = load * rate
    rest = left(rate, kv, spares=spares)
    assert 0 <= rest <= rate
    if spares and is_taken(rate, kv):
        assert rest == 0
    else:
        slowed = min(kv, rate) - (rate - rest)
        assert slowed <= WEIGHTS_LEAST * rate * (1 + 1e-9)
        assert rest == max(rate - kv, WEIGHTS_LEAST * rate)


@given(rates, st.floats(0.0, 2.0), st.floats(0.0, 2.0), st.booleans())
def test_more_kv_never_leaves_more(rate: float, one: float, other: float, spares: bool) -> None:
    less, more = sorted((one * rate, other * rate))
    assert left(rate, more, spares=spares) <= left(rate, less, spares=spares)


def test_a_direction_is_taken_from_the_point_where_kv_leaves_too_little() -> None:
    assert not is_taken(100.0, (1 - BUSY) * 100.0)
    assert is_taken(100.0, (1 - BUSY) * 100.0 + 1)
    assert left(100.0, 0.0, spares=True) == 100.0


def said(traffic: KvTraffic, node: NodeId, *, out: int = 0, into: int = 0, until: int = 10) -> None:
    """The node reports this much KV in every second."""
    for second in range(until + 1):
        traffic.on_status(node, second * out, second * into, float(second))


def test_kv_is_the_mean_of_the_last_seconds() -> None:
    traffic = KvTraffic()
    said(traffic, A, out=100, into=20)
    assert traffic.flows(10.0) == {A: Flow(100.0, 20.0)}
    for second in range(11, 16):
        traffic.on_status(A, 1000, 200, float(second))
    assert traffic.flows(15.0) == {A: Flow(50.0, 10.0)}
    assert traffic.flows(20.0 + WINDOW_S) == {}


def test_a_node_that_began_anew_counts_from_then() -> None:
    traffic = KvTraffic()
    said(traffic, A, out=100)
    traffic.on_status(A, 0, 0, 11.0)
    traffic.on_status(A, 70, 0, 12.0)
    assert traffic.flows(12.0) == {A: Flow(70.0, 0.0)}
    traffic.on_gone(A)
    assert traffic.flows(12.0) == {}


def test_roles_decide_where_the_kv_of_a_model_goes() -> None:
    """B has only begun to prefill, and C to decode: it is as if they had done so all the time."""
    traffic = KvTraffic()
    said(traffic, A, out=60)
    said(traffic, C, out=60)
    said(traffic, D, into=120)
    traffic.on_roles(LLAMA, APART)
    assert traffic.flows(10.0) == {
        A: Flow(60.0, 0.0),
        B: Flow(60.0, 0.0),
        C: Flow(0.0, 60.0),
        D: Flow(0.0, 60.0),
    }
    traffic.on_roles(LLAMA, dict.fromkeys(APART, Role.BOTH))
    assert traffic.flows(10.0)[C] == Flow(60.0, 0.0)


def test_a_node_of_two_models_has_the_kv_of_both() -> None:
    traffic = KvTraffic()
    said(traffic, A, out=60)
    said(traffic, B, out=30)
    traffic.on_roles(LLAMA, {A: Role.PREFILL, C: Role.DECODE})
    traffic.on_roles(QWEN, {B: Role.PREFILL, A: Role.DECODE})
    assert traffic.flows(10.0)[A].out == 60.0
    traffic.on_roles(LLAMA, {})
    traffic.on_roles(QWEN, {})
    assert traffic.flows(10.0) == {A: Flow(60.0, 0.0), B: Flow(30.0, 0.0)}


flows = st.builds(Flow, st.integers(0, 1000).map(float), st.integers(0, 1000).map(float))


@given(
    st.dictionaries(st.sampled_from((A, B, C, D)), flows),
    st.dictionaries(st.sampled_from((A, B, C, D)), st.sampled_from(Role), min_size=1),
)
def test_no_kv_is_lost_among_the_nodes_of_a_model(
    measured: dict[NodeId, Flow], roles: dict[NodeId, Role]
) -> None:
    traffic = KvTraffic()
    for node, flow in measured.items():
        said(traffic, node, out=int(flow.out), into=int(flow.into))
    traffic.on_roles(LLAMA, roles)
    found = traffic.flows(10.0)
    apart = set(roles.values()) >= {Role.PREFILL, Role.DECODE}
    if apart:
        total = sum(measured.get(node, NO_FLOW).out for node in roles)
        assert sum(found.get(node, NO_FLOW).out for node in roles) == pytest.approx(total)
        for node, role in roles.items():
            flow = found.get(node, NO_FLOW)
            assert flow.out == 0 or role is Role.PREFILL
            assert flow.into == 0 or role is Role.DECODE
    for node in measured.keys() - roles.keys():
        assert found.get(node, NO_FLOW) == measured[node]


def test_words_say_what_is_slow_and_why() -> None:
    kv = Flow(out=7.5e9, into=4e7)
    assert list(words("a", kv, out=10e9, into=1e8, spares=True)) == [
        "a receives at 60 MB/s: KV takes 40 MB/s of 100 MB/s into it",
        "a sends no weights: KV takes 7.5 GB/s of 10 GB/s out of it",
    ]
    (slow,) = words("a", kv, out=10e9, into=0.0, spares=False)
    assert slow == "a sends at 2.5 GB/s: KV takes 7.5 GB/s of 10 GB/s out of it"
    assert not list(words("a", Flow(out=1.0), out=100.0, into=100.0, spares=True))
