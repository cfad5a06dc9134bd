"""A scaling event as a value: its states, what it records, and its legal steps.

    decided -> planned -> transferring -> serving -> complete
Any state but the last three may end in failed or cancelled. `serving` (a path over nodes that
are still loading) may be skipped: a target can be complete before any path is worth opening.
A new revision of the plan is no new state.
"""

from collections.abc import Mapping, Sequence

import msgspec

from services.planner.core.ledger import ledger, longer
from shared.errors import IllegalTransition
from shared.ids import EventId, NodeId
from shared.messages.pool import ModelRecord
from shared.messages.scaling import (
    EventRecord,
    EventState,
    Growth,
    Landing,
    Repair,
    Timings,
    Transfer,
)
from shared.parts import Part, whole

_S = EventState
TRANSITIONS: dict[EventState, frozenset[EventState]] = {
    _S.DECIDED: frozenset({_S.PLANNED, _S.FAILED, _S.CANCELLED}),
    _S.PLANNED: frozenset({_S.TRANSFERRING, _S.FAILED, _S.CANCELLED}),
    _S.TRANSFERRING: frozenset({_S.SERVING, _S.COMPLETE, _S.FAILED, _S.CANCELLED}),
    _S.SERVING: frozenset({_S.COMPLETE, _S.FAILED, _S.CANCELLED}),
    _S.COMPLETE: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}
MOVING = frozenset({_S.TRANSFERRING, _S.SERVING})
LEDGER, PREDICTED = "ledger.", ".predicted"
"""How a summary names the seconds of each phase, actual and predicted."""
TERMINAL = frozenset({_S.COMPLETE, _S.FAILED, _S.CANCELLED})


def begin(
    id_: EventId,
    model: ModelRecord,
    *,
    strategy: str,
    cause: str,
    waiting_ns: int,
    detected_ns: int,
    wanted_ns: int,
    decided_ns: int,
    expected: dict[str, float],
    trace: str,
    together: bool = False,
    way: str = "",
) -> EventRecord:
    """The record of an event that was just decided."""
    return EventRecord(
        id=id_,
        name=model.name,
        model_id=model.model_id,
        state=EventState.DECIDED,
        cause=cause,
        revision=0,
        sources=(),
        targets=(),
        strategy=strategy,
        transfers=(),
        n_blocks=model.n_blocks,
        nbytes=model.nbytes,
        waiting_ns=waiting_ns,
        detected_ns=detected_ns,
        wanted_ns=wanted_ns,
        decided_ns=decided_ns,
        expected=expected,
        history=((EventState.DECIDED, decided_ns),),
        predicted=Timings(),
        actual=Timings(),
        physical_limit_s=None,
        bytes_moved=0,
        trace=trace,
        together=together,
        way=way,
    )


def advance(record: EventRecord, state: EventState, at_ns: int, *, error: str = "") -> EventRecord:
    """The record in its next state; IllegalTransition carries the event's history."""
    if state not in TRANSITIONS[record.state]:
        story = " -> ".join(f"{past.value}@{ns}" for past, ns in record.history)
        raise IllegalTransition(
            f"event {record.id}: {record.state.value} -> {state.value} is not a step; "
            f"so far {story}"
        )
    history = (*record.history, (state, at_ns))
    return _settled(msgspec.structs.replace(record, state=state, history=history, error=error))


def _settled(record: EventRecord) -> EventRecord:
    """The record with its ledger, if it is over."""
    if record.state not in TERMINAL:
        return record
    return msgspec.structs.replace(record, ledger=ledger(record))


def note(record: EventRecord, at_ns: int, timing: str) -> EventRecord:
    """Sets a field of `actual`, in seconds after the decision. Of several reports the earliest
    counts, since they come in any order."""
    return _noted(record, timing, (at_ns - record.decided_ns) / 1e9)


