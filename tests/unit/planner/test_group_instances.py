"""Which devices serve together as groups."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.planner.core.events import begin
from services.planner.core.forecast import expected_of
from services.planner.core.instances import Member, groups, is_group, plan, revise, rules
from services.planner.core.serving.strategies import SERVING
from shared.ids import EventId, NodeId
from shared.messages.instances import Instance, InstanceState
from shared.parts import Part
from tests.unit.planner.scripted import record as model_record

BLOCKS, SLOTS = 6, 8
A, B = CUT = Part(0, 3), Part(3, 6)
RULES = rules(BLOCKS, len(CUT), 4, SERVING["pools"])


def device(
    name: str, part: Part, *, host: str = "", held: int | None = None, draining: bool = False
) -> Member:
    blocks = frozenset(list(part.blocks)[:held])
    return Member(
        NodeId(name), f"tcp://{name}", SLOTS, blocks, None, part=part, host=host, draining=draining
    )


def next_set(
    members: list[Member], previous: tuple[Instance, ...] = (), busy: bool = False
) -> tuple[Instance, ...]:
    known, ids = {m.node: m for m in members}, itertools.count()
    return revise(
        previous,
        known,
        plan(previous, known, RULES),
        BLOCKS,
        busy=lambda _: busy,
        new_id=lambda prefix: f"{prefix}-{next(ids)}-{len(previous)}",
        event=None,
    )


def nodes(instances: tuple[Instance, ...]) -> list[tuple[str, ...]]:
    return [tuple(stage.node for stage in each.stages) for each in instances]


def test_a_group_has_the_capacity_and_the_slots_of_all_its_devices() -> None:
    (group,) = next_set([device("a", A), device("b", B)])
    assert (group.group, group.lasts, group.is_replica) == (True, True, False)
    assert (group.capacity, group.slots) == (2.0, 2 * SLOTS)
    assert [(s.start, s.stop) for s in group.stages] == [(0, 3), (3, 6)]


def test_a_group_of_many_devices_serves_on_while_others_load() -> None:
    """However many stages it has: a token takes the time of one pass in all."""
    parts = [Part(n, n + 1) for n in range(8)]
    there = [device(f"a{n}", part) for n, part in enumerate(parts)]
    loads = [device(f"b{n}", part, held=0) for n, part in enumerate(parts)]
    members = {m.node: m for m in (*there, *loads)}
    planned = plan((), members, rules(8, len(parts), 4, SERVING["pools"]))
    assert {tuple(s.node for s in stages): capacity for stages, capacity in planned.items()} == {
        tuple(m.node for m in there): pytest.approx(8.0, rel=0.01)
    }


def test_devices_of_one_machine_go_together() -> None:
    members = [
        device("a", A, host="x"),
        device("b", B, host="y"),
        device("c", A, host="y"),
        device("d", B, host="x"),
    ]
    assert nodes(next_set(members)) == [("a", "d"), ("c", "b")]


def test_a_group_keeps_its_devices_and_its_id_when_others_come() -> None:
    before = next_set([device("a", A, host="x"), device("b", B, host="y")])
    members = [device("z", B, host="x"), device("a", A, host="x"), device("b", B, host="y")]
    assert next_set(members, before)[0] == before[0]


def test_a_device_without_a_group_does_not_serve() -> None:
    assert next_set([device("a", A)]) == ()
    assert nodes(next_set([device("a", A), device("c", A), device("b", B)])) == [("a", "b")]


def test_a_group_whose_device_drains_ends_its_requests_where_they_are() -> None:
    before = next_set([device("a", A), device("b", B)])
    draining = [device("a", A), device("b", B, draining=True)]
    (group,) = next_set(draining, before, busy=True)
    assert (group.id, group.state) == (before[0].id, InstanceState.DRAINING)
    assert next_set(draining, before) == ()


def test_while_a_group_loads_paths_mix_its_devices_with_those_of_others() -> None:
    before = next_set([device("a", A), device("b", B)])
    members = [device("a", A), device("b", B), device("c", A, held=2), device("d", B, held=1)]
    found = next_set(members, before, busy=True)
    serving = [each for each in found if each.state is InstanceState.SERVING]
    assert any({"a", "b", "c", "d"} == {s.node for s in each.stages} for each in serving)
    capacity = sum(each.capacity for each in serving)
    assert 2.0 < capacity <= 3.0, "the new device takes a share of the old one's work"


PARTS = st.sampled_from(CUT)


@given(st.lists(st.tuples(PARTS, st.sampled_from("xyz")), max_size=8), st.data())
def test_as_many_groups_as_there_can_be(found: list[tuple[Part, str]], data: st.DataObject) -> None:
    members = [device(f"n{i}", part, host=host) for i, (part, host) in enumerate(found)]
    before = tuple(groups((), members, BLOCKS))
    most = min(sum(part == each for each, _ in found) for part in CUT)
    assert len(before) == most
    left = data.draw(st.lists(st.sampled_from(members), unique=True)) if members else []
    after = groups(before, left, BLOCKS)
    there = {m.node: m for m in left}
    kept = [stages for stages in before if all(s.node in there for s in stages)]
    assert set(kept) <= set(after), "nobody leaves a group that is whole"
    assert all(is_group(stages, there) for stages in after)
    used = [stage.node for stages in after for stage in stages]
    assert len(used) == len(set(used))


def test_an_event_brings_as_many_replicas_as_groups() -> None:
    record = begin(
        EventId("ev"),
        model_record(),
        strategy="auto",
        cause="",
        waiting_ns=0,
        detected_ns=0,
        wanted_ns=0,
        decided_ns=0,
        expected={},
        trace="",
    )
    names = tuple(map(NodeId, "abcd"))
    assert expected_of(replace(record, targets=names), 0).replicas == 4
    parts = dict(zip(names, (A, B, A, B), strict=True))
    assert expected_of(replace(record, targets=names, parts=parts), 0).replicas == 2
    mends = replace(record, targets=names[:1], parts=parts)
    assert expected_of(mends, 0).replicas == 1
