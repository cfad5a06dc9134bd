"""How lanes share ports: flows by their parts, and within a flow strict priorities.

A lane is a stream of bytes between two nodes, of one flow and at one priority. It takes its rate
from every port on its way. A flow is what one model, or the KV of all requests, moves: priorities
are steps of its plan and mean nothing beside another flow's. Real ports have the same rule, with
the same parts (`services/node/transport/pacing.py`). Lanes of a priority below 0 (messages) bypass
all others.

Of one flow alone, lanes of the best (lowest) priority share the ports as if they were alone, lanes
of the next priority share the rest, and so on. Among equals, no lane could get more unless a lane
that has no more than it got less (max-min; progressive filling: Bertsekas and Gallager, Data
Networks, section 6.5.2). Where several flows meet, they grow at each port until it is full, at
speeds like their parts. Only a flow's best lanes at a port grow there; once they are held up
elsewhere, its next lanes do.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.node.transport.pacing import parts

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
    __slots__ = ("flow", "is_open", "ports", "priority", "rate")

    def __init__(self, ports: tuple[Port, ...], priority: int, flow: str = "") -> None:
        """`ports`: the ports on the lane's way, each once."""
        self.ports = ports
        self.priority = priority
        self.flow = flow
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
    concerns. Lanes of better priorities keep their rates: they never notice worse ones of their
    flow. So while several flows have open lanes, a change of any of them is to be given as of
    priority 0.
    """
    rates: dict[Lane, float] = {}
    ordered = sorted(changed.items(), key=lambda item: item[1])
    starts = {port: max(priority, 0.0) for port, priority in ordered}
    seen: set[Port] = set()
    for port, priority in ordered:
        if priority < 0 and port not in seen:
            lanes, left = _affected(port, priority, 0.0, rates)
            seen |= left.keys()
            starts |= dict.fromkeys(left, 0.0)
            _fill_by_priority(lanes, left, rates)
    seen.clear()
    for port, priority in sorted(starts.items(), key=lambda item: item[1]):
        if port not in seen:
            lanes, left = _affected(port, priority, math.inf, rates)
            seen |= left.keys()
            several = len({lane.flow for lane in lanes}) > 1
            (_fill_by_flow if several else _fill_by_priority)(lanes, left, rates)
    return rates


def _affected(
    start: Port, first: float, end: float, rates: Mapping[Lane, float]
) -> tuple[list[Lane], dict[Port, float]]:
    """The lanes of priorities from `first` up to `end` that share ports with one another, directly
    or not, and what better lanes leave of these ports. `rates`: those that are new."""
    lanes: dict[Lane, None] = {}
    left: dict[Port, float] = {}
    ports, seen = [start], {start}
    while ports:
        port = ports.pop()
        rest = port.rate
        for lane in port.lanes:
            if lane.priority < first:
                rest -= rates.get(lane, lane.rate)
            elif lane.priority < end and lane not in lanes:
                lanes[lane] = None
                ports.extend(other for other in lane.ports if other not in seen)
                seen.update(lane.ports)
        left[port] = _rest(rest, port)
    return list(lanes), left


def _fill_by_priority(
    lanes: Iterable[Lane], left: dict[Port, float], rates: dict[Lane, float]
) -> None:
    for each in sorted({lane.priority for lane in lanes}):
        _fill([lane for lane in lanes if lane.priority == each], left, rates)


def _fill_by_flow(lanes: Iterable[Lane], left: dict[Port, float], rates: dict[Lane, float]) -> None:
    """Shares `left` among lanes of several flows, and subtracts what they get.

    In each round the lanes grow that have no better lane of their flow at any port on their way. A
    flow's speed is its parts, however many lanes it has at a port: each of them grows at the speed
    that it has where most share it. The first port that is full ends the round, and its lanes grow
    no further.
    """
    waiting = sorted(lanes, key=lambda lane: lane.priority)
    rates |= dict.fromkeys(waiting, 0.0)
    while waiting:
        growing, users = _growing(waiting)
        speeds: dict[Port, float] = {}
        for lane in growing:
            most = max(users[port, lane.flow] for port in lane.ports)
            growing[lane] = speed = parts(lane.flow) / most
            for port in lane.ports:
                speeds[port] = speeds.get(port, 0.0) + speed
        full = min(speeds, key=lambda port: left[port] / speeds[port])
        grown = left[full] / speeds[full]
        for port, speed in speeds.items():
            left[port] = _rest(left[port] - grown * speed, port) if port is not full else 0.0
        for lane, speed in growing.items():
            rates[lane] += grown * speed
        waiting = [lane for lane in waiting if all(left[port] for port in lane.ports)]


def _growing(waiting: Iterable[Lane]) -> tuple[dict[Lane, float], Counter[tuple[Port, str]]]:
    """Of these lanes, the best first, those that have no better one of their flow at any port; and
    how many of them each flow has at each port."""
    best: dict[tuple[Port, str], int] = {}
    users = Counter[tuple[Port, str]]()
    growing: dict[Lane, float] = {}
    for lane in waiting:
        keys = [(port, lane.flow) for port in lane.ports]
        firsts = [best.setdefault(key, lane.priority) for key in keys]  # it counts at every port
        if all(first == lane.priority for first in firsts):
            growing[lane] = 0.0
            users.update(keys)
    return growing, users


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
