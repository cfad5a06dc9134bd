"""How a chain, a binomial pipeline and several sources take newcomers in."""

import pytest

from services.planner.core.append import append
from services.planner.core.costs import arrival_times
from services.planner.core.multicast.fabric import Fabric, Port, Task, step_task, uniform
from services.planner.core.multicast.schedule import Move, Schedule, by_step
from services.planner.core.multicast.strategies import strategy
from shared.errors import PlanError
from tests.property.test_append import begun, checked
from tests.unit.planner.step_model import document, independent_checker


@pytest.mark.parametrize("step", range(1, 13))
def test_a_chain_grows_at_its_tail(step: int) -> None:
    case = begun("chain", step_task(7, 12, [0]), newcomers=3, step=step)
    moves = checked(case)
    feeds = {(move.src, move.dst) for move in moves}
    if step == 3:  # the tail has just begun
        assert feeds == {(3, 4), (4, 5), (5, 6)}
        assert moves[-1].step == 3 + 12 + 2
    # A chain of n nodes with b blocks left: a source is free at the end, so all are complete when
    # the chain is over, or a copy later.
    over = max(move.step for move in case.running)
    assert moves[-1].step <= max(over, step + 12) + 3


def test_a_source_helps_as_soon_as_its_sends_are_over() -> None:
    case = begun("chain", step_task(5, 8, [0]), newcomers=2, step=8)
    assert 0 in {move.src for move in checked(case)}


def test_whoever_is_free_in_a_binomial_pipeline_feeds_newcomers() -> None:
    case = begun("binomial", step_task(9, 12, [0]), newcomers=1, step=4)
    moves = checked(case)
    assert len({move.src for move in moves}) > 1
    assert moves[0].step < max(move.step for move in case.running)


def test_several_free_nodes_share_the_newcomers() -> None:
    case = begun("chain", step_task(8, 6, [0, 1]), newcomers=4, step=20)
    assert not case.running
    moves = checked(case)
    assert moves[-1].step == 6
    assert len({move.src for move in moves}) == 4


def test_a_narrow_trunk_is_crossed_by_each_block_once() -> None:
    ports = (*(Port(100, 100, "left") for _ in range(3)), *[Port(100, 100, "right")] * 4)
    task = Task(Fabric(ports, 0.0, {"left": 100.0, "right": 100.0}), (100,) * 8, (0,))
    case = begun("chain", task, newcomers=4, step=3)
    crossing = [move for move in checked(case) if move.src < 3]
    assert len(crossing) == 8


def test_a_node_that_only_receives_feeds_nobody() -> None:
    ports = (*[Port(100, 100)] * 3, Port(0, 100), Port(100, 100))
    case = begun("chain", Task(Fabric(ports, 0.0), (100,) * 4, (0,)), newcomers=2, step=1)
    assert 3 not in {move.src for move in checked(case)}


def test_blocks_that_nobody_will_have_are_named() -> None:
    with pytest.raises(PlanError, match=r"blocks \[2\]"):
        append([{0, 1}, set()], [], {1: {0, 1, 2}}, Task(uniform(2), (1, 1, 1), (0,)))


def test_only_nodes_that_may_send_do() -> None:
    moves = append([{0, 1}, {0, 1}, set()], [], {2: {0, 1}}, step_task(3, 2, [0]), can_send=[1])
    assert {move.src for move in moves} == {1}


def test_the_independent_checker_agrees() -> None:
    """A chain that is appended to before its first step is a schedule from a clean start."""
    checker = independent_checker()
    task = step_task(9, 10, [0])
    case = begun("chain", task, newcomers=4, step=0)
    together = by_step((*case.running, *checked(case)))
    schedule = Schedule(9, 10, (0,), tuple(together))
    verdict = checker.check(document(schedule))
    assert verdict["valid"]
    assert verdict["complete"]
    assert strategy("chain")(task).steps == schedule.steps


def test_a_wide_trunk_is_left_alone_where_sharing_it_would_delay_what_runs() -> None:
    """In the cost model a trunk serves moves in order, so that the source's last move to node 2
    would wait for the move from 1 to 5, which waits for its block."""
    ports = (
        Port(100.0, 50.0), Port(50.0, 50.0), Port(50.0, 50.0, "left"), Port(0.0, 50.0),
        Port(0.0, 50.0), Port(100.0, 50.0, "left"),
    )  # fmt: skip
    task = Task(Fabric(ports, 0.0, {"left": 200.0}, 400.0), (100,) * 3, (0,))
    every = frozenset(range(3))
    held = [every, *(frozenset[int]() for _ in range(5))]
    running = [Move(2 * block + dst, 0, dst, block) for block in range(3) for dst in (1, 2)]
    moves = append(held, running, dict.fromkeys((3, 4, 5), every), task)
    alone = arrival_times(running, task)
    together = arrival_times(by_step((*running, *moves)), task)
    assert {key: together[key] for key in alone} == alone
