"""Requests that may kill nodes.

    no suspect --its node died, or its engine failed--> suspect
    suspect    --it got past where that happened-------> no suspect
    suspect    --the same happens while it is tried----> refused (`RequestKillsNodes`)

When a node dies, one of the requests that ran there may be the reason, and nobody knows which: all
are suspects. Each goes on at once, but alone:

- It goes to an instance over whose nodes nothing runs, if there is one. If all are busy, it goes to
  an instance that runs requests already. In both cases the gateway and the nodes
  (`Submit.alone_until`) let nothing else begin there meanwhile, and no other suspect above all.
- So if that node dies too, at most one suspect was there. That suspect has killed two nodes. It is
  refused, also if its client asks again with the same Idempotency-Key. The requests beside it are
  suspects for the first time.
- A suspect is cleared when it has the tokens that the node may have come to before it died. That
  takes a prefill and a few steps. Then the next suspect has its turn.

What looks like a death may be a cut link or a paused process. That makes suspects too, since they
lose little by it. But a suspect is refused only if its node had said that it has the request, and

- the node says that its engine failed, or
- the bus says that the node's process is connected no longer. The gateway asks this itself
  (`AskWhetherAlive`), unless registry or planner have said that the node is gone.

A node that is found dead gets nothing more. Otherwise its one death would count twice.
"""

from collections.abc import Callable, Collection

from services.gateway.core.attempts import Attempts
from services.gateway.core.commands import AskWhetherAlive
from services.gateway.core.ledger import Ledger
from services.gateway.core.requests import Request
from services.gateway.core.routes import Route
from services.gateway.core.table import Table
from shared.errors import EngineFailed, LambdaScaleError, RequestKillsNodes
from shared.ids import NodeId

PAST = 3
"""A suspect is cleared this many tokens after the last one that its node may have sent before it
died: the node may have been a step ahead, and in the next one."""
MOST_UNHEARD = 16
"""The most tokens that a node is taken to have sent in vain."""
Requeue = Callable[[list[Request], str, str], None]
"""(requests, reason, detail): puts requests that were taken off their instances back to the head of
the queue."""


class Suspects:
    def __init__(self, table: Table, attempts: Attempts, ledger: Ledger, requeue: Requeue) -> None:
        self._table = table
        self._attempts = attempts
        self._ledger = ledger
        self._requeue = requeue

    def break_off(self, gone: Collection[Route], why: str, now: float) -> None:
        """Nodes of these routes may have died. Requests that were to move there stay where they
        are, and those that ran there are suspects."""
        for route in gone:
            for request in list(route.requests.values()):
                if request.instance != route.instance.id:
                    self._attempts.stay(route, request, why)
        for route in gone:
            for request in reversed(list(route.requests.values())):
                self.broke(request, route, "gone", LambdaScaleError(why), now)

    def broke(
        self, request: Request, route: Route, reason: str, error: LambdaScaleError, now: float
    ) -> None:
        """The request's attempt on `route` broke off: a node may have died, or its engine failed
        (EngineFailed: it says so itself)."""
        why = str(error)
        if request.move is not None:
            self._attempts.stay(self._table.routes[request.move.instance], request, why)
        # What killed the node before the request had come there is not known.
        tried = request.suspect and (request.begun or isinstance(error, EngineFailed))
        self._attempts.take_off(route, request, why, now)
        request.tried = tried
        failed = isinstance(error, EngineFailed)
        if request.tried and failed and request.surely:
            self._attempts.fail(request, _refusal(why))
            return
        if failed or not request.tried:  # else the answer says it
            request.surely = failed or reason == "gone"
        if not request.tried:
            request.cleared_at = request.due + PAST + _unheard(request, route, now)
        if request.tried or reason != "gone":
            self._ask(request, route)
        self._requeue([request], reason, why)

    def _ask(self, request: Request, route: Route) -> None:
        """Has the request wait until it is known which nodes of the route live. A dead one must not
        be taken for one that the request killed later."""
        request.in_doubt = True
        nodes = tuple(stage.node for stage in route.instance.stages)
        ask = AskWhetherAlive(
            request.id, request.attempt, nodes, request.tried, cause=self._ledger.cause
        )
        self._ledger.out.append(ask)

    def judged(self, request: Request, attempt: int, dead: Collection[NodeId]) -> bool:
        """`AskWhetherAlive` was answered. Returns whether the request has ended."""
        if not request.in_doubt or request.attempt != attempt:
            return False
        request.in_doubt = False
        guilty = request.tried and request.surely and bool(dead)
        if guilty:
            self._attempts.fail(request, _refusal(f"{', '.join(dead)} died"))
        request.surely = request.surely or bool(dead)
        return guilty

    def clear(self, request: Request) -> bool:
        """Clears a suspect that got past where its node died. Returns whether it did now."""
        if request.cleared_at is None or request.due < request.cleared_at:
            return False
        self._attempts.route(request).clear(request)
        self._ledger.tell(request, "cleared: it got past where its node died")
        return True


def _unheard(request: Request, route: Route, now: float) -> int:
    """How many tokens the node may have drawn since the last one that came from it, at its pace."""
    silent_s = now - request.progress_at
    return min(round(silent_s / route.token_s), MOST_UNHEARD) if route.token_s else 0


def _refusal(why: str) -> RequestKillsNodes:
    return RequestKillsNodes(
        f"two nodes failed while they ran the request, the second while the request was tried "
        f"alone ({why}): it is not tried again, so do not repeat it"
    )
