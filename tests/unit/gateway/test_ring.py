"""Homes of sessions: the same everywhere, shared by capacity, and moved only where they must."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.ring import Ring, points_of
from shared.ids import NodeId

SESSIONS = [f"session-{i}" for i in range(400)]
NODES = st.dictionaries(
    st.integers(0, 30).map(lambda i: NodeId(f"node-{i}")), st.integers(1, 64), min_size=1
)


def home(ring: Ring, session: str) -> NodeId:
    return next(ring.homes(session))


@given(points=NODES)
def test_every_node_stands_in_once(points: dict[NodeId, int]) -> None:
    found = list(Ring(points).homes("a"))
    assert sorted(found) == sorted(points)


@given(points=NODES)
def test_a_node_that_goes_moves_only_its_own_sessions(points: dict[NodeId, int]) -> None:
    before, gone = Ring(points), min(points)
    after = Ring({node: count for node, count in points.items() if node != gone})
    for session in SESSIONS:
        stand_in = [node for node in before.homes(session) if node != gone]
        assert list(after.homes(session)) == stand_in


def test_sessions_are_shared_in_proportion_to_capacity() -> None:
    nodes = {NodeId(f"node-{i}"): points_of(2.0 if i < 5 else 1.0) for i in range(10)}
    ring = Ring(nodes)
    count = Counter(home(ring, f"s{i}") for i in range(20_000))
    fast = sum(count[NodeId(f"node-{i}")] for i in range(5))
    assert fast / 20_000 == pytest.approx(2 / 3, abs=0.1)


def test_another_process_finds_the_same_home() -> None:
    """Nothing random goes into it, such as the hash of a text in Python."""
    ring = Ring({NodeId(f"node-{i}"): 32 for i in range(4)})
    found = [home(ring, f"session-{i}") for i in range(6)]
    assert [int(node.removeprefix("node-")) for node in found] == [0, 0, 1, 3, 1, 2]
