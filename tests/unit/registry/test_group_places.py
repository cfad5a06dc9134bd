"""Where groups of devices are reserved."""

from dataclasses import replace

import msgspec

from services.registry.core.placement import Candidate, choose_groups
from shared.parts import Part
from tests.unit.registry.builders import info

BLOCKS = 4
A, B = CUT = Part(0, 2), Part(2, 4)
SIZE = {A: 100, B: 200}


def device(name: str, host: str = "", free: int = 300) -> Candidate:
    return Candidate(msgspec.structs.replace(info(name), host=host or name), free=free)


def chosen(
    *candidates: Candidate, groups: tuple[tuple[Part, ...], ...] = (CUT,), serving: str = ""
) -> list[tuple[str, Part]]:
    found = choose_groups(candidates, groups, SIZE.__getitem__, BLOCKS, serving.split())
    return [(target.info.node, part) for target, part in found]


def test_a_group_lies_on_one_machine_if_one_has_room() -> None:
    apart = [device("a", "x"), device("b", "y"), device("c", "z"), device("d", "z")]
    assert chosen(*apart) == [("d", A), ("c", B)]
    assert [node for node, _ in chosen(*apart[:3])] == ["b", "a"]


def test_each_group_has_a_machine_of_its_own_or_goes_together_as_it_can() -> None:
    nodes = [device(f"{host}{i}", host) for host in "xy" for i in range(2)]
    found = chosen(*nodes, groups=(CUT, CUT))
    assert [{node[0] for node, _ in found[i : i + 2]} for i in (0, 2)] == [{"x"}, {"y"}]


def test_a_group_without_room_as_a_whole_is_left_out() -> None:
    assert chosen(device("a"), device("b"), device("c"), groups=(CUT, CUT))[2:] == []
    assert chosen(device("a", free=100), device("b", free=199)) == []
    assert chosen(device("a", free=100), device("b", free=200)) == [("a", A), ("b", B)]


def test_what_sleeps_on_a_node_is_woken_there() -> None:
    asleep = replace(device("z", free=0), has_space=True, part=B, in_memory=2)
    assert chosen(device("a"), asleep) == [("a", A), ("z", B)]
    other = replace(device("z", free=1000), has_space=True, part=Part(1, 4))
    assert chosen(device("a"), other) == [], "it has room set aside for another part"


def test_a_device_is_replaced_on_the_machine_of_its_group() -> None:
    nodes = [device("a", "x"), device("b", "y")]
    assert chosen(*nodes, groups=((B,),), serving="y") == [("b", B)]
    assert chosen(*nodes, groups=((B,),)) == [("a", B)]
