"""What the pool's facts come to in placement: rooms, neighbours, racks, ports."""

import math
from typing import Any

import msgspec
import pytest

from services.registry.core.pool import Pool
from shared.messages.pool import Holding, NodeInfo, Profile, Tier
from tests.unit.registry.builders import MODEL, OTHER, holding, info, record, reserve, status

WHOLE = (0, 1, 2, 3)


class Nodes:
    """A pool that is filled node by node."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.pool.catalog.put(record())
        self.pool.catalog.put(record("other", OTHER))

    def add(self, name: str, *held: Holding, free: int = 1000, **of_info: Any) -> NodeInfo:
        made = msgspec.structs.replace(info(name), **({"host": f"host-{name}"} | of_info))
        self.pool.lease_put(made, 0.0)
        self.pool.status(status(name, *held, free=free), 0.0)
        return made

    def best(self, count: int = 9, **request: Any) -> list[str]:
        targets, _ = self.pool.reserve(reserve(count, **request))
        return [target.info.node for target in targets]

    def sources(self) -> list[tuple[str, Tier, bool]]:
        found = self.pool.sources(MODEL)
        return [(s.info.node, s.tier, s.complete) for s in found]


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


def test_blocks_that_are_there_come_before_room_that_just_suffices(nodes: Nodes) -> None:
    nodes.add("a", free=900)
    nodes.add("b", free=500)
    nodes.add("c", holding(Tier.DISK, *WHOLE))
    nodes.add("d", holding(Tier.HOST, 0))
    nodes.add("e", holding(Tier.HOST, 0, 1))
    nodes.add("f", holding(Tier.GPU, 0, 7, 8))  # one that the model has
    assert nodes.best() == ["e", "f", "d", "c", "b", "a"]


@pytest.mark.parametrize(("free", "fits"), [(399, False), (400, True)])
def test_a_target_needs_room(nodes: Nodes, free: int, fits: bool) -> None:
    nodes.add("a", free=free)
    assert nodes.best() == (["a"] if fits else [])


@pytest.mark.parametrize("held", [holding(Tier.GPU), holding(Tier.HOST, *WHOLE)])
def test_space_that_stands_is_room(nodes: Nodes, held: Holding) -> None:
    nodes.add("a", held, free=0)
    assert nodes.best() == ["a"]


def test_a_copy_on_disk_needs_room(nodes: Nodes) -> None:
    nodes.add("a", holding(Tier.DISK, *WHOLE), free=0)
    assert nodes.best() == []


def test_a_node_that_has_not_reported_is_no_target(nodes: Nodes) -> None:
    nodes.pool.lease_put(info("a"), 0.0)
    assert nodes.best() == []


def test_an_engine_for_itself_then_memory_for_itself(nodes: Nodes) -> None:
    nodes.add("a", holding(Tier.GPU, 0, model_id=OTHER), free=500)
    nodes.add("b", holding(Tier.HOST, 0, model_id=OTHER), free=500)
    nodes.add("c", holding(Tier.DISK, 0, model_id=OTHER))
    assert nodes.best() == ["c", "b", "a"]


def test_a_fast_local_link_to_a_copy_counts(nodes: Nodes) -> None:
    nodes.add("a")
    nodes.add("b", host="h", link_bytes_per_s=100, local_bytes_per_s=100)
    nodes.add("c", host="h", link_bytes_per_s=100, local_bytes_per_s=1000)
    nodes.add("s", holding(Tier.GPU, *WHOLE), host="h", free=0)
    assert nodes.best(event="ev-1") == ["s", "c", "b", "a"]


def test_a_measured_rate_counts_where_none_is_configured(nodes: Nodes) -> None:
    nodes.add("a")
    nodes.add("b")
    fast = msgspec.structs.replace(status("b", seq=2), profile=Profile(in_bytes_per_s=1e9))
    nodes.pool.status(fast, 0.1)
    assert nodes.best() == ["b", "a"]


@pytest.mark.parametrize("rate", [math.inf, -math.inf, math.nan])
def test_a_measured_rate_that_is_not_finite_counts_as_not_known(nodes: Nodes, rate: float) -> None:
    nodes.add("b")
    nodes.add("a")
    odd = msgspec.structs.replace(status("b", seq=2), profile=Profile(in_bytes_per_s=rate))
    nodes.pool.status(odd, 0.1)
    assert nodes.best() == ["a", "b"]


def test_what_another_event_uses_comes_later(nodes: Nodes) -> None:
    nodes.add("t", rack="r1")
    nodes.best(1, event="ev-2", model_id=OTHER)
    nodes.add("a", holding(Tier.HOST, 0, model_id=OTHER))  # sends to t
    nodes.add("b", rack="r1")
    nodes.add("c", rack="r2")
    assert nodes.best() == ["c", "b", "a"]


def test_racks_of_sources_then_another_for_the_failures(nodes: Nodes) -> None:
    nodes.add("a", rack="r2")
    nodes.add("b", rack="r1")
    nodes.add("c", rack="r1")
    nodes.add("s", holding(Tier.GPU, *WHOLE), rack="r1", free=0)
    targets, _ = nodes.pool.reserve(reserve(2, "s"))
    assert [t.info.node for t in targets] == ["b", "a"]
    assert targets[0].reason == "an engine for itself, a source in rack 'r1'"
    assert targets[1].reason.startswith("another rack than 'r1'")


def test_sources_by_what_they_hold(nodes: Nodes) -> None:
    nodes.add("a", holding(Tier.DISK, *WHOLE))
    nodes.add("b", holding(Tier.HOST, *WHOLE))
    nodes.add("c", holding(Tier.GPU, 0, 1, 7, 8))
    nodes.add("d", holding(Tier.GPU, *WHOLE, 4), holding(Tier.DISK, 1))
    nodes.add("e", holding(Tier.GPU), holding(Tier.GPU, 0, model_id=OTHER))
    assert nodes.sources() == [
        ("d", Tier.GPU, True),
        ("b", Tier.HOST, True),
        ("c", Tier.GPU, False),
        ("a", Tier.DISK, True),
        ("d", Tier.DISK, False),
    ]


def test_idle_sources_come_before_busy_ones_and_near_ones_before_far(nodes: Nodes) -> None:
    whole = holding(Tier.HOST, *WHOLE)
    nodes.add("t", rack="r2")
    nodes.best(1)
    nodes.add("x", free=400)
    nodes.best(1, event="ev-2", model_id=OTHER)
    nodes.add("a", whole, holding(Tier.HOST, 0, model_id=OTHER))  # sends to x
    nodes.add("b")
    nodes.pool.status(msgspec.structs.replace(status("b", whole, seq=2), running=3), 0.1)
    nodes.add("c", whole, rack="r1")
    nodes.add("d", whole, rack="r2")
    assert [name for name, *_ in nodes.sources()] == ["d", "c", "b", "a"]


@pytest.mark.parametrize(("free", "fits"), [(399, False), (400, True)])
def test_a_copy_in_the_host_cache_takes_no_room_in_the_arena_and_saves_none(
    nodes: Nodes, free: int, fits: bool
) -> None:
    nodes.add("a", holding(Tier.CACHE, *WHOLE), free=free)
    nodes.add("b")
    assert nodes.best() == (["a", "b"] if fits else ["b"])
    assert nodes.sources() == [("a", Tier.CACHE, True)]
    assert nodes.pool.copies(MODEL).memory == ("a",)
