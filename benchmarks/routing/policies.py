"""Other ways to choose an instance, which balancers have."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import inf

from services.gateway.core.requests import Request
from services.gateway.core.routes import Route
from services.gateway.core.routing import Draw, Routing, choose
from services.gateway.core.table import Table
from shared.ids import InstanceId

MANY_SLOTS = 1 << 30
Choose = Callable[[Table, Request, float, Draw], Route | None]
Length = Callable[[InstanceId], int]
"""How many requests an instance really has."""
PolicyOf = Callable[[Length], Routing]


@dataclass(frozen=True, slots=True)
class Policy:
    routing: PolicyOf
    slots: int = MANY_SLOTS
    """Requests that an instance is given at once. The others wait at their gateway, and go where a
    slot comes free first."""


def _routing(choice: Choose) -> Routing:
    return Routing(inf, inf, choice, affinity=False, by_due_date=False)


def two_choices(_: Length) -> Routing:
    """The gateway's own choice, with the reports of other gateways."""
    return _routing(choose)


def random(_: Length) -> Routing:
    def pick(table: Table, request: Request, now: float, draw: Draw) -> Route | None:
        return table.open[int(draw() * len(table.open))]

    return _routing(pick)


def round_robin(_: Length) -> Routing:
    turn = count()

    def pick(table: Table, request: Request, now: float, draw: Draw) -> Route | None:
        return table.open[next(turn) % len(table.open)]

    return _routing(pick)


def least_connections(_: Length) -> Routing:
    """The fewest requests of this gateway, per unit of capacity: what a balancer sees that knows of
    no other."""

    def pick(table: Table, request: Request, now: float, draw: Draw) -> Route | None:
        start = int(draw() * len(table.open))  # of equals any
        around = table.open[start:] + table.open[:start]
        return min(around, key=lambda r: (len(r.requests) + 1) / r.instance.capacity)

    return _routing(pick)


def join_shortest(length: Length) -> Routing:
    """The shortest queue of all, per unit of capacity, by what is true at this moment: no balancer
    can know it once there are several."""

    def pick(table: Table, request: Request, now: float, draw: Draw) -> Route | None:
        start = int(draw() * len(table.open))
        around = table.open[start:] + table.open[:start]
        return min(around, key=lambda r: (length(r.instance.id) + 1) / r.instance.capacity)

    return _routing(pick)


TWO = "two choices alone"
POLICIES = {
    "two choices and a queue (ours)": Policy(two_choices, slots=1),
    TWO: Policy(two_choices),
    "random": Policy(random),
    "round robin": Policy(round_robin),
    "least connections": Policy(least_connections),
    "shortest queue, all known": Policy(join_shortest),
}
