"""Repair: complete, within the port model, and close to the bounds from any holdings."""

import pytest

from services.planner.core.multicast.groups import binomial
from services.planner.core.multicast.schedule import check_moves
from services.planner.core.multicast.strategies import lower_bound
from services.planner.core.replan import repair
from shared.errors import PlanError
from tests.unit.planner.step_model import least_steps, replay


@pytest.mark.parametrize(("nodes", "blocks"), [(2, 5), (4, 4), (8, 16), (13, 20), (16, 16)])
def test_from_a_clean_start_it_is_a_step_from_the_optimum_at_most(nodes: int, blocks: int) -> None:
    held = [set(range(blocks)), *(set[int]() for _ in range(nodes - 1))]
    moves = repair(held, blocks, range(nodes))
    history = replay(held, moves)
    assert all(len(have) == blocks for have in history[-1])
    assert len(history) - 1 <= lower_bound(nodes, blocks, 1) + 1


@pytest.mark.parametrize(("nodes", "blocks", "sources"), [(8, 16, 1), (12, 12, 2), (13, 20, 3)])
def test_after_a_death_at_any_step_it_is_close_to_the_bound(
    nodes: int, blocks: int, sources: int
) -> None:
    schedule = binomial(nodes, blocks, range(sources))
    for step in range(1, schedule.steps):
        for dead in (sources, nodes - 1):
            held = [*schedule.held(step)]
            held[dead] = frozenset()
            live = [node for node in range(nodes) if node != dead]
            moves = repair(held, blocks, live)
            history = replay(held, moves)
            check_moves(held, blocks, moves, live)
            assert all(dead not in (move.src, move.dst) for move in moves)
            assert len(history) - 1 <= least_steps(held, blocks, live) + 2


def test_the_dead_source_does_not_matter_once_its_blocks_are_out() -> None:
    schedule = binomial(8, 16, [0])
    held = [*schedule.held(16)]
    held[0] = frozenset()
    moves = repair(held, 16, range(1, 8))
    assert all(len(have) == 16 for have in replay(held, moves)[-1][1:])


def test_blocks_that_nobody_can_send_are_named() -> None:
    schedule = binomial(8, 16, [0])
    held = [*schedule.held(14)]
    held[0] = frozenset()
    with pytest.raises(PlanError, match=r"blocks \[14, 15\]"):
        repair(held, 16, range(1, 8))


def test_only_nodes_that_may_send_do() -> None:
    held = [{0, 1}, {0}, set[int](), {0, 1}]
    moves = repair(held, 2, [1, 2], can_send=[3])
    assert {move.src for move in moves} == {3}
    with pytest.raises(PlanError, match=r"\[1\]"):
        repair(held, 2, [1, 2], can_send=[1])


def test_only_what_is_wanted_and_missing_moves() -> None:
    held = [{0, 1, 2}, {1}, set[int](), {0, 1, 2}]
    moves = repair(held, 3, [1, 3])
    assert sorted((move.dst, move.block) for move in moves) == [(1, 0), (1, 2)]
    assert repair(held, 3, [0, 3]) == ()
    assert repair([set()], 3, []) == ()


def test_a_node_that_joins_late_is_fed_by_many() -> None:
    held = [*(set(range(8)) for _ in range(4)), set[int](), set[int]()]
    moves = repair(held, 8, range(6))
    assert max(move.step for move in moves) == 8


def test_steps_count_on_from_where_the_event_is() -> None:
    moves = repair([{0, 1}, set()], 2, [1], start_step=7)
    assert [move.step for move in moves] == [7, 8]


def test_a_rare_block_goes_first() -> None:
    held = [{0, 1, 2}, {1, 2}, {1, 2}, set[int]()]
    first = [move for move in repair(held, 3, range(4)) if move.step == 1]
    assert (0, 0) in {(move.src, move.block) for move in first}
