"""An event's legal steps, and what its record takes down."""

import pytest

from services.planner.core import events
from shared.errors import IllegalTransition
from shared.ids import NodeId
from shared.messages.scaling import EventState, Timings, Transfer
from tests.unit.planner.records import event

S = EventState
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def test_the_way_of_an_event_that_serves_while_it_loads() -> None:
    record = event()
    for at, state in enumerate((S.PLANNED, S.TRANSFERRING, S.SERVING, S.COMPLETE), start=2):
        record = events.advance(record, state, at)
    assert record.history[1:] == (
        (S.PLANNED, 2),
        (S.TRANSFERRING, 3),
        (S.SERVING, 4),
        (S.COMPLETE, 5),
    )
    assert record.state is S.COMPLETE


@pytest.mark.parametrize("state", [s for s in S if s not in events.TERMINAL])
@pytest.mark.parametrize("end", [S.FAILED, S.CANCELLED])
def test_what_is_not_over_may_fail_or_be_cancelled(state: EventState, end: EventState) -> None:
    ended = events.advance(event(state=state), end, 2, error="why")
    assert (ended.state, ended.error) == (end, "why")


@pytest.mark.parametrize("over", sorted(events.TERMINAL, key=str))
@pytest.mark.parametrize("state", list(S))
def test_what_is_over_stays_over(over: EventState, state: EventState) -> None:
    with pytest.raises(IllegalTransition, match=f"{over.value} -> {state.value} is not a step"):
        events.advance(event(state=over), state, 2)


@pytest.mark.parametrize(
    ("state", "after"),
    [(S.DECIDED, S.TRANSFERRING), (S.DECIDED, S.COMPLETE), (S.PLANNED, S.SERVING)],
)
def test_no_step_is_left_out(state: EventState, after: EventState) -> None:
    with pytest.raises(IllegalTransition, match=f"{state.value}@1000000000"):
        events.advance(event(state=state), after, 2)


def test_timings_are_from_the_decision_and_the_earliest_counts() -> None:
    record = events.note(event(decided_ns=1_000_000_000), 1_500_000_000, "first_byte_s")
    record = events.note(record, 3_000_000_000, "first_byte_s")
    record = events.note(record, 3_000_000_000, "first_path_s")
    record = events.note(record, 2_500_000_000, "first_path_s")
    assert record.actual == Timings(first_byte_s=0.5, first_path_s=1.5)


def test_a_new_revision_names_who_is_left_and_who_sends() -> None:
    record = events.replan(event(), (A,), (Transfer(1, B, A, 0), Transfer(2, B, A, 1)))
    assert (record.revision, record.targets, record.sources) == (1, (A,), (B,))
    record = events.replan(record, (A, B), (Transfer(1, C, A, 1), Transfer(2, A, B, 1)))
    assert (record.revision, record.sources) == (2, (B, C))
    assert record.state is S.DECIDED


def test_summary_has_what_was_predicted_and_what_came() -> None:
    record = events.note(event(), 1_250_000_000, "first_byte_s")
    summary = events.summary(record)
    assert summary["actual.first_byte_s"] == 0.25
    assert summary["state"] == "decided"
    assert not any(key.startswith("predicted") for key in summary)
