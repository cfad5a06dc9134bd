"""Racks and speed classes one after the other: the promised steps, and what crosses the trunks."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations
from random import Random

import pytest

from services.planner.core.multicast.binomial import pipeline
from services.planner.core.multicast.fabric import Fabric, Port, step_task
from services.planner.core.multicast.racks import rack_moves
from services.planner.core.multicast.schedule import Move, Schedule, check
from services.planner.core.multicast.strategies import STRATEGIES
from tests.unit.planner.multicast.fabric_model import equal_blocks, racks, replay_in

taps = STRATEGIES["taps"]
binomial = STRATEGIES["binomial"]


def ceil_log2(n: int) -> int:
    return (n - 1).bit_length()


def floor_log2(n: int) -> int:
    return n.bit_length() - 1


def row_steps(sizes: tuple[int, ...], blocks: int) -> int:
    """The docstring's formula; the first rack has the source, which is one of its nodes."""
    lag, steps = 0, 0
    for size in (sizes[0] - 1, *sizes[1:]):
        if size:
            steps = max(steps, lag + blocks + ceil_log2(size + 1) - 1)
        lag += floor_log2(size + 1)
    return steps


def one_head_a_rack(sizes: tuple[int, ...], blocks: int) -> int:
    """Steps if a rack's blocks all came in by one of its nodes."""
    lags = [sum(size.bit_length() for size in sizes[:r]) for r in range(len(sizes))]
    return max(lag + blocks + ceil_log2(size) - 1 for lag, size in zip(lags, sizes, strict=True))


@pytest.mark.parametrize("nodes", [*range(2, 40), 63, 64, 65, 100])
@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_a_pipeline_feeds_one_node_more_for_free(nodes: int, blocks: int) -> None:
    part = pipeline([0], range(1, nodes), range(blocks))
    assert part.lag == floor_log2(nodes)
    outside = [Move(part.lag + m + 1, tap, nodes, m) for m, tap in enumerate(part.taps)]
    check(Schedule(nodes + 1, blocks, (0,), tuple(sorted(part.moves + outside))))


def test_two_racks_behind_trunks_of_one_link() -> None:
    fabric = racks([8, 8])
    schedule = taps(equal_blocks(fabric, 16, [0]))
    replay_in(fabric, schedule, trunk_blocks=1)
    assert schedule.steps == 22
    assert STRATEGIES["chain"](equal_blocks(fabric, 16, [0])).steps == 30
    flat = binomial(equal_blocks(fabric, 16, [0]))
    crossing = Counter(fabric.crosses(move.src, move.dst) for move in flat.moves)
    assert crossing["r0", "r1"] >= 2 * 16


