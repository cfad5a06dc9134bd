"""Paths over pools of holders: their capacity against bounds, and what they leave alone."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import pytest

from services.planner.core.classes import Classes
from services.planner.core.multicast.groups import binomial
from services.planner.core.paths import WeightedPath, plan_paths
from services.planner.core.pricing import loads
from shared.errors import BadInput
from tests.unit.planner.step_model import capacity_bound

ALL4 = frozenset(range(4))


def capacity(paths: Sequence[WeightedPath]) -> float:
    return sum(path.weight for path in paths)


def best(
    held: Sequence[AbstractSet[int]], blocks: int, max_stages: int
) -> tuple[WeightedPath, ...]:
    """Nothing but capacity counts."""
    return plan_paths(
        held, blocks, max_stages=max_stages, hop_cost=1e-4, keep_gain=0.0, replica_floor=0.0
    )


def mean_capacity(nodes: int, blocks: int, sources: int, max_stages: int) -> tuple[float, float]:
    """(reached, bound) in the mean over the loading window, as shares of the final capacity."""
    schedule = binomial(nodes, blocks, range(sources))
    reached = bound = 0.0
    for step in range(schedule.steps):
        held = schedule.held(step)
        reached += capacity(best(held, blocks, max_stages))
        bound += float(capacity_bound(held, blocks))
    return reached / schedule.steps / nodes, bound / schedule.steps / nodes


def test_a_complete_node_is_a_path_of_one_stage() -> None:
    paths = plan_paths([ALL4, frozenset(), ALL4], 4, max_stages=4)
    assert [path.stages for path in paths] == [((0, 0, 4),), ((2, 0, 4),)]
    assert capacity(paths) == pytest.approx(2.0, rel=1e-3)


def test_a_source_runs_what_the_others_lack() -> None:
    """Two nodes with the first half: the source can run the second half for both of them."""
    paths = best([ALL4, frozenset({0, 1}), frozenset({0, 1})], 4, 4)
    assert capacity(paths) == pytest.approx(2.0, rel=1e-3)
    assert all(path.stages[-1] == (0, 2, 4) for path in paths)


def test_no_path_without_every_block() -> None:
    assert plan_paths([frozenset({0, 1}), frozenset({3})], 4, max_stages=4) == ()
    assert plan_paths([], 4, max_stages=4) == ()


def test_no_path_has_more_stages_than_allowed() -> None:
    held = [frozenset({0, 2}), frozenset({1}), frozenset({3})]
    assert plan_paths(held, 4, max_stages=3) == ()
    scattered = [frozenset({n}) for n in range(4)]
    assert plan_paths(scattered, 4, max_stages=3) == ()
    (path,) = plan_paths(scattered, 4, max_stages=4)
    assert path.stages == ((0, 0, 1), (1, 1, 2), (2, 2, 3), (3, 3, 4))
    assert path.weight == pytest.approx(4.0, rel=1e-3)


def test_fewer_stages_are_preferred_where_capacity_is_the_same() -> None:
    held = [frozenset({0, 1}), frozenset({2, 3}), frozenset({0, 2}), frozenset({1, 3})]
    paths = plan_paths(held[:2], 4, max_stages=4)
    assert [path.stages for path in paths] == [((0, 0, 2), (1, 2, 4))]
    assert all(len(path.stages) <= 3 for path in plan_paths(held, 4, max_stages=3))


@pytest.mark.parametrize(
    ("shape", "max_stages", "least"),
    [
        ((8, 16, 1), 16, 0.42),
        ((8, 16, 1), 4, 0.405),
        ((12, 16, 2), 4, 0.64),
        ((12, 16, 4), 4, 0.82),
    ],
)
def test_mean_capacity_while_loading(
    shape: tuple[int, int, int], max_stages: int, least: float
) -> None:
    """0.125 of the final capacity is what complete nodes alone give for 8 nodes and 16 blocks."""
    reached, bound = mean_capacity(*shape, max_stages)
    assert least <= reached <= bound + 1e-9
    if shape == (8, 16, 1):
        assert bound == pytest.approx(0.4312, abs=1e-4)


def test_uncapped_capacity_meets_the_bound_for_two_sources() -> None:
    reached, bound = mean_capacity(12, 12, 2, 12)
    assert reached == pytest.approx(bound, rel=0.01)


def test_previous_paths_stay_while_they_are_nearly_as_good() -> None:
    """Four nodes with a half each: it does not matter which first half goes with which second."""
    held = [frozenset({0, 1}), frozenset({2, 3}), frozenset({0, 1}), frozenset({2, 3})]
    crossed = (WeightedPath(((0, 0, 2), (3, 2, 4)), 1.0), WeightedPath(((2, 0, 2), (1, 2, 4)), 1.0))
    paths = plan_paths(held, 4, max_stages=4, previous=crossed)
    assert {path.stages for path in paths} == {path.stages for path in crossed}
    assert capacity(paths) == pytest.approx(4.0, rel=1e-3)


def test_a_replica_that_was_alone_is_no_reason_to_open_no_path() -> None:
    held = [frozenset(range(16)), frozenset({0})]
    alone = (WeightedPath(((0, 0, 16),), 1.0),)
    paths = plan_paths(held, 16, max_stages=4, hop_cost=0.02, previous=alone)
    assert [path.stages for path in paths] == [((0, 0, 16),), ((1, 0, 1), (0, 1, 16))]


def test_a_hop_saved_for_less_than_a_path_stays_for_is_no_reason_to_drop_it() -> None:
    held = [frozenset({0, 1}), frozenset({1}), frozenset({2, 3})]
    long = WeightedPath(((0, 0, 1), (1, 1, 2), (2, 2, 4)), 2.0)
    (kept,) = plan_paths(held, 4, max_stages=4, previous=(long,), hop_cost=0.03)
    assert kept.stages == long.stages
    (short,) = plan_paths(held, 4, max_stages=4, previous=(long,), hop_cost=0.03, keep_gain=0.0)
    assert short.stages == ((0, 0, 2), (2, 2, 4))
    (short,) = plan_paths(held, 4, max_stages=4, previous=(long,))
    assert short.stages == ((0, 0, 2), (2, 2, 4)), "the planner's price is higher"


def test_previous_paths_go_when_the_gain_is_large() -> None:
    long = WeightedPath(((0, 0, 1), (1, 1, 2), (2, 2, 4)), 1.0)
    held = [frozenset({0}), frozenset({1}), ALL4, ALL4]
    paths = plan_paths([frozenset(), frozenset(), ALL4, ALL4], 4, max_stages=4, previous=(long,))
    assert long.stages not in {path.stages for path in paths}
    crowded = plan_paths(held, 4, max_stages=4, previous=(long,))
    assert capacity(crowded) == pytest.approx(float(capacity_bound(held, 4)), rel=0.05)


def test_previous_paths_that_cannot_run_are_dropped() -> None:
    gone = WeightedPath(((0, 0, 2), (1, 2, 4)), 1.0)
    unknown = WeightedPath(((9, 0, 4),), 1.0)
    short = WeightedPath(((1, 0, 2),), 1.0)
    paths = plan_paths([frozenset(), ALL4], 4, max_stages=4, previous=(gone, unknown, short))
    assert [path.stages for path in paths] == [((1, 0, 4),)]


def test_a_replica_keeps_a_share_for_itself() -> None:
    held = [ALL4, *(frozenset({0, 1, 2}) for _ in range(6))]
    with_floor = {p.stages: p.weight for p in plan_paths(held, 4, max_stages=4)}
    assert with_floor[(0, 0, 4),] >= 0.05
    without = {p.stages for p in plan_paths(held, 4, max_stages=4, replica_floor=0.0)}
    assert ((0, 0, 4),) not in without


def test_when_all_are_complete_no_old_path_is_left() -> None:
    previous = plan_paths([ALL4, frozenset({0, 1}), frozenset({0, 1})], 4, max_stages=4)
    paths = plan_paths([ALL4, ALL4, ALL4], 4, max_stages=4, previous=previous)
    assert [len(path.stages) for path in paths] == [1, 1, 1]


def test_capacity_is_near_the_bound_where_the_cheapest_paths_would_repeat_a_node() -> None:
    """The dynamic programme alone wants the complete node twice in a path: 9 % less capacity."""
    held = [frozenset(have) for have in ({0}, {0, 1}, set(range(5)), set(range(4)), {0, 1, 4})]
    paths = plan_paths(held, 5, max_stages=4, hop_cost=0.03)  # nearly all that can be carried
    assert capacity(paths) >= 0.95 * capacity_bound(held, 5)


def test_planning_for_classes_of_alike_nodes_loses_little() -> None:
    schedule = binomial(256, 64, range(8))
    previous: tuple[WeightedPath, ...] = ()
    for step in (30, 45):
        previous = plan_paths(schedule.held(step), 64, max_stages=4, previous=previous)
        assert capacity(previous) >= 0.97 * 256


def test_alike_nodes_take_turns_where_a_path_needs_two_of_them() -> None:
    """Three nodes with a third at each end: in pairs they run 4.5 times the model, and if one pair
    were to do all it can the third node would be left alone."""
    paths = plan_paths([frozenset({0, 2})] * 3 + [frozenset({1})] * 40, 3, max_stages=3)
    assert capacity(paths) == pytest.approx(4.5, rel=0.01)


def test_nodes_that_differ_in_little_are_planned_for_together() -> None:
    """Each of 200 nodes lacks another block: far more kinds than there are classes."""
    every = frozenset(range(200))
    held = [every - {n} for n in range(200)]
    assert len(Classes(held, 200, [1.0] * 200).held) <= 64
    assert capacity(plan_paths(held, 200, max_stages=4)) >= 0.95 * 200


def test_many_alike_nodes_are_all_put_to_use_within_the_limit_on_passes() -> None:
    held = binomial(64, 64, range(4)).held(45)
    paths = plan_paths(held, 64, max_stages=4)
    assert capacity(paths) >= 0.9 * 64
    assert len(paths) <= 2 * 64


def test_the_same_input_gives_the_same_paths() -> None:
    held = binomial(16, 16, [0, 1]).held(9)
    assert plan_paths(held, 16, max_stages=4) == plan_paths(held, 16, max_stages=4)


def test_loads_are_shares_of_the_model() -> None:
    assert loads(((0, 0, 1), (1, 1, 4)), 4) == {0: 0.25, 1: 0.75}


@pytest.mark.parametrize(("blocks", "max_stages"), [(0, 1), (4, 0)])
def test_bad_inputs_are_refused(blocks: int, max_stages: int) -> None:
    with pytest.raises(BadInput):
        plan_paths([ALL4], blocks, max_stages=max_stages)
