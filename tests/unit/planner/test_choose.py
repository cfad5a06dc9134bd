"""The choice: the best by its own criterion, for reasons that it gives."""

from dataclasses import replace

import pytest

from services.planner.core import choose as choosing
from services.planner.core.choose import CANDIDATES, RULED_OUT, choose, unit_sizes, units
from services.planner.core.costs import arrival_times, equal_links_seconds
from services.planner.core.multicast.fabric import Fabric, Port, Task, step_task, uniform
from services.planner.core.multicast.schedule import check, check_moves
from services.planner.core.multicast.strategies import STRATEGIES, lower_bound
from services.planner.core.outlook import Serving
from shared.errors import BadInput

FOUR = Serving(max_stages=4)
RACKS = tuple(Port(50e6, 50e6, rack=rack) for rack in "aaaaaaaabbbbbbbb")
SIZES = (4_000_000,) * 16


def test_on_equal_links_it_is_the_binomial_pipeline() -> None:
    choice = choose(step_task(13, 16, [0, 1]), FOUR)
    assert (choice.strategy, choice.unit) == ("binomial", 1)
    assert choice.schedule.steps == lower_bound(13, 16, 2)
    assert choice.outlook.all_complete_s == choice.schedule.steps
    check(choice.schedule)


@pytest.mark.parametrize(
    ("nodes", "strategy"),
    [(4, "chain"), (8, "chain"), (16, "chain"), (24, "chain"), (64, "head"), (160, "binomial")],
)
def test_where_relays_forward_chunks_it_is_a_chain_until_that_is_too_long(
    nodes: int, strategy: str
) -> None:
    """64 MiB on links of 400 Mbit/s: chains take longer from 30 nodes on, and what serves meanwhile
    decides between nearly equal ones."""
    of = Task(uniform(nodes, 50e6, 0.001), (512 << 10,) * 128, (0,), 256 << 10)
    assert choose(of, FOUR).strategy == strategy


def test_racks_behind_slow_trunks_are_fed_one_after_the_other() -> None:
    fabric = Fabric(RACKS, 0.001, {"a": 50e6, "b": 50e6})
    choice = choose(Task(fabric, SIZES, (0,)), FOUR)
    assert choice.strategy == "taps"
    flat = choose(Task(fabric, SIZES, (0,)), FOUR, name="binomial")
    assert choice.outlook.all_complete_s is not None
    assert flat.outlook.all_complete_s is not None
    assert choice.outlook.all_complete_s < 0.55 * flat.outlook.all_complete_s


def test_dear_transfers_are_made_larger() -> None:
    task = Task(uniform(32, 50e6, 0.05), (1_000_000,) * 64, (0,))
    choice = choose(task, FOUR)
    assert (choice.strategy, choice.unit) == ("binomial", 8)
    assert choice.outlook.all_complete_s == pytest.approx(12 * (0.05 + 8e6 / 50e6))
    for other in choice.considered:
        assert other.score >= choice.considered[0].score


def test_blocks_of_one_unit_move_in_one_step() -> None:
    task = Task(uniform(5, 50e6, 0.05), (1_000_000,) * 10, (0,))
    choice = replace(choose(task, FOUR), unit=1)
    assert [*choice.moves(10)] == [*choice.schedule.moves]
    three = units(task, 3)
    assert three.block_bytes == (3_000_000,) * 3 + (1_000_000,)
    choice = replace(choice, unit=3, schedule=STRATEGIES["chain"](three))
    moves = [*choice.moves(10)]
    assert sorted((m.dst, m.block) for m in moves) == [
        (node, block) for node in range(1, 5) for block in range(10)
    ]
    assert [m.block for m in moves if (m.step, m.dst) == (4, 1)] == [9]
    assert [m.block for m in moves if (m.step, m.dst) == (1, 1)] == [0, 1, 2]


def test_a_named_strategy_is_taken_as_it_is() -> None:
    task = Task(uniform(16, 50e6, 0.05), (1_000_000,) * 64, (0,))
    choice = choose(task, FOUR, name="tree")
    assert (choice.strategy, choice.unit, choice.schedule) == ("tree", 1, STRATEGIES["tree"](task))
    assert [each.strategy for each in choice.considered] == ["tree"]
    with pytest.raises(BadInput, match="no multicast algorithm 'magic'"):
        choose(task, FOUR, name="magic")


def test_local_loads_take_what_the_disks_take() -> None:
    task = Task(uniform(3, 50e6), (50_000_000,) * 2, (0,))
    found = choose(task, FOUR, name="local", load_bytes_per_s={1: 50e6, 2: 100e6})
    assert found.outlook.all_complete_s == 2.0
    assert found.outlook.first_complete_s == 1.0
    unknown = choose(task, FOUR, name="local", load_bytes_per_s={1: 50e6})
    assert unknown.outlook.all_complete_s is None


def test_every_candidate_is_named_once_with_a_reason() -> None:
    task = Task(Fabric(RACKS, 0.02, {"a": 50e6, "b": 50e6}), SIZES, (0,))
    choice = choose(task, FOUR)
    named = [(each.strategy, each.unit) for each in choice.considered]
    expected = {(name, size) for name in CANDIDATES for size in unit_sizes(task)}
    assert len(named) == len(expected)
    assert set(named) == expected
    assert [bool(each.verdict) for each in choice.considered] == [False] + [True] * (len(named) - 1)


def test_large_equal_clusters_are_judged_without_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counting(name: str) -> object:
        made.append(name)
        return STRATEGIES[name]

    monkeypatch.setattr(choosing, "strategy", counting)
    task = Task(uniform(1024, 50e6, 0.001), SIZES, (0,))
    choice = choose(task, FOUR)
    assert made == ["binomial"]
    assert all(each.verdict == RULED_OUT for each in choice.considered[1:])
    assert choice.unit == 1
    assert choice.outlook.all_complete_s == equal_links_seconds("binomial", task)
    assert choice.outlook.first_complete_s == pytest.approx(choice.outlook.all_complete_s)
    assert choice.outlook.first_path_s == pytest.approx(0.081)
    check_moves(choice.schedule.held(0), choice.schedule.blocks, choice.schedule.moves, range(1024))


@pytest.mark.parametrize(("nodes", "strategy"), [(2, "binomial"), (3, "head"), (4, "chain")])
def test_what_is_judged_without_a_schedule_is_timed_as_that_is(nodes: int, strategy: str) -> None:
    large = Task(uniform(nodes, 50e6, 0.01), (1 << 20,) * choosing.LARGE, (0,), 256 << 10)
    choice = choose(large, FOUR)
    assert choice.strategy == strategy
    arrivals = arrival_times(choice.schedule.moves, large)
    last = [arrivals[node, large.blocks - 1] for node in large.destinations]
    assert choice.outlook.first_path_s == pytest.approx(min(arrivals.values()))
    assert choice.outlook.first_complete_s == pytest.approx(min(last))
    assert choice.outlook.all_complete_s == pytest.approx(max(last))


def test_where_all_are_sources_nothing_moves() -> None:
    choice = choose(step_task(2, 3, [0, 1]), FOUR)
    assert choice.schedule.moves == ()
