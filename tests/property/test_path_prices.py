"""The price of a stage: whatever it is, no other plan of paths is worth more at this price."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.paths import WeightedPath, plan_paths

PRICES = st.sampled_from([0.02, 0.1, 0.2, 0.3])
SLACK = 0.02
"""For each node: columns that gain less than a hundredth do not enter the plan."""


@st.composite
def holdings(draw: st.DrawFn) -> tuple[int, list[frozenset[int]]]:
    blocks = draw(st.integers(2, 8))
    part = st.frozensets(st.integers(0, blocks - 1))
    held = draw(st.lists(part, min_size=1, max_size=6))
    complete = draw(st.integers(1, 2))
    return blocks, [frozenset(range(blocks))] * complete + held


def at(price: float, blocks: int, held: Sequence[AbstractSet[int]]) -> tuple[WeightedPath, ...]:
    return plan_paths(held, blocks, max_stages=4, hop_cost=price, keep_gain=0.0, replica_floor=0.0)


def hops(paths: tuple[WeightedPath, ...]) -> float:
    return sum(path.weight * (len(path.stages) - 1) for path in paths)


def worth(paths: tuple[WeightedPath, ...], price: float) -> float:
    return sum(path.weight for path in paths) - price * hops(paths)


@given(known=holdings(), price=PRICES, other=PRICES)
def test_no_plan_for_another_price_is_worth_more(
    known: tuple[int, list[frozenset[int]]], price: float, other: float
) -> None:
    ours, theirs = at(price, *known), at(other, *known)
    assert worth(ours, price) >= worth(theirs, price) - SLACK * len(known[1])


@given(known=holdings(), price=PRICES)
def test_nothing_is_worth_less_than_the_replicas_alone(
    known: tuple[int, list[frozenset[int]]], price: float
) -> None:
    blocks, held = known
    alone = sum(len(have) == blocks for have in held)
    assert worth(at(price, blocks, held), price) >= alone - SLACK * len(held)
