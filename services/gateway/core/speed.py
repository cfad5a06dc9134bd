"""Which instances are slow, compared with their peers.

What a token took is divided by what it should have taken: less on a fast instance, more beside many
other requests. So the figures of instances with different speeds and loads can be compared, and
one is slow if its figure is more than `SLOW` times the median. Only replicas are compared. A path's
time depends on links, and on what its nodes do besides. Replicas that only prefill are not compared
either: the few tokens that they give come between long prompts.
"""

from collections.abc import Iterable
from statistics import median

from services.gateway.core.routes import SMOOTHING, Route
from shared.messages.instances import Role

SLOW = 2.0
PEERS = 3
"""Fewer than so many cannot be compared."""
LOOKS = 4
"""So many times in a row an instance has to be slow. One long prompt makes it that for a moment."""
LOOK_S = 0.5
"""Seconds between two looks."""


def slowness(route: Route, decode_s: float, row_s: float) -> float:
    """What a token takes there, by what it should take; any unit.

    `decode_s`, `row_s`: what a pass takes on an ordinary node, and each further row in it. 0: not
    known.
    """
    rows = len(route.requests) + route.others.requests
    expected = (decode_s + row_s * rows) or 1.0
    return route.token_s * route.instance.capacity / expected


def compare(routes: Iterable[Route], decode_s: float, row_s: float) -> tuple[float, list[Route]]:
    """The median of all that run something, and those that are slow. (0, []): too few to tell."""
    measured = [
        (slowness(route, decode_s, row_s), route)
        for route in routes
        if route.instance.is_replica
        and route.instance.role is not Role.PREFILL
        and route.requests
        and route.measured >= SMOOTHING
    ]
    if len(measured) < PEERS:
        return 0.0, []
    usual = median(value for value, _ in measured)
    return usual, [route for value, route in measured if value > SLOW * usual]
