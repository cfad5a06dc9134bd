"""How a model is cut into parts for the devices of a group."""

from collections.abc import Sequence
from itertools import pairwise, permutations

from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.cut import Cut, Room, completed, cut, cuts, lacking
from shared.ids import NodeId
from shared.layout import PAGE, room_of
from shared.parts import Part, whole

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=9).map(
    lambda sizes: [size * 100 * PAGE for size in sizes]
)
ROOMS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 30)), min_size=1, max_size=5).map(
    lambda found: [
        Room(NodeId(f"n{i}"), host, size * 101 * PAGE) for i, (host, size) in enumerate(found)
    ]
)


def taken(blocks: Sequence[int], part: Part) -> int:
    return sum(room_of(blocks[block]) for block in part.blocks)


def reach(blocks: Sequence[int], rooms: Sequence[int]) -> bool:
    """Whether rooms, in this order, take all blocks if each takes what it can."""
    block = 0
    for room in rooms:
        while block < len(blocks) and room_of(blocks[block]) <= room:
            room -= room_of(blocks[block])
            block += 1
    return block == len(blocks)


def possible(blocks: Sequence[int], rooms: Sequence[int], parts: int, largest: int) -> bool:
    """Whether there is a cut of so many parts, none larger, by trying all orders of all rooms."""
    bounded = [min(room, largest) for room in rooms]
    return any(reach(blocks, order) for order in set(permutations(bounded, parts)))


@given(SIZES, ROOMS)
def test_a_cut_is_the_best_of_all(blocks: list[int], rooms: list[Room]) -> None:
    found = cut(blocks, rooms)
    hosts = [[r.nbytes for r in rooms if r.host == host] for host in ("a", "b")]
    every = [room.nbytes for room in rooms]

    def fits(sizes: Sequence[int]) -> bool:
        return any(possible(blocks, sizes, n, sum(every)) for n in range(1, len(sizes) + 1))

    if found is None:
        assert not fits(every)
        return
    assert [b for part in found for b in part.blocks] == list(range(len(blocks)))
    assert all(part.size for part in found)
    where = [sizes for sizes in hosts if fits(sizes)] or [every]  # one machine, if it fits on one
    largest = max(taken(blocks, part) for part in found)
    assert any(possible(blocks, sizes, len(found), largest) for sizes in where)
    for sizes in where:
        assert not any(possible(blocks, sizes, n, sum(every)) for n in range(1, len(found)))
        assert not possible(blocks, sizes, len(found), largest - 1)


@given(SIZES, ROOMS)
def test_cuts_are_those_of_each_machine_and_one_over_several_that_has_fewer_parts(
    blocks: list[int], rooms: list[Room]
) -> None:
    found = cuts(blocks, rooms)
    if any(room.nbytes >= taken(blocks, whole(len(blocks))) for room in rooms):
        assert found == (Cut((whole(len(blocks)),), ""),)
        return
    for each in found[:1]:
        assert each.parts == cut(blocks, rooms)
    hosts = [each for each in found if each.host]
    over = [each for each in found if not each.host]
    assert found == (*hosts, *over)
    for each in hosts:
        assert each.parts == cut(blocks, [room for room in rooms if room.host == each.host])
    missing = {room.host for room in rooms} - {each.host for each in hosts}
    assert not any(cut(blocks, [r for r in rooms if r.host == host]) for host in missing)
    assert all(len(over[0].parts) < len(each.parts) for each in hosts if over)


def test_equal_rooms_are_used_evenly() -> None:
    rooms = [Room(NodeId(f"n{i}"), f"h{i // 8}", 40_000_000) for i in range(16)]
    found = cut([1_000_000] * 80, rooms)
    assert found is not None
    assert [part.size for part in found] == [27, 27, 26]


def test_many_different_rooms_are_looked_at_fast() -> None:
    rooms = [Room(NodeId(f"n{i}"), "h", 30_000_000 + 12_345 * i) for i in range(64)]
    found = cut([1_000_000] * 1_000, rooms)
    assert found is not None
    assert len(found) in (34, 35)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_the_parts_that_are_left_tell_the_cut(sizes: list[int], data: st.DataObject) -> None:
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    parts = [Part(a, b) for a, b in pairwise(ends)]
    left = data.draw(st.lists(st.sampled_from(parts), unique=True))
    blocks = [100 * PAGE] * ends[-1]
    rooms = [Room(NodeId(f"n{i}"), "a", max(sizes) * 101 * PAGE) for i in range(len(sizes))]
    found = completed(left, blocks, rooms)
    assert found is not None
    assert set(left) <= set(found)
    assert [b for part in found for b in part.blocks] == list(whole(ends[-1]).blocks)
    assert len(found) <= len(rooms)
    assert all(taken(blocks, part) <= rooms[0].nbytes for part in found)


def test_what_lies_between_known_parts_is_cut_by_what_devices_have_room_for() -> None:
    """A model of which only the last part slept was once taken for one of two parts, the first of
    which no device has room for, and then for one that fits a device: it waited for ever."""
    blocks = [100 * PAGE] * 8
    rooms = [Room(NodeId(f"n{i}"), "a", 303 * PAGE) for i in range(3)]
    assert completed([Part(6, 8)], blocks, rooms) == (Part(0, 3), Part(3, 6), Part(6, 8))
    assert completed([Part(6, 8)], blocks, rooms[:2]) is None
    assert completed([Part(4, 8)], blocks, rooms) is None, "it fits no device"


def test_parts_of_different_cuts_do_not_go_together() -> None:
    rooms = [Room(NodeId(f"n{i}"), "a", 909 * PAGE) for i in range(3)]
    assert completed([Part(0, 4), Part(3, 8)], [100 * PAGE] * 8, rooms) is None
    assert completed([Part(0, 9)], [100 * PAGE] * 8, rooms) is None


def test_what_groups_lack() -> None:
    a, b, c = cuts = (Part(0, 2), Part(2, 4), Part(4, 5))
    assert lacking(cuts, {}, 2) == ((a, b, c), (a, b, c))
    assert lacking(cuts, {a: 2, b: 1, c: 2}, 2) == ((b,),)
    assert lacking(cuts, {a: 1, b: 0, c: 1}, 2) == ((b,), (a, b, c))
    assert lacking(cuts, {a: 1, b: 1, c: 1}, 1) == ()
