"""The choice of targets, whatever the candidates."""

import random
from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.registry.core.placement import Candidate, choose, rank
from tests.unit.registry.builders import info

RACKS = st.sampled_from(["r1", "r2", "r3"])
FACTS = st.builds(
    lambda rack, **facts: Candidate(msgspec.structs.replace(info(), rack=rack), **facts),
    RACKS,
    free=st.integers(0, 3),
    own=st.booleans(),
    in_memory=st.integers(0, 2),
    on_disk=st.integers(0, 2),
    active=st.integers(0, 2),
    source_rack=st.booleans(),
)


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    """Candidates, each with a name of its own."""
    found = []
    for number, candidate in enumerate(draw(st.lists(FACTS, max_size=8))):
        named = msgspec.structs.replace(candidate.info, node=f"n{number}")
        found.append(replace(candidate, info=named))
    return found


@given(found=candidates(), count=st.integers(0, 8), serving=st.sets(RACKS))
def test_as_many_as_can_be_had_the_own_first(
    found: list[Candidate], count: int, serving: set[str]
) -> None:
    chosen = {t.info.node for t in choose(found, count, 2, serving)}
    assert len(chosen) == min(count, len(found))
    own = {c.info.node for c in found if c.own}
    assert own <= chosen or chosen <= own


@given(found=candidates(), count=st.integers(0, 8), serving=st.sets(RACKS))
def test_two_racks_wherever_that_costs_nothing_that_is_there(
    found: list[Candidate], count: int, serving: set[str]
) -> None:
    """Nothing is given up for it but the place of one node that would have to fetch all."""
    chosen = [t.info for t in choose(found, count, 2, serving)]
    racks = serving | {i.rack for i in chosen}
    if len(racks) == 1 and len(chosen) + len(serving) > 1:
        left = {c.info.node: c for c in found} | {i.node: None for i in chosen}
        fixed = all(c.own or c.in_memory for c in found if c.info in chosen)
        assert fixed or not any(c and c.info.rack not in racks for c in left.values())


@given(found=candidates(), count=st.integers(0, 8), serving=st.sets(RACKS))
def test_nobody_is_passed_over_for_a_worse_node_but_one_for_the_racks(
    found: list[Candidate], count: int, serving: set[str]
) -> None:
    chosen = {t.info.node for t in choose(found, count, 2, serving)}
    best = sorted(found, key=lambda c: (not c.own, rank(c)))[:count]
    assert len({c.info.node for c in best} - chosen) <= 1


@given(found=candidates(), count=st.integers(0, 8), serving=st.sets(RACKS), order=st.randoms())
def test_the_answer_does_not_depend_on_the_order_of_the_candidates(
    found: list[Candidate], count: int, serving: set[str], order: random.Random
) -> None:
    chosen = choose(found, count, 2, serving)
    ranks = {c.info.node: rank(c) for c in found}
    assert [t.info.node for t in chosen] == sorted(
        (t.info.node for t in chosen), key=ranks.__getitem__
    )
    order.shuffle(found)
    assert choose(found, count, 2, serving) == chosen
