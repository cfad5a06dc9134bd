"""The planner's answers about one scaling event, page by page: a large one does not fit into a
message."""

import msgspec

from shared import subjects
from shared.ids import EventId
from shared.messages.chronicle import EventPast, EventQuery
from shared.pool_pages import Ask


async def read_event(ask: Ask, event: EventId) -> EventPast:
    """All that the planner knows of an event. Raises what `ask` raises; NotFound."""
    past = await ask(subjects.PLANNER_EVENT, EventQuery(event=event), EventPast)
    arrivals = past.arrivals
    while len(arrivals) < past.arrived:
        query = EventQuery(event=event, after=len(arrivals))
        more = await ask(subjects.PLANNER_EVENT, query, EventPast)
        if not more.arrivals:
            break  # another planner has answered, which knows less
        arrivals = (*arrivals, *more.arrivals)
    return msgspec.structs.replace(past, arrivals=arrivals)
