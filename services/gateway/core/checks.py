"""Checks of a model's replicas while they are idle: each is asked for the log probabilities of a
few known tokens (`shared.known_tokens`). One that answers otherwise than the others (`agreement`)
gets no requests until it answers as they do, and its node is told. Whether the node ends is the
node's to decide.

A check is a request like others, but no client waits for it, it is never queued or tried again, and
it does not count as load. It goes to a replica on which nothing runs. One is under way at a time in
each model of a gateway. If one breaks off, the model is checked no more: its tokens may be what
kills nodes.
"""

from math import inf

from services.gateway.core.agreement import Agreement, Verdict
from services.gateway.core.attempts import Attempts
from services.gateway.core.breakers import Breakers
from services.gateway.core.commands import Checked
from services.gateway.core.ledger import Ledger
from services.gateway.core.requests import Request
from services.gateway.core.routes import Route
from services.gateway.core.table import Table
from shared.errors import LambdaScaleError, ModelError
from shared.ids import ModelId, ModelName, NodeId, RequestId
from shared.known_tokens import TOKENS
from shared.messages.serving import Logprobs, Sampling

AGAIN_S = 1.0
"""When a replica that answered otherwise is asked again, and when idle ones are looked for anew."""
APART_S = 60.0
"""At most one node is taken out in so long. Should the others be at fault, some are left."""


class Checks:
    def __init__(
        self,
        name: ModelName,
        model_id: ModelId,
        table: Table,
        attempts: Attempts,
        breakers: Breakers,
        ledger: Ledger,
        every_s: float,
    ) -> None:
        """`every_s`: how often each replica is checked by any gateway. 0: never."""
        self._name = name
        self._model_id = model_id
        self._table = table
        self._attempts = attempts
        self._breakers = breakers
        self._ledger = ledger
        self._every_s = every_s or inf
        self._agreement = Agreement()
        self._next_at = 0.0
        self._asked: dict[NodeId, int] = {}
        """The number of the last check of each node."""
        self._number = 0
        self._running: Request | None = None
        self._answer: list[float] = []
        self._out_at = -inf
        """When a node was last taken out."""

    def look(self, now: float) -> None:
        """Begins a check if it is time, and a replica is idle. To be called often, while no request
        waits."""
        if self._running is not None or now < self._next_at or self._every_s == inf:
            return
        replicas = [route for route in self._table.replicas.values() if route.served]
        idle = [
            route for route in replicas if route.idle and (route.takes(now) or route.breaker.wrong)
        ]
        if (len(replicas) < 2 and self._agreement.known is None) or not idle:
            self._next_at = now + AGAIN_S
            return
        route = min(idle, key=self._turn)
        others = self._ledger.others.count
        self._next_at = now + self._every_s * (1 + others) / len(replicas)
        self._begin(route, now)

    def _turn(self, route: Route) -> tuple[bool, int]:
        """Doubtful ones go first, and then those that were asked longest ago."""
        node = route.instance.leader
        return node not in self._agreement.doubts, self._asked.get(node, 0)

    def _begin(self, route: Route, now: float) -> None:
        self._number += 1
        self._asked = {
            node: number for node, number in self._asked.items() if node in self._table.replicas
        }
        self._asked[route.instance.leader] = self._number
        self._running = request = Request(
            id=RequestId(f"check-{self._ledger.gateway}-{self._name}-{self._number}"),
            model_id=self._model_id,
            prompt=TOKENS,
            max_tokens=1,
            stop_ids=(),
            sampling=Sampling(logprobs=0),
            waiting_since=now,
            score_from=1,
            check=True,
        )
        self._answer = []
        self._ledger.requests[request.id] = request
        self._attempts.start(request, route, now, "to check it")

    def scored(self, logprobs: tuple[Logprobs, ...]) -> None:
        self._answer += (each.drawn for each in logprobs)

    def done(self, route: Route, now: float) -> None:
        """The check that runs has its answer."""
        self._running = None
        node = route.instance.leader
        verdict = self._agreement.hear(node, tuple(self._answer))
        if self._agreement.doubts:
            self._next_at = now + AGAIN_S
        if verdict in (Verdict.OTHER, Verdict.WRONG):
            self._tell(route, "its answer to known tokens is not that of other replicas")
        elif verdict is Verdict.ALIKE:
            self._breakers.right(route)
        if verdict is Verdict.WRONG:
            if now < self._out_at + APART_S:
                self._next_at = self._out_at + APART_S
                return
            self._agreement.forget(node)
            self._out_at = now
            self._breakers.wrong(route)
        command = Checked(self._name, node, verdict.value, cause=self._ledger.cause)
        self._ledger.out.append(command)

    def failed(self, route: Route, error: LambdaScaleError, now: float) -> None:
        """The check that runs failed. ModelError: the model's answer is no number."""
        if isinstance(error, ModelError):
            self._answer = []
            self.done(route, now)
        else:
            self.broke(str(error), died=True)

    def broke(self, why: str, died: bool) -> None:
        """The check that runs was refused, or broke off. `died`: perhaps because its node did."""
        self._running = None
        if died:
            self._every_s = inf
        stops = "; there are no more" if died else ""
        self._ledger.tell_about(f"a check broke off: {why}{stops}", self._name)

    def _tell(self, route: Route, text: str) -> None:
        instance = route.instance
        about = (instance.id, instance.leader, self._name)
        self._ledger.tell_about(f"{instance.id} on {instance.leader}: {text}", *about)
