"""Closed forms against schedules that are timed move by move."""

import pytest

from services.planner.core.costs import (
    Link,
    arrival_times,
    best_blocks,
    multicast_seconds,
    physical_limit,
    predict,
)
from services.planner.core.multicast.fabric import step_task
from services.planner.core.multicast.groups import binomial
from services.planner.core.multicast.schedule import Move
from services.planner.core.multicast.strategies import STRATEGIES, strategy

LINK = Link(bytes_per_s=50e6, overhead_s=0.001)


@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - {"local"}))
@pytest.mark.parametrize(("nodes", "blocks", "sources"), [(8, 16, 1), (11, 6, 2)])
def test_on_equal_links_arrivals_follow_the_steps(
    name: str, nodes: int, blocks: int, sources: int
) -> None:
    schedule = strategy(name)(step_task(nodes, blocks, range(sources)))
    there = arrival_times(schedule.moves, [50_000] * blocks, [LINK.bytes_per_s] * nodes, 0.001)
    assert len(there) == len(schedule.moves)
    for move in schedule.moves:
        assert there[move.dst, move.block] <= move.step * 0.002 + 1e-9
    assert max(there.values()) == pytest.approx(schedule.steps * 0.002)


def test_multicast_seconds_is_the_timed_schedule() -> None:
    nbytes, blocks = 64_000_000, 16
    schedule = binomial(12, blocks, [0])
    there = arrival_times(schedule.moves, [nbytes // blocks] * blocks, [50e6] * 12, 0.001)
    assert multicast_seconds(nbytes, blocks, 12, LINK) == pytest.approx(max(there.values()))


def test_a_slow_node_delays_what_it_sends_and_receives_only() -> None:
    schedule = binomial(4, 4, [0])
    equal = arrival_times(schedule.moves, [100] * 4, [100.0] * 4, 0.0)
    slow = arrival_times(schedule.moves, [100] * 4, [100.0, 100.0, 100.0, 50.0], 0.0)
    assert max(at for (node, _), at in slow.items() if node == 3) > max(equal.values())
    first = schedule.moves[0]
    assert slow[first.dst, first.block] == (2.0 if 3 in first[1:3] else 1.0)


def test_a_receiver_takes_one_block_after_the_other() -> None:
    """Of two sources the second is ready earlier than the port."""
    moves = [Move(1, 0, 2, 0), Move(2, 1, 2, 1), Move(2, 0, 3, 0)]
    there = arrival_times(moves, [100, 100], [50.0, 100.0, 100.0, 100.0], 0.0)
    assert there == {(2, 0): 2.0, (2, 1): 3.0, (3, 0): 4.0}


def test_unequal_blocks_take_their_own_time() -> None:
    schedule = binomial(2, 3, [0])
    there = arrival_times(schedule.moves, [100, 300, 50], [100.0, 100.0], 0.5)
    assert there == {(1, 0): 1.5, (1, 1): 5.0, (1, 2): 6.0}


@pytest.mark.parametrize("nodes", [2, 3, 8, 9, 64])
@pytest.mark.parametrize("overhead", [1e-5, 1e-3, 0.05])
def test_best_number_of_blocks_is_the_best(nodes: int, overhead: float) -> None:
    link = Link(50e6, overhead)
    times = {b: multicast_seconds(64e6, b, nodes, link) for b in range(1, 400)}
    found = best_blocks(64e6, nodes, link, most=399)
    assert times[found] == pytest.approx(min(times.values()))


def test_without_overhead_finer_is_better() -> None:
    assert best_blocks(64e6, 8, Link(50e6, 0.0), most=48) == 48


def test_physical_limit() -> None:
    assert physical_limit(64e6, 16, 8, 50e6) == pytest.approx(1.28 * 18 / 16)
    assert physical_limit(64e6, 16, 16, 50e6, sources=2) == pytest.approx(1.28 * 18 / 16)
    assert physical_limit(64e6, 16, 2, 50e6, sources=2) == 0.0


def test_prediction_with_sources_as_stages_begins_with_the_first_block() -> None:
    schedule = binomial(8, 16, [0])
    there = arrival_times(schedule.moves, [100] * 16, [100.0] * 8, 0.0)
    times = predict(schedule.held(0), 16, there, max_stages=4)
    assert times.first_path_s == 1.0
    assert times.first_complete_s == 18.0
    assert times.all_complete_s == 18.0


def test_prediction_without_them_waits_for_every_block() -> None:
    schedule = binomial(8, 16, [0])
    there = arrival_times(schedule.moves, [100] * 16, [100.0] * 8, 0.0)
    times = predict(schedule.held(0), 16, there, max_stages=4, executing=range(1, 8))
    assert times.first_path_s == 16.0


def test_a_cap_on_stages_delays_the_first_path() -> None:
    held = [frozenset({0, 2}), frozenset({1}), frozenset[int]()]
    there = {(2, 1): 1.0, (2, 2): 2.0, (2, 0): 3.0}
    assert predict(held, 3, there, max_stages=3).first_path_s == 1.0
    assert predict(held, 3, there, max_stages=2).first_path_s == 2.0
    assert predict(held, 3, there, max_stages=1).first_path_s == 3.0


def test_nothing_is_predicted_for_what_never_happens() -> None:
    held = [frozenset({0, 1}), frozenset[int](), frozenset[int]()]
    times = predict(held, 2, {(1, 0): 1.0, (1, 1): 2.0, (2, 0): 2.0}, max_stages=2)
    assert (times.first_complete_s, times.all_complete_s) == (2.0, None)
    empty = predict(held, 2, {}, max_stages=2)
    assert (empty.first_path_s, empty.first_complete_s, empty.all_complete_s) == (None, None, None)
