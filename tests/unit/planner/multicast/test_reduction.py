"""Hosts with local links, nodes that only receive, sources that may not send."""

import pytest

from services.planner.core.multicast.fabric import Fabric, Port, Task
from services.planner.core.multicast.schedule import Move, Schedule, check
from services.planner.core.multicast.strategies import STRATEGIES, lower_bound
from shared.errors import BadInput, PlanError
from tests.unit.planner.multicast.fabric_model import equal_blocks, racks, replay_in

MULTICASTS = sorted(STRATEGIES.keys() - {"local"})
NVLINK = 100.0


def hosts(*names: str) -> Fabric:
    """A node for each name, by its host; prefill nodes, which send nothing, in capitals."""
    ports = [Port(float(not name.isupper()), 1.0, host=name.lower()) for name in names]
    return Fabric(tuple(ports), 0.0, local_bytes_per_s=NVLINK)


@pytest.mark.parametrize("name", MULTICASTS)
def test_one_node_of_a_host_is_planned_and_the_others_copy(name: str) -> None:
    fabric = hosts("x", *"aaabbbccc")
    schedule = STRATEGIES[name](equal_blocks(fabric, 6, [0]))
    replay_in(fabric, schedule)
    check(schedule, fabric)
    alone = STRATEGIES[name](equal_blocks(hosts("x", "a", "b", "c"), 6, [0]))
    assert schedule.steps == alone.steps + 1
    ported = [move for move in schedule.moves if not fabric.is_local(move.src, move.dst)]
    assert len(ported) == len(alone.moves)


@pytest.mark.parametrize("name", MULTICASTS)
def test_next_to_a_source_everybody_copies_from_it(name: str) -> None:
    fabric = hosts(*"aaaa")
    schedule = STRATEGIES[name](equal_blocks(fabric, 5, [2]))
    replay_in(fabric, schedule)
    assert {(move.src, fabric.is_local(move.src, move.dst)) for move in schedule.moves} == {
        (2, True)
    }
    assert schedule.steps == 5


def test_who_copied_from_a_source_helps_to_feed() -> None:
    ports = [Port(1.0, 1.0, host="a"), Port(1.0, 1.0, host="a"), Port(0.0, 1.0), Port(0.0, 1.0)]
    fabric = Fabric(tuple(ports), 0.0, local_bytes_per_s=NVLINK)
    schedule = STRATEGIES["binomial"](equal_blocks(fabric, 8, [0]))
    replay_in(fabric, schedule)
    assert schedule.steps <= 8 + 2


def test_without_a_local_link_a_host_means_nothing() -> None:
    ports = tuple(Port(1.0, 1.0, host="a") for _ in range(4))
    schedule = STRATEGIES["binomial"](equal_blocks(Fabric(ports, 0.0), 5, [0]))
    assert schedule.steps == lower_bound(4, 5, 1)


def test_the_node_that_sends_fastest_stands_for_its_host() -> None:
    ports = [Port(1.0, 1.0), *(Port(out, 1.0, host="a") for out in (0.0, 2.0, 1.0))]
    fabric = Fabric(tuple(ports), 0.0, local_bytes_per_s=NVLINK)
    schedule = STRATEGIES["binomial"](equal_blocks(fabric, 3, [0]))
    assert {move.dst for move in schedule.moves if move.src == 0} == {2}


@pytest.mark.parametrize("name", MULTICASTS)
def test_a_source_that_may_not_send_feeds_its_host_alone(name: str) -> None:
    fabric = hosts("A", "a", "b", "c")
    alone = Task(fabric, (1,) * 4, (0,))
    with pytest.raises(PlanError, match="name a source that may"):
        STRATEGIES[name](alone)
    schedule = STRATEGIES[name](equal_blocks(fabric, 4, [0, 2]))
    check(schedule, fabric)
    assert {move.dst for move in schedule.moves if move.src == 0} == {1}
    assert {move.src for move in schedule.moves if move.dst == 1} == {0}
    only_hosts = hosts("A", "a", "A")
    check(STRATEGIES[name](equal_blocks(only_hosts, 4, [0])), only_hosts)


def leaves(relays: int, leaves: int) -> Fabric:
    return Fabric((Port(1.0, 1.0),) * relays + (Port(0.0, 1.0),) * leaves, 0.0)


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 13])
def test_one_node_that_only_receives_is_free(nodes: int) -> None:
    """The tap has all blocks for it floor(log2 N) steps after the source sent them."""
    fabric = leaves(nodes, 1)
    schedule = STRATEGIES["binomial"](equal_blocks(fabric, 8, [0]))
    replay_in(fabric, schedule)
    core = lower_bound(nodes, 8, 1)
    assert schedule.steps <= max(core, 8 + nodes.bit_length() - 1)


