"""The cost model and the choice, on clusters of any links."""

import math
from dataclasses import replace
from random import Random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.planner.core.choose import CANDIDATES, Choice, choose, units
from services.planner.core.costs import (
    arrival_times,
    equal_links_seconds,
    is_uniform,
    least_seconds,
    physical_limit,
    schedule_arrivals,
)
from services.planner.core.multicast.fabric import Fabric, Port, Task, uniform
from services.planner.core.multicast.schedule import Move
from services.planner.core.multicast.strategies import STRATEGIES, lower_bound, strategy
from services.planner.core.outlook import (
    SAMPLES,
    Serving,
    capacity_bound,
    equal_links_capacity,
    predict,
)
from services.planner.core.paths import plan_paths
from services.planner.core.replan import repair_soonest
from tests.support.amounts import examples
from tests.unit.planner.step_model import replay

RATES = st.sampled_from([10.0, 40.0, 100.0])
CHUNKS = st.sampled_from([0, 1, 7, 30, 200])
"""200 is as large as blocks get."""
FOUR = Serving(max_stages=4)


@st.composite
def ports(draw: st.DrawFn, index: int) -> Port:
    rate = draw(RATES)
    rack = draw(st.sampled_from("ab"))
    return Port(
        out=rate if index == 0 else draw(st.sampled_from([rate, rate, 0.0])),
        into=draw(RATES),
        rack=rack,
        host=draw(st.sampled_from(["", f"{rack}1", f"{rack}2"])),
    )


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    nodes = draw(st.integers(2, 9))
    fabric = Fabric(
        tuple(draw(ports(index)) for index in range(nodes)),
        draw(st.sampled_from([0.0, 0.5])),
        draw(st.dictionaries(st.sampled_from("ab"), RATES)),
        draw(st.sampled_from([0.0, 1000.0])),
    )
    sizes = draw(st.lists(st.integers(20, 200), min_size=1, max_size=8))
    sources = tuple(range(draw(st.integers(1, max(1, nodes // 3)))))
    return Task(fabric, tuple(sizes), sources, draw(CHUNKS))


def chosen(task: Task) -> Choice:
    assume(all(task.fabric.ports[source].out for source in task.sources))
    return choose(task, FOUR)


@given(tasks(), st.sampled_from(CANDIDATES))
@settings(deadline=None)
def test_no_prediction_is_below_the_physical_limit(task: Task, name: str) -> None:
    assume(all(task.fabric.ports[source].out for source in task.sources))
    schedule = strategy(name)(task)
    over = max(schedule_arrivals(schedule, task, {}).values())
    assert over >= least_seconds(task) * (1 - 1e-9)
    assert least_seconds(task) >= physical_limit(task) * (1 - 1e-9)


@st.composite
def equal_tasks(draw: st.DrawFn) -> Task:
    nodes = draw(st.integers(2, 7))
    fabric = uniform(nodes, 100.0, draw(st.sampled_from([0.0, 0.2, 3.0])))
    sources = tuple(range(draw(st.integers(1, 2))))
    assume(len(sources) < nodes)
    return Task(fabric, (100,) * draw(st.integers(1, 4)), sources, draw(CHUNKS))


@given(st.one_of(equal_tasks(), tasks()), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_no_order_of_any_moves_is_below_the_bound(task: Task, random: Random) -> None:
    held = {block: list(task.sources) for block in range(task.blocks)}
    lacking = [(node, block) for node in task.destinations for block in range(task.blocks)]
    random.shuffle(lacking)
    moves = []
    for step, (dst, block) in enumerate(lacking, 1):
        moves.append(Move(step, random.choice(held[block]), dst, block))
        held[block].append(dst)
    over = max(arrival_times(moves, task).values())
    assert over >= least_seconds(task) * (1 - 1e-9)


@given(tasks(), st.sampled_from(CANDIDATES), st.data())
@settings(deadline=None)
def test_a_faster_port_delays_nothing(task: Task, name: str, data: st.DataObject) -> None:
    assume(all(task.fabric.ports[source].out for source in task.sources))
    moves = strategy(name)(task).moves
    faster = list(task.fabric.ports)
    node = data.draw(st.integers(0, task.nodes - 1))
    port = faster[node]
    faster[node] = Port(port.out * 2, port.into * 2, port.rack, port.host)
    fabric = task.fabric
    quick = Fabric(tuple(faster), fabric.overhead_s, fabric.trunks, fabric.local_bytes_per_s)
    before, after = (arrival_times(moves, replace(task, fabric=links)) for links in (fabric, quick))
    assert all(after[arrival] <= at + 1e-9 for arrival, at in before.items())


@given(tasks(), st.sampled_from(list(STRATEGIES)), CHUNKS)
@settings(deadline=None)
def test_smaller_chunks_delay_nothing(task: Task, name: str, chunk: int) -> None:
    assume(all(task.fabric.ports[source].out for source in task.sources))
    moves = strategy(name)(task).moves
    finer = min(chunk or task.chunk_bytes, task.chunk_bytes or chunk)
    before, after = (arrival_times(moves, t) for t in (task, replace(task, chunk_bytes=finer)))
    assert all(after[arrival] <= at + 1e-9 for arrival, at in before.items())
    assert physical_limit(replace(task, chunk_bytes=finer)) <= physical_limit(task)


@given(tasks(), st.sampled_from(list(STRATEGIES)))
@settings(deadline=None)
def test_blocks_of_one_chunk_are_relayed_whole(task: Task, name: str) -> None:
    """A move then begins once its block is with its sender, and no sooner."""
    assume(all(task.fabric.ports[source].out for source in task.sources))
    moves = strategy(name)(task).moves
    whole = arrival_times(moves, replace(task, chunk_bytes=0))
    assert whole == arrival_times(moves, replace(task, chunk_bytes=max(task.block_bytes)))
    for _, src, dst, block in moves:
        alone = (
            task.block_bytes[block] / task.fabric.rate(src, dst)
            if whole[dst, block] < math.inf
            else 0.0
        )
        assert whole[dst, block] >= whole.get((src, block), 0.0) + alone - 1e-9


@given(
    st.integers(2, 40),
    st.integers(1, 20),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0, 1, 10, 25, 50]),
    st.sampled_from(CANDIDATES),
)
@settings(deadline=None)
def test_on_equal_links_the_closed_forms_are_exact(
    nodes: int, blocks: int, sources: int, overhead_s: float, chunk_bytes: int, name: str
) -> None:
    assume(sources < nodes)
    task = Task(
        uniform(nodes, 50.0, overhead_s), (100,) * blocks, tuple(range(sources)), chunk_bytes
    )
    over = max(arrival_times(strategy(name)(task).moves, task).values())
    closed = equal_links_seconds(name, task)
    late = lower_bound(nodes, 1, sources) - 1
    if name == "chain" or blocks < 3 or blocks >= late:
        assert math.isclose(over, closed)
    assert closed - max(0, blocks - 2) * overhead_s <= over * (1 + 1e-9) <= closed * (1 + 2e-9)
    assert over >= least_seconds(task) * (1 - 1e-9)
    assert is_uniform(task.fabric)
    if name == "binomial" and (late == 0 or not chunk_bytes):
        changes = (blocks - 1) * overhead_s if late else 0.0
        assert math.isclose(closed, least_seconds(task) + changes)
    if name == "chain" and nodes - sources <= 2 * sources:
        assert math.isclose(closed, least_seconds(task))


@given(
    st.integers(2, 12),
    st.integers(2, 12),
    st.integers(1, 3),
    st.sampled_from([1, 10, 25, 100]),
    st.sampled_from(CANDIDATES),
    st.booleans(),
)
@settings(deadline=None, max_examples=examples(40))
def test_no_schedule_serves_more_meanwhile_than_the_bound_on_equal_links(
    nodes: int, blocks: int, sources: int, chunk_bytes: int, name: str, sources_run: bool
) -> None:
    assume(sources < nodes)
    task = Task(uniform(nodes, 100.0), (100,) * blocks, tuple(range(sources)), chunk_bytes)
    schedule = strategy(name)(task)
    serving = Serving(4, None if sources_run else task.destinations)
    arrivals = schedule_arrivals(schedule, task, {})
    outlook = predict(schedule.held(0), blocks, arrivals, serving)
    assert outlook.all_complete_s is not None
    assert outlook.mean_capacity is not None
    bound = equal_links_capacity(
        nodes,
        blocks,
        sources,
        math.ceil(outlook.all_complete_s - 1e-9),
        sources_run=sources_run,
        whole_blocks=chunk_bytes == 100,
    )
    assert outlook.mean_capacity <= bound + 1 / SAMPLES


@given(equal_tasks())
@settings(deadline=None)
def test_floors_on_equal_links_are_no_higher_than_what_they_stand_for(task: Task) -> None:
    """But for what `predict` misses by looking at so many moments only."""
    for other in choose(task, FOUR).considered:
        alone = units(task, other.unit)
        schedule = strategy(other.strategy)(alone)
        arrivals = schedule_arrivals(schedule, alone, {})
        outlook = predict(schedule.held(0), alone.blocks, arrivals, FOUR)
        assert outlook.all_complete_s is not None
        score = outlook.all_complete_s * (1 - 0.5 * (outlook.mean_capacity or 0.0))
        assert score >= other.score - 0.5 * outlook.all_complete_s / SAMPLES


@given(tasks())
@settings(deadline=None, max_examples=examples(40))
def test_nothing_that_was_considered_is_better_than_the_choice(task: Task) -> None:
    choice = chosen(task)
    best = choice.considered[0]
    assert (best.strategy, best.unit, best.outlook) == (
        choice.strategy,
        choice.unit,
        choice.outlook,
    )
    for other in choice.considered:
        assert other.score >= best.score
        alone = units(task, other.unit)
        schedule = strategy(other.strategy)(alone)
        arrivals = schedule_arrivals(schedule, alone, {})
        outlook = predict(schedule.held(0), alone.blocks, arrivals, FOUR)
        assert outlook.all_complete_s is not None
        score = outlook.all_complete_s * (1 - 0.5 * (outlook.mean_capacity or 0.0))
        assert score >= best.score * (1 - 1e-9), "ruled out, and yet better"
        assert score >= other.score * (1 - 1e-9), "a bound that does not hold"


@given(tasks())
@settings(deadline=None, max_examples=examples(40))
def test_the_chosen_moves_bring_every_block_once(task: Task) -> None:
    moves = [*chosen(task).moves(task.blocks)]
    assert sorted((m.dst, m.block) for m in moves) == [
        (node, block) for node in task.destinations for block in range(task.blocks)
    ]
    held = {(node, block) for node in task.sources for block in range(task.blocks)}
    arriving: list[tuple[int, int]] = []
    step = 0
    for move in moves:
        assert move.step >= step
        if move.step > step:
            held.update(arriving)
            arriving, step = [], move.step
        assert (move.src, move.block) in held
        arriving.append((move.dst, move.block))


@given(
    st.integers(1, 6).flatmap(
        lambda blocks: st.tuples(
            st.just(blocks),
            st.lists(st.frozensets(st.integers(0, blocks - 1)), min_size=1, max_size=6),
        )
    )
)
@settings(deadline=None)
def test_paths_never_serve_more_than_the_bound(
    cluster: tuple[int, list[frozenset[int]]],
) -> None:
    blocks, held = cluster
    capacity = sum(path.weight for path in plan_paths(held, blocks, max_stages=blocks))
    masks = [sum(1 << block for block in have) for have in held]
    assert capacity <= capacity_bound(masks, blocks) + 1e-6


@given(tasks(), st.data())
@settings(deadline=None, max_examples=examples(40))
def test_a_repair_on_any_links_completes_all_without_the_reluctant_where_it_can(
    task: Task, data: st.DataObject
) -> None:
    every = frozenset(range(task.blocks))
    held = [every] + [
        data.draw(st.frozensets(st.integers(0, task.blocks - 1))) for _ in range(task.nodes - 1)
    ]
    reluctant = data.draw(st.sets(st.integers(1, task.nodes - 1)))
    moves = repair_soonest(held, range(task.nodes), task, reluctant=reluctant)
    assert all(have == every for have in replay(held, moves)[-1])
    assert {move.src for move in moves}.isdisjoint(reluctant)  # node 0 has all, and gives it
