"""Instances over members: always able to run, the same for life, retired in order."""

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.planner.core.instances import (
    Member,
    Rules,
    join,
    loading,
    node_slots,
    plan,
    revise,
    rules,
)
from services.planner.core.multicast.groups import binomial
from services.planner.core.paths import WeightedPath
from services.planner.core.serving.loading import Loading
from services.planner.core.serving.strategies import SERVING
from shared.ids import EventId, InstanceId, NodeId
from shared.messages.instances import Instance, InstanceState, Stage

BLOCKS = 4
SLOTS = 8
RULES = Rules(BLOCKS, max_stages=4, hop_cost=0.02, strategy=SERVING["pools"])
EVENT = EventId("ev-1")
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def member(node: str, *held: int, draining: bool = False, address: str = "") -> Member:
    blocks = frozenset(held)
    where = address or f"tcp://{node}"
    return Member(NodeId(node), where, SLOTS, blocks, EVENT, draining=draining)


def full(node: str, *, draining: bool = False, address: str = "") -> Member:
    return member(node, *range(BLOCKS), draining=draining, address=address)


class Model:
    """Members and instances through time, as the planner keeps them."""

    def __init__(self) -> None:
        self.members: Mapping[NodeId, Member] = {}
        self.instances: tuple[Instance, ...] = ()
        self.planned: Mapping[tuple[Stage, ...], float] = {}
        self.busy: set[InstanceId] = set()
        self._ids = itertools.count()

    def put(self, *members: Member) -> "Model":
        self.members = {**self.members, **{m.node: m for m in members}}
        return self

    def drop(self, node: NodeId) -> "Model":
        self.members = {n: m for n, m in self.members.items() if n != node}
        return self

    def plan(self) -> "Model":
        self.planned = plan(self.instances, self.members, RULES)
        return self.revise()

    def revise(self, opening: NodeId | None = None) -> "Model":
        self.instances = revise(
            self.instances,
            self.members,
            self.planned,
            BLOCKS,
            busy=self.busy.__contains__,
            new_id=lambda kind: f"{kind}-{next(self._ids)}",
            event=EVENT,
            opening=opening,
        )
        return self

    @property
    def paths(self) -> list[Instance]:
        return [i for i in self.instances if not i.is_replica]

    def states(self) -> dict[str, InstanceState]:
        return {i.id: i.state for i in self.instances}


S = InstanceState


def test_complete_members_are_replicas() -> None:
    model = Model().put(full("a"), full("b", draining=True)).plan()
    assert model.states() == {"replica-a": S.SERVING, "replica-b": S.DRAINING}
    assert {(i.capacity, i.slots, i.event) for i in model.instances} == {(1.0, SLOTS, EVENT)}


def test_a_member_that_holds_a_part_serves_with_a_complete_one() -> None:
    model = Model().put(full("a"), member("b", 0, 1)).plan()
    (path,) = model.paths
    assert path.stages == (Stage(B, "tcp://b", 0, 2), Stage(A, "tcp://a", 2, BLOCKS))
    (replica,) = [i for i in model.instances if i.is_replica]
    load_of_a = replica.capacity + path.capacity / 2
    assert load_of_a <= 1.0 + 1e-9, "what a node can do is given out once"
    assert replica.capacity > 0
    assert replica.slots + path.slots / 4 <= SLOTS + 1
    assert path.slots > SLOTS, "half a slot on each node, in every second pass"


def test_an_opening_replica_has_what_paths_leave_of_its_node() -> None:
    model = Model().put(member("a", 0, 2, 3), member("b", 0, 1)).plan().revise(opening=A)
    (path,) = model.paths
    (replica,) = [i for i in model.instances if i.is_replica]
    assert (replica.leader, replica.opening) == (A, True)
    share = sum(stage.stop - stage.start for stage in path.stages if stage.node == A) / BLOCKS
    assert share > 0
    assert replica.capacity + path.capacity * share <= 1.0 + 1e-9


def test_a_path_has_no_further_stages_for_a_little_more_capacity() -> None:
    """After 8 steps to 11 nodes, paths of four stages would have a quarter more than pairs."""
    held = binomial(12, 16, [0]).held(8)
    members = {NodeId(f"n{n}"): member(f"n{n}", *have) for n, have in enumerate(held)}
    planned = plan((), members, rules(16, 1, 4, SERVING["pools"]))
    assert max(map(len, planned)) == 2
    assert sum(planned.values()) > 1.5


def test_nothing_serves_until_all_blocks_are_held() -> None:
    assert Model().put(member("a", 0, 1), member("b", 2)).plan().instances == ()
    assert len(Model().put(member("a", 0, 1), member("b", 2, 3)).plan().paths) == 1


