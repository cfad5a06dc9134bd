"""Closed forms against schedules that are timed move by move, on links equal and unequal."""

import math
from dataclasses import replace

import pytest

from services.planner.core.costs import (
    arrival_times,
    best_blocks,
    block_seconds,
    copy_seconds,
    equal_links_seconds,
    is_uniform,
    least_seconds,
    physical_limit,
    schedule_arrivals,
)
from services.planner.core.multicast.fabric import Fabric, Port, Task, uniform
from services.planner.core.multicast.groups import binomial
from services.planner.core.multicast.schedule import Move, Schedule
from services.planner.core.multicast.strategies import STRATEGIES, strategy


def task(sizes: tuple[int, ...], *ports: float | Port, overhead_s: float = 0.0) -> Task:
    """From node 0; a port that is a number has that rate each way."""
    made = tuple(p if isinstance(p, Port) else Port(p, p) for p in ports)
    return Task(Fabric(made, overhead_s), sizes, (0,))


@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - {"local"}))
@pytest.mark.parametrize(("nodes", "blocks", "sources"), [(8, 16, 1), (11, 6, 2)])
@pytest.mark.parametrize("overhead", [0.0, 0.001])
def test_on_equal_links_arrivals_follow_the_steps(
    name: str, nodes: int, blocks: int, sources: int, overhead: float
) -> None:
    """Alpha a step at most; without it, steps are times."""
    equal = Task(uniform(nodes, 50e6, overhead), (50_000,) * blocks, tuple(range(sources)))
    schedule = strategy(name)(equal)
    there = arrival_times(schedule.moves, equal)
    assert len(there) == len(schedule.moves)
    for move in schedule.moves:
        assert there[move.dst, move.block] <= move.step * (0.001 + overhead) + 1e-9
    if not overhead:
        assert max(there.values()) == pytest.approx(schedule.steps * 0.001)


def test_blocks_between_the_same_two_nodes_cost_alpha_once() -> None:
    moves = [Move(1, 0, 1, 0), Move(2, 0, 1, 1), Move(3, 0, 1, 2)]
    there = arrival_times(moves, task((100, 100, 100), 100.0, 100.0, overhead_s=0.5))
    assert there == {(1, 0): 1.5, (1, 1): 2.5, (1, 2): 3.5}


def test_a_receiver_that_changes_its_source_waits_for_the_first_bytes() -> None:
    """They flow only when its port is free, and come alpha later; once more when it changes
    back."""
    moves = [Move(1, 0, 2, 0), Move(2, 1, 2, 1), Move(3, 0, 2, 2)]
    there = arrival_times(moves, task((100, 100, 100), 100.0, 100.0, 100.0, overhead_s=0.5))
    assert there == {(2, 0): 1.5, (2, 1): 3.0, (2, 2): 4.5}


def test_a_sender_that_changes_its_receiver_loses_alpha() -> None:
    moves = [Move(1, 0, 1, 0), Move(2, 0, 2, 0), Move(3, 0, 2, 1)]
    there = arrival_times(moves, task((100, 100), 100.0, 100.0, 100.0, overhead_s=0.5))
    assert there == {(1, 0): 1.5, (2, 0): 3.0, (2, 1): 4.0}


def test_a_change_costs_nothing_where_the_port_waits_for_the_block_anyhow() -> None:
    """Node 2 has a block of node 0 by 1.5 s, and node 1's own only comes up at 9 s."""
    moves = [Move(1, 0, 2, 0), Move(2, 1, 2, 1)]
    ports = 100.0, 100.0, 100.0
    there = arrival_times(moves, task((100, 100), *ports, overhead_s=0.5), {(1, 1): 9.0})
    assert there == {(2, 0): 1.5, (2, 1): 10.5}


def test_every_hop_costs_alpha_once() -> None:
    """Also behind a link that is slower: a stream that waits for each block is not late anew."""
    chain = [Move(block + hop, hop - 1, hop, block) for hop in range(1, 4) for block in range(5)]
    by_chunks = replace(task((100,) * 5, *(100.0,) * 4, overhead_s=0.5), chunk_bytes=10)
    assert max(arrival_times(chain, by_chunks).values()) == pytest.approx(5.5 + 2 * 0.6)
    slow = task((100,) * 5, 10.0, 100.0, 100.0, 100.0, overhead_s=0.5)
    slow_first = arrival_times(chain, replace(slow, chunk_bytes=10))
    assert max(slow_first.values()) == pytest.approx(50.5 + 2 * 0.6)


def test_chains_win_on_few_nodes_and_the_pipeline_on_many() -> None:
    """64 MiB on links of 400 Mbit/s, in 128 blocks of two chunks."""

    def sooner(nodes: int) -> str:
        of = Task(uniform(nodes, 50e6, 0.001), (512 << 10,) * 128, (0,), 256 << 10)
        return min(("binomial", "chain"), key=lambda name: equal_links_seconds(name, of))

    assert {sooner(nodes) for nodes in range(3, 30)} == {"chain"}
    assert {sooner(nodes) for nodes in range(30, 200)} == {"binomial"}


