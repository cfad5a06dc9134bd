"""Where the time of a scaling event went: from its first waiting request to its last complete node.

The event passes a row of milestones. Each phase lasts from one milestone to the next, so phases
leave no gap and do not overlap, whatever the timestamps are. These come from the clocks of several
processes: a milestone that seems to come before the one that leads to it counts as if both came
together. A phase whose milestone never came takes no time.

Trouble and growth interrupt this row. If the node that was complete last waited for them, they are
phases of their own, cut out of what they interrupted.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from shared.ids import ModelId
from shared.messages.ledger import Phase, Spent
from shared.messages.scaling import EventRecord, EventState, Timings

Tile = tuple[Phase, int, int]
"""(phase, its beginning, its end), in ns."""

LATEST = 16
"""How many of the last events predictions are taken from."""
_TYPICAL_S = {
    Phase.EVIDENCE: 0.005,
    Phase.ROOM: 0.0,
    Phase.RESERVE: 0.005,
    Phase.PLAN: 0.01,
    Phase.FORM: 0.0,
    Phase.ORDERS: 0.02,
    Phase.ATTACH: 0.005,
    Phase.REGISTER: 0.005,
}
"""Predictions for the first event of a cluster."""
_COPYING = (Phase.FIRST_BYTE, Phase.FIRST_PATH, Phase.FIRST_TOKEN, Phase.LAST_BLOCK)
"""The phases that a plan predicts. They depend on the model."""


def ledger(record: EventRecord) -> tuple[Spent, ...]:
    """The event's phases in order. Empty while it runs."""
    if record.state not in (EventState.COMPLETE, EventState.FAILED, EventState.CANCELLED):
        return ()
    took: dict[Phase, int] = {}
    for phase, began, ended in tiles(record, record.history[-1][1]):
        took[phase] = took.get(phase, 0) + ended - began
    return tuple(
        Spent(phase, took[phase] / 1e9, record.expected.get(phase.value))
        for phase in Phase
        if phase in took
    )


def tiles(record: EventRecord, end_ns: int) -> list[Tile]:
    """The event's phases by time, up to `end_ns`. Each begins where the last one ended."""
    row: list[Tile] = []
    at = begin = min(record.waiting_ns or record.detected_ns, end_ns)
    for phase, until in _milestones(record, end_ns):
        ended = at if until is None else min(max(at, until), end_ns)
        row.append((phase, at, ended))
        at = ended
    for growth in record.growths:
        if record.last in growth.nodes and growth.since_ns:
            row = _cut(row, Phase.GROW, max(begin, growth.since_ns), min(growth.at_ns, end_ns))
    for repair in record.repairs:
        if record.last is None or record.last in repair.nodes:
            row = _cut(row, Phase.REPAIR, max(begin, repair.since_ns), min(repair.at_ns, end_ns))
    return row


def _milestones(record: EventRecord, end_ns: int) -> Iterator[tuple[Phase, int | None]]:
    """What ends each phase."""
    actual = record.actual

    def at(seconds: float | None) -> int | None:
        return None if seconds is None else record.decided_ns + round(seconds * 1e9)

    yield Phase.EVIDENCE, record.detected_ns
    yield Phase.HOLD, record.wanted_ns or record.decided_ns
    yield Phase.ROOM, record.decided_ns
    yield Phase.RESERVE, at(actual.reserved_s)
    yield Phase.PLAN, at(actual.planned_s)
    yield Phase.FORM, at(actual.sent_s)
    yield Phase.ORDERS, at(actual.asked_s)
    yield Phase.FIRST_BYTE, at(actual.first_byte_s)
    yield Phase.FIRST_PATH, at(actual.first_path_s)
    yield Phase.FIRST_TOKEN, at(actual.first_partial_token_s)
    yield Phase.LAST_BLOCK, at(actual.last_block_s)
    yield Phase.ATTACH, at(actual.ready_s)
    yield Phase.REGISTER, end_ns


def _cut(row: list[Tile], phase: Phase, began: int, ended: int) -> list[Tile]:
    """The row with this phase in place of what was there from `began` to `ended`."""
    if began >= ended:
        return row
    before = [(p, start, min(end, began)) for p, start, end in row if start < began]
    after = [(p, max(start, ended), end) for p, start, end in row if end > ended]
    return [*before, (phase, began, ended), *after]


# --- predictions ---


def expected(past: Iterable[EventRecord], model: ModelId, hold_s: float) -> dict[str, float]:
    """What each phase of the model's next event is expected to take, before anything is known of
    its plan: the median of the latest events that were complete. `hold_s`: the policy's."""
    complete = [r for r in past if r.state is EventState.COMPLETE and r.ledger]
    own = [record for record in complete if record.model_id == model]
    found = _TYPICAL_S | {Phase.HOLD: hold_s} | _medians(complete)
    found = {phase: at for phase, at in found.items() if phase not in _COPYING}
    found |= {phase: at for phase, at in _medians(own).items() if phase in _COPYING}
    found |= {Phase.REPAIR: 0.0, Phase.GROW: found[Phase.RESERVE] + found[Phase.PLAN]}
    return {phase.value: seconds for phase, seconds in found.items()}


def _medians(records: Sequence[EventRecord]) -> dict[Phase, float]:
    seen: dict[Phase, list[float]] = {}
    for spent in (spent for record in records[-LATEST:] for spent in record.ledger):
        seen.setdefault(spent.phase, []).append(spent.seconds)
    return {phase: median(seconds) for phase, seconds in seen.items()}


def planned(known: Mapping[str, float], predicted: Timings, *, setup_s: float) -> dict[str, float]:
    """The expectations once the event has a plan. `predicted`: seconds from the time at which the
    plan is sent. What it does not know stays as it was."""
    found = dict(known) | {Phase.FORM.value: setup_s}
    if predicted.all_complete_s is None:
        return found
    reached = setup_s
    over = predicted.all_complete_s
    ends = (predicted.first_byte_s, predicted.first_path_s, predicted.first_partial_token_s, over)
    for phase, end in zip(_COPYING, ends, strict=True):
        until = reached if end is None else min(max(reached, end), max(reached, over))
        found[phase.value], reached = until - reached, until
    return found


def longer(known: Mapping[str, float], seconds: float) -> dict[str, float]:
    """The expectations if the last block comes later than it was predicted, because the event has
    grown."""
    last = Phase.LAST_BLOCK.value
    return dict(known) | {last: known.get(last, 0.0) + max(0.0, seconds)}