def test_an_instance_keeps_its_id_while_blocks_arrive() -> None:
    model = Model().put(full("a"), member("b", 0, 1)).plan()
    before = {i.stages: i.id for i in model.instances}
    model.busy = set(before.values())
    model.put(member("b", 0, 1, 2)).plan()
    after = {i.stages: i.id for i in model.instances}
    assert before.items() <= after.items()


def test_a_path_moves_when_its_nodes_are_complete_and_goes_when_it_is_empty() -> None:
    model = Model().put(full("a"), member("b", 0, 1)).plan()
    (path,) = model.paths
    model.busy = {path.id}
    model.put(full("b")).plan()
    assert model.states() == {"replica-a": S.SERVING, "replica-b": S.SERVING, path.id: S.MOVING}
    model.busy = set()
    assert model.revise().states() == {"replica-a": S.SERVING, "replica-b": S.SERVING}


def test_a_path_that_others_replace_drains() -> None:
    model = Model().put(full("a"), member("b", 0, 1)).plan()
    (path,) = model.paths
    model.busy = {path.id}
    model.planned = {}
    assert model.revise().states() == {"replica-a": S.SERVING, path.id: S.DRAINING}


def test_what_moves_goes_on_moving_when_another_node_begins_to_load() -> None:
    model = Model().put(full("a"), member("b", 0, 1)).plan()
    (path,) = model.paths
    model.busy = {path.id}
    model.put(full("b")).plan().put(member("c"))
    assert model.revise().states()[path.id] is S.MOVING


def test_an_instance_over_a_node_that_is_gone_goes_at_once() -> None:
    model = Model().put(full("a"), member("b", 0, 1)).plan()
    model.busy = {i.id for i in model.instances}
    assert model.drop(B).revise().states() == {"replica-a": S.SERVING}


def test_a_node_that_came_back_elsewhere_is_another() -> None:
    model = Model().put(full("a"), member("b", 0, 1)).plan()
    (path,) = model.paths
    model.busy = {path.id}
    model.put(full("a", address="tcp://elsewhere")).revise()
    assert path.id not in model.states()
    assert model.instances[0].stages[0].address == "tcp://elsewhere"


def test_a_plan_of_a_while_ago_opens_no_path_that_cannot_run() -> None:
    model = Model().put(full("a"), member("b", 0, 1)).plan()
    planned = model.planned
    late = Model().put(full("a", draining=True), member("b", 0, 1))
    late.planned = planned
    assert late.revise().paths == []
    gone = Model().put(full("a"))
    gone.planned = planned
    assert gone.revise().paths == []


def test_a_replica_that_the_plan_does_not_know_has_what_its_paths_leave() -> None:
    model = Model().put(full("a"), member("b", 0, 1)).plan()
    (path,) = model.paths
    on_b = path.capacity * sum(s.stop - s.start for s in path.stages if s.node == B) / BLOCKS
    model.put(full("b")).revise()
    (replica,) = [i for i in model.instances if i.is_replica and i.leader == B]
    assert replica.capacity == pytest.approx(1 - on_b)
    assert model.paths == [path]


HALVES = (Stage(B, "tcp://b", 0, 2), Stage(A, "tcp://a", 2, BLOCKS))


@pytest.mark.parametrize(("capacity", "slots"), [(0.01, 1), (0.5, 8), (2.0, 32)])
def test_a_paths_slots_fill_its_stages(capacity: float, slots: int) -> None:
    model = Model().put(full("a"), member("b", 0, 1))
    model.planned = {HALVES: capacity}
    (path,) = model.revise().paths
    assert path.slots == slots


def test_a_path_takes_what_the_node_with_the_fewest_slots_does() -> None:
    model = Model().put(full("a"), replace(member("b", 0, 1), slots=2))
    model.planned = {HALVES: 0.5}
    (path,) = model.revise().paths
    assert path.slots == 2
    assert node_slots(model.instances, model.members) == {A: SLOTS, B: 2}
    model.drop(B)
    assert node_slots(model.instances, model.members) == {A: SLOTS}, "its path is still there"


def test_a_replica_has_the_slots_of_its_own_node() -> None:
    model = Model().put(full("a"), replace(full("b"), slots=2)).plan()
    assert {i.leader: i.slots for i in model.instances} == {A: SLOTS, B: 2}


def test_a_slow_node_has_less_capacity_and_holds_as_many_sequences() -> None:
    model = Model().put(full("a"), replace(full("b"), speed=0.5)).plan()
    assert {i.leader: (i.capacity, i.slots) for i in model.instances} == {
        A: (1.0, SLOTS),
        B: (0.5, SLOTS),
    }


