"""Every strategy, on any fabric: valid, complete, nothing sent twice, within the bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.multicast.fabric import Fabric, Port, Task, step_task
from services.planner.core.multicast.schedule import check
from services.planner.core.multicast.strategies import STRATEGIES, lower_bound
from shared.errors import PlanError
from tests.unit.planner.multicast.fabric_model import equal_blocks, racks, replay_in
from tests.unit.planner.step_model import document, independent_checker, replay_schedule

NAMES = st.sampled_from(sorted(STRATEGIES))


@st.composite
def equal_tasks(draw: st.DrawFn) -> Task:
    nodes = draw(st.integers(1, 40))
    sources = draw(st.lists(st.integers(0, nodes - 1), min_size=1, max_size=nodes, unique=True))
    return step_task(nodes, draw(st.integers(1, 20)), sources)


@st.composite
def ports(draw: st.DrawFn) -> Port:
    speed = draw(st.sampled_from([1.0, 1.0, 1.0, 0.9, 0.25]))
    return Port(
        out=draw(st.sampled_from([0.0, speed, speed, speed])),
        into=speed,
        rack=draw(st.sampled_from(["", "a", "b", "c"])),
        host=draw(st.sampled_from(["", "", "h", "i", "j"])),
    )


@st.composite
def any_tasks(draw: st.DrawFn) -> Task:
    """Racks behind trunks of any width or none, hosts, mixed speeds, nodes that only receive."""
    nodes = draw(st.lists(ports(), min_size=1, max_size=20))
    trunks = draw(
        st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sampled_from([0.2, 1.0, 3.0]))
    )
    fabric = Fabric(tuple(nodes), 0.01, trunks, draw(st.sampled_from([0.0, 10.0])))
    chosen = st.lists(st.integers(0, len(nodes) - 1), min_size=1, max_size=4, unique=True)
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    return Task(fabric, tuple(sizes), tuple(draw(chosen)))


@given(equal_tasks(), NAMES)
def test_on_equal_links_the_bounds_hold(task: Task, name: str) -> None:
    schedule = STRATEGIES[name](task)
    check(schedule)
    if name == "local":
        assert schedule.own == task.destinations
        return
    replay_schedule(schedule)
    bound = lower_bound(task.nodes, task.blocks, len(task.sources))
    assert schedule.steps >= bound
    if name in ("binomial", "taps"):
        assert schedule.steps == bound
    if name == "head":
        assert schedule.steps <= bound + 1


@given(any_tasks(), NAMES)
def test_on_any_fabric_all_are_filled_once(task: Task, name: str) -> None:
    fabric = task.fabric
    try:
        schedule = STRATEGIES[name](task)
    except PlanError:
        assert all(fabric.ports[source].out == 0 for source in task.sources)
        return
    check(schedule, fabric)
    replay_in(fabric, schedule)
    assert (schedule.nodes, schedule.blocks, schedule.sources) == (
        task.nodes,
        task.blocks,
        task.sources,
    )
    if name != "local":
        assert len(schedule.moves) == len(task.destinations) * task.blocks


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 12),
    st.sets(st.integers(0, 200), max_size=12),
    st.data(),
)
def test_taps_put_a_block_a_step_on_a_trunk(
    sizes: list[int], blocks: int, receiving: set[int], data: st.DataObject
) -> None:
    fabric = racks(sizes)
    nodes = len(fabric.ports)
    sources = data.draw(st.lists(st.integers(0, nodes - 1), min_size=1, max_size=4, unique=True))
    silent = receiving - set(sources)
    fabric = Fabric(
        tuple(
            Port(0.0, 1.0, port.rack) if node in silent else port
            for node, port in enumerate(fabric.ports)
        ),
        0.0,
        fabric.trunks,
    )
    # A rack whose trunk is as wide as its ports needs no care: one of a single node.
    schedule = STRATEGIES["taps"](equal_blocks(fabric, blocks, sources))
    tight = fabric.tight_racks()
    wide = {rack for rack in fabric.trunks if rack not in tight}
    assert all(sizes[int(rack[1:])] == 1 for rack in wide)
    replay_in(fabric, schedule, trunk_blocks=1)


@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - {"local"}))
def test_the_independent_checker_agrees(name: str) -> None:
    checker = independent_checker()
    for sizes in ([8, 8], [1, 3, 5], [4, 4, 4, 4]):
        schedule = STRATEGIES[name](equal_blocks(racks(sizes), 7, [0, sizes[0]]))
        verdict = checker.check(document(schedule))
        assert verdict["valid"], verdict["errors"]
        assert verdict["complete"]
        assert verdict["redundant_transfers"] == 0
