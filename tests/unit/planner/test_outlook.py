"""First paths, first tokens and capacity, from arrivals."""

import pytest

from services.planner.core.multicast.groups import binomial
from services.planner.core.outlook import (
    Outlook,
    Serving,
    capacity_bound,
    equal_links_capacity,
    predict,
)

FOUR = Serving(max_stages=4)


def by_steps(nodes: int, blocks: int, serving: Serving, sources: int = 1) -> Outlook:
    """A binomial pipeline, a step a second."""
    schedule = binomial(nodes, blocks, range(sources))
    arrivals = {(m.dst, m.block): float(m.step) for m in schedule.moves}
    return predict(schedule.held(0), blocks, arrivals, serving)


def test_with_sources_as_stages_it_begins_with_the_first_block() -> None:
    times = by_steps(8, 16, FOUR)
    assert (times.first_path_s, times.first_complete_s, times.all_complete_s) == (1.0, 18.0, 18.0)


def test_without_them_it_waits_for_every_block() -> None:
    assert by_steps(8, 16, Serving(4, range(1, 8))).first_path_s == 16.0


def test_a_cap_on_stages_delays_the_first_path() -> None:
    held = [frozenset({0, 2}), frozenset({1}), frozenset[int]()]
    there = {(2, 1): 1.0, (2, 2): 2.0, (2, 0): 3.0}
    firsts = [predict(held, 3, there, Serving(stages)).first_path_s for stages in (3, 2, 1)]
    assert firsts == [1.0, 2.0, 3.0]


def test_the_first_token_comes_when_the_stages_of_the_first_path_have_run_the_prompt() -> None:
    held = [frozenset({0, 1, 2}), frozenset[int]()]
    there = {(1, 0): 1.0, (1, 1): 2.0, (1, 2): 3.0}
    assert predict(held, 3, there, Serving(2, None, {0: 0.1, 1: 0.5})).first_token_s == 1.7
    assert predict(held, 3, there, Serving(1, None, {0: 0.1, 1: 0.5})).first_token_s == 4.5
    assert predict(held, 3, there, Serving(2, None, {1: 0.5})).first_token_s is None
    assert predict(held, 3, there, Serving(2)).first_token_s is None


def test_nothing_is_predicted_for_what_never_happens() -> None:
    held = [frozenset({0, 1}), frozenset[int](), frozenset[int]()]
    times = predict(held, 2, {(1, 0): 1.0, (1, 1): 2.0, (2, 0): 2.0}, Serving(2))
    assert (times.first_complete_s, times.all_complete_s) == (2.0, None)
    assert predict(held, 2, {}, Serving(2)) == Outlook()


def test_capacity_is_bound_by_the_holders_of_rare_blocks() -> None:
    assert capacity_bound([0b1111, 0b0000], 4) == 1.0
    assert capacity_bound([0b1111, 0b0001], 4) == pytest.approx(4 / 3)
    assert capacity_bound([0b1111, 0b0011, 0b1100], 4) == 3.0
    assert capacity_bound([0b0111, 0b0011], 4) == 0.0
    assert capacity_bound([], 4) == 0.0


@pytest.mark.parametrize(("sources", "nodes", "share"), [(1, 8, 0.431), (2, 16, 0.707)])
def test_on_equal_links_the_pipeline_comes_close_to_the_bound(
    sources: int, nodes: int, share: float
) -> None:
    steps = 18
    bound = equal_links_capacity(nodes, 16, sources, steps, sources_run=True)
    found = by_steps(nodes, 16, FOUR, sources).mean_capacity
    assert bound == pytest.approx(share, abs=0.01)
    assert found == pytest.approx(bound, rel=0.05)


def test_sources_that_do_not_run_add_nothing() -> None:
    found = by_steps(8, 16, Serving(4, range(1, 8))).mean_capacity
    bound = equal_links_capacity(8, 16, 1, 18, sources_run=False)
    assert found == pytest.approx(bound, abs=0.03)
    assert bound < equal_links_capacity(8, 16, 1, 18, sources_run=True)
