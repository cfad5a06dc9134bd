"""Whatever is held: every serving strategy overloads no node and stays within the pools' bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.pricing import loads
from services.planner.core.serving.loading import Loading
from services.planner.core.serving.strategies import SERVING
from tests.unit.planner.step_model import capacity_bound


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
        assert max(load) <= 1 + 1e-9
        assert [path.stages for path in paths] == sorted({path.stages for path in paths})
        alone = {path.stages[0][0] for path in paths if len(path.stages) == 1}
        assert alone == set(loading.replicas)
        capacity = sum(path.weight for path in paths)
        assert len(alone) - 1e-9 <= capacity
        assert capacity <= capacity_bound(loading.held, loading.blocks) + 1e-9
        loading = Loading(
            loading.held, loading.blocks, loading.sources, loading.max_stages, 0.02, paths
        )
