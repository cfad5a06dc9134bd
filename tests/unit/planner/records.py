"""Records of events for tests."""

from shared.ids import EventId
from shared.messages.scaling import EventRecord, EventState, Timings, Transfer
from tests.unit.planner.scripted import BLOCKS, MODEL, NAME


def event(
    name: str = "ev-1",
    state: EventState = EventState.DECIDED,
    decided_ns: int = 1_000_000_000,
    transfers: tuple[Transfer, ...] = (),
) -> EventRecord:
    return EventRecord(
        id=EventId(name),
        name=NAME,
        model_id=MODEL,
        state=state,
        cause="a test",
        revision=0,
        sources=(),
        targets=(),
        strategy="binomial",
        transfers=transfers,
        n_blocks=BLOCKS,
        nbytes=400,
        detected_ns=decided_ns,
        decided_ns=decided_ns,
        history=((state, decided_ns),),
        predicted=Timings(),
        actual=Timings(),
        physical_limit_s=None,
        bytes_moved=0,
        trace="",
    )
