"""Repairs and paths keep their promises for any input."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.planner.core.paths import WeightedPath, plan_paths
from services.planner.core.pricing import loads
from services.planner.core.replan import repair
from tests.support.amounts import examples
from tests.unit.planner.step_model import capacity_bound, least_steps, replay


@st.composite
def holdings(draw: st.DrawFn) -> tuple[list[frozenset[int]], int]:
    blocks = draw(st.integers(1, 8))
    held = st.frozensets(st.integers(0, blocks - 1))
    return draw(st.lists(held, min_size=1, max_size=8)), blocks


def many_holdings(seed: int) -> tuple[list[frozenset[int]], int]:
    """More nodes than are planned for one by one, alike or not."""
    rng = random.Random(seed)
    blocks = rng.randint(1, 12)
    kinds = [frozenset(range(blocks))]
    for _ in range(rng.randint(1, 100)):
        share = rng.random()
        kinds.append(frozenset(block for block in range(blocks) if rng.random() < share))
    return [rng.choice(kinds) for _ in range(rng.randint(41, 100))], blocks


@given(holdings())
def test_repair_completes_whatever_is_held(case: tuple[list[frozenset[int]], int]) -> None:
    held, blocks = case
    assume(len(frozenset[int]().union(*held)) == blocks)
    moves = repair(held, blocks, range(len(held)))
    history = replay(held, moves)
    assert all(len(have) == blocks for have in history[-1])
    assert len(history) - 1 <= 2 * least_steps(held, blocks, range(len(held)))


def check_paths(
    paths: Sequence[WeightedPath], held: Sequence[frozenset[int]], blocks: int, max_stages: int
) -> None:
    load = [0.0] * len(held)
    for path in paths:
        assert path.weight > 0
        assert 1 <= len(path.stages) <= max_stages
        run = [block for _, start, stop in path.stages for block in range(start, stop)]
        assert run == list(range(blocks))
        nodes = [node for node, _, _ in path.stages]
        assert len(set(nodes)) == len(nodes)
        for node, start, stop in path.stages:
            assert start < stop
            assert held[node] >= set(range(start, stop))
        for node, share in loads(path.stages, blocks).items():
            load[node] += share * path.weight
    assert max(load) <= 1 + 1e-9
    assert len({path.stages for path in paths}) == len(paths) <= 3 * len(held)
    if len(held) <= 8:
        assert sum(path.weight for path in paths) <= capacity_bound(held, blocks) + 1e-9


@given(holdings(), st.integers(1, 5))
def test_paths_are_feasible(case: tuple[list[frozenset[int]], int], max_stages: int) -> None:
    held, blocks = case
    paths = plan_paths(held, blocks, max_stages=max_stages)
    check_paths(paths, held, blocks, max_stages)
    alone = {path.stages for path in paths if len(path.stages) == 1}
    assert alone == {((n, 0, blocks),) for n, have in enumerate(held) if len(have) == blocks}


@given(holdings(), holdings(), st.integers(1, 5))
def test_paths_are_feasible_whatever_was_before(
    case: tuple[list[frozenset[int]], int], earlier: tuple[list[frozenset[int]], int], stages: int
) -> None:
    held, blocks = case
    previous = plan_paths(earlier[0], earlier[1], max_stages=5)
    paths = plan_paths(held, blocks, max_stages=stages, previous=previous)
    check_paths(paths, held, blocks, stages)


@given(holdings())
def test_planning_again_soon_changes_nothing(case: tuple[list[frozenset[int]], int]) -> None:
    held, blocks = case
    first = second = plan_paths(held, blocks, max_stages=4)
    for _ in range(4):
        first, second = second, plan_paths(held, blocks, max_stages=4, previous=second)
    assert {path.stages for path in first} == {path.stages for path in second}
    assert sum(p.weight for p in second) == pytest.approx(sum(p.weight for p in first), rel=0.01)


@given(st.integers(0, 1 << 32), st.integers(0, 1 << 32))
@settings(max_examples=examples(10))
def test_paths_over_classes_of_nodes_are_feasible(seed: int, other: int) -> None:
    held, blocks = many_holdings(seed)
    previous = plan_paths(*many_holdings(other), max_stages=3)
    for _ in range(2):
        previous = plan_paths(held, blocks, max_stages=4, previous=previous)
        check_paths(previous, held, blocks, 4)
