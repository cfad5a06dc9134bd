"""What a plan is expected to take, in the terms of an event's record."""

from collections import Counter
from dataclasses import dataclass

import msgspec

from services.planner.core.outlook import Outlook
from shared.messages.scaling import EventRecord, Timings


@dataclass(frozen=True, slots=True)
class Forecast:
    predicted: Timings
    physical_limit_s: float | None
    """For a multicast to nodes that hold nothing; None for any other."""


NO_FORECAST = Forecast(Timings(), None)


def forecast(outlook: Outlook, first_byte_s: float | None, limit_s: float | None) -> Forecast:
    """What an event is expected to take. `first_byte_s`: seconds from its decision to the first
    byte, if that is known; `limit_s` as in `Forecast`."""
    return Forecast(
        Timings(
            first_byte_s=first_byte_s,
            first_path_s=outlook.first_path_s,
            first_partial_token_s=outlook.first_token_s,
            first_complete_s=outlook.first_complete_s,
            all_complete_s=outlook.all_complete_s,
        ),
        limit_s,
    )


def later(timings: Timings, seconds: float) -> Timings:
    """The timings, counted from `seconds` earlier. Predictions count from the first transfer,
    records from the decision."""
    found = msgspec.structs.asdict(timings)
    return Timings(**{name: None if at is None else at + seconds for name, at in found.items()})


@dataclass(frozen=True, slots=True)
class Expected:
    """What an event that runs brings, and in how many seconds from now."""

    first_s: float | None
    """Until an instance of it can serve; 0: one can, or should by now. None: it is not planned
    yet."""
    complete_s: float | None
    replicas: int
    """A group of devices counts once."""


def expected_of(record: EventRecord, wall_ns: int) -> Expected:
    passed_s = (wall_ns - record.decided_ns) / 1e9
    predicted, actual = record.predicted, record.actual
    firsts = (predicted.first_path_s, predicted.first_complete_s, predicted.all_complete_s)
    first = min((at for at in firsts if at is not None), default=None)
    begun = actual.first_path_s is not None or actual.first_complete_s is not None

    def left(at: float | None) -> float | None:
        return None if at is None else max(0.0, at - passed_s)

    return Expected(
        first_s=0.0 if begun else left(first),
        complete_s=left(predicted.all_complete_s),
        replicas=max(Counter(map(record.parts.get, record.targets)).values(), default=0),
    )