def test_nodes_that_only_receive_soon_hold_every_block_between_them() -> None:
    schedule = STRATEGIES["binomial"](equal_blocks(leaves(4, 4), 8, [0, 1, 2, 3]))
    assert schedule.steps == 8
    assert len(set().union(*schedule.held(2)[4:])) == 8


@pytest.mark.parametrize("name", ["binomial", "head", "taps"])
@pytest.mark.parametrize(("relays", "count"), [(1, 5), (4, 4), (8, 20), (5, 11), (16, 3)])
def test_nodes_that_only_receive_keep_every_sender_busy(name: str, relays: int, count: int) -> None:
    fabric = leaves(relays, count)
    schedule = STRATEGIES[name](equal_blocks(fabric, 8, [0]))
    replay_in(fabric, schedule)
    core = STRATEGIES[name](equal_blocks(leaves(relays, 0), 8, [0])).steps
    work = 8 * (relays - 1 + count)
    assert schedule.steps >= -(-work // relays)
    assert schedule.steps <= core + max(8, -(-8 * count // relays)) + 1
    assert max((m.step for m in schedule.moves if m.dst < relays), default=0) == core


def test_who_only_receives_is_fed_from_its_own_rack() -> None:
    ports = list(racks([4, 4]).ports)
    ports[7] = Port(0.0, 1.0, "r1")
    fabric = Fabric(tuple(ports), 0.0, racks([4, 4]).trunks)
    schedule = STRATEGIES["taps"](equal_blocks(fabric, 6, [0]))
    replay_in(fabric, schedule, trunk_blocks=1)
    assert {fabric.ports[move.src].rack for move in schedule.moves if move.dst == 7} == {"r1"}


def test_a_rack_where_nobody_sends_is_fed_through_its_trunk_a_block_a_step() -> None:
    ports = [Port(1.0, 1.0, "a")] * 4 + [Port(0.0, 1.0, "b")] * 3
    fabric = Fabric(tuple(ports), 0.0, {"a": 1.0, "b": 1.0})
    schedule = STRATEGIES["taps"](equal_blocks(fabric, 6, [0]))
    replay_in(fabric, schedule, trunk_blocks=1)
    assert 3 * 6 <= schedule.steps <= 3 * 6 + 2


@pytest.mark.parametrize(
    ("task", "complaint"),
    [
        (Task(Fabric((Port(1.0, 1.0), Port(1.0, 0.0)), 0.0), (1,), (0,)), "takes nothing in"),
        (Task(Fabric((Port(1.0, 1.0),) * 2, 0.0), (1, 0), (0,)), "more than 0"),
        (Task(Fabric((Port(1.0, 1.0),) * 2, 0.0, {"a": 0.0}), (1,), (0,)), "trunk of rack 'a'"),
    ],
)
def test_links_and_blocks_that_make_no_sense_are_refused(task: Task, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        STRATEGIES["binomial"](task)


PAIR = hosts("x", "a", "a")


@pytest.mark.parametrize(
    ("fabric", "moves", "complaint"),
    [
        (hosts("x", "A", "b"), [Move(1, 0, 1, 0), Move(2, 1, 2, 0)], "only receives"),
        (PAIR, [Move(1, 0, 1, 0), Move(1, 0, 2, 0)], "sends twice"),
        (PAIR, [Move(1, 0, 1, 0), Move(2, 1, 2, 0), Move(2, 0, 2, 0)], "from elsewhere as well"),
        (hosts(*"aaa"), [Move(1, 0, 1, 0), Move(2, 0, 2, 0), Move(2, 1, 2, 0)], "receives twice"),
    ],
)
def test_check_knows_the_links(fabric: Fabric, moves: list[Move], complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        check(Schedule(3, 1, (0,), tuple(moves)), fabric)


def test_a_local_copy_takes_no_port() -> None:
    moves = (Move(1, 0, 1, 0), Move(2, 0, 1, 1), Move(2, 1, 2, 0), Move(3, 1, 2, 1))
    check(Schedule(3, 2, (0,), moves), PAIR)
    check(Schedule(3, 1, (0,), (Move(1, 0, 1, 0), Move(1, 0, 2, 0))), hosts(*"aaa"))
    with pytest.raises(PlanError, match="sends twice"):
        check(Schedule(3, 1, (0,), (Move(1, 0, 1, 0), Move(1, 0, 2, 0))))
