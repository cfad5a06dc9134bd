"""Which phase of an event gets which part of its time, and what is predicted."""

import msgspec
import pytest

from services.planner.core import ledger
from services.planner.core.events import advance, arrived, note
from shared.ids import EventId, Generation, ModelId, NodeId
from shared.messages.ledger import Phase, Spent
from shared.messages.scaling import (
    BlockArrived,
    EventRecord,
    EventState,
    Growth,
    Repair,
    Timings,
)
from tests.unit.planner.records import event
from tests.unit.planner.scripted import MODEL

DECIDED_NS = 1_000_000_000_000
A, B = NodeId("a"), NodeId("b")


def ns(seconds: float) -> int:
    return DECIDED_NS + round(seconds * 1e9)


def complete(**changes: object) -> EventRecord:
    """An event that began 0.5 s before its decision and was complete after 5 s."""
    ended = ((EventState.DECIDED, DECIDED_NS), (EventState.COMPLETE, ns(5)))
    record = msgspec.structs.replace(
        event(decided_ns=DECIDED_NS, state=EventState.COMPLETE),
        waiting_ns=ns(-0.5),
        detected_ns=ns(-0.4),
        wanted_ns=ns(-0.1),
        history=ended,
        actual=Timings(
            reserved_s=0.01,
            planned_s=0.03,
            sent_s=0.03,
            asked_s=0.04,
            first_byte_s=0.06,
            first_path_s=2.0,
            first_partial_token_s=2.5,
            last_block_s=4.8,
            ready_s=4.9,
            all_complete_s=5.0,
        ),
        last=A,
    )
    return msgspec.structs.replace(record, **changes)


def seconds(record: EventRecord) -> dict[Phase, float]:
    return {spent.phase: round(spent.seconds, 6) for spent in ledger.ledger(record)}


def test_each_milestone_ends_its_phase() -> None:
    assert seconds(complete()) == {
        Phase.EVIDENCE: 0.1,
        Phase.HOLD: 0.3,
        Phase.ROOM: 0.1,
        Phase.RESERVE: 0.01,
        Phase.PLAN: 0.02,
        Phase.FORM: 0.0,
        Phase.ORDERS: 0.01,
        Phase.FIRST_BYTE: 0.02,
        Phase.FIRST_PATH: 1.94,
        Phase.FIRST_TOKEN: 0.5,
        Phase.LAST_BLOCK: 2.3,
        Phase.ATTACH: 0.1,
        Phase.REGISTER: 0.1,
    }


def test_what_never_came_takes_no_time() -> None:
    found = seconds(complete(actual=Timings(reserved_s=0.01, planned_s=0.03, last_block_s=4.8)))
    assert found[Phase.FIRST_PATH] == found[Phase.FIRST_TOKEN] == found[Phase.ATTACH] == 0.0
    assert found[Phase.LAST_BLOCK] == 4.77


@pytest.mark.parametrize(("last", "waited"), [(A, {}), (B, {Phase.GROW: 0.5})])
def test_growth_counts_if_the_last_node_waited_for_it(
    last: NodeId, waited: dict[Phase, float]
) -> None:
    growth = Growth(ns(3.5), "more load", (B,), ns(3.0))
    found = seconds(complete(last=last, growths=(growth,)))
    assert {phase: found[phase] for phase in found if phase is Phase.GROW} == waited
    assert found[Phase.LAST_BLOCK] == pytest.approx(2.3 - sum(waited.values()))


@pytest.mark.parametrize(("nodes", "waited"), [((A, B), 0.4), ((B,), 0.0)])
def test_repairs_count_if_they_concerned_the_last_node(
    nodes: tuple[NodeId, ...], waited: float
) -> None:
    repairs = (Repair(ns(1.0), ns(1.1), "a loss", nodes), Repair(ns(4.0), ns(4.3), "late", nodes))
    found = seconds(complete(repairs=repairs))
    assert sum(s.seconds for s in ledger.ledger(complete(repairs=repairs))) == pytest.approx(5.5)
    if waited:
        assert found[Phase.REPAIR] == waited
    else:
        assert Phase.REPAIR not in found