def test_a_slow_node_delays_what_it_sends_and_receives_only() -> None:
    schedule = binomial(4, 4, [0])
    sizes = (100,) * 4
    equal = arrival_times(schedule.moves, task(sizes, 100.0, 100.0, 100.0, 100.0))
    slow = arrival_times(schedule.moves, task(sizes, 100.0, 100.0, 100.0, 50.0))
    assert max(at for (node, _), at in slow.items() if node == 3) > max(equal.values())
    first = schedule.moves[0]
    assert slow[first.dst, first.block] == (2.0 if 3 in first[1:3] else 1.0)


def test_a_relay_forwards_what_it_is_still_receiving() -> None:
    """It begins a chunk (and alpha) after its own block began, and ends no sooner than a chunk
    after it: a fast one waits for each chunk of a slow source."""
    moves = [Move(1, 0, 1, 0), Move(2, 1, 2, 0)]

    def arrivals(*rates: float, overhead_s: float = 0.0) -> dict[tuple[int, int], float]:
        by_chunks = replace(task((100,), *rates, overhead_s=overhead_s), chunk_bytes=10)
        return arrival_times(moves, by_chunks)

    assert arrivals(100.0, 100.0, 100.0) == {(1, 0): 1.0, (2, 0): pytest.approx(1.1)}
    assert arrivals(10.0, 100.0, 100.0) == {(1, 0): 10.0, (2, 0): pytest.approx(10.1)}
    assert arrivals(100.0, 100.0, 10.0) == {(1, 0): 1.0, (2, 0): pytest.approx(10.1)}
    late = arrivals(100.0, 100.0, 100.0, overhead_s=0.5)
    assert late == {(1, 0): 1.5, (2, 0): pytest.approx(0.6 + 1.5)}


def test_what_a_relay_loads_by_itself_is_forwarded_when_it_is_complete() -> None:
    by_chunks = replace(task((100,), 100.0, 100.0), chunk_bytes=10)
    assert arrival_times([Move(1, 0, 1, 0)], by_chunks, {(0, 0): 3.0}) == {(1, 0): 4.0}


def test_a_receiver_takes_one_block_after_the_other() -> None:
    """The second of two sources is ready before the receiver's port is."""
    moves = [Move(1, 0, 2, 0), Move(2, 1, 2, 1), Move(2, 0, 3, 0)]
    there = arrival_times(moves, task((100, 100), 100.0, 100.0, 100.0, 100.0))
    assert there == {(2, 0): 1.0, (2, 1): 2.0, (3, 0): 2.0}


def test_a_fast_sender_serves_slow_receivers_side_by_side() -> None:
    moves = [Move(1, 0, 1, 0), Move(2, 0, 2, 0)]
    assert arrival_times(moves, task((100,), 100.0, 10.0, 10.0)) == {(1, 0): 10.0, (2, 0): 11.0}


def test_the_directions_of_a_port_have_their_own_rates() -> None:
    ports = Port(out=10.0, into=100.0), Port(out=100.0, into=50.0)
    assert arrival_times([Move(1, 0, 1, 0)], task((100,), *ports)) == {(1, 0): 10.0}


def test_a_node_that_may_not_send_never_delivers() -> None:
    ports = 100.0, Port(out=0.0, into=100.0), 100.0
    moves = [Move(1, 0, 1, 0), Move(2, 1, 2, 0)]
    assert arrival_times(moves, task((100,), *ports)) == {(1, 0): 1.0, (2, 0): math.inf}


def test_unequal_blocks_take_their_own_time() -> None:
    moves = binomial(2, 3, [0]).moves
    there = arrival_times(moves, task((100, 300, 50), 100.0, 100.0, overhead_s=0.5))
    assert there == {(1, 0): 1.5, (1, 1): 4.5, (1, 2): 5.0}


def test_moves_between_racks_share_their_trunks() -> None:
    racks = tuple(Port(100.0, 100.0, rack=rack) for rack in ("a", "a", "b", "b"))
    moves = [Move(1, 0, 2, 0), Move(1, 1, 3, 0)]
    free = Task(Fabric(racks, 0.0), (100,), (0, 1))
    assert arrival_times(moves, free) == {(2, 0): 1.0, (3, 0): 1.0}
    tight = Task(Fabric(racks, 0.5, {"b": 50.0}), (100,), (0, 1))
    assert arrival_times(moves, tight) == {(2, 0): 2.5, (3, 0): 4.5}
    both = Task(Fabric(racks, 0.0, {"a": 50.0, "b": 50.0}), (100, 100), (0, 3))
    assert arrival_times([Move(1, 0, 2, 0), Move(1, 3, 1, 1)], both) == {(2, 0): 2.0, (1, 1): 2.0}


def test_a_local_link_takes_nothing_from_the_ports() -> None:
    ports = tuple(Port(10.0, 10.0, host=host) for host in ("a", "a", "b"))
    local = Task(Fabric(ports, 0.0, local_bytes_per_s=100.0), (100,), (0,))
    moves = [Move(1, 0, 1, 0), Move(2, 0, 2, 0)]
    assert arrival_times(moves, local) == {(1, 0): 1.0, (2, 0): 10.0}


