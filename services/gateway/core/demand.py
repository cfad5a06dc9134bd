"""What a gateway reports of a model's requests."""

from itertools import chain

from services.gateway.core.fair_queue import FairQueue
from services.gateway.core.requests import Request
from services.gateway.core.suspects import Suspects
from services.gateway.core.table import Table
from shared.ids import ModelName
from shared.messages.load import ModelLoad


class Demand:
    def __init__(
        self, name: ModelName, table: Table, queue: FairQueue[Request], suspects: Suspects
    ) -> None:
        self._name = name
        self._table = table
        self._queue = queue
        self._suspects = suspects
        self._asked_requests = self._asked_tokens = 0
        """Requests that were submitted so far, and tokens of their prompts."""
        self._reported = 0
        """How many requests waited when the load was last reported."""

    def ask(self, request: Request) -> None:
        self._asked_requests += 1
        self._asked_tokens += len(request.prompt)

    @property
    def pressing(self) -> bool:
        """Whether the load should be reported at once: since the last report requests began to
        wait, or as many more wait as an instance takes."""
        grown = len(self._queue) - self._reported
        return grown > 0 and (self._reported == 0 or grown >= self._table.instance_slots)

    def load(self, zero_ns: int) -> ModelLoad:
        """`zero_ns`: what the wall clock showed at time 0."""
        self._reported = len(self._queue)
        routes = self._table.routes
        running = [r for route in routes.values() for r in route.runs() if not r.check]
        submitted = [request for request in running if not request.has_token]
        waiting = (request.waiting_since for request in self._queue or submitted)
        oldest = min(waiting, default=None)
        return ModelLoad(
            model=self._name,
            queued_requests=len(self._queue),
            queued_tokens=sum(request.work for request in self._queue),
            running_requests=len(running),
            running_tokens=sum(request.charge for request in running),
            prompt_tokens=sum(
                len(request.prompt) + len(request.tokens)
                for request in chain(self._queue, submitted)
            ),
            waiting_since_ns=0 if oldest is None else zero_ns + round(oldest * 1e9),
            asked_requests=self._asked_requests,
            asked_tokens=self._asked_tokens,
            instance_requests={
                key: count
                for key, route in routes.items()
                if (count := sum(not request.check for request in route.requests.values()))
            },
            kept_out={
                key: route.breaker.why for key, route in routes.items() if route.breaker.faulty
            },
            explained=self._suspects.explained,
        )