SIZES = [(8, 8, 8), (1, 5), (1, 1, 1), (2, 7, 4), (5, 3, 7, 1), (16, 2, 15), (3, 4, 6, 8), (4, 31)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("blocks", [1, 5, 16])
def test_racks_in_a_row_take_the_steps_of_the_best_order(
    sizes: tuple[int, ...], blocks: int
) -> None:
    fabric = racks(sizes)
    schedule = taps(equal_blocks(fabric, blocks, [0]))
    replay_in(fabric, schedule, trunk_blocks=1)
    orders = [(sizes[0], *rest) for rest in permutations(sizes[1:])]
    assert schedule.steps <= min(one_head_a_rack(order, blocks) for order in orders)
    assert schedule.steps <= min(row_steps(order, blocks) for order in orders)


@pytest.mark.parametrize("sizes", [(8, 8), (3, 7), (7, 2), (16, 15), (5, 6), (2, 31)])
def test_two_racks_take_the_steps_of_the_formula(sizes: tuple[int, ...]) -> None:
    for blocks in (1, 5, 16):
        schedule = taps(equal_blocks(racks(sizes), blocks, [0]))
        assert schedule.steps == row_steps(sizes, blocks)


@pytest.mark.parametrize(("count", "steps"), [(4, 26), (8, 30), (16, 34), (32, 38)])
def test_many_racks_cost_a_lag_for_each_doubling(count: int, steps: int) -> None:
    """A row of racks of 8 would take 16 + 3 * count."""
    fabric = racks([8] * count)
    schedule = taps(equal_blocks(fabric, 16, [0]))
    replay_in(fabric, schedule, trunk_blocks=1)
    assert schedule.steps == steps


def test_racks_of_any_size_form_a_pipeline() -> None:
    generator = Random(1)
    for _ in range(60):
        sizes = [generator.randint(1, 12) for _ in range(generator.randint(2, 10))]
        fabric = racks(sizes)
        ends = [sum(sizes[:rack]) for rack in range(len(sizes) + 1)]
        moves = rack_moves([range(*pair) for pair in pairwise(ends)], range(9))
        assert moves is not None
        schedule = Schedule(sum(sizes), 9, (0,), tuple(moves))
        replay_in(fabric, schedule, trunk_blocks=1)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_block_enters_a_rack_once_and_the_last_a_few_times_more(sizes: tuple[int, ...]) -> None:
    fabric = racks(sizes)
    moves = taps(equal_blocks(fabric, 12, [0])).moves
    for rack, size in enumerate(sizes[1:], 1):
        if size == 1:
            continue
        into = Counter(
            m.block for m in moves if (fabric.crosses(m.src, m.dst) or "")[1:] == (f"r{rack}",)
        )
        assert sorted(into) == list(range(12))
        assert {into[block] for block in range(11)} == {1}
        assert into[11] <= 1 + floor_log2(size + 1)


@pytest.mark.parametrize(("out", "into"), [(0.25, 0.25), (1.0, 0.25), (0.25, 1.0)])
def test_a_slow_trunk_is_crossed_once_by_every_block(out: float, into: float) -> None:
    """One node of the fast side does nothing else, and one of the other side takes all from it."""
    fabric = replace(racks([8, 8]), trunks={"r0": out, "r1": into})
    schedule = taps(equal_blocks(fabric, 16, [0]))
    replay_in(fabric, schedule, trunk_blocks=1)
    crossing = [move for move in schedule.moves if fabric.crosses(move.src, move.dst)]
    assert len(crossing) == 16
    (relay,) = {move.src for move in crossing}
    assert {move.src for move in schedule.moves if move.dst >= 8 and move.src < 8} == {relay}
    assert all(move in crossing for move in schedule.moves if move.src == relay)


def test_no_rack_sends_a_block_through_a_slow_trunk_twice() -> None:
    fabric = racks([4] * 8, trunk=0.25)
    schedule = taps(equal_blocks(fabric, 5, [0]))
    replay_in(fabric, schedule, trunk_blocks=1)
    crossing = Counter(
        (ends[0], move.block)
        for move in schedule.moves
        if (ends := fabric.crosses(move.src, move.dst))
    )
    assert set(crossing.values()) == {1}


def test_the_lag_between_racks_fits_the_blocks() -> None:
    """Lag 3 would do for racks of 4, but 16 blocks are four batches of 4 and six of 3."""
    moves = rack_moves([range(first, first + 4) for first in range(0, 16, 4)], range(16))
    assert moves is not None
    assert moves[-1].step == 2 + 4 * (4 + 1) + 2


def test_racks_with_sources_are_fed_by_their_own() -> None:
    fabric = racks([8, 8, 8])
    schedule = taps(equal_blocks(fabric, 16, [1, 9]))
    replay_in(fabric, schedule, trunk_blocks=1)
    crossing = {fabric.crosses(move.src, move.dst) for move in schedule.moves} - {None}
    assert crossing == {("r0", "r2")}
    assert schedule.steps == 22
    first = next(
        step
        for step, held in enumerate(replay_in(fabric, schedule))
        if len(set().union(*(held[n] for n in schedule.destinations))) == 16
    )
    assert first == 8


def test_a_source_without_a_group_feeds_the_next_rack_at_once() -> None:
    fabric = racks([2, 7])
    schedule = taps(equal_blocks(fabric, 16, [0, 1]))
    replay_in(fabric, schedule, trunk_blocks=1)
    assert schedule.steps == 16 + 3 - 1


@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 8, 13])
def test_in_one_rack_of_equal_nodes_it_is_the_binomial_pipeline(nodes: int) -> None:
    for sources in range(1, nodes + 1):
        task = step_task(nodes, 6, range(sources))
        assert taps(task) == binomial(task)


def test_behind_wide_trunks_racks_are_one() -> None:
    task = equal_blocks(racks([4, 4], trunk=4.0), 6, [0])
    assert taps(task) == binomial(task)


def speeds(*rates: float) -> Fabric:
    return Fabric(tuple(Port(rate, rate) for rate in rates), 0.0)


def test_slow_nodes_are_fed_by_one_fast_node_that_does_nothing_else() -> None:
    fabric = speeds(*[1.0, 0.95, 1.0, 0.9, 1.0, 0.95, 1.0, 0.9], *[0.25] * 4)
    schedule = taps(equal_blocks(fabric, 8, [0]))
    replay_in(fabric, schedule)
    between = {move.src for move in schedule.moves if move.src < 8 <= move.dst}
    assert len(between) == 1
    assert all(move.dst >= 8 for move in schedule.moves if move.src in between)
    assert not [move for move in schedule.moves if move.src >= 8 > move.dst]
    fast = max(move.step for move in schedule.moves if move.dst < 8)
    assert fast <= 8 + floor_log2(7) + 1


def test_a_lone_fast_source_feeds_the_slow_itself() -> None:
    schedule = taps(equal_blocks(speeds(1.0, *[0.25] * 7), 8, [0]))
    assert schedule.steps == 8 + 3 - 1


def test_nobody_is_fast_behind_a_slow_source() -> None:
    task = equal_blocks(speeds(0.25, 1.0, 1.0, 0.25, 0.25), 8, [0])
    assert taps(task).moves == binomial(task).moves
