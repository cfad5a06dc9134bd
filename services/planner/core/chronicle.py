"""What happened lately, for people who look later (`shared/messages/chronicle.py`).

Nothing is decided by it. It takes down what the planner hears and says anyway, and is bounded:
ARRIVALS of about 200 bytes each are 20 MB at most; COUNTS and RATES of about 150 bytes, 10 MB.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeVar

import msgspec

from services.planner.core.archive import LARGEST
from shared.ids import EventId, InstanceId, ModelId, ModelName, NodeId
from shared.messages.chronicle import Arrival, Count, Rate, Served
from shared.messages.instances import Instance, InstanceChange, InstanceSet, InstanceState
from shared.messages.pool import NodeStatus
from shared.messages.scaling import FirstPartialToken, Landing

ARRIVALS = 100_000
"""How many arrivals are kept, over all events. The oldest events lose theirs first; of a larger
event the first are kept."""
EVENTS = 100
SERVED = 2000
"""How many instances of one event are kept."""
COUNTS = 50_000
"""How many counts are kept, over all models; each model has its share."""
RATES = 2400
COUNT_S = 0.2
"""The least time between two counts of a model that differ in their loads only."""
RATE_S = 1.0
AT_ONCE = LARGEST // 150
"""How many arrivals one answer has at most."""
_Timed = TypeVar("_Timed", Count, Rate)


class Trail:
    """What one event did."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.forgotten = 0
        self.served: dict[InstanceId, Served] = {}

    def after(self, count: int) -> tuple[Arrival, ...]:
        known = count if count <= len(self.arrivals) else 0
        return tuple(islice(self.arrivals, known, known + AT_ONCE))


