"""Plans beside KV, for any roles and rates: who sends, and that everybody is complete."""

from dataclasses import dataclass

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.kv_traffic import Flow, is_taken, left
from services.planner.core.links import Links
from services.planner.core.placement import (
    LITTLE,
    Held,
    Plan,
    Roles,
    append_transfers,
    plan_transfers,
    repair_transfers,
)
from shared.ids import NodeId
from shared.messages.pool import Profile
from shared.messages.scaling import Transfer
from tests.unit.planner.scripted import BLOCKS, record
from tests.unit.registry.builders import info

EVERY, NONE = frozenset(range(BLOCKS)), frozenset[int]()


@dataclass(frozen=True)
class Case:
    links: Links
    sources: tuple[NodeId, ...]
    targets: tuple[NodeId, ...]

    @property
    def taken(self) -> frozenset[NodeId]:
        """By the book: KV leaves less than half of the way out."""
        rates = {node: i.link_bytes_per_s for node, i in self.links.nodes.items()}
        return frozenset(n for n, flow in self.links.kv.items() if is_taken(rates[n], flow.out))

    def left(self) -> Links:
        """Links without KV that are as fast as what KV leaves for weights."""
        infos, profiles = {}, {}
        for node, known in self.links.nodes.items():
            kv, rate = self.links.kv.get(node, Flow()), known.link_bytes_per_s
            infos[node] = msgspec.structs.replace(known, link_bytes_per_s=0)
            profiles[node] = Profile(
                out_bytes_per_s=left(rate, kv.out, spares=False),
                in_bytes_per_s=left(rate, kv.into, spares=False),
            )
        return Links(infos, profiles, 0, 0.001)

    def plan(self, links: Links) -> Plan:
        roles = Roles(self.sources, (), (), self.targets)
        nodes = (*self.sources, *self.targets)
        return plan_transfers(
            roles, {}, record(), links, strategy="auto", executing=nodes, max_stages=4
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nodes = [NodeId(f"n{i}") for i in range(draw(st.integers(2, 8)))]
    count = draw(st.integers(1, len(nodes) - 1))
    infos = {
        node: msgspec.structs.replace(info(node), link_bytes_per_s=draw(st.integers(50, 400)))
        for node in nodes
    }
    shares = st.floats(0.0, 1.2)
    kv = {
        node: Flow(draw(shares) * i.link_bytes_per_s, draw(shares) * i.link_bytes_per_s)
        for node, i in infos.items()
        if draw(st.booleans())
    }
    links = Links(infos, {}, 0, 0.001, kv=kv)
    return Case(links, tuple(nodes[:count]), tuple(nodes[count:]))


def seconds(plan: Plan) -> float:
    over = plan.considered[0].outlook.all_complete_s
    assert over is not None
    return over


def complete(transfers: tuple[Transfer, ...], held: Held) -> None:
    """Carries the transfers out. Each sender has what it sends."""
    have = {node: set(blocks) for node, blocks in held.items()}
    for step in sorted({t.step for t in transfers}):
        now = [t for t in transfers if t.step == step]
        assert all(t.block in have[t.src] for t in now)
        for t in now:
            have[t.dst].add(t.block)
    assert all(blocks == EVERY for blocks in have.values())


@given(cases())
def test_everybody_is_complete_and_a_taken_way_out_is_used_only_for_a_reason(case: Case) -> None:
    plan, taken = case.plan(case.links), case.taken
    complete(plan.transfers, dict.fromkeys(case.sources, EVERY) | dict.fromkeys(case.targets, NONE))
    senders = {t.src for t in plan.transfers}
    used = seconds(case.plan(case.left()))
    if not {*case.sources} - taken:
        assert any("nobody but" in words for words in plan.ports)
    elif senders & taken:
        (why,) = (words for words in plan.ports if words.startswith("without "))
        assert all(node in why for node in taken)
    if senders & taken:
        assert seconds(plan) == used
    else:
        assert seconds(plan) <= LITTLE * used * (1 + 1e-9)
    for node in senders - taken:  # it has no less than half of its port for weights
        rate = case.links.nodes[node].link_bytes_per_s
        kv = case.links.kv.get(node, Flow())
        assert left(rate, kv.out, spares=True) >= rate / 2


@given(cases())
def test_a_repair_takes_from_a_taken_port_only_what_nobody_else_has(case: Case) -> None:
    held = dict.fromkeys(case.sources, EVERY) | dict.fromkeys(case.targets, NONE)
    moves = repair_transfers(held, case.targets, record(), case.links)
    complete(moves, held)
    if set(case.sources) - case.taken:
        assert case.taken.isdisjoint(t.src for t in moves)


@given(cases())
def test_newcomers_are_fed_by_free_ports_if_there_are_any(case: Case) -> None:
    held = dict.fromkeys(case.sources, EVERY) | dict.fromkeys(case.targets, NONE)
    wanted = dict.fromkeys(case.targets, EVERY)
    plan = append_transfers(held, (), wanted, record(), case.links, can_send=held)
    complete(plan.transfers, held)
    if set(case.sources) - case.taken:
        assert case.taken.isdisjoint(t.src for t in plan.transfers)
