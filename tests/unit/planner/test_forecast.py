"""Predictions are made of what is known, or not at all."""

import pytest

from services.planner.core.forecast import Forecast, forecast
from services.planner.core.placement import Held, Roles, plan_transfers
from shared.ids import NodeId
from shared.messages.scaling import Timings

BLOCKS = 4
BYTES = (100,) * BLOCKS
EVERY = frozenset(range(BLOCKS))
NONE = frozenset[int]()
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
RATES = {A: 100, B: 100, C: 100}


def predict(
    held: Held, rates: dict[NodeId, int] = RATES, runs: tuple[NodeId, ...] = (A, B, C)
) -> Forecast:
    receiving = tuple(node for node, blocks in held.items() if blocks != EVERY)
    roles = Roles((A,), (), receiving, from_disk=False)
    transfers = plan_transfers(roles, held, BLOCKS, "binomial")
    return forecast(transfers, held, runs, rates, BYTES, overhead_s=0.5, max_stages=4)


def test_one_target_takes_the_time_of_its_blocks_one_after_the_other() -> None:
    found = predict({A: EVERY, B: NONE})
    assert found.predicted == Timings(
        first_byte_s=0.5, first_path_s=1.5, first_complete_s=6.0, all_complete_s=6.0
    )
    assert found.physical_limit_s == pytest.approx(4.0)


def test_a_source_in_host_memory_runs_no_stage() -> None:
    found = predict({A: EVERY, B: NONE}, runs=(B,))
    assert found.predicted.first_path_s == found.predicted.all_complete_s == 6.0


def test_the_slowest_link_counts() -> None:
    found = predict({A: EVERY, B: NONE, C: NONE}, {A: 100, B: 100, C: 10})
    assert found.physical_limit_s == pytest.approx(10 * 5)
    assert found.predicted.all_complete_s is not None
    assert found.predicted.all_complete_s >= 40


def test_what_is_held_already_takes_no_time_and_has_no_textbook_limit() -> None:
    found = predict({A: EVERY, B: frozenset({0, 1, 2})})
    assert found.predicted.all_complete_s == 1.5
    assert found.physical_limit_s is None


@pytest.mark.parametrize("rates", [{}, {A: 100}, {A: 100, B: 0}])
def test_a_rate_that_is_not_known_makes_no_prediction(rates: dict[NodeId, int]) -> None:
    assert predict({A: EVERY, B: NONE}, rates) == Forecast(Timings(), None)


def test_nothing_to_move_nothing_to_predict() -> None:
    assert predict({A: EVERY}) == Forecast(Timings(), None)
