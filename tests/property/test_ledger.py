"""A ledger tiles an event's time, whatever timestamps its record has."""

from itertools import pairwise

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.planner.core.events import TERMINAL
from services.planner.core.ledger import ledger, tiles
from shared.ids import NodeId
from shared.messages.scaling import EventRecord, EventState, Growth, Repair, Timings
from tests.support.amounts import examples
from tests.unit.planner.records import event

DECIDED_NS = 10**18
NODES = tuple(NodeId(name) for name in "abc")
_seconds = st.none() | st.floats(-5.0, 60.0)
_ns = st.integers(DECIDED_NS - 5 * 10**9, DECIDED_NS + 60 * 10**9)
_nodes = st.lists(st.sampled_from(NODES), max_size=3, unique=True).map(tuple)
_timings = st.builds(
    Timings, **{name: _seconds for name in Timings.__struct_fields__ if name.endswith("_s")}
)


@st.composite
def records(draw: st.DrawFn) -> EventRecord:
    """Events that are over. Their timestamps come in any order, and some are missing."""
    state = draw(st.sampled_from(sorted(TERMINAL, key=str)))
    return msgspec.structs.replace(
        event(decided_ns=DECIDED_NS, state=state),
        waiting_ns=draw(st.just(0) | _ns),
        detected_ns=draw(_ns),
        wanted_ns=draw(st.just(0) | _ns),
        history=((EventState.DECIDED, DECIDED_NS), (state, draw(_ns))),
        actual=draw(_timings),
        last=draw(st.sampled_from((None, *NODES))),
        growths=tuple(draw(st.lists(st.builds(Growth, _ns, st.just("load"), _nodes, _ns)))),
        repairs=tuple(draw(st.lists(st.builds(Repair, _ns, _ns, st.just("a loss"), _nodes)))),
    )


@given(records())
@example(event(decided_ns=DECIDED_NS, state=EventState.COMPLETE))
@settings(max_examples=examples(400), deadline=None)
def test_phases_leave_no_gap_and_do_not_overlap_and_each_is_in_the_ledger_once(
    record: EventRecord,
) -> None:
    begin, (_, end) = record.waiting_ns or record.detected_ns, record.history[-1]
    row = tiles(record, end)
    assert row[0][1] == min(begin, end)
    assert row[-1][2] == end
    assert all(before[2] == after[1] for before, after in pairwise(row))
    assert all(began <= ended for _, began, ended in row)

    found = ledger(record)
    assert len({spent.phase for spent in found}) == len(found)
    assert abs(sum(spent.seconds for spent in found) - max(0, end - begin) / 1e9) < 1e-6
