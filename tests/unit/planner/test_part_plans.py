"""Multicasts of parts of a model: each device gets its part, and nothing else."""

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.links import Links
from services.planner.core.part_plans import plan_parts, repair_parts, roles_by_part, together
from services.planner.core.placement import Plan
from shared.errors import PlanError
from shared.ids import NodeId
from shared.messages.pool import NodeInfo, Source, Tier
from shared.messages.scaling import Transfer
from shared.parts import Part
from tests.unit.registry.builders import info, record

BLOCKS = 6
CUT = (Part(0, 2), Part(2, 5), Part(5, 6))
MODEL = msgspec.structs.replace(record(n_blocks=BLOCKS), nbytes=100 * BLOCKS)
RATE = 1000


def node(name: str, host: str = "", local: int = 0) -> NodeInfo:
    return msgspec.structs.replace(
        info(name), host=host or name, link_bytes_per_s=RATE, local_bytes_per_s=local
    )


def links(*infos: NodeInfo) -> Links:
    return Links({i.node: i for i in infos}, {}, 0, 0.001)


def source(where: NodeInfo, blocks: range, tier: Tier = Tier.GPU) -> Source:
    return Source(where, tier, tuple(blocks), complete=len(blocks) == BLOCKS)


def plan(sources: list[Source], targets: Mapping[NodeInfo, Part]) -> Plan:
    return plan_parts(
        roles_by_part(sources, {i.node: part for i, part in targets.items()}),
        {},
        MODEL,
        links(*(s.info for s in sources), *targets),
        strategy="auto",
        executing=(),
        max_stages=4,
    )


def came(transfers: tuple[Transfer, ...]) -> dict[str, list[int]]:
    """The blocks that come to each node. A sender has what it sends by then."""
    found: dict[str, list[int]] = {}
    for t in transfers:
        found.setdefault(t.dst, []).append(t.block)
    return found


@given(st.lists(st.sampled_from(CUT), min_size=1, max_size=9), st.integers(1, 2))
def test_each_target_gets_its_part_from_holders_of_it(wanted: list[Part], groups: int) -> None:
    old = [
        source(node(f"old-{group}-{i}"), part.blocks)
        for group in range(groups)
        for i, part in enumerate(CUT)
    ]
    targets = {node(f"new-{i}"): part for i, part in enumerate(wanted)}
    found = plan(old, targets)
    held = {s.info.node: set(s.blocks) for s in old}
    for t in found.transfers:  # in order of steps
        assert t.block in held[t.src]
        held.setdefault(t.dst, set()).add(t.block)
    for where, part in targets.items():
        assert held[where.node] == set(part.blocks)
    assert len(found.transfers) == sum(part.size for part in wanted), "each block once"
    seconds = found.forecast.predicted.all_complete_s
    assert seconds is not None
    assert seconds >= max(part.size for part in wanted) * 100 / RATE


def test_a_disk_feeds_all_parts() -> None:
    disk, targets = node("disk"), {node(f"new-{i}"): part for i, part in enumerate(CUT)}
    found = plan([source(disk, range(BLOCKS), Tier.DISK)], targets)
    assert came(found.transfers) == {i.node: list(part.blocks) for i, part in targets.items()}
    assert found.sources == (disk.node,)


def test_a_node_that_holds_its_part_fetches_nothing_and_feeds_others() -> None:
    asleep, other = node("asleep"), node("other")
    sources = [source(asleep, CUT[0].blocks, Tier.HOST)]
    found = plan(sources, {asleep: CUT[0], other: CUT[0]})
    assert found.loading == {asleep.node: frozenset(CUT[0].blocks)}
    assert {(t.src, t.dst) for t in found.transfers} == {(asleep.node, other.node)}


def test_a_part_that_nobody_has_cannot_be_planned() -> None:
    with pytest.raises(PlanError, match="all of its blocks"):
        roles_by_part([source(node("a"), CUT[0].blocks)], {NodeId("b"): CUT[1]})


def test_a_block_comes_to_a_machine_once_and_goes_on_locally() -> None:
    """Two groups on each of two new machines: each part is wanted twice there."""
    old = [source(node(f"old-{i}", "first", 10**6), part.blocks) for i, part in enumerate(CUT)]
    targets = {
        node(f"{host}-{group}-{i}", host, 10**6): part
        for host in ("second", "third")
        for group in range(2)
        for i, part in enumerate(CUT)
    }
    hosts = {i.node: i.host for i in (*targets, *(s.info for s in old))}
    found = plan(old, targets)
    across = [(hosts[t.dst], t.block) for t in found.transfers if hosts[t.src] != hosts[t.dst]]
    assert sorted(across) == [(host, b) for host in ("second", "third") for b in range(BLOCKS)]


def test_what_is_left_is_planned_again_part_by_part() -> None:
    a, b, c, d = (node(name) for name in "abcd")
    held = {
        a.node: frozenset(CUT[0].blocks),
        b.node: frozenset(CUT[1].blocks),
        c.node: frozenset({0}),
        d.node: frozenset({2, 3}),
    }
    again = repair_parts(held, {c.node: CUT[0], d.node: CUT[1]}, MODEL, links(a, b, c, d))
    assert {(t.src, t.dst, t.block) for t in again} == {(a.node, c.node, 1), (b.node, d.node, 4)}


def test_the_roles_of_all_parts() -> None:
    a, b, c, d = (node(name) for name in "abcd")
    sources = [source(a, CUT[0].blocks), source(b, range(BLOCKS), Tier.DISK)]
    roles = together(roles_by_part(sources, {c.node: CUT[0], d.node: CUT[1]}).values())
    assert (roles.memory, roles.disk) == ((a.node,), (b.node,))
    assert roles.receiving == (c.node, d.node)
