"""Requests whose attempt is over before they are: they go on with another attempt, wait again, or
fail."""

from collections.abc import Iterable

from services.gateway.core.attempts import Attempts
from services.gateway.core.breaker import pause
from services.gateway.core.checks import Checks
from services.gateway.core.commands import Resumed
from services.gateway.core.fair_queue import FairQueue
from services.gateway.core.ledger import Ledger, Rules
from services.gateway.core.requests import Request
from services.gateway.core.routes import Route
from shared.errors import LambdaScaleError
from shared.ids import ModelName


class Setbacks:
    def __init__(
        self,
        name: ModelName,
        queue: FairQueue[Request],
        attempts: Attempts,
        checks: Checks,
        ledger: Ledger,
        rules: Rules,
    ) -> None:
        self._name = name
        self._queue = queue
        self._attempts = attempts
        self._checks = checks
        self._ledger = ledger
        self._out = ledger.out
        self._max_attempts = rules.max_attempts

    def over(
        self, request: Request, attempt: int, route: Route, reason: str, detail: str, now: float
    ) -> None:
        """The attempt is over. If the request is moving, it goes on with its other attempt."""
        if attempt != request.attempt:
            shun(route, request, detail, now)
            self._attempts.stay(route, request, detail)
        elif request.move is not None:
            self._attempts.take_over(route, request, reason, now)
        else:
            self._put_back(route, request, reason, detail, now)

    def _put_back(
        self, route: Route, request: Request, reason: str, detail: str, now: float
    ) -> None:
        """Ends the attempt; the request keeps away from its instance for a while."""
        shun(route, request, detail, now)
        self._attempts.take_off(route, request, detail, now)
        self.requeue([request], reason, detail, last=request.suspect)

    def give_back(self, gone: Iterable[Route], detail: str, now: float) -> None:
        orphans = []
        for route in gone:
            for request in list(route.requests.values()):
                if request.instance != route.instance.id:
                    self._attempts.stay(route, request, detail)
                elif request.move is not None:
                    self._attempts.take_over(route, request, "gone", now)
                else:
                    request.leave(route.nodes, route.beyond(request, now))
                    self._attempts.take_off(route, request, detail, now)
                    orphans.append(request)
        self.requeue(orphans, "gone", detail)

    def requeue(
        self, requests: list[Request], reason: str, detail: str, *, last: bool = False
    ) -> None:
        """To the queue's head, in the order given; `last`: behind others that begin again."""
        for request in reversed(requests):
            if request.check:
                self._checks.broke(detail, died=reason == "gone" and request.failures > 0)
                self._attempts.fail(request, LambdaScaleError(detail))
            elif request.failures > self._max_attempts:
                message = f"the request failed {request.failures} times, at last: {detail}"
                self._attempts.fail(request, LambdaScaleError(message))
            else:
                self._out.append(Resumed(self._name, reason, detail, cause=self._ledger.cause))
                self._queue.put_back([request], last=last)


def shun(route: Route, request: Request, why: str, now: float) -> None:
    """The request keeps away from an instance that did not take it, longer each time. It does so
    for twice as long as others, so that they go first: the request may be too large for it."""
    before = 0 if request.suspect else request.refusals
    request.shunned[route.instance.id] = now + 2 * pause(before)
    request.refusals += 1
    request.refusal = why
