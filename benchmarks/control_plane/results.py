"""What the control plane was measured to cost, as a document, a table and bars."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

START_S = 30.0
CORES = 0.3
EVENT_CPU_S = 0.5
SET_BYTES = 2_000_000
ROUTE_US = 50.0
AT_NODES = 1000
"""The number of nodes for which the bars are."""
PLANNER, REGISTRY, GATEWAY = "planner", "registry", "gateway"
ROLES = (PLANNER, REGISTRY, GATEWAY)


@dataclass(frozen=True, slots=True)
class Settings:
    nodes: tuple[int, ...]
    models: int
    gateways: int
    window_s: float
    """Virtual seconds of steady load that are measured."""


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What a service had in some time."""

    cpu: dict[str, float]
    """Processor seconds, by what they were spent on: the name of a task."""
    messages: int
    """Messages that it received."""
    nbytes: int

    @property
    def cpu_s(self) -> float:
        return sum(self.cpu.values())

    def since(self, before: "Spent", times: float = 1.0) -> "Spent":
        """What it had without `times` what it had before."""
        cpu = {what: s - times * before.cpu.get(what, 0.0) for what, s in self.cpu.items()}
        cpu |= {what: -times * s for what, s in before.cpu.items() if what not in cpu}
        return Spent(
            cpu=cpu,
            messages=round(self.messages - times * before.messages),
            nbytes=round(self.nbytes - times * before.nbytes),
        )

    def and_(self, other: "Spent") -> "Spent":
        return self.since(other, -1.0)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured with so many nodes. Services are named by their roles."""

    nodes: int
    start_s: float
    """Virtual seconds from the start of planner and registry until the planner knows all."""
    start: dict[str, Spent]
    steady_s: float
    steady: dict[str, Spent]
    after: dict[str, Spent]
    """The same for as long once the event is over."""
    event_s: float
    """Virtual seconds until one node's model was on all of them."""
    event: dict[str, Spent]
    """What it took beside the steady load, which is taken to be the mean of what it was before and
    after it. Whatever slows the machine down for a moment is in one of them and not in the
    others."""
    event_set_bytes: int
    """Instance sets to each gateway."""
    route_us: float
    """Microseconds in which a gateway admits a request and gives it to one of as many instances."""

    @property
    def started_s(self) -> float:
        """Seconds until all is known, if planner and registry compute one after the other."""
        return self.start_s + self.start[PLANNER].cpu_s + self.start[REGISTRY].cpu_s

    def cores(self, role: str) -> float:
        return self.steady[role].cpu_s / self.steady_s


@dataclass(frozen=True, slots=True)
class Bar:
    what: str
    met: bool

    def __str__(self) -> str:
        return f"{'met    ' if self.met else 'NOT MET'}  {self.what}"


def document(settings: Settings, rows: Iterable[Row]) -> dict[str, object]:
    return {
        "models": settings.models,
        "gateways": settings.gateways,
        "rows": [msgspec.to_builtins(row) for row in rows],
    }


def table(rows: Iterable[Row]) -> Iterator[str]:
    yield (
        "nodes   start  | steady: planner  registry  gateway |  event  planner  registry   sets to"
        " a | route"
    )
    yield (
        "            s  |           cores     cores    cores |      s    cpu s     cpu s  gateway,"
        " MB |    us"
    )
    for row in rows:
        yield (
            f"{row.nodes:5}  {row.started_s:6.2f}  | {row.cores(PLANNER):15.3f}  "
            f"{row.cores(REGISTRY):8.3f}  {row.cores(GATEWAY):7.3f} | {row.event_s:6.1f}  "
            f"{row.event[PLANNER].cpu_s:7.2f}  {row.event[REGISTRY].cpu_s:8.2f}  "
            f"{row.event_set_bytes / 1e6:10.2f} | {row.route_us:5.0f}"
        )


def bars(rows: Iterable[Row]) -> list[Bar]:
    """The bars, which are for 1,000 nodes."""
    return [bar for row in rows if row.nodes == AT_NODES for bar in _bars(row)]


def _bars(row: Row) -> Iterator[Bar]:
    yield Bar(f"start <= {START_S:g} s: {row.started_s:.2f} s", row.started_s <= START_S)
    for role in (PLANNER, REGISTRY):
        cores = row.cores(role)
        yield Bar(f"{role} <= {CORES:g} core under steady load: {cores:.3f}", cores <= CORES)
    cpu_s = row.event[PLANNER].cpu_s
    yield Bar(f"event <= {EVENT_CPU_S:g} s of the planner: {cpu_s:.2f} s", cpu_s <= EVENT_CPU_S)
    nbytes = row.event_set_bytes
    yield Bar(
        f"event <= {SET_BYTES / 1e6:g} MB a gateway: {nbytes / 1e6:.2f} MB", nbytes <= SET_BYTES
    )
    yield Bar(
        f"admission and routing <= {ROUTE_US:g} us: {row.route_us:.0f} us", row.route_us <= ROUTE_US
    )
