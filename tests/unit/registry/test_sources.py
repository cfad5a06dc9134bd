import pytest

from services.registry.core.residency import Residency
from services.registry.core.sources import candidate, sources
from shared.messages.pool import NodeInfo, NodeStatus, Tier
from tests.unit.registry.builders import MODEL, OTHER, holding, info, record, status


def held(*reports: NodeStatus) -> Residency:
    residency = Residency()
    for report in reports:
        residency.report(report, 0.0)
    return residency


def test_sources_come_best_first() -> None:
    reports = (
        status("a", holding(Tier.DISK, 0, 1, 2, 3)),
        status("b", holding(Tier.HOST, 0, 1, 2, 3)),
        status("c", holding(Tier.GPU, 0, 1)),
        status("d", holding(Tier.GPU, 0, 1, 2)),
        status("f", holding(Tier.GPU, 0, 1, 2, 3)),
        status("e", holding(Tier.GPU, 0, 1, 2, 3), holding(Tier.DISK, 1)),
    )
    nodes = [info(name) for name in "abcdef"]
    found = sources(record(), nodes, held(*reports))
    assert [(s.info.node, s.tier, s.complete) for s in found] == [
        ("e", Tier.GPU, True),
        ("f", Tier.GPU, True),
        ("d", Tier.GPU, False),
        ("c", Tier.GPU, False),
        ("b", Tier.HOST, True),
        ("a", Tier.DISK, True),
        ("e", Tier.DISK, False),
    ]


def test_nodes_without_blocks_of_the_model_are_no_sources() -> None:
    residency = held(
        status("a", holding(Tier.GPU)), status("b", holding(Tier.GPU, 0, model_id=OTHER))
    )
    assert sources(record(), [info("a"), info("b"), info("c")], residency) == []


def test_blocks_that_the_model_does_not_have_do_not_count() -> None:
    residency = held(status("a", holding(Tier.GPU, 0, 1, 7, 8)), status("b", holding(Tier.GPU, 9)))
    (only,) = sources(record(n_blocks=4), [info("a"), info("b")], residency)
    assert (only.blocks, only.complete) == ((0, 1), False)


def best(residency: Residency, *nodes: NodeInfo, nbytes: int = 400) -> list[str]:
    found = [c for node in nodes if (c := candidate(record(), node, nbytes, residency))]
    return [c.node for c in sorted(found)]


def test_targets_that_hold_blocks_come_first_then_the_emptiest() -> None:
    residency = held(
        status("a", free=500),
        status("b", free=900),
        status("c", holding(Tier.DISK, 0, 1, 2, 3), free=400),
        status("d", holding(Tier.HOST, 0), free=400),
        status("e", holding(Tier.HOST, 0, 1), free=400),
        status("f", free=900),
    )
    nodes = [info(name) for name in "abcdef"]
    assert best(residency, *nodes) == ["e", "d", "c", "b", "f", "a"]


@pytest.mark.parametrize(("free", "fits"), [(399, False), (400, True)])
def test_a_target_needs_room(free: int, fits: bool) -> None:
    assert best(held(status("a", free=free)), info("a")) == (["a"] if fits else [])


def test_a_node_whose_arena_stands_needs_no_more_room() -> None:
    assert best(held(status("a", holding(Tier.GPU), free=0)), info("a")) == ["a"]


def test_a_copy_asleep_in_host_memory_needs_no_more_room_to_wake() -> None:
    assert best(held(status("a", holding(Tier.HOST, 0, 1, 2, 3), free=0)), info("a")) == ["a"]


def test_a_copy_on_disk_needs_room() -> None:
    assert best(held(status("a", holding(Tier.DISK, 0, 1, 2, 3), free=0)), info("a")) == []


def test_a_node_that_has_not_reported_is_no_target() -> None:
    assert candidate(record(), info("a"), 0, Residency()) is None
    assert held(status("a")).blocks(info("a"), MODEL) == {}
