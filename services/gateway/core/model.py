"""The requests of one model: those that wait, and those that run on its instances.

Requests wait first-in first-out; one that is resumed goes to the head; only one that was refused
by whoever is free lets others go first. Whenever a slot may have
come free, requests on moving instances get it first, then the queue.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean

from services.gateway.core import routing, streams
from services.gateway.core.commands import (
    Command,
    Emit,
    End,
    Resumed,
    Scored,
    Send,
    Served,
    Switched,
    Withdraw,
)
from services.gateway.core.requests import NEXT, Move, Request, State
from services.gateway.core.routing import Route, Table
from shared.errors import (
    BadInput,
    CapacityExceeded,
    LambdaScaleError,
    NoResponders,
    NotFound,
    NotReady,
    StaleEpoch,
)
from shared.ids import GatewayId, ModelId, ModelName, NodeId, RequestId
from shared.messages.instances import InstanceSet, InstanceState
from shared.messages.load import ModelLoad
from shared.messages.serving import Cancel, Scores, Submit, Token
from shared.story import Story

REFUSALS = (CapacityExceeded, NotFound, StaleEpoch, NoResponders)
"""The node did not take the attempt (or could not keep it for want of room): no failure of the
request's, which may try as often as its time allows."""

SILENCE_S = 2.0
"""An attempt that gives no token for so long is asked about the first time: the message with its
last token may be lost, which no later one would show."""


@dataclass(frozen=True, slots=True)
class Rules:
    gateway: GatewayId
    draw: Callable[[], float]
    """Uniform numbers in [0, 1)."""
    max_queue: int
    """Requests of one model that may wait."""
    queue_timeout_s: float
    stall_s: float
    """After this long without a token, the leader is asked whether the attempt is alive. It may
    wait for room there; and a lost last token leaves no gap that would show the loss."""
    max_attempts: int
    """Failures that a request survives."""


@dataclass(slots=True)
class Ledger:
    """What the models of a gateway share."""

    requests: dict[RequestId, Request] = field(default_factory=dict)
    """All that have not ended."""
    out: list[Command] = field(default_factory=list)
    """Commands of the event that is being handled."""
    story: Story = field(default_factory=Story)
    """Of the requests."""
    cause: str = ""
    """The id of the event that is being handled, and when it happened."""
    now: float = 0.0

    def step(self, request: Request, state: State, why: str) -> None:
        """The request's next state, by its table."""
        if state not in NEXT[request.state]:
            before = request.state.value
            raise self.story.illegal(request.id, f"{before} -> {state.value} ({why})")
        request.state = state
        subjects = (request.id, request.model_id, *([request.instance] if request.instance else []))
        text = f"{state.value} (attempt {request.attempt}): {why}"
        self.story.tell(self.now, self.cause, text, *subjects)


@dataclass(frozen=True, slots=True)
class _Judged:
    """A request whose instance moves."""

    request: Request
    source: Route
    costs: routing.Switch | None
    """None: not measured yet, or it has no KV yet."""
    stays: bool


