"""Chains on unequal links against every other order; trees, rings and nodes that load alone."""

from collections.abc import Sequence
from itertools import pairwise, permutations

import pytest

from services.planner.core.multicast.fabric import Fabric, Port, Task, step_task
from services.planner.core.multicast.schedule import check
from services.planner.core.multicast.strategies import STRATEGIES
from tests.unit.planner.multicast.fabric_model import equal_blocks, replay_in
from tests.unit.planner.step_model import replay_schedule


def chains_of(task: Task) -> list[list[int]]:
    """What hangs on each source, in order, by following the moves of block 0."""
    follows = {m.src: m.dst for m in STRATEGIES["chain"](task).moves if m.block == 0}
    chains = [[source] for source in task.sources]
    for chain in chains:
        while chain[-1] in follows:
            chain.append(follows[chain[-1]])
    return chains


def finishes(task: Task, chain: Sequence[int]) -> list[float]:
    """When each node of a chain is complete, move by move."""
    there = {(chain[0], block): 0.0 for block in range(task.blocks)}
    for src, dst in pairwise(chain):
        free = 0.0
        for block, nbytes in enumerate(task.block_bytes):
            start = max(free, there[src, block])
            free = start + task.fabric.overhead_s + nbytes / task.fabric.rate(src, dst)
            there[dst, block] = free
    return [there[node, task.blocks - 1] for node in chain[1:]]


def unequal(*rates: float) -> Fabric:
    return Fabric(tuple(Port(rate, rate) for rate in rates), overhead_s=0.01)


@pytest.mark.parametrize("rates", [(9, 1, 5, 3, 8), (2, 9, 1, 4, 2), (5, 5, 1, 5, 2), (1, 2, 3, 4)])
@pytest.mark.parametrize("blocks", [1, 3, 12])
def test_no_order_of_a_chain_finishes_any_place_earlier(
    rates: tuple[float, ...], blocks: int
) -> None:
    task = equal_blocks(unequal(*rates), blocks, [0])
    (chain,) = chains_of(task)
    best = finishes(task, chain)
    for order in permutations(range(1, len(rates))):
        other = sorted(finishes(task, [0, *order]))
        assert all(mine <= theirs + 1e-9 for mine, theirs in zip(best, other, strict=True))


def test_a_target_runs_at_what_it_receives_not_at_what_it_could_send() -> None:
    """A slow source's chain gets the nodes that the fast one's would delay more."""
    task = equal_blocks(unequal(10, 1, 10, 10, 10, 10), 16, [0, 1])
    assert chains_of(task) == [[0, 2, 3, 4, 5], [1]]


def test_two_sources_share_nodes_by_when_they_would_finish() -> None:
    """Algorithm 1 as printed puts every node on the faster source, the other left idle."""
    task = equal_blocks(unequal(10, 9.9, *[10] * 10), 4, [0, 1])
    assert [len(chain) for chain in chains_of(task)] == [6, 6]


@pytest.mark.parametrize("slow", [9.0, 5.0, 3.0, 1.0])
@pytest.mark.parametrize("blocks", [1, 4, 8])
def test_equal_nodes_are_split_as_well_as_can_be(slow: float, blocks: int) -> None:
    task = equal_blocks(unequal(10, slow, *[10] * 12), blocks, [0, 1])
    nodes = range(2, 14)
    best = min(
        max([*finishes(task, [0, *nodes[:cut]]), *finishes(task, [1, *nodes[cut:]])])
        for cut in range(13)
    )
    mine = max(finish for chain in chains_of(task) for finish in finishes(task, chain))
    assert mine == pytest.approx(best)


def test_a_node_that_takes_in_slowly_is_no_relay_however_fast_it_sends() -> None:
    ports = (Port(10, 10), Port(99, 1), Port(10, 10), Port(1, 99), Port(5, 5))
    task = equal_blocks(Fabric(ports, 0.0), 4, [0])
    assert chains_of(task) == [[0, 2, 4, 1, 3]]


def test_what_a_chain_of_several_sources_loses_to_the_best_split() -> None:
    fabric = unequal(8, 3, 9, 7, 4, 2, 2)
    task = equal_blocks(fabric, 6, [0, 1])
    mine = max(max(finishes(task, chain), default=0.0) for chain in chains_of(task))
    best = float("inf")
    for mask in range(32):
        split = [[0], [1]]
        for i, node in enumerate((2, 3, 4, 5, 6)):
            split[mask >> i & 1].append(node)
        best = min(best, max(max(finishes(task, chain), default=0.0) for chain in split))
    assert mine <= 1.1 * best


@pytest.mark.parametrize("sources", [1, 2, 3])
def test_on_equal_links_chains_are_balanced(sources: int) -> None:
    for nodes in range(sources + 1, 20):
        schedule = STRATEGIES["chain"](step_task(nodes, 6, range(sources)))
        replay_schedule(schedule)
        assert schedule.steps == 6 + -(-(nodes - sources) // sources) - 1


def test_a_chain_and_a_ring_cross_each_trunk_once() -> None:
    ports = [Port(1.0, 1.0, rack) for rack in "abababab"]
    fabric = Fabric(tuple(ports), 0.0, {"a": 1.0, "b": 1.0})
    for name in ("chain", "broadcast"):
        schedule = STRATEGIES[name](equal_blocks(fabric, 5, [0]))
        replay_in(fabric, schedule, trunk_blocks=1)
        assert sum(fabric.crosses(m.src, m.dst) is not None for m in schedule.moves) == 5


def test_a_tree_takes_twice_as_long_to_load() -> None:
    for nodes in range(3, 20):
        for blocks in (1, 4, 16):
            tree = STRATEGIES["tree"](step_task(nodes, blocks, [0]))
            replay_schedule(tree)
            assert tree.steps >= 2 * blocks


def test_a_broadcast_forms_its_group_first_and_uses_one_source() -> None:
    schedule = STRATEGIES["broadcast"](step_task(6, 4, [2, 5]))
    assert schedule.setup_s == step_task(6, 4, [2]).group_setup_s > 0.1
    assert schedule.steps == 4 + 4 - 1
    assert {move.src for move in schedule.moves if move.step == 1} == {2}
    assert not [move for move in schedule.moves if move.src == 5]
    assert STRATEGIES["broadcast"](step_task(2, 4, [0, 1])).setup_s == 0
    assert STRATEGIES["binomial"](step_task(6, 4, [2])).setup_s == 0


def test_who_loads_by_itself_gets_nothing_from_others() -> None:
    schedule = STRATEGIES["local"](step_task(4, 3, [1]))
    assert (schedule.own, schedule.moves) == ((0, 2, 3), ())
    check(schedule)


@pytest.mark.parametrize(("nodes", "sources"), [(2, 1), (3, 1), (4, 1), (9, 1), (16, 2), (18, 2)])
@pytest.mark.parametrize("blocks", [1, 4, 12])
def test_heads_hold_everything_first_and_cost_a_step(nodes: int, sources: int, blocks: int) -> None:
    schedule = STRATEGIES["head"](step_task(nodes, blocks, range(sources)))
    history = replay_schedule(schedule)
    heads = {move.dst for move in schedule.moves if move.src < sources}
    assert len(heads) == sources
    first = -(-blocks // sources)
    assert len(set().union(*(history[first][head] for head in heads))) == blocks
    group = nodes // sources
    assert schedule.steps == blocks + (group - 2).bit_length()
    optimum = STRATEGIES["binomial"](step_task(nodes, blocks, range(sources))).steps
    assert schedule.steps - optimum == (0 if (group - 1).bit_count() == 1 else 1)
