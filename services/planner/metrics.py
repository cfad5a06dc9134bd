"""What the planner shows at `/metrics`: replicas and what is wanted of them, and scaling events. A
planner that stands by shows none of it."""

from collections import Counter
from collections.abc import Callable

from services.planner.core.census import Census, wanted_nodes
from services.planner.core.events import TERMINAL
from services.planner.core.planner import Planner
from shared import telemetry
from shared.messages.pool import Duty
from shared.messages.scaling import EventRecord
from shared.metrics import Metrics, Series

_TIMES = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
_P = "lambdascale_planner"


class PlannerMetrics:
    def __init__(self, metrics: Metrics, planner: Callable[[], Planner | None]) -> None:
        """`planner`: once this process is the active one."""
        self._planner = planner
        self._metrics = metrics
        self._found: tuple[Census, ...] = ()
        self._page = 0
        """The page that it was found for."""
        metrics.watch(
            "gauge", f"{_P}_nodes", "Nodes that the planner knows, by what they may be used for",
            "duty", read=self._nodes,
        )  # fmt: skip
        metrics.watch(
            "gauge", f"{_P}_wanted_nodes",
            "Nodes like those that are there that would hold every replica that is wanted",
            read=self._wanted_nodes,
        )  # fmt: skip
        self._of_models(
            "wanted_replicas",
            "Replicas that a model's load fills, or its floor, whatever room there is",
            lambda model: model.wanted,
        )
        self._of_models(
            "complete_replicas",
            "Complete replicas of a model that take requests",
            lambda model: model.complete,
        )
        self._of_models(
            "loading_replicas",
            "Nodes that load a model, and may serve with others meanwhile",
            lambda model: model.loading,
        )
        self._of_models(
            "waits_for_room",
            "Whether a model wants more replicas and finds no room for them",
            lambda model: model.waits,
        )
        self._of_models(
            "running_events", "Scaling events of a model that run", lambda model: model.scaling
        )
        self._events = metrics.counter(
            f"{_P}_events_total", "Scaling events, by how they ended", "model", "end"
        )
        self._bytes = metrics.counter(
            f"{_P}_event_bytes_total", "Bytes that scaling events have moved", "model"
        )
        self._first = metrics.histogram(
            f"{_P}_event_first_token_seconds",
            "From the decision to the first token from a node that was still loading",
            "model", buckets=_TIMES,
        )  # fmt: skip
        self._whole = metrics.histogram(
            f"{_P}_event_seconds", "From the decision until every replica is complete",
            "model", buckets=_TIMES,
        )  # fmt: skip

    def event_changed(self, record: EventRecord) -> None:
        """Counts it once it is over."""
        if record.state not in TERMINAL:
            return
        model, actual = record.name, record.actual
        self._events.labels(model, record.state.value).inc()
        self._bytes.labels(model).inc(record.bytes_moved)
        trace = telemetry.exemplar(record.trace)
        if actual.first_partial_token_s is not None:
            self._first.labels(model).observe(actual.first_partial_token_s, trace)
        if actual.all_complete_s is not None:
            self._whole.labels(model).observe(actual.all_complete_s, trace)

    def _of_models(self, name: str, text: str, value: Callable[[Census], float]) -> None:
        def read() -> Series:
            return [((model.model,), value(model)) for model in self._census()]

        self._metrics.watch("gauge", f"{_P}_{name}", text, "model", read=read)

    def _nodes(self) -> Series:
        if (planner := self._planner()) is None:
            return []
        found = Counter(info.duty for info in planner.nodes)
        return [((duty.value,), found[duty]) for duty in Duty]

    def _wanted_nodes(self) -> Series:
        if (planner := self._planner()) is None:
            return []
        rooms = [info.arena_bytes for info in planner.nodes]
        return [((), wanted_nodes(self._census(), rooms))]

    def _census(self) -> tuple[Census, ...]:
        """Looks once for each page, and forgets models that are gone."""
        if self._page != self._metrics.pages:
            before = {model.model for model in self._found}
            self._page = self._metrics.pages
            self._found = planner.census() if (planner := self._planner()) else ()
            for gone in before - {model.model for model in self._found}:
                self._metrics.forget(model=gone)
        return self._found
