"""The breakers of one model's instances: what opens and closes them, and the record of it."""

from collections import Counter
from collections.abc import Mapping

from services.gateway.core import speed
from services.gateway.core.breaker import Cause, State, may_eject
from services.gateway.core.commands import Opened
from services.gateway.core.ledger import Ledger
from services.gateway.core.requests import Request
from services.gateway.core.routes import SMOOTHING, Route
from services.gateway.core.table import Table
from shared.ids import ModelName

WHY_CHARS = 200
"""The most that is told of a fault."""


class Breakers:
    def __init__(self, name: ModelName, table: Table, ledger: Ledger) -> None:
        self._name = name
        self._table = table
        self._ledger = ledger
        self._look_at = 0.0

    def states(self) -> Mapping[State, int]:
        """How many instances are in each state."""
        return Counter(route.breaker.state for route in self._table.routes.values())

    def refused(self, route: Route, request: Request, now: float) -> None:
        if route.breaker.refuse(request.id, now, suspect=request.suspect):
            self._opened(route, "")

    def failed(self, route: Route, request: Request, why: str, now: float) -> None:
        if route.breaker.fail(request.id, self._may_eject(route), now):
            self._opened(route, why)

    def accepted(self, route: Route, request: Request) -> bool:
        """The instance has said that it has the request. Returns whether it takes more now."""
        closed = route.breaker.accepted(request.id)
        if closed:
            self._closed(route)
        return closed

    def gave(self, route: Route, request: Request, now: float) -> None:
        """The instance gave a token of the request."""
        if route.breaker.gave(request.id, now):
            self._closed(route)

    def wrong(self, route: Route) -> None:
        """The instance answers wrong."""
        route.breaker.condemn()
        self._opened(route, "its answer to known tokens is not that of other replicas")

    def right(self, route: Route) -> None:
        """The instance answers as others do."""
        if route.breaker.wrong:
            route.breaker.close()
            self._closed(route)

    def look(self, now: float) -> None:
        """Compares the speeds of the instances. To be called often; it looks now and then."""
        if now < self._look_at:
            return
        self._look_at = now + speed.LOOK_S
        table = self._table
        usual, slow = speed.compare(table.routes.values(), table.decode_s, table.prefill_s)
        for route in table.routes.values():
            breaker = route.breaker
            if breaker.wrong:
                continue
            route.slow_looks = route.slow_looks + 1 if route in slow else 0
            if route.slow_looks >= speed.LOOKS:
                if breaker.state is not State.OPEN and self._may_eject(route):
                    breaker.slow(now)
                    times = speed.slowness(route, table.decode_s, table.prefill_s) / usual
                    self._opened(route, f"a token takes {times:.1f} times as long as usual")
                    route.forget_speed()
            elif breaker.trial and route.measured >= SMOOTHING and not route.slow_looks:
                breaker.close()
                self._closed(route)

    def _may_eject(self, one: Route) -> bool:
        return may_eject(one.breaker, [route.breaker for route in self._table.routes.values()])

    def _opened(self, route: Route, why: str) -> None:
        breaker, ledger = route.breaker, self._ledger
        ledger.out.append(Opened(self._name, breaker.cause.value, cause=ledger.cause))
        breaker.why = f"{breaker.cause.value}: {why}"[:WHY_CHARS]
        if breaker.cause is not Cause.REFUSED:
            pause = "left alone"
            if not breaker.wrong:
                pause += f" for {breaker.pause_s:g} s"
            self._tell(route, f"{route.instance.id} {breaker.cause.value}, {pause}: {why}")

    def _closed(self, route: Route) -> None:
        if route.breaker.cause is not Cause.REFUSED:
            self._tell(route, f"{route.instance.id} is well again")

    def _tell(self, route: Route, text: str) -> None:
        instance = route.instance
        nodes = (stage.node for stage in instance.stages)
        self._ledger.tell_about(text, instance.id, self._name, *nodes)
