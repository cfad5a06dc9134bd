"""What outlives a planner: the records of its events, and the numbers of replicas that operators
set."""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from services.planner.core import events
from services.planner.core.commands import StoreEvent, StoreFixed, StoreHistory
from services.planner.core.rhythm import History
from shared.ids import EventId, ModelId
from shared.messages.scaling import EventRecord, EventState

KEEP = 200
"""How many finished events are remembered."""
LARGEST = 6 << 20
"""The most bytes of a record, or of several in one answer. It is less than the bus takes in a
message."""


def fitting(records: Iterable[EventRecord]) -> tuple[EventRecord, ...]:
    """The first records, as many as one message can carry. Large ones come without their
    schedules."""
    fitted: list[EventRecord] = []
    room = LARGEST
    for record in records:
        size = len(msgspec.msgpack.encode(record))
        if size > room // 2:
            record = msgspec.structs.replace(record, transfers=())
            size = len(msgspec.msgpack.encode(record))
        room -= size
        if room < 0:
            break
        fitted.append(record)
    return tuple(fitted)


class Archive:
    """Every change returns what has to be stored."""

    def __init__(
        self,
        records: Iterable[EventRecord] = (),
        fixed: Mapping[ModelId, int] | None = None,
        histories: Mapping[ModelId, History] | None = None,
    ) -> None:
        self.events: dict[EventId, EventRecord] = {}
        """All events by id, the oldest first."""
        self.fixed: dict[ModelId, int] = dict(fixed or {})
        """Numbers of replicas that operators asked for."""
        self.histories: dict[ModelId, History] = dict(histories or {})
        for record in sorted(records, key=lambda r: r.decided_ns):
            self.events[record.id] = record

    def begun(self, model: ModelId) -> EventRecord | None:
        """The event of a model that an earlier planner began, and whose plan the nodes follow."""
        found = (r for r in reversed(self.events.values()) if r.model_id == model)
        last = next(found, None)
        return last if last is not None and last.state in events.MOVING else None

    def fail_unfinished(
        self, running: Collection[EventId], wall_ns: int, cause: str
    ) -> list[StoreEvent]:
        """Marks events that an earlier planner left unfinished, and that are not `running` now, as
        failed."""
        stored: list[StoreEvent] = []
        for record in list(self.events.values()):
            if record.state not in events.TERMINAL and record.id not in running:
                reason = "the planner was restarted"
                failed = events.advance(record, EventState.FAILED, wall_ns, error=reason)
                stored += self.put(failed, cause)
        return stored

    def put(
        self, record: EventRecord, cause: str, fit: EventRecord | None = None
    ) -> list[StoreEvent]:
        """`fit`: the record as `fitting` has it, if that is known."""
        self.events[record.id] = record
        fit = fit or fitting([record])[0]
        stored = [StoreEvent(event=record.id, record=fit, cause=cause)]
        over = [r.id for r in self.events.values() if r.state in events.TERMINAL]
        for event in over[:-KEEP]:
            del self.events[event]
            stored.append(StoreEvent(event=event, record=None, cause=cause))
        return stored

    def fix(self, model: ModelId, count: int | None, cause: str) -> list[StoreFixed]:
        """Sets the operator's number of replicas for a model. None: there is none."""
        if self.fixed.get(model) == count:
            return []
        if count is None:
            del self.fixed[model]
        else:
            self.fixed[model] = count
        return [StoreFixed(model=model, count=count, cause=cause)]

    def remember(self, model: ModelId, history: History | None, cause: str) -> list[StoreHistory]:
        """Keeps a model's history. None: forgets it."""
        if history is not None:
            self.histories[model] = history
        elif self.histories.pop(model, None) is None:
            return []
        return [StoreHistory(model=model, history=history, cause=cause)]

    def newest(self, count: int) -> tuple[EventRecord, ...]:
        newest = sorted(self.events.values(), key=lambda r: r.decided_ns, reverse=True)
        return fitting(newest[: max(0, count)])
