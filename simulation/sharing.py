"""How lanes share ports: strict priorities, and max-min fairness among equals.

A lane is a stream of bytes between two nodes at one priority. It takes its rate from every port on
its way. Lanes of the best (lowest) priority share the ports as if they were alone, lanes of the
next priority share the rest, and so on. Among equals, no lane could get more unless a lane that has
no more than it got less (max-min; progressive filling: Bertsekas and Gallager, Data Networks,
section 6.5.2).
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_NOTHING = 1e-12
"""If less than this share of a port's rate is left, it is a rounding error."""


@dataclass(slots=True, eq=False)
class Port:
    name: str
    rate: float
    """Bytes/s."""
    lanes: dict["Lane", None] = field(default_factory=dict)
    """The lanes that have something to send, as an ordered set."""


class Lane:
    __slots__ = ("is_open", "ports", "priority", "rate")

    def __init__(self, ports: tuple[Port, ...], priority: int) -> None:
        """`ports`: the ports on the lane's way, each once."""
        self.ports = ports
        self.priority = priority
        self.rate = 0.0
        """Bytes/s; 0 unless open."""
        self.is_open = False
        """Whether it has something to send."""

    def open(self) -> None:
        self.is_open = True
        for port in self.ports:
            port.lanes[self] = None

    def close(self) -> None:
        self.is_open = False
        for port in self.ports:
            del port.lanes[self]
        self.set_rate(0.0)

    def set_rate(self, rate: float) -> None:
        self.rate = rate


def reshare(changed: Mapping[Port, float]) -> dict[Lane, float]:
    """The new rates of all lanes that a change may affect. No other rate changes.

    `changed`: the ports whose rate or lanes changed, with the best priority that the change
    concerns. Lanes of better priorities keep their rates: they never notice worse ones.
    """
    rates: dict[Lane, float] = {}
    seen: set[Port] = set()
    for port, priority in sorted(changed.items(), key=lambda item: item[1]):
        if port not in seen:
            lanes, left = _affected(port, priority, seen)
            for each in sorted({lane.priority for lane in lanes}):
                _fill([lane for lane in lanes if lane.priority == each], left, rates)
    return rates


def _affected(
    start: Port, priority: float, seen: set[Port]
) -> tuple[list[Lane], dict[Port, float]]:
    """The lanes of this priority or worse that share ports with one another, directly or not, and
    what better lanes leave of these ports."""
    lanes: dict[Lane, None] = {}
    left: dict[Port, float] = {}
    ports = [start]
    seen.add(start)
    while ports:
        port = ports.pop()
        rest = port.rate
        for lane in port.lanes:
            if lane.priority < priority:
                rest -= lane.rate
            elif lane not in lanes:
                lanes[lane] = None
                ports.extend(other for other in lane.ports if other not in seen)
                seen.update(lane.ports)
        left[port] = _rest(rest, port)
    return list(lanes), left


def _fill(lanes: Iterable[Lane], left: dict[Port, float], rates: dict[Lane, float]) -> None:
    """Shares `left` among lanes of one priority, and subtracts what they get.

    The port that can give each of its lanes the least sets their rate. That only increases the
    shares at other ports, so a heap of shares that may be outdated finds the next such port.
    """
    waiting: dict[Port, dict[Lane, None]] = {}
    for lane in lanes:
        for port in lane.ports:
            waiting.setdefault(port, {})[lane] = None
    heap = [
        (left[port] / len(users), index, port)
        for index, (port, users) in enumerate(waiting.items())
    ]
    heapq.heapify(heap)
    while heap:
        known, index, port = heapq.heappop(heap)
        users = waiting[port]
        if not users:
            continue
        current = left[port] / len(users)
        if current > known:
            heapq.heappush(heap, (current, index, port))
            continue
        for lane in list(users):
            rates[lane] = current
            for other in lane.ports:
                del waiting[other][lane]
                left[other] = _rest(left[other] - current, other)


def _rest(left: float, port: Port) -> float:
    return left if left > port.rate * _NOTHING else 0.0
