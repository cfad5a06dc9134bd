"""The attempts of one model's requests: how each begins, takes over, is given up and ends.

Each step here changes three things together: the request, the routes that it runs on, and the
commands that tell nodes and clients.
"""

from services.gateway.core.commands import End, Resumed, Send
from services.gateway.core.fair_queue import FairQueue
from services.gateway.core.ledger import Ledger
from services.gateway.core.metering import Meter
from services.gateway.core.requests import Move, Request, State
from services.gateway.core.routes import Route
from services.gateway.core.table import Table
from shared.errors import LambdaScaleError, NotFound
from shared.ids import ModelName
from shared.messages.instances import Role, Stage
from shared.messages.serving import Submit


class Attempts:
    def __init__(
        self, name: ModelName, table: Table, queue: FairQueue[Request], ledger: Ledger
    ) -> None:
        self._name = name
        self._table = table
        self._queue = queue
        self._ledger = ledger
        self._out = ledger.out
        self._meter = Meter()

    def start(self, request: Request, route: Route, now: float, why: str = "") -> None:
        """`why`: what speaks for this instance, if it is not its load."""
        instance = route.instance
        request.submissions += 1
        request.attempt = request.submissions
        request.instance, request.alone = instance.id, False
        self._ledger.step(request, State.SUBMITTED, f"{instance.id} {why}".rstrip())
        request.progress_at = request.submitted_at = now
        request.asked_at = request.answered_at = None
        request.charge = request.work
        self._trace(request, route)
        request.prefill = len(request.prompt) + len(request.tokens)
        self._begin(route, request, request.charge, request.prefill)
        self.ask(route, request)

    def begin_move(
        self, request: Request, target: Route, now: float, *, with_kv: bool = False
    ) -> None:
        """`with_kv`: the target is not expected to compute the request's KV."""
        request.submissions += 1
        instance = target.instance
        prefill = 0 if with_kv else len(request.prompt) + len(request.tokens)
        move = Move(request.submissions, instance.id, request.work, prefill, now)
        self._ledger.step(request, State.MOVING, f"to {instance.id}")
        request.move = move
        self._begin(target, request, move.charge, move.prefill)
        self.ask(target, request)

    def take_over(self, source: Route, request: Request, reason: str, now: float) -> None:
        """Ends the attempt on `source`. The request goes on with the attempt of its move."""
        move = request.move
        assert move is not None
        self.withdraw(source, request)
        request.leave(source.nodes, source.beyond(request, now))
        self._end(source, request, request.charge, request.prefill)
        cause = self._ledger.cause
        self._out.append(Resumed(self._name, reason, f"to {move.instance}", cause=cause))
        request.move = None
        self._ledger.step(request, State.SUBMITTED, f"{reason}, on {move.instance}")
        request.attempt, request.instance, request.alone = move.attempt, move.instance, False
        request.charge, request.prefill = move.charge, move.prefill
        request.waiting_since += now - request.progress_at
        request.progress_at, request.submitted_at = now, move.since
        request.asked_at = request.answered_at = None
        self._trace(request, self._table.routes.get(move.instance))

    def settle(self, request: Request) -> Route:
        """The leader of the request's path runs it alone by now. So it counts where that serves as
        a replica, unless it moves elsewhere. Returns where it counts."""
        request.alone = True
        path = self.route(request)
        replica = self._table.replicas.get(path.instance.leader)
        if replica is None or replica is path or request.move is not None:
            return path
        self._end(path, request, request.charge, request.prefill)
        request.instance = replica.instance.id
        self._begin(replica, request, request.charge, request.prefill)
        return replica

    def stay(self, target: Route, request: Request, why: str) -> None:
        """Gives up the request's move. The request goes on where it is."""
        self._drop_move(target, request)
        self._ledger.step(request, State.STREAMING if request.has_token else State.SUBMITTED, why)

    def take_off(self, route: Route, request: Request, why: str, now: float) -> None:
        """Ends the attempt on its instance, so that the next one can begin."""
        request.waiting_since += now - request.progress_at
        self.withdraw(route, request)
        self._detach(route, request)
        self._ledger.step(request, State.QUEUED, why)

    def fail(self, request: Request, error: LambdaScaleError) -> None:
        self._out.append(End(request.id, error, cause=self._ledger.cause))
        self.close(request, State.FAILED, str(error))

    def close(self, request: Request, state: State, why: str) -> None:
        if request.move is not None:
            self._drop_move(self._table.routes[request.move.instance], request)
        if request.running:
            self._detach(self.route(request), request)
        self._queue.end(request, unused=request.unused)
        self._ledger.step(request, state, why)
        del self._ledger.requests[request.id]

    def withdraw(self, route: Route, request: Request) -> None:
        self._ledger.withdraw(route.instance.leader, request.id, request.attempt)

    def ask(self, route: Route, request: Request) -> None:
        """Sends the attempt on this route to its leader, for the first time or again."""
        submit = self._submit(request, route)
        self._out.append(Send(route.instance.leader, submit, cause=self._ledger.cause))

    def _submit(self, request: Request, route: Route) -> Submit:
        move, kv_from = request.move, tuple[Stage, ...]()
        if move is not None and move.instance != route.instance.id:
            move = None
        if move is not None:
            source = self.route(request).instance
            kv_from = source.stages if request.has_token or source.role is Role.PREFILL else ()
        gateway = self._ledger.gateway
        assert gateway is not None
        return Submit(
            cause=self._ledger.cause,
            trace=request.trace,
            request=request.id,
            attempt=move.attempt if move else request.attempt,
            takes_over=request.attempt if move else 0,
            kv_from=kv_from,
            gateway=gateway,
            model_id=request.model_id,
            instance=route.instance.id,
            stages=route.instance.stages,
            tokens=(*request.prompt, *request.tokens),
            prompt_tokens=len(request.prompt),
            max_tokens=request.max_tokens,
            stop_ids=request.stop_ids,
            sampling=request.sampling,
            rules=request.rules,
            adapter=request.adapter,
            image=request.image,
            score_from=request.score_from,
            pooling=request.pooling,
            alone_until=request.alone_until,
            opening=route.instance.opening,
        )

    def route(self, request: Request) -> Route:
        if request.instance is None:
            raise NotFound(f"request {request.id} is on no instance")
        return self._table.routes[request.instance]

    def route_of(self, request: Request, attempt: int) -> Route:
        """The route on which that attempt of the request runs."""
        if request.move is not None and attempt == request.move.attempt:
            return self._table.routes[request.move.instance]
        return self.route(request)

    def _begin(self, route: Route, request: Request, charge: int, prefill: int) -> None:
        route.begin(request, charge, prefill)
        self._meter.begin(route, request, self._ledger.now)

    def _end(self, route: Route, request: Request, charge: int, prefill: int) -> None:
        route.end(request, charge, prefill)
        self._meter.end(route, request, self._ledger.now)

    def _drop_move(self, target: Route, request: Request) -> None:
        move = request.move
        assert move is not None
        self._ledger.withdraw(target.instance.leader, request.id, move.attempt)
        self._end(target, request, move.charge, move.prefill)
        request.move = None

    def _detach(self, route: Route, request: Request) -> None:
        self._end(route, request, request.charge, request.prefill)
        request.charge = request.prefill = 0
        request.instance = None

    def _trace(self, request: Request, route: Route | None) -> None:
        if route is not None and route.instance.event is not None:
            request.traces[route.trace] = None
