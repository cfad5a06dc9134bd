"""Whatever is held, on nodes of any speed: every serving strategy overloads no node and stays
within the pools' bound."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.pricing import loads
from services.planner.core.serving.loading import Loading
from services.planner.core.serving.strategies import SERVING
from tests.unit.planner.step_model import capacity_bound


def speeds(nodes: int) -> st.SearchStrategy[list[float]]:
    """Often all the same; otherwise some nodes have half of the speed, or twice as much."""
    alike = st.just([1.0] * nodes)
    return alike | st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=nodes, max_size=nodes)


@st.composite
def loadings(draw: st.DrawFn) -> Loading:
    blocks = draw(st.integers(1, 8))
    part = st.frozensets(st.integers(0, blocks - 1))
    held = draw(st.lists(part, min_size=1, max_size=8))
    complete = draw(st.integers(0, len(held)))
    held[:complete] = [frozenset(range(blocks))] * complete
    sources = draw(st.integers(0, complete))
    return Loading(
        held=held,
        blocks=blocks,
        speeds=draw(speeds(len(held))),
        sources=frozenset(range(sources)),
        max_stages=draw(st.integers(1, 5)),
        hop_cost=0.02,
    )


@pytest.mark.parametrize("name", list(SERVING))
@given(data=st.data())
def test_paths_are_feasible(name: str, data: st.DataObject) -> None:
    loading = data.draw(loadings())
    for _ in range(2):
        paths = SERVING[name](loading)
        load = [0.0] * len(loading.held)
        for path in paths:
            assert path.weight > 0
            assert len(path.stages) <= loading.max_stages
            nodes = [node for node, _, _ in path.stages]
            assert len(set(nodes)) == len(nodes)
            run = [block for _, start, stop in path.stages for block in range(start, stop)]
            assert run == list(range(loading.blocks))
            for node, start, stop in path.stages:
                assert loading.held[node] >= set(range(start, stop))
            for node, share in loads(path.stages, loading.blocks).items():
                load[node] += share * path.weight
        for node, speed in enumerate(loading.speeds):
            assert load[node] <= speed + 1e-9
        assert [path.stages for path in paths] == sorted({path.stages for path in paths})
        alone = {path.stages[0][0] for path in paths if len(path.stages) == 1}
        assert alone == set(loading.replicas)
        capacity = sum(path.weight for path in paths)
        assert sum(loading.speeds[node] for node in alone) - 1e-9 <= capacity
        bound = capacity_bound(loading.held, loading.blocks) * max(loading.speeds)
        assert capacity <= bound + 1e-9
        loading = replace(loading, previous=paths)


@given(loading=loadings(), again=st.data())
def test_live_scaling_keeps_pairs_and_gives_each_other_target_to_who_has_the_fewest(
    loading: Loading, again: st.DataObject
) -> None:
    loading = replace(loading, max_stages=2)
    for _ in range(2):
        paths = SERVING["zigzag"](loading)
        had = {p.stages[0][0]: p.stages[1][0] for p in loading.previous if len(p.stages) == 2}
        pairs = {p.stages[0][0]: p.stages[1][0] for p in paths if len(p.stages) == 2}
        assert all(pairs[n] == had[n] for n in pairs.keys() & had.keys())
        counts = [list(pairs.values()).count(node) for node in loading.replicas]
        before = [list(had.values()).count(node) for node in loading.replicas]
        if pairs:
            assert max(counts) - min(counts) <= max(1, *before)
        whole = frozenset(range(loading.blocks))
        node = again.draw(st.integers(0, len(loading.held) - 1))
        held = [whole if n == node else have for n, have in enumerate(loading.held)]
        loading = replace(loading, held=held, previous=paths)


@given(data=st.data())
def test_a_pool_of_nodes_of_half_the_speed_has_half_the_capacity(data: st.DataObject) -> None:
    """Speeds are relative: the paths stay, their weights scale."""
    loading = replace(data.draw(loadings()), max_stages=4)
    speeds = [1.0] * len(loading.held)
    whole = SERVING["pools"](replace(loading, speeds=speeds))
    half = SERVING["pools"](replace(loading, speeds=[0.5 for _ in speeds]))
    assert sum(path.weight for path in half) == pytest.approx(
        sum(path.weight for path in whole) / 2, rel=0.05
    )


@given(complete=st.integers(1, 6), data=st.data())
def test_a_slow_node_among_complete_ones_counts_for_what_it_can_do(
    complete: int, data: st.DataObject
) -> None:
    slow = data.draw(st.integers(0, complete - 1))
    speeds = [0.5 if node == slow else 1.0 for node in range(complete)]
    held = [frozenset(range(4))] * complete
    paths = SERVING["pools"](Loading(held, 4, speeds, frozenset(), 4, 0.02))
    assert {path.stages[0][0]: path.weight for path in paths} == pytest.approx(
        dict(enumerate(speeds))
    )
