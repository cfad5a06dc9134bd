"""Predictions in the record are made of what is known, or not at all."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from services.planner.core.events import begin
from services.planner.core.forecast import NO_FORECAST, Expected, Forecast, expected_of, later
from services.planner.core.links import Links
from services.planner.core.placement import Held, Plan, Roles, plan_transfers
from shared.ids import EventId, NodeId
from shared.messages.pool import ModelProfile, Profile
from shared.messages.scaling import EventRecord, Timings
from tests.unit.planner.scripted import record
from tests.unit.registry.builders import info

MODEL = record()  # 4 blocks of 100 bytes
EVERY = frozenset(range(MODEL.n_blocks))
NONE = frozenset[int]()
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
RATES = {A: 100, B: 100, C: 100}


def planned(
    held: Held,
    rates: Mapping[NodeId, int] = RATES,
    runs: tuple[NodeId, ...] = (A, B, C),
    profiles: Mapping[NodeId, Profile] | None = None,
    *,
    from_disk: bool = False,
    strategy: str = "binomial",
    chunk_bytes: int = 0,
) -> Plan:
    receiving = tuple(node for node, blocks in held.items() if blocks != EVERY or from_disk)
    infos = {n: msgspec.structs.replace(info(n), link_bytes_per_s=r) for n, r in rates.items()}
    return plan_transfers(
        Roles((), (A,), (), receiving) if from_disk else Roles((A,), (), (), receiving),
        {} if from_disk else held,
        msgspec.structs.replace(MODEL, chunk_bytes=chunk_bytes),
        Links(infos, profiles or {}, 0, 0.5),
        strategy=strategy,
        executing=runs,
        max_stages=4,
    )


def predict(held: Held, *args: Any, **kwargs: Any) -> Forecast:
    return planned(held, *args, **kwargs).forecast


def test_one_target_takes_the_time_of_its_blocks_one_after_the_other() -> None:
    found = predict({A: EVERY, B: NONE})
    assert found.predicted == Timings(
        first_byte_s=0.5, first_path_s=1.5, first_complete_s=4.5, all_complete_s=4.5
    )
    assert found.physical_limit_s == pytest.approx(4.0)


def test_a_source_in_host_memory_runs_no_stage() -> None:
    found = predict({A: EVERY, B: NONE}, runs=(B,))
    assert found.predicted.first_path_s == found.predicted.all_complete_s == 4.5


def test_the_slowest_link_counts() -> None:
    found = predict({A: EVERY, B: NONE, C: NONE}, {A: 100, B: 100, C: 10})
    assert found.physical_limit_s == pytest.approx(40)
    assert found.predicted.all_complete_s is not None
    assert found.predicted.all_complete_s >= 40


def test_what_is_held_already_takes_no_time_and_has_no_textbook_limit() -> None:
    found = predict({A: EVERY, B: frozenset({0, 1, 2})})
    assert found.predicted.all_complete_s == 1.5
    assert found.physical_limit_s is None


def test_measured_engines_predict_the_first_token() -> None:
    timed = Profile(models=(ModelProfile(model_id=MODEL.model_id, decode_s=0.1),))
    found = predict({A: EVERY, B: NONE}, profiles={A: timed, B: timed})
    assert found.predicted.first_partial_token_s == pytest.approx(1.6)


@pytest.mark.parametrize("rates", [{}, {A: 100}, {A: 100, B: 0}])
def test_a_rate_that_is_not_known_makes_no_prediction(rates: dict[NodeId, int]) -> None:
    plan = planned({A: EVERY, B: NONE}, rates)
    assert plan.transfers
    assert plan.forecast == NO_FORECAST
    assert not plan.considered, "seconds on links of one byte a second"


def test_what_comes_from_disks_takes_what_the_disks_take() -> None:
    """Each block is on the target 0.5 + 1 s after it is on the source."""
    disk = {A: Profile(load_bytes_per_s=50.0)}
    found = predict({A: EVERY, B: NONE}, profiles=disk, from_disk=True)
    assert found.predicted == Timings(first_path_s=8.0, first_complete_s=8.0, all_complete_s=9.5)
    assert found.physical_limit_s is None
    alone = predict({A: EVERY}, profiles=disk, from_disk=True)
    assert alone.predicted.all_complete_s == 8.0


def test_a_disk_that_was_never_timed_makes_no_prediction() -> None:
    assert predict({A: EVERY, B: NONE}, from_disk=True) == NO_FORECAST


def test_what_is_not_predicted_stays_so_when_counted_from_the_decision() -> None:
    found = later(Timings(first_byte_s=0.5, all_complete_s=6.0), 0.25)
    assert found == Timings(first_byte_s=0.75, all_complete_s=6.25)


def test_relays_forward_the_chunks_that_the_model_record_says() -> None:
    """Down a chain of three, c a hop behind b, for its first chunk or its first block."""
    held = {A: EVERY, B: NONE, C: NONE}
    whole = predict(held, strategy="chain")
    chunked = predict(held, strategy="chain", chunk_bytes=10)
    assert whole.predicted.all_complete_s == pytest.approx(4.5 + 1.5)
    assert chunked.predicted.all_complete_s == pytest.approx(4.5 + 0.6)
    assert whole.physical_limit_s == pytest.approx(5.0)
    assert chunked.physical_limit_s == pytest.approx(4.1)


def test_nothing_to_move_nothing_to_predict() -> None:
    assert predict({A: EVERY}) == NO_FORECAST


S = 10**9


def event(**fields: object) -> EventRecord:
    begun = begin(
        EventId("ev-1"),
        record(),
        strategy="auto",
        cause="load",
        waiting_ns=0,
        detected_ns=0,
        wanted_ns=0,
        decided_ns=100 * S,
        expected={},
        trace="",
    )
    return msgspec.structs.replace(begun, **fields)


def test_an_event_without_a_plan_promises_nothing() -> None:
    assert expected_of(event(), 101 * S) == Expected(None, None, 0)


def test_what_a_plan_predicts_is_told_from_now() -> None:
    planned = event(
        predicted=Timings(first_path_s=2.0, first_complete_s=4.0, all_complete_s=5.0),
        targets=(NodeId("a"), NodeId("b")),
    )
    assert expected_of(planned, 101 * S) == Expected(1.0, 4.0, 2)
    assert expected_of(planned, 103 * S) == Expected(0.0, 2.0, 2)
    assert expected_of(planned, 109 * S) == Expected(0.0, 0.0, 2)


def test_without_a_path_the_first_whole_copy_serves_first() -> None:
    planned = event(predicted=Timings(first_complete_s=4.0, all_complete_s=5.0))
    assert expected_of(planned, 100 * S).first_s == 4.0


def test_an_instance_that_is_there_earlier_than_planned_counts() -> None:
    early = event(
        predicted=Timings(first_path_s=2.0, all_complete_s=5.0), actual=Timings(first_path_s=0.5)
    )
    assert expected_of(early, 101 * S) == Expected(0.0, 4.0, 0)
