"""What the planner predicts is what movers take on modelled links."""

import pytest

from services.planner.core.choose import choose
from services.planner.core.costs import arrival_times
from services.planner.core.multicast.fabric import Fabric, Port, Task, uniform
from services.planner.core.multicast.schedule import Schedule
from services.planner.core.multicast.strategies import STRATEGIES
from services.planner.core.outlook import Serving
from simulation.multicast import UNIT, carry_out

RATE = 1e6
BLOCK = 256 * UNIT
FAST, SLOW = Port(RATE, RATE), Port(RATE / 4, RATE / 4)
RACKS = tuple(Port(RATE, RATE, rack=rack) for rack in "aaabbb")
FABRICS = {
    "equal": uniform(6, RATE),
    "racks": Fabric(RACKS, 0.0, {"a": RATE, "b": RATE}),
    "mixed": Fabric((FAST,) * 4 + (SLOW,) * 2, 0.0),
}


def task(fabric: Fabric, chunks: int, sources: int = 1) -> Task:
    return Task(fabric, (BLOCK,) * 8, tuple(range(sources)), BLOCK // chunks)


def both(made: Schedule, of: Task) -> tuple[float, float]:
    """(predicted, actual)"""
    return max(arrival_times(made.moves, of).values()), max(carry_out(made, of).values())


@pytest.mark.parametrize("name", ["binomial", "head", "chain", "taps", "tree", "broadcast"])
@pytest.mark.parametrize("chunks", [1, 4, 16])
def test_on_equal_links_predictions_are_exact(name: str, chunks: int) -> None:
    equal = task(FABRICS["equal"], chunks)
    predicted, actual = both(STRATEGIES[name](equal), equal)
    assert predicted == pytest.approx(actual, rel=1e-3)


@pytest.mark.parametrize("kind", ["racks", "mixed"])
@pytest.mark.parametrize("name", ["chain", "taps", "tree"])
@pytest.mark.parametrize("chunks", [1, 4, 16])
def test_on_other_links_they_are_near(kind: str, name: str, chunks: int) -> None:
    unequal = task(FABRICS[kind], chunks)
    predicted, actual = both(STRATEGIES[name](unequal), unequal)
    assert predicted == pytest.approx(actual, rel=0.03)


@pytest.mark.parametrize("kind", FABRICS)
@pytest.mark.parametrize("sources", [1, 2])
def test_what_is_chosen_takes_what_was_predicted(kind: str, sources: int) -> None:
    of = task(FABRICS[kind], 8, sources)
    choice = choose(of, Serving(max_stages=4))
    actual = max(carry_out(choice.schedule, of).values())
    assert choice.outlook.all_complete_s == pytest.approx(actual, rel=0.05)


def test_every_block_is_on_time_not_only_the_last() -> None:
    of = task(FABRICS["racks"], 4)
    made = STRATEGIES["chain"](of)
    assert carry_out(made, of) == pytest.approx(arrival_times(made.moves, of))


def test_blocks_and_chunks_need_not_be_equal() -> None:
    of = Task(uniform(4, RATE), (BLOCK, 3 * BLOCK, BLOCK // 2, BLOCK), (0,), 100 * UNIT)
    predicted, actual = both(STRATEGIES["chain"](of), of)
    assert predicted == pytest.approx(actual, rel=0.03)