def test_an_event_that_runs_has_none_and_one_that_failed_has() -> None:
    running = msgspec.structs.replace(complete(), state=EventState.TRANSFERRING)
    assert ledger.ledger(running) == ()
    failed = advance(running, EventState.FAILED, ns(5), error="why")
    assert sum(spent.seconds for spent in failed.ledger) == pytest.approx(5.5)


def test_what_is_heard_after_the_end_corrects_the_ledger() -> None:
    late = note(complete(), ns(1.0), "first_path_s")
    (spent,) = (spent for spent in late.ledger if spent.phase is Phase.FIRST_PATH)
    assert spent.seconds == pytest.approx(0.94)


def test_arrivals_of_blocks_say_when_the_first_was_asked_for_and_the_last_was_ready() -> None:
    record = event(decided_ns=DECIDED_NS)
    for asked, end in ((0.2, 1.5), (0.1, 1.2)):
        message = BlockArrived(
            event=EventId("ev-1"), revision=0, node=A, generation=Generation(1), model_id=MODEL,
            block=0, source=B, transport="tcp", nbytes=1, started_ns=ns(asked),
            first_byte_ns=ns(asked + 0.05), finished_ns=ns(end), ready_ns=ns(end + 0.1),
        )  # fmt: skip
        record = arrived(record, [message], moved=1)
    assert record.actual == Timings(asked_s=0.1, first_byte_s=0.15, last_block_s=1.5, ready_s=1.6)


# --- predictions ---


def ended(name: str, model: ModelId, **phases: float) -> EventRecord:
    spent = tuple(Spent(Phase[phase], took, None) for phase, took in phases.items())
    return msgspec.structs.replace(event(name, EventState.COMPLETE), model_id=model, ledger=spent)


def test_control_is_predicted_from_all_events_and_copying_from_the_models_own() -> None:
    other = ModelId("other")
    past = [
        ended("ev-1", other, RESERVE=0.1, LAST_BLOCK=9.0),
        ended("ev-2", MODEL, RESERVE=0.2, LAST_BLOCK=1.0),
        ended("ev-3", MODEL, RESERVE=0.3, LAST_BLOCK=2.0),
    ]
    found = ledger.expected(past, MODEL, 0.2)
    assert found["reserve"] == 0.2
    assert found["last block"] == 1.5
    assert found["hold"] == 0.2
    assert found["grow"] == pytest.approx(0.2 + found["plan"])


def test_the_first_event_has_predictions_for_all_but_the_copying() -> None:
    found = ledger.expected((), MODEL, 0.2)
    named = {phase for phase in Phase if phase.value in found}
    assert set(Phase) - named == {
        Phase.FIRST_BYTE, Phase.FIRST_PATH, Phase.FIRST_TOKEN, Phase.LAST_BLOCK
    }  # fmt: skip


def test_a_plan_predicts_the_copying() -> None:
    predicted = Timings(
        first_byte_s=0.31, first_path_s=1.0, first_partial_token_s=1.1, all_complete_s=3.0
    )
    found = ledger.planned({"reserve": 0.1}, predicted, setup_s=0.3)
    assert {name: pytest.approx(took) for name, took in found.items()} == {
        "reserve": 0.1, "form": 0.3, "first byte": 0.01, "first path": 0.69, "first token": 0.1,
        "last block": 1.9,
    }  # fmt: skip
    without = ledger.planned({}, Timings(all_complete_s=3.0), setup_s=0.0)
    assert without["first path"] == 0.0
    assert without["last block"] == 3.0
    assert ledger.longer(found, 2.0)["last block"] == pytest.approx(3.9)


def test_a_token_that_would_come_after_the_last_block_leaves_no_time_for_it() -> None:
    predicted = Timings(first_path_s=2.5, first_partial_token_s=4.0, all_complete_s=3.0)
    found = ledger.planned({}, predicted, setup_s=0.0)
    assert found["first token"] == 0.5
    assert found["last block"] == 0.0
