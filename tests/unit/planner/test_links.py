"""What nodes say and measure, as the cost model takes it."""

import msgspec
import pytest

from services.planner.core.cluster import DISK_BYTES_PER_S
from services.planner.core.links import PROMPT_TOKENS, Links
from services.planner.core.multicast.fabric import Port
from shared.ids import ModelId, NodeId
from shared.messages.pool import ModelProfile, NodeInfo, Profile
from tests.unit.registry.builders import info

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
LLAMA = ModelId("llama")


def node(name: NodeId, **fields: object) -> NodeInfo:
    base = msgspec.structs.replace(info(name), link_bytes_per_s=0)
    return msgspec.structs.replace(base, **fields)


def links(
    *infos: NodeInfo, default: int = 0, profiles: dict[NodeId, Profile] | None = None
) -> Links:
    return Links({i.node: i for i in infos}, profiles or {}, default, 0.5)


def test_what_a_node_says_comes_before_what_it_measured_and_what_is_assumed() -> None:
    measured = {A: Profile(out_bytes_per_s=50.0, in_bytes_per_s=60.0)}
    said = node(A, link_bytes_per_s=100, rack="r", host="h")
    assert links(said, profiles=measured, default=7).port(A) == Port(100.0, 100.0, "r", "h")
    silent = node(A, host="h")
    assert links(silent, profiles=measured, default=7).port(A) == Port(50.0, 60.0, "", "h")
    assert links(silent, default=7).port(A) == Port(7, 7, "", "h")
    assert links(silent).port(A) is None
    assert links(default=7).port(B) == Port(7, 7)


def test_one_unknown_rate_leaves_no_fabric() -> None:
    assert links(node(A, link_bytes_per_s=1), node(B)).fabric([A, B]) is None


def test_what_is_not_known_is_taken_to_be_as_what_is_and_no_faster() -> None:
    measured = {A: Profile(out_bytes_per_s=50.0), B: Profile(in_bytes_per_s=80.0)}
    known = links(node(A), node(B), node(C), profiles=measured)
    assert rates(known.assumed()) == {A: (50, 50), B: (80, 80), C: (50, 50)}
    assert rates(known) == {}
    stated = links(node(A, link_bytes_per_s=30), node(B), profiles=measured)
    assert rates(stated.assumed()) == {A: (30, 30), B: (80, 80), C: (30, 30)}
    nothing = links(node(A), node(B))
    assert nothing.assumed() == nothing


def rates(of: Links) -> dict[NodeId, tuple[float, float]]:
    ports = {name: of.port(name) for name in (A, B, C)}
    return {name: (port.out, port.into) for name, port in ports.items() if port is not None}


def test_racks_and_hosts_make_trunks_and_local_links() -> None:
    one = node(A, link_bytes_per_s=1, rack="r", trunk_bytes_per_s=40, local_bytes_per_s=900)
    two = node(B, link_bytes_per_s=1, rack="s", local_bytes_per_s=800)
    fabric = links(one, two).fabric([A, B])
    assert fabric is not None
    assert (fabric.trunks, fabric.local_bytes_per_s) == ({"r": 40.0}, 800.0)
    assert fabric.overhead_s == 0.5


def test_what_nodes_measured_can_only_lower_the_overhead() -> None:
    measured = {A: Profile(overhead_s=0.1), B: Profile(overhead_s=0.9)}
    assert links(profiles=measured).overhead_s([A, B]) == 0.1
    assert links(profiles=measured).overhead_s([B]) == 0.5
    assert links().overhead_s([A]) == 0.5


def test_times_of_a_block_and_rates_of_disks_where_they_are_known() -> None:
    timed = ModelProfile(model_id=LLAMA, decode_s=0.2, prefill_s_per_token=0.001)
    measured = {B: Profile(load_bytes_per_s=9.0, models=(timed,))}
    found = links(profiles=measured)
    assert found.block_s([A, B], LLAMA, 10) == {
        1: pytest.approx((0.2 + 0.001 * (PROMPT_TOKENS - 1)) / 10)
    }
    assert found.block_s([A, B], ModelId("other"), 10) == {}
    assert found.load_rates([A, B]) == {0: DISK_BYTES_PER_S, 1: 9.0}
    assert found.are_timed([B])
    assert not found.are_timed([A, B])


def test_a_node_that_sends_from_its_disk_sends_no_faster_than_that_is_read() -> None:
    rates = Profile(out_bytes_per_s=50.0, in_bytes_per_s=50.0, load_bytes_per_s=9.0)
    found = links(profiles={A: rates})
    memory, disk = found.port(A), found.reading([A]).port(A)
    assert memory is not None
    assert disk is not None
    assert (memory.out, disk.out, disk.into) == (50.0, 9.0, 50.0)