def arrived(record: EventRecord, blocks: Sequence[Landing], moved: int) -> EventRecord:
    """Takes down when blocks came to a target, and that they brought `moved` bytes over links. A
    large event takes in thousands of blocks a second."""
    since, actual = record.decided_ns, record.actual
    news: dict[str, float] = {}
    asked = (min(each.started_ns for each in blocks) - since) / 1e9
    first = (min(each.first_byte_ns for each in blocks) - since) / 1e9
    last = (max(each.finished_ns for each in blocks) - since) / 1e9
    ready = (max(each.ready_ns for each in blocks) - since) / 1e9
    if actual.asked_s is None or asked < actual.asked_s:
        news["asked_s"] = asked
    if actual.first_byte_s is None or first < actual.first_byte_s:
        news["first_byte_s"] = first
    if actual.last_block_s is None or last > actual.last_block_s:
        news["last_block_s"] = last
    if actual.ready_s is None or ready > actual.ready_s:
        news["ready_s"] = ready
    if not news and not moved:
        return record
    return _settled(
        msgspec.structs.replace(
            record,
            actual=msgspec.structs.replace(actual, **news) if news else actual,
            bytes_moved=record.bytes_moved + moved,
        )
    )


def _noted(record: EventRecord, name: str, seconds: float) -> EventRecord:
    known: float | None = getattr(record.actual, name)
    if known is not None and known <= seconds:
        return record
    actual = msgspec.structs.replace(record.actual, **{name: seconds})
    return _settled(msgspec.structs.replace(record, actual=actual))


def mend(record: EventRecord, repair: Repair, transfers: tuple[Transfer, ...]) -> EventRecord:
    """The record's next revision after a trouble, with the new schedule."""
    revised = replan(record, record.targets, transfers)
    return msgspec.structs.replace(revised, repairs=(*record.repairs, repair))


def wanted(record: EventRecord, node: NodeId) -> Part:
    """The blocks that a target is to hold."""
    return record.parts.get(node) or whole(record.n_blocks)


def replan(
    record: EventRecord, targets: tuple[NodeId, ...], transfers: tuple[Transfer, ...]
) -> EventRecord:
    """The record's next revision, with the remaining targets, the new schedule, and the nodes that
    now send."""
    senders = (t.src for t in transfers if t.src not in targets)
    return msgspec.structs.replace(
        record,
        revision=record.revision + 1,
        targets=targets,
        transfers=transfers,
        sources=tuple(dict.fromkeys((*record.sources, *senders))),
    )


def grow(
    record: EventRecord,
    growth: Growth,
    transfers: tuple[Transfer, ...],
    *,
    complete_s: float | None,
    limit_s: float | None,
    parts: Mapping[NodeId, Part],
) -> EventRecord:
    """The record's next revision, with newcomers and what they get.

    `complete_s`: when all targets are expected to be complete, `limit_s`: the newcomers' physical
    limit; both in seconds after the decision. None: not known. `parts`: what newcomers are to hold
    that are devices of groups.
    """
    known = record.predicted.all_complete_s
    over = None if known is None or complete_s is None else max(known, complete_s)
    limit = record.physical_limit_s
    revised = replan(
        record,
        (*record.targets, *growth.nodes),
        tuple(sorted((*record.transfers, *transfers), key=lambda t: t.step)),
    )
    return msgspec.structs.replace(
        revised,
        growths=(*record.growths, growth),
        parts={**record.parts, **parts},
        predicted=msgspec.structs.replace(record.predicted, all_complete_s=over),
        expected=longer(record.expected, (over or 0.0) - (known or 0.0)),
        physical_limit_s=None if limit is None or limit_s is None else max(limit, limit_s),
    )


def summary(record: EventRecord) -> dict[str, str | int | float]:
    """The event in a few names and numbers."""
    found: dict[str, str | int | float] = {
        "event": record.id,
        "model": record.name,
        "state": record.state.value,
        "cause": record.cause,
        "revision": record.revision,
        "growths": len(record.growths),
        "bytes_moved": record.bytes_moved,
    }
    for kind, timings in (("predicted", record.predicted), ("actual", record.actual)):
        for name, value in msgspec.structs.asdict(timings).items():
            if value is not None:
                found[f"{kind}.{name}"] = round(value, 6)
    for spent in record.ledger:
        found[f"{LEDGER}{spent.phase.value}"] = spent.seconds
        if spent.predicted_s is not None:
            found[f"{LEDGER}{spent.phase.value}{PREDICTED}"] = spent.predicted_s
    return found
