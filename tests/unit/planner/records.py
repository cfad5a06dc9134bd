"""Records of events, and what is said of their blocks, for tests."""

from services.planner.core.arrivals import Arrivals
from shared.ids import EventId, Generation, ModelId, NodeId
from shared.messages.scaling import EventRecord, EventState, Landed, Timings, Transfer
from tests.unit.planner.scripted import BLOCKS, MODEL, NAME


def arrival(node: NodeId, model: ModelId, block: int) -> Arrivals:
    """One block of a model has come to a node."""
    landed = Landed(
        block=block,
        source=node,
        transport="tcp",
        nbytes=1,
        started_ns=0,
        first_byte_ns=0,
        finished_ns=0,
        ready_ns=0,
    )
    return Arrivals(EventId("ev"), node, Generation(1), model, (landed,), (0.0,))


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
