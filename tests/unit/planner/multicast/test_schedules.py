"""Schedules against the bounds, by a step model of their own and by the independent checker."""

import pytest

from services.planner.core.multicast.fabric import step_task
from services.planner.core.multicast.groups import balanced, binomial, fixed_pipelines, make_groups
from services.planner.core.multicast.schedule import Move, Schedule, check
from services.planner.core.multicast.strategies import STRATEGIES, lower_bound, strategy
from shared.errors import BadInput, PlanError
from tests.unit.planner.step_model import document, independent_checker, replay_schedule

LARGE = [512, 513, 600, 767, 768, 1000, 1023, 1024]


def ceil_log2(n: int) -> int:
    return (n - 1).bit_length()


@pytest.mark.parametrize("blocks", range(1, 25))
def test_binomial_takes_the_least_steps_and_moves_for_every_number_of_nodes(blocks: int) -> None:
    many = range(129 + blocks % 8, 301, 8)  # every number of nodes with three numbers of blocks
    for nodes in (*range(2, 129), *many):
        schedule = binomial(nodes, blocks, [0])
        assert schedule.steps == blocks + ceil_log2(nodes) - 1, nodes
        assert len(schedule.moves) == (nodes - 1) * blocks


@pytest.mark.parametrize("shift", range(3))
def test_binomial_keeps_the_rules_for_every_number_of_nodes(shift: int) -> None:
    for nodes in range(2, 301):
        schedule = binomial(nodes, 1 + (7 * nodes + 8 * shift) % 24, [0])
        if nodes <= 64:
            replay_schedule(schedule)
        elif shift == nodes % 3:
            check(schedule)


@pytest.mark.parametrize("nodes", LARGE)
def test_binomial_takes_the_least_steps_for_large_clusters(nodes: int) -> None:
    schedule = binomial(nodes, 9, [0])
    check(schedule)
    assert schedule.steps == lower_bound(nodes, 9, 1)


@pytest.mark.parametrize("sources", [1, 2, 3, 4, 7])
def test_groups_take_the_least_steps_and_first_set(sources: int) -> None:
    for nodes in range(sources + 1, 40):
        for blocks in (1, 4, 9, 16):
            schedule = binomial(nodes, blocks, range(sources))
            history = replay_schedule(schedule)
            assert schedule.steps == blocks + ceil_log2(-(-nodes // sources)) - 1
            destinations = range(sources, nodes)
            first = next(
                step
                for step, held in enumerate(history)
                if len(set().union(*(held[n] for n in destinations))) == blocks
            )
            assert first == -(-blocks // min(sources, len(destinations))), (nodes, blocks)


@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - {"local"}))
def test_the_independent_checker_agrees(name: str) -> None:
    checker = independent_checker()
    for nodes, blocks, sources in [(2, 1, 1), (8, 16, 1), (13, 5, 1), (16, 16, 2), (12, 16, 8)]:
        schedule = strategy(name)(step_task(nodes, blocks, range(sources)))
        verdict = checker.check(document(schedule))
        assert verdict["valid"], verdict["errors"]
        assert verdict["complete"]
        assert verdict["redundant_transfers"] == 0
        assert verdict["makespan"] == schedule.steps
        assert verdict["lower_bound"] == lower_bound(nodes, blocks, sources)
        if name == "binomial":
            assert verdict["gap"] == 0


def test_few_destinations_share_the_sources_out() -> None:
    groups = make_groups(12, 16, range(8))
    assert [len(group.destinations) for group in groups] == [1, 1, 1, 1]
    assert {group.order[0] // 4 for group in groups} == {0, 1, 2, 3}


def test_groups_differ_by_at_most_one_node_and_cover_all() -> None:
    for nodes in range(3, 30):
        for sources in range(2, nodes):
            groups = make_groups(nodes, 8, range(sources))
            sizes = [len(group.destinations) for group in groups]
            assert max(sizes) - min(sizes) <= 1
            assert sum(sizes) == nodes - sources
            assert all(sorted(group.order) == list(range(8)) for group in groups)
    assert [list(run) for run in balanced(range(7), 3)] == [[0, 1], [2, 3], [4, 5, 6]]


def test_fixed_pipelines_form_when_the_analysis_says() -> None:
    """L = N/k = 9, l = b/k = 12: first l + floor(log2 L) - 1, last l + ceil(log2 L)."""
    schedule = binomial(18, 24, [0, 1])
    done = [
        max(min(schedule.arrival(n, b) or 99 for n in pipeline) for b in range(24))
        for pipeline in fixed_pipelines(18, 24, [0, 1])
    ]
    assert (min(done), max(done)) == (12 + 3 - 1, 12 + 4)


def test_nodes_left_over_join_a_pipeline() -> None:
    pipelines = fixed_pipelines(11, 16, [0, 1])
    assert sorted(node for pipeline in pipelines for node in pipeline) == list(range(2, 11))
    assert min(map(len, pipelines)) == 2
    assert fixed_pipelines(2, 4, [0, 1]) == ()


def test_sources_may_be_any_nodes() -> None:
    schedule = binomial(9, 6, [7, 2])
    history = replay_schedule(schedule)
    assert all(move.dst not in (7, 2) for move in schedule.moves)
    for step in range(schedule.steps + 1):
        assert [set(have) for have in schedule.held(step)] == history[step]
    assert schedule.arrival(7, 3) == 0
    assert schedule.destinations == (0, 1, 3, 4, 5, 6, 8)


@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_moves_where_every_node_is_a_source(name: str) -> None:
    schedule = strategy(name)(step_task(3, 4, [0, 1, 2]))
    assert schedule.moves == ()
    assert schedule.steps == 0
    check(schedule)


BROKEN = {
    "does not hold": [Move(1, 1, 2, 0)],
    "holds block 0 already": [Move(1, 0, 1, 0), Move(2, 0, 1, 0)],
    "sends twice": [Move(1, 0, 1, 0), Move(1, 0, 2, 1)],
    "receives twice": [Move(1, 0, 1, 0), Move(2, 1, 2, 0), Move(2, 0, 2, 1)],
    "stands after": [Move(2, 0, 1, 0), Move(1, 0, 2, 0)],
    "does not name": [Move(1, 0, 3, 0)],
    "never gets": [Move(1, 0, 1, 0)],
}


@pytest.mark.parametrize("complaint", BROKEN)
def test_check_names_the_broken_rule(complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        check(Schedule(3, 2, (0,), tuple(BROKEN[complaint])))


def test_a_relay_may_not_send_in_the_step_in_which_it_receives() -> None:
    with pytest.raises(PlanError, match="does not hold"):
        check(Schedule(3, 1, (0,), (Move(1, 0, 1, 0), Move(1, 1, 2, 0))))


@pytest.mark.parametrize(
    ("nodes", "blocks", "sources"),
    [(0, 1, [0]), (2, 0, [0]), (2, 2, []), (2, 2, [0, 0]), (2, 2, [2]), (2, 2, [-1])],
)
def test_bad_inputs_are_refused(nodes: int, blocks: int, sources: list[int]) -> None:
    for plan in STRATEGIES.values():
        with pytest.raises(BadInput):
            plan(step_task(nodes, blocks, sources))
    with pytest.raises(BadInput, match="binomial"):
        strategy("no such")
