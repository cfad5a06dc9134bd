"""What a process shows of itself at `/metrics`, in the text forms of Prometheus and OpenMetrics.

Values that the process keeps anyway are read when somebody asks (`watch`): they cost nothing until
then, and series of what is gone are gone. What happens in a moment is counted in that moment
(`counter`, `histogram`), and `forget` removes the series of what is gone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Metric,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.samples import Sample

from shared import telemetry
from shared.containment import is_containable

Kind = Literal["counter", "gauge", "histogram"]
Series = Iterable[tuple[tuple[str, ...], float]]
"""The values of a family, each with those of its labels."""
TOTAL = "_total"
"""What names of counters end with."""
_Read = Callable[[], Iterable[Metric]]
_log: structlog.stdlib.BoundLogger = telemetry.logger("metrics")


@dataclass(frozen=True, slots=True)
class Family:
    """What `/metrics` calls something, and what that means."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    text: str


class Metrics:
    """The families of one process. Names follow Prometheus' conventions: base units, and `_total`
    at the end of counters."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, which no tool needs
        self.pages = 0
        """How many pages were shown: within one, what is read need be looked at only once."""
        self.families: list[Family] = []
        self._readers: dict[str, _Read] = {}
        self._counted: list[tuple[Family, Counter | Histogram]] = []
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(name, text, labels, registry=None)
        self._count(Family(name, "counter", labels, text), made)
        return made

    def histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(name, text, labels, buckets=buckets, registry=None)
        self._count(Family(name, "histogram", labels, text), made)
        return made

    def watch(
        self, kind: Kind, name: str, text: str, *labels: str, read: Callable[[], Series]
    ) -> None:
        """A counter or gauge whose values `read` gives, on the process's event loop."""
        family = Family(name, kind, labels, text)
        self._add(family, lambda: _watched(family, read))

    def alias(self, name: str, of: str, labels: Mapping[str, str]) -> None:
        """Shows a family under a second name, with other names for its labels, for tools that
        expect these."""
        family = next(family for family in self.families if family.name == of)
        read = self._readers[of]
        renamed = tuple(labels.get(label, label) for label in family.labels)
        text = f"{family.text} (the same as `{of}`)"
        self._add(
            Family(name, family.kind, renamed, text),
            lambda: (_renamed(metric, of, name, labels) for metric in read()),
        )

    def include_process(self) -> None:
        """Processor time, memory, open files and start of the process, as Prometheus' own clients
        name them."""
        collector = ProcessCollector(registry=None)
        for metric in collector.collect():
            kind: Kind = "counter" if metric.type == "counter" else "gauge"
            name = metric.name + TOTAL if kind == "counter" else metric.name
            self.families.append(Family(name, kind, (), metric.documentation))
        self._readers["process"] = collector.collect

    def forget(self, **labels: str) -> None:
        """Removes the series of counters and histograms that have these values."""
        for family, metric in self._counted:
            if labels.keys() <= set(family.labels):
                metric.remove_by_labels(labels)

    def describe(self) -> Iterable[Metric]:
        """For the registry, which would otherwise read everything to learn the names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        self.pages += 1
        for read in self._readers.values():
            yield from read()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page, and its content type. `accept`: the header with what the reader understands.
        OpenMetrics has exemplars; Prometheus' own form has none."""
        # Names are legal as they are; the library's choice would change the colons of aliases.
        as_is = openmetrics.ALLOWUTF8
        if "application/openmetrics-text" in accept:
            page = openmetrics.generate_latest(self.registry, as_is)  # type: ignore[no-untyped-call]
            return page, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self.registry, as_is), CONTENT_TYPE_PLAIN_0_0_4

    def _count(self, family: Family, metric: Counter | Histogram) -> None:
        self._counted.append((family, metric))
        self._add(family, metric.collect)

    def _add(self, family: Family, read: _Read) -> None:
        assert family.name not in self._readers, f"{family.name} is there twice"
        self.families.append(family)
        self._readers[family.name] = read


def _watched(family: Family, read: Callable[[], Series]) -> Iterator[Metric]:
    """A family that cannot be read is logged and left empty: the others are shown all the same."""
    metric = Metric(family.name.removesuffix(TOTAL), family.text, family.kind)
    try:
        for values, value in read():
            metric.add_sample(family.name, dict(zip(family.labels, values, strict=True)), value)
    except Exception as error:  # the boundary of one family
        if not is_containable(error):
            raise
        _log.error("a metric cannot be read", metric=family.name, exc_info=error)
    yield metric


def _renamed(metric: Metric, old: str, new: str, labels: Mapping[str, str]) -> Metric:
    old, new = old.removesuffix(TOTAL), new.removesuffix(TOTAL)
    renamed = Metric(new, metric.documentation, metric.type)
    for sample in metric.samples:
        given = {labels.get(label, label): value for label, value in sample.labels.items()}
        name = new + sample.name.removeprefix(old)
        renamed.samples.append(Sample(name, given, sample.value, None, sample.exemplar))
    return renamed