def test_a_slow_node_is_given_less_of_a_path() -> None:
    even = Model().put(member("a", 0, 1), member("b", 2, 3)).plan()
    slow = Model().put(member("a", 0, 1), replace(member("b", 2, 3), speed=0.5)).plan()
    assert slow.paths[0].capacity == pytest.approx(even.paths[0].capacity / 2, rel=0.01)


def test_requests_that_move_find_the_slots_of_the_replicas_they_move_to() -> None:
    model = Model().put(full("a"), member("b", 0, 1)).plan()
    (path,) = model.paths
    model.busy = {path.id}
    model.put(full("b")).plan()
    assert [i.slots for i in model.instances if i.is_replica] == [SLOTS, SLOTS]


def test_complete_members_become_sources_when_a_loading_begins() -> None:
    members: dict[NodeId, Member] = {}
    for each in (full("a"), member("b", 0), member("c")):
        join(members, each, BLOCKS)
    members[B] = full("b")
    assert {m.node for m in members.values() if m.source} == {A}
    members[C] = full("c")
    join(members, member("d"), BLOCKS)
    assert {m.node for m in members.values() if m.source} == {A, B, C}


def test_the_strategy_is_told_who_the_sources_are() -> None:
    seen: list[Loading] = []

    def spy(asked: Loading) -> tuple[WeightedPath, ...]:
        seen.append(asked)
        return ()

    members: dict[NodeId, Member] = {}
    for each in (full("a"), member("b", 0, 1)):
        join(members, each, BLOCKS)
    assert plan((), members, Rules(BLOCKS, max_stages=3, hop_cost=0.1, strategy=spy)) == {}
    (asked,) = seen
    assert (asked.sources, asked.max_stages, asked.hop_cost) == ({0}, 3, 0.1)
    assert asked.held == [frozenset(range(BLOCKS)), frozenset({0, 1})]


steps = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.sampled_from(["grow", "grow", "grow", "fill", "gone", "drain", "undrain"]),
        st.integers(0, BLOCKS - 1),
        st.booleans(),
        st.booleans(),
    ),
    max_size=25,
)


@given(steps)
def test_whatever_happens_to_members_instances_can_run_and_keep_their_ids(
    steps: list[tuple[str, str, int, bool, bool]],
) -> None:
    model = Model()
    ids: dict[tuple[Stage, ...], InstanceId] = {}
    for name, what, block, planned, busy in steps:
        node = NodeId(name)
        now = model.members.get(node, member(name))
        if what == "gone":
            model.drop(node)
            ids = {s: i for s, i in ids.items() if all(stage.node != node for stage in s)}
        else:
            held = {"grow": now.held | {block}, "fill": frozenset(range(BLOCKS))}
            complete = len(held.get(what, now.held)) == BLOCKS
            draining = complete and what == "drain"
            model.put(member(name, *held.get(what, now.held), draining=draining))
        model.busy = {i.id for i in model.instances} if busy else set()
        before = {i.stages: i.id for i in model.instances}
        (model.plan if planned else model.revise)()
        check(model)
        for stages, known in before.items():
            still = [i.id for i in model.instances if i.stages == stages]
            assert still in ([], [known])
            holds = all(stage.node in model.members for stage in stages)
            assert still or not (busy and holds), "what is busy stays"


def check(model: Model) -> None:
    assert len({i.id for i in model.instances}) == len(model.instances)
    for instance in model.instances:
        ends = [0, *(stage.stop for stage in instance.stages)]
        assert [stage.start for stage in instance.stages] == ends[:-1]
        assert ends[-1] == BLOCKS
        assert instance.capacity > 0 or instance.is_replica
        assert instance.slots >= 1
        for stage in instance.stages:
            holder = model.members[stage.node]
            assert holder.held >= set(range(stage.start, stage.stop))
            if instance.state is S.SERVING:
                assert not holder.draining
    assert max(load(model).values(), default=0) <= 1 + 1e-9
    replicas = {i.leader for i in model.instances if i.is_replica}
    assert replicas == {m.node for m in model.members.values() if len(m.held) == BLOCKS}
    if not loading(model.members, BLOCKS):
        assert all(i.state is S.MOVING for i in model.paths if i.state is not S.SERVING)


def load(model: Model) -> dict[NodeId, float]:
    """What instances that take requests ask of each node."""
    found: dict[NodeId, float] = {}
    for instance in model.instances:
        if instance.state is S.SERVING:
            for stage in instance.stages:
                share = (stage.stop - stage.start) / BLOCKS
                found[stage.node] = found.get(stage.node, 0.0) + instance.capacity * share
    return found