def test_partners_change_on_local_links_too() -> None:
    ports = (Port(10.0, 10.0, host="a"),) * 3
    local = Task(Fabric(ports, 0.5, local_bytes_per_s=100.0), (100, 100), (0, 1))
    assert arrival_times([Move(1, 0, 2, 0), Move(2, 0, 2, 1)], local) == {(2, 0): 1.5, (2, 1): 2.5}
    assert arrival_times([Move(1, 0, 2, 0), Move(2, 1, 2, 1)], local) == {(2, 0): 1.5, (2, 1): 3.0}


def test_loads_from_lower_tiers_and_the_set_up_count() -> None:
    schedule = Schedule(3, 2, (0,), (Move(1, 0, 2, 0), Move(2, 1, 2, 1)), own=(1,), setup_s=0.5)
    equal = task((100, 100), 100.0, 100.0, 100.0)
    there = schedule_arrivals(schedule, equal, {1: 50.0})
    assert there == {(1, 0): 2.0, (1, 1): 4.0, (2, 0): 1.5, (2, 1): 5.0}
    assert schedule_arrivals(schedule, equal, {}) == {(2, 0): 1.5}


@pytest.mark.parametrize("nodes", [2, 3, 8, 9, 64])
@pytest.mark.parametrize("overhead", [1e-5, 1e-3, 0.05])
def test_best_number_of_blocks_is_the_best(nodes: int, overhead: float) -> None:
    def cut(blocks: int) -> Task:
        return Task(uniform(nodes, 50e6, overhead), (64_000_000 // blocks,) * blocks, (0,))

    times = {b: equal_links_seconds("binomial", cut(b)) for b in range(1, 400)}
    found = best_blocks(cut(1), 50e6, most=399)
    assert times[found] == pytest.approx(min(times.values()), rel=1e-5)


@pytest.mark.parametrize(("nodes", "overhead"), [(8, 0.0), (2, 0.05)])
def test_where_nobody_changes_partners_or_that_is_free_finer_is_better(
    nodes: int, overhead: float
) -> None:
    of = Task(uniform(nodes, 50e6, overhead), (64_000_000,), (0,))
    assert best_blocks(of, 50e6, most=48) == 48


def test_nothing_comes_sooner_than_between_the_fastest_ports() -> None:
    of = task((100, 300, 50), 100.0, 50.0, overhead_s=0.5)
    assert (block_seconds(of), copy_seconds(of)) == (3.5, 5.0)


def test_physical_limit_on_equal_links() -> None:
    def limit(nodes: int, sources: int) -> float:
        fabric = uniform(nodes, 50e6, overhead_s=1.0)
        return physical_limit(Task(fabric, (4_000_000,) * 16, tuple(range(sources))))

    assert limit(8, 1) == pytest.approx(1.28 * 18 / 16)
    assert limit(16, 2) == pytest.approx(1.28 * 18 / 16)
    assert limit(2, 2) == 0.0


def test_the_slowest_way_that_a_copy_must_go_is_the_limit() -> None:
    def limit(*ports: Port, local: float = 0.0, **trunks: float) -> float:
        fabric = Fabric(ports, 0.0, trunks, local)
        return least_seconds(Task(fabric, (10,) * 10, (0,)))

    fast = Port(100.0, 100.0, rack="a", host="x")
    assert limit(fast, fast, Port(100.0, 10.0, rack="a")) == 10.0
    assert limit(Port(5.0, 5.0, rack="a"), fast) == 20.0
    assert limit(fast, Port(100.0, 100.0, rack="b"), a=100.0, b=20.0) == 5.0
    assert limit(fast, fast, local=900.0) == pytest.approx(0.1)
    assert limit(fast, Port(0.0, 50.0, host="y"), Port(0.0, 50.0, host="y"), local=900.0) == 1.0
    assert limit(Port(0.0, 5.0), fast) == math.inf


def test_what_makes_links_unequal() -> None:
    def racks(*names: str) -> tuple[Port, ...]:
        return tuple(Port(100.0, 100.0, rack=name, host="h") for name in names)

    assert is_uniform(Fabric(racks("a", "a", "b", "b"), 0.0))
    assert is_uniform(Fabric(racks("a", "a", "b", "b"), 0.0, {"a": 200.0, "b": 200.0}))
    assert not is_uniform(Fabric(racks("a", "a", "b", "b"), 0.0, {"a": 199.0}))
    assert is_uniform(Fabric(racks("a", "a"), 0.0, {"a": 1.0}))
    assert not is_uniform(Fabric(racks("a", "a"), 0.0, local_bytes_per_s=1000.0))
    assert is_uniform(Fabric((Port(100.0, 97.0), Port(99.0, 100.0)), 0.0))
    assert not is_uniform(Fabric((Port(100.0, 90.0), Port(100.0, 100.0)), 0.0))