class Chronicle:
    def __init__(self) -> None:
        self._trails: dict[EventId, Trail] = {}
        """The oldest first."""
        self._kept = 0
        """Arrivals, over all events."""
        self._names: dict[NodeId, NodeId] = {}
        """Each node's id, once: arrivals share it."""
        self._there: dict[ModelId, dict[InstanceId, EventId | None]] = {}
        """The instances that were there when they were last published."""
        self._counts: dict[ModelName, deque[Count]] = {}
        self._rates: deque[Rate] = deque(maxlen=RATES)
        self._drawn: dict[NodeId, tuple[int, int]] = {}
        """(generation, tokens drawn) that each node said last."""
        self._drawn_since = 0
        """Tokens that were drawn since the last rate."""
        self._rated_ns = 0

    # --- events ---

    def begin(self, event: EventId) -> None:
        if event not in self._trails:
            self._trails[event] = Trail()
            if len(self._trails) > EVENTS:
                gone = self._trails.pop(next(iter(self._trails)))
                self._kept -= len(gone.arrivals)

    def trail(self, event: EventId) -> Trail:
        """An empty one if nothing is known."""
        return self._trails.get(event) or Trail()

    def on_blocks(self, event: EventId, node: NodeId, landings: Sequence[Landing]) -> None:
        trail = self._trails.get(event)
        if trail is None:
            return
        names = self._names
        node = names.setdefault(node, node)
        kept = landings[: self._room(event, len(landings))]
        self._kept += len(kept)
        trail.forgotten += len(landings) - len(kept)
        trail.arrivals += [
            Arrival(
                node,
                landing.block,
                names.setdefault(landing.source, landing.source),
                landing.transport,
                landing.started_ns,
                landing.first_byte_ns,
                landing.finished_ns,
                landing.ready_ns,
            )
            for landing in kept
        ]

    def _room(self, event: EventId, wanted: int) -> int:
        """How many of `wanted` more arrivals of this event are kept. Arrivals of older events make
        room for them."""
        for known, trail in self._trails.items():
            if self._kept + wanted <= ARRIVALS or known == event:
                break
            self._kept -= len(trail.arrivals)
            trail.forgotten += len(trail.arrivals)
            trail.arrivals = []
        return max(0, min(wanted, ARRIVALS - self._kept))

    def on_token(self, message: FirstPartialToken) -> None:
        trail, instance = self._trails.get(message.event), InstanceId(message.instance)
        served = trail.served.get(instance) if trail is not None else None
        if trail is not None and served is not None:
            earliest = min(served.first_token_ns or message.at_ns, message.at_ns)
            trail.served[instance] = msgspec.structs.replace(served, first_token_ns=earliest)

    def on_instances(self, message: InstanceSet | InstanceChange, at_ns: int) -> None:
        """Takes in what gateways are told."""
        now = message if isinstance(message, InstanceSet) else message.now
        there = self._there.setdefault(now.model_id, {})
        if isinstance(message, InstanceSet):
            gone: Iterable[InstanceId] = there.keys() - {i.id for i in now.instances}
        else:
            gone = message.gone
        for id_ in gone:
            self._on_ended(id_, there.pop(id_, None), at_ns)
        for instance in now.instances:
            there[instance.id] = instance.event
            self._on_instance(instance, at_ns)

    def _on_instance(self, instance: Instance, at_ns: int) -> None:
        trail = self._trails.get(instance.event) if instance.event is not None else None
        if trail is None:
            return
        served = trail.served.get(instance.id)
        if served is None and len(trail.served) < SERVED:
            stages = tuple((stage.node, stage.start, stage.stop) for stage in instance.stages)
            served = Served(
                instance=instance.id, stages=stages, began_ns=at_ns, group=instance.group
            )
            trail.served[instance.id] = served
        moves = instance.state is InstanceState.MOVING
        if served is not None and moves and not served.moving_ns:
            trail.served[instance.id] = msgspec.structs.replace(served, moving_ns=at_ns)

    def _on_ended(self, id_: InstanceId, event: EventId | None, at_ns: int) -> None:
        trail = self._trails.get(event) if event is not None else None
        if trail is not None and (served := trail.served.get(id_)) is not None:
            trail.served[id_] = msgspec.structs.replace(served, ended_ns=at_ns)

    # --- numbers over time ---

    def count(self, name: ModelName, count: Count) -> None:
        """Keeps a count that says something new. Loads alone are not news more often than every
        COUNT_S."""
        counts = self._counts.setdefault(name, deque())
        if counts and not _is_news(counts[-1], count):
            return
        counts.append(count)
        share = max(COUNTS // len(self._counts), 1)
        while len(counts) > share:
            counts.popleft()

    def counts(self, name: ModelName, since_ns: int) -> tuple[Count, ...]:
        return _since(self._counts.get(name, ()), since_ns)

    def forget(self, name: ModelName, model: ModelId) -> None:
        """The model was removed. What its events did stays."""
        self._counts.pop(name, None)
        self._there.pop(model, None)

    def on_status(self, status: NodeStatus, at_ns: int) -> None:
        generation, drawn = self._drawn.get(status.node, (status.generation, status.tokens_out))
        if generation == status.generation:
            self._drawn_since += max(0, status.tokens_out - drawn)
        self._drawn[status.node] = (status.generation, status.tokens_out)
        seconds = (at_ns - self._rated_ns) / 1e9
        if seconds >= RATE_S:
            rate = self._drawn_since / seconds if self._rated_ns else 0.0
            self._rates.append(Rate(at_ns, round(rate, 1)))
            self._rated_ns, self._drawn_since = at_ns, 0

    def on_gone(self, node: NodeId) -> None:
        self._drawn.pop(node, None)

    def rates(self, since_ns: int) -> tuple[Rate, ...]:
        return _since(self._rates, since_ns)


def _is_news(last: Count, count: Count) -> bool:
    if _replicas(last) != _replicas(count):
        return True
    loads = (last.queued, last.running, last.wanted) != (count.queued, count.running, count.wanted)
    return loads and count.at_ns - last.at_ns >= COUNT_S * 1e9


def _replicas(count: Count) -> tuple[int, int, bool]:
    """How many more are wanted than there are is a load, which changes all the time."""
    return count.serving, count.granted, count.wanted > count.granted


def _since(items: Iterable[_Timed], since_ns: int) -> tuple[_Timed, ...]:
    return tuple(item for item in items if item.at_ns >= since_ns)
