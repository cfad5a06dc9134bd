"""Where durable copies go: plain cases, and clusters that lose machines."""

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.registry.core.goals import Goals, Need, Place, goals
from shared.ids import ModelId, NodeId
from shared.messages.pool import NodeInfo
from tests.unit.registry.builders import MODEL, OTHER, info


def node(name: str, machine: str = "", rack: str = "") -> NodeInfo:
    return msgspec.structs.replace(info(name), host=machine or name, rack=rack)


def disk(
    name: str, machine: str = "", rack: str = "", *, free: int = 1000, busy: bool = False
) -> Place:
    return Place(node(name, machine, rack), free, 200, busy=busy)


def need(*there: str, model: str = MODEL, worth: float = 0) -> Need:
    return Need(
        ModelId(model),
        400,
        there=tuple(node(name) for name in there),
        sources=frozenset(NodeId(name) for name in there),
        wanted=2,
        worth=worth,
    )


def chosen(found: Goals) -> list[tuple[str, str]]:
    return [(choice.model_id, choice.info.node) for choice in found.choices]


def test_the_second_copy_goes_to_another_machine_and_rack_then_to_the_emptiest_disk() -> None:
    disks = [
        disk("a", rack="r"),
        disk("a2", machine="a", rack="s", free=9000),
        disk("b", rack="r", free=8000),
        disk("c", rack="s", free=5000),
        disk("d", rack="s", free=6000),
    ]
    there = (node("a", rack="r"),)
    found = goals([Need(MODEL, 400, there, 2, sources=frozenset({NodeId("a")}))], disks, 9)
    assert chosen(found) == [(MODEL, "d")]
    assert not found.reasons


def test_a_node_with_a_part_of_the_model_goes_on_with_it() -> None:
    begun = Place(node("c"), 300, 200, drafts=frozenset({MODEL}))
    assert chosen(goals([need("a")], [disk("b", free=9000), begun], 9)) == [(MODEL, "c")]


def test_the_model_with_fewer_copies_goes_first_then_the_most_used() -> None:
    disks = [disk("b"), disk("c")]
    less_used = need("a", model=OTHER, worth=1)
    assert chosen(goals([less_used, need("a", worth=2)], disks, 1)) == [(MODEL, "b")]
    lost = Need(OTHER, 400, (), 2, sources=frozenset({NodeId("a")}))
    assert chosen(goals([need("a", worth=9), lost], disks, 1)) == [(OTHER, "b")]


def test_copies_that_come_and_copies_that_may_come_back_count() -> None:
    disks = [disk("b"), disk("c")]
    coming, awaited = (node("b"),), (node("z"),)
    there = (node("a"),)
    for waits in (
        Need(MODEL, 1, there, 2, coming=coming),
        Need(MODEL, 1, there, 2, awaited=awaited),
    ):
        assert not goals([waits], disks, 9).choices
    alone = Need(MODEL, 1, (), 2, awaited=awaited, sources=frozenset({NodeId("b")}))
    assert chosen(goals([alone], disks, 9)) == [(MODEL, "c")]


@pytest.mark.parametrize(
    ("disks", "refused", "why"),
    [
        ([disk("a"), disk("a2", machine="a")], {}, "there is no other machine"),
        ([disk("b", free=500)], {}, "no other machine has room for 0.0 GB"),
        ([disk("b")], {NodeId("b"): "disk on fire"}, "b failed to make it: disk on fire"),
        ([disk("b", busy=True)], {}, "other copies are made first"),
    ],
)
def test_what_stands_in_the_way_is_said(
    disks: list[Place], refused: dict[NodeId, str], why: str
) -> None:
    sources = frozenset({NodeId("a")})
    found = goals([Need(MODEL, 400, (node("a"),), 2, sources=sources, refused=refused)], disks, 9)
    assert (found.choices, found.reasons) == ((), {MODEL: why})


def test_a_node_is_no_source_for_itself() -> None:
    """It has the model in memory only: another machine copies it first."""
    lost = Need(MODEL, 400, (), 2, sources=frozenset({NodeId("a")}))
    found = goals([lost], [disk("a", free=9000), disk("b")], 9)
    assert chosen(found) == [(MODEL, "b")]
    assert found.reasons == {MODEL: "no node can give its blocks now"}


# --- clusters that lose machines ---


@dataclass
class Cluster:
    nodes: list[NodeInfo]
    sizes: dict[ModelId, int]
    stored: dict[ModelId, set[NodeId]]

    def lose(self, machine: str) -> None:
        gone = {info.node for info in self.nodes if info.host == machine}
        self.nodes = [info for info in self.nodes if info.node not in gone]
        for model, names in self.stored.items():
            names -= gone
            assert names, f"{model} is lost with {machine}"

    def machines(self, model: ModelId) -> list[str]:
        return [info.host for info in self.nodes if info.node in self.stored[model]]

    def settle(self, wanted: int, most: int) -> None:
        """Makes the copies that are asked for, round by round, until none is."""
        while True:
            needs = [
                Need(
                    model,
                    nbytes,
                    there=tuple(i for i in self.nodes if i.node in self.stored[model]),
                    wanted=wanted,
                    sources=frozenset(self.stored[model]),
                )
                for model, nbytes in self.sizes.items()
            ]
            found = goals(needs, [Place(i, 10**6) for i in self.nodes], most)
            assert len(found.choices) <= most
            assert len({choice.info.node for choice in found.choices}) == len(found.choices)
            if not found.choices:
                return
            for choice in found.choices:
                assert choice.info.host not in self.machines(choice.model_id)
                self.stored[choice.model_id].add(choice.info.node)


@given(data=st.data(), wanted=st.integers(1, 3), most=st.integers(1, 4))
def test_every_model_gets_its_copies_again_after_the_loss_of_any_machine(
    data: st.DataObject, wanted: int, most: int
) -> None:
    machines = data.draw(st.integers(2, 6))
    hosts = data.draw(st.lists(st.integers(0, machines - 1), min_size=2, max_size=9))
    nodes = [node(f"n{i}", f"m{host}", f"r{host % 2}") for i, host in enumerate(hosts)]
    count = data.draw(st.integers(1, 5))
    sizes = {ModelId(f"model-{i}"): 100 * (i + 1) for i in range(count)}
    stored = {model: {data.draw(st.sampled_from(nodes)).node} for model in sizes}
    cluster = Cluster(nodes, sizes, stored)
    while True:
        cluster.settle(wanted, most)
        left = sorted({info.host for info in cluster.nodes})
        for model in sizes:
            assert len(set(cluster.machines(model))) == min(wanted, len(left))
            assert len(set(cluster.machines(model))) == len(cluster.machines(model))
        if wanted == 1 or len(left) == 1:
            return
        cluster.lose(data.draw(st.sampled_from(left)))