class Model:
    def __init__(self, name: ModelName, model_id: ModelId, rules: Rules, ledger: Ledger) -> None:
        self.name = name
        self.id = model_id
        self.listed = False
        """The registry has it. Otherwise nothing is begun for it."""
        self.table = Table()
        self.queue: deque[Request] = deque()
        self._reported = 0
        """Requests that waited when its load was last told."""
        self._rules = rules
        self._ledger = ledger
        self._out = ledger.out

    @property
    def over(self) -> bool:
        """It was removed, its requests have ended and its instances are gone."""
        return not (self.listed or self.queue or self.table.routes)

    # --- events --------------------------------------------------------------

    def apply(self, new: InstanceSet, now: float) -> None:
        self._give_back(self.table.apply(new), "left the set", now)
        self._tell(self._move(now), new.trace)
        self.dispatch(now)

    def node_gone(self, node: NodeId, now: float, graceful: bool) -> None:
        gone = self.table.drop_node(node)
        for route in () if graceful else gone:
            for request in route.runs():
                request.failures += 1
        self._give_back(gone, f"node {node} is gone", now)
        self.dispatch(now)

    def score(self, request: Request, scores: Scores, now: float) -> None:
        """Takes the log probabilities of the next tokens of the request's prompt."""
        if scores.attempt != request.attempt:
            self.taken(request, now)
        request.score_from += len(scores.logprobs)
        self._out.append(Scored(request.id, scores.logprobs))

    def accept(self, request: Request, token: Token, now: float) -> bool:
        """Takes the request's next token; says whether its instance has more room now."""
        if token.attempt != request.attempt:
            self.taken(request, now)
        route = self._route(request)
        first = not request.has_token
        if not first:
            route.measure(now - request.progress_at)
        if first and not route.served:
            route.served = True
            self._out.append(Served(self.name, route.instance, route.trace, request.submitted_at))
        request.tokens.append(token.token)
        request.progress_at = request.waiting_since = now
        request.asked_at = None
        route.refusals = request.refusals = 0
        if request.shunned:
            request.shunned.clear()
        route.charge(request.remaining - request.charge)
        request.charge = request.remaining
        finish = streams.finish_of(request, token)
        self._out.append(Emit(request.id, token.token, finish, first, token.logprobs, token.cached))
        if finish:
            if not token.finish:
                self._withdraw(route, request)
            self._close(request, State.DONE, finish)
        elif first:
            route.prefill(-request.prefill)
            request.prefill = 0
            if request.move is None:
                self._ledger.step(request, State.STREAMING, "first token")
        return first or bool(finish)

    def not_done(self, request: Request, attempt: int, error: LambdaScaleError, now: float) -> None:
        """The node refused the attempt, did not answer, or gave it up."""
        reason = "refused" if isinstance(error, (NotReady, *REFUSALS)) else "failed"
        if isinstance(error, BadInput) and attempt == request.attempt:
            self._fail(request, error)
        elif reason == "failed":
            self.lost(request, attempt, reason, str(error), now)
        else:
            route = self._route_of(request, attempt)
            if not isinstance(error, NotReady):
                route.avoid(now)
            self._over(request, attempt, route, reason, str(error), now)

    def lost(self, request: Request, attempt: int, reason: str, detail: str, now: float) -> None:
        route = self._route_of(request, attempt)
        route.avoid(now)
        request.failures += attempt == request.attempt
        self._over(request, attempt, route, reason, detail, now)

    def taken(self, request: Request, now: float) -> None:
        """Where the request moves to has it: the attempt before is withdrawn."""
        self._take_over(self._route(request), request, "moved", now)

    def _over(
        self, request: Request, attempt: int, route: Route, reason: str, detail: str, now: float
    ) -> None:
        """The attempt is; the request goes on with its other one, if it has one."""
        if attempt != request.attempt:
            self._stay(route, request, detail)
        elif request.move is not None:
            self._take_over(route, request, reason, now)
        else:
            self._put_back(route, request, reason, detail, now)

    def leave(self, request: Request, state: State, why: str, now: float) -> None:
        """The gateway itself ends the request."""
        if request.running:
            self._withdraw(self._route(request), request)
        else:
            self.queue.remove(request)
        self._close(request, state, why)
        self.dispatch(now)

    def tick(self, now: float) -> None:
        patience = self._rules.queue_timeout_s
        for request in [r for r in self.queue if now - r.waiting_since >= patience]:
            self.queue.remove(request)
            message = f"no instance of model {self.name!r} took the request for {patience:g} s"
            said = f" (the last one said: {request.refusal})" if request.refusals else ""
            self._fail(request, CapacityExceeded(f"{message}{said}: try again later"))
        for route in self.table.routes.values():
            for request in route.runs():
                patience = self._rules.stall_s
                if request.asked_at is None:
                    patience = min(patience, SILENCE_S)
                if now - (request.asked_at or request.progress_at) >= patience:
                    request.asked_at = now
                    self._out.append(Send(route.instance.leader, self._submit(request, route)))
        self.dispatch(now)

    def dispatch(self, now: float) -> None:
        """Gives out the slots that are free now."""
        if error := self._closed():
            while self.queue:
                self._fail(self.queue.popleft(), error)
            return
        self._move(now)
        draw = self._rules.draw
        routes = self.table.routes.values()
        position = 0
        while position < len(self.queue) and any(route.takes(now) for route in routes):
            request = self.queue[position]
            route = routing.choose(routes, now, draw(), draw(), request.shunned)
            if route is None:
                position += 1  # whoever takes some took not this one: the next may go first
                continue
            del self.queue[position]
            self._start(request, route, now)

    def _closed(self) -> LambdaScaleError | None:
        """Why waiting is of no use."""
        if not self.listed:
            return NotFound(f"model {self.name!r} was removed")
        if self.table.fixed == 0 and not self.table.routes:
            return CapacityExceeded(
                f"model {self.name!r} is kept at 0 instances by its operator, until `lambdascale "
                f"scale {self.name} --instances auto`"
            )
        return None

    @property
    def pressing(self) -> bool:
        """Whether requests began to wait since the load was last told, or as many more wait as an
        instance takes."""
        grown = len(self.queue) - self._reported
        return grown > 0 and (self._reported == 0 or grown >= self.table.instance_slots)

    def load(self) -> ModelLoad:
        self._reported = len(self.queue)
        routes = self.table.routes
        running = [request for route in routes.values() for request in route.runs()]
        submitted = (request for request in running if not request.has_token)
        return ModelLoad(
            model=self.name,
            queued_requests=len(self.queue),
            queued_tokens=sum(request.work for request in self.queue),
            running_requests=len(running),
            running_tokens=sum(request.charge for request in running),
            prompt_tokens=sum(
                len(request.prompt) + len(request.tokens)
                for request in chain(self.queue, submitted)
            ),
            instance_requests={key: len(route.requests) for key, route in routes.items()},
        )

    # --- attempts ------------------------------------------------------------

    def _move(self, now: float) -> list[_Judged]:
        """Resumes elsewhere what is worth moving, as far as there is room.

        What finds no room goes on where it is: that is better for it than to wait.
        """
        judged: list[_Judged] = []
        routes = self.table.routes.values()
        moving = [
            (request, route)
            for route in routes
            if _is_moving(route)
            for request in route.runs()
            if request.move is None
        ]
        for request, source in sorted(moving, key=lambda pair: _turn(pair[0])):
            target = routing.refuge(routes, now)
            if target is None:
                break
            costs = None
            if request.has_token:
                context = len(request.prompt) + len(request.tokens)
                costs = routing.switch(
                    self.table, source, target, remaining=request.remaining, context=context
                )
            stays = costs is not None and costs.stays
            judged.append(_Judged(request, source, costs, stays))
            if not stays:
                self._begin_move(request, target, now)
        return judged

    def _begin_move(self, request: Request, target: Route, now: float) -> None:
        request.submissions += 1
        instance = target.instance
        prefill = len(request.prompt) + len(request.tokens)
        move = Move(request.submissions, instance.id, request.work, prefill, now)
        self._ledger.step(request, State.MOVING, f"to {instance.id}")
        request.move = move
        target.begin(request, move.charge, move.prefill)
        self._out.append(Send(instance.leader, self._submit(request, target)))

    def _take_over(self, source: Route, request: Request, reason: str, now: float) -> None:
        """The attempt of its move is the request's from now on."""
        move = request.move
        assert move is not None
        self._withdraw(source, request)
        source.end(request, request.charge, request.prefill)
        self._out.append(Resumed(self.name, reason, f"to {move.instance}"))
        request.move = None
        self._ledger.step(request, State.SUBMITTED, f"{reason}, on {move.instance}")
        request.attempt, request.instance = move.attempt, move.instance
        request.charge, request.prefill = move.charge, move.prefill
        request.waiting_since += now - request.progress_at
        request.progress_at, request.submitted_at, request.asked_at = now, move.since, None
        self._trace(request, self.table.routes.get(move.instance))

    def _stay(self, target: Route, request: Request, why: str) -> None:
        """The move comes to nothing: the request goes on where it is."""
        self._drop_move(target, request)
        self._ledger.step(request, State.STREAMING if request.has_token else State.SUBMITTED, why)

    def _drop_move(self, target: Route, request: Request) -> None:
        move = request.move
        assert move is not None
        cancel = Cancel(request=request.id, attempt=move.attempt)
        self._out.append(Withdraw(target.instance.leader, cancel))
        target.end(request, move.charge, move.prefill)
        request.move = None

    def _trace(self, request: Request, route: Route | None) -> None:
        if route is not None and route.instance.event is not None:
            request.traces[route.trace] = None

    def _tell(self, judged: list[_Judged], trace: str) -> None:
        """Of requests that moved, and the first time of those that all stay."""
        if all(each.stays and each.source.told for each in judged):
            return
        for each in judged:
            each.source.told = True
        moved = [each for each in judged if not each.stays]
        stayed = [each for each in judged if each.stays]
        left = sum(
            request.move is None
            for route in self.table.routes.values()
            if _is_moving(route)
            for request in route.runs()
        )
        switched = Switched(
            name=self.name,
            trace=trace,
            moved=tuple(each.request.id for each in moved),
            stayed=len(stayed),
            waiting=left - len(stayed),
            sources=tuple(dict.fromkeys(each.source.instance.id for each in judged)),
            moved_costs=_mean(moved),
            stayed_costs=_mean(stayed),
        )
        self._out.append(switched)

    def _start(self, request: Request, route: Route, now: float) -> None:
        instance = route.instance
        request.submissions += 1
        request.attempt = request.submissions
        request.instance = instance.id
        self._ledger.step(request, State.SUBMITTED, instance.id)
        request.progress_at = request.submitted_at = now
        request.asked_at = None
        request.charge = request.work
        self._trace(request, route)
        request.prefill = len(request.prompt) + len(request.tokens)
        route.begin(request, request.charge, request.prefill)
        self._out.append(Send(instance.leader, self._submit(request, route)))

    def _submit(self, request: Request, route: Route) -> Submit:
        """The request's attempt on this instance."""
        move = request.move
        moves = move is not None and move.instance == route.instance.id
        return Submit(
            cause=self._ledger.cause,
            request=request.id,
            attempt=move.attempt if move is not None and moves else request.attempt,
            gateway=self._rules.gateway,
            model_id=request.model_id,
            instance=route.instance.id,
            stages=route.instance.stages,
            tokens=(*request.prompt, *request.tokens),
            prompt_tokens=len(request.prompt),
            max_tokens=request.max_tokens,
            stop_ids=request.stop_ids,
            sampling=request.sampling,
            rules=request.rules,
            image=request.image,
            score_from=request.score_from,
        )

    def _put_back(
        self, route: Route, request: Request, reason: str, detail: str, now: float
    ) -> None:
        """Ends the attempt; the request keeps away from its instance for a while."""
        request.shunned[route.instance.id] = now + 2 * routing.pause(request.refusals)
        request.refusals += 1
        request.refusal = detail
        self._take_off(route, request, detail, now)
        self._requeue([request], reason, detail)

    def _give_back(self, gone: Iterable[Route], detail: str, now: float) -> None:
        orphans = []
        for route in gone:
            for request in list(route.requests.values()):
                if request.instance != route.instance.id:
                    self._stay(route, request, detail)
                elif request.move is not None:
                    self._take_over(route, request, "gone", now)
                else:
                    self._take_off(route, request, detail, now)
                    orphans.append(request)
        self._requeue(orphans, "gone", detail)

    def _requeue(self, requests: list[Request], reason: str, detail: str) -> None:
        """To the queue's head, in the order given."""
        for request in reversed(requests):
            if request.failures > self._rules.max_attempts:
                message = f"the request failed {request.failures} times, at last: {detail}"
                self._fail(request, LambdaScaleError(message))
            else:
                self._out.append(Resumed(self.name, reason, detail))
                self.queue.appendleft(request)

    def _take_off(self, route: Route, request: Request, why: str, now: float) -> None:
        """Ends the attempt on its instance, so that the next one can begin."""
        request.waiting_since += now - request.progress_at
        self._withdraw(route, request)
        self._detach(route, request)
        self._ledger.step(request, State.QUEUED, why)

    def _withdraw(self, route: Route, request: Request) -> None:
        cause = self._ledger.cause
        cancel = Cancel(request=request.id, attempt=request.attempt, cause=cause)
        self._out.append(Withdraw(route.instance.leader, cancel))

    def _detach(self, route: Route, request: Request) -> None:
        route.end(request, request.charge, request.prefill)
        request.charge = request.prefill = 0
        request.instance = None

    def _fail(self, request: Request, error: LambdaScaleError) -> None:
        self._out.append(End(request.id, error))
        self._close(request, State.FAILED, str(error))

    def _close(self, request: Request, state: State, why: str) -> None:
        if request.move is not None:
            self._drop_move(self.table.routes[request.move.instance], request)
        if request.running:
            self._detach(self._route(request), request)
        self._ledger.step(request, state, why)
        del self._ledger.requests[request.id]

    def _route(self, request: Request) -> Route:
        if request.instance is None:
            raise NotFound(f"request {request.id} is on no instance")
        return self.table.routes[request.instance]

    def _route_of(self, request: Request, attempt: int) -> Route:
        """Where that attempt of the request runs."""
        if request.move is not None and attempt == request.move.attempt:
            return self.table.routes[request.move.instance]
        return self._route(request)


def _mean(judged: list[_Judged]) -> routing.Switch | None:
    costs = [each.costs for each in judged if each.costs is not None]
    if not costs:
        return None
    return routing.Switch(fmean(c.stay_s for c in costs), fmean(c.move_s for c in costs))


def _turn(request: Request) -> tuple[bool, int, int]:
    """Who moves first: requests that wait for their first token, and then those with the least KV
    to compute anew and the most tokens to come."""
    context = len(request.prompt) + len(request.tokens)
    return request.has_token, context, -request.remaining


def _is_moving(route: Route) -> bool:
    return route.instance.state is InstanceState.MOVING
