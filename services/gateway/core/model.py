"""The requests of one model: those that wait, and those that run on its instances.

Requests wait in the order of their tenants' shares (`fair_queue`), those of one tenant first-in
first-out, and a request that is resumed goes to the head of the queue. A
request lets others go first only while it keeps away from every instance that is free, because each
of them refused it. Whenever a slot may have come free, requests on moving instances get it first,
and then the queue.
"""

from collections.abc import Collection, Mapping, Sequence

from services.gateway.core import admission, affinity, routing, streams
from services.gateway.core.attempts import Attempts
from services.gateway.core.breaker import State as Health
from services.gateway.core.breakers import Breakers
from services.gateway.core.checks import Checks
from services.gateway.core.commands import Emit, Scored, Served
from services.gateway.core.demand import Demand
from services.gateway.core.fair_queue import FairQueue
from services.gateway.core.ledger import Ledger, Rules
from services.gateway.core.moves import Judged, Moves
from services.gateway.core.requests import Request, State
from services.gateway.core.routes import Route
from services.gateway.core.setbacks import Setbacks, shun
from services.gateway.core.suspects import Suspects
from services.gateway.core.table import Table
from services.gateway.core.turns import Turns
from shared.errors import (
    AdapterUnavailable,
    BadInput,
    CapacityExceeded,
    CutOff,
    LambdaScaleError,
    NoResponders,
    NotFound,
    NotReady,
    SourceLost,
    StaleEpoch,
)
from shared.ids import InstanceId, ModelId, ModelName, NodeId
from shared.messages.instances import InstanceSet
from shared.messages.serving import Scores, Token

REFUSALS = (CapacityExceeded, NotFound, StaleEpoch, NoResponders, CutOff)
"""Errors by which a node says that it does not take an attempt, or can no longer keep it, or that
say that the gateway is cut off. They do not count as failures of the request, which may try again
as often as its time allows."""

NO_FAULT = (BadInput, NotReady)
"""Errors that say nothing about the instance."""
KEPT_AT_0_S = 60.0
"""When to ask again for a model that its operator keeps at 0 instances."""
NO_VECTOR = "the node gives no vectors yet: it is of the release before"
SILENCE_S = 2.0
"""After this long without a token, an attempt's leader is asked for the first time whether it goes
on: the message with its last token may be lost, and no later token would show that."""


class Model:
    def __init__(self, name: ModelName, model_id: ModelId, rules: Rules, ledger: Ledger) -> None:
        self.name = name
        self.id = model_id
        self.listed = False
        """Whether the registry lists the model. If not, no request of it is begun."""
        self.checked = False
        """Whether its replicas can be checked."""
        most_ahead, ahead_s = rules.routing.prompts_ahead, rules.routing.ahead_s
        self.table = Table(most_ahead, lambda: ledger.others.of(name), ahead_s)
        self.queue: FairQueue[Request] = FairQueue()
        self.turns = Turns(self.table, self.queue, rules)
        self._rules = rules
        self._ledger = ledger
        self._out = ledger.out
        self._attempts = Attempts(name, self.table, self.queue, ledger)
        self._breakers = Breakers(name, self.table, ledger)
        self._checks = Checks(
            name, model_id, self.table, self._attempts, self._breakers, ledger, rules.check_s
        )
        self._setbacks = Setbacks(name, self.queue, self._attempts, self._checks, ledger, rules)
        self._suspects = Suspects(
            model_id, self.table, self._attempts, ledger, self._setbacks.requeue
        )
        self.demand = Demand(name, self.table, self.queue, self._suspects)
        self._moves = Moves(name, self.table, self._attempts, ledger, rules.draw)

    @property
    def over(self) -> bool:
        """Whether the model was removed, its requests have ended and its instances are gone."""
        return not (self.listed or self.queue or self.table.routes)

    # --- events --------------------------------------------------------------

    def ask(self, request: Request) -> None:
        """Takes in a new request."""
        self.demand.ask(request)
        self.queue.add(request, request.share, request.cost, self.turns.place(request))

    def make_room(self, requests: Sequence[Request], now: float) -> None:
        """Lets all of a call's requests into the queue, or none. If it is full, the last requests
        of tenants that have more than their share of it go. CapacityExceeded."""
        limit, share = self._rules.max_queue, requests[0].share
        excess = len(self.queue) + len(requests) - limit
        if excess <= 0:
            return
        gone = self.queue.make_room(share, len(requests), excess)
        if gone is None:
            raise admission.full(len(self.queue), limit, self.turns.turn_s(now))
        for request in gone:
            self._drop(request, admission.full(len(self.queue), limit, self.turns.turn_s(now)))

    def apply(self, new: InstanceSet, now: float) -> None:
        """Takes in a set. An instance on which requests run leaves the set of the same planner only
        if a node of it fails. Another planner may name instances otherwise."""
        same_planner = new.epoch == self.table.version[0]
        gone, why = self.table.apply(new), "left the set"
        if same_planner:
            self._suspects.break_off(gone, why, now)
        else:
            self._begin_anew(gone, why, now)
        self._suspects.seen(stage.node for each in new.instances for stage in each.stages)
        if self.table.version == (new.epoch, new.revision):
            self.turns.hear(new.coming, now)
        self._moves.tell(self.dispatch(now), new.trace)

    def hear_others(self, changed: Collection[InstanceId], now: float) -> None:
        """Other gateways have said what they have running on these instances."""
        if self.table.hear_others(changed):
            self.dispatch(now)

    def hear_explained(self, nodes: Collection[NodeId], now: float) -> None:
        """Another gateway has found out what killed these nodes."""
        if self._suspects.hear(nodes):
            self.dispatch(now)

    def node_gone(self, node: NodeId, now: float, graceful: bool) -> None:
        gone, why = self.table.drop_node(node), f"node {node} is gone"
        if not graceful:
            self._suspects.found_dead([node])
        if graceful:
            self._setbacks.give_back(gone, why, now)
        else:
            for route in gone:
                for request in route.runs():
                    request.failures += 1
            self._suspects.break_off(gone, why, now, [node])
        self.dispatch(now)

    def begin_again(self, why: str, now: float) -> None:
        """Ends every attempt. The requests go back to the queue, and to instances as those take
        them."""
        self._begin_anew(self.table.routes.values(), why, now)
        self.dispatch(now)

    def _begin_anew(self, routes: Collection[Route], why: str, now: float) -> None:
        """Ends every attempt on these routes, on which nodes may have died."""
        self._suspects.doubt(routes, why, now)
        self._setbacks.give_back(routes, why, now)

    def score(self, request: Request, scores: Scores, now: float) -> None:
        """Takes the log probabilities of the next tokens of the request's prompt."""
        if scores.attempt != request.attempt:
            self.taken(request, now)
        logprobs = scores.logprobs[request.due - scores.index : -scores.index]
        request.score_from += len(logprobs)
        self._suspects.clear(request)
        if request.check:
            self._checks.scored(logprobs)
            return
        self._out.append(Scored(request.id, logprobs, cause=self._ledger.cause))

    def accept(self, request: Request, token: Token, now: float) -> bool:
        """Takes the request's next token. Returns whether its instance has more room now."""
        if request.pooling and not token.vector:
            # No fault of the instance, which may go on with text.
            request.failures += 1
            route = self._attempts.route_of(request, token.attempt)
            self._setbacks.over(request, token.attempt, route, "refused", NO_VECTOR, now)
            return True
        if token.attempt != request.attempt:
            self.taken(request, now)
        route = self._attempts.route(request)
        first = not request.has_token
        if not first:
            route.measure(now - request.progress_at)
        if first and not route.served:
            route.served = True
            at, cause = request.submitted_at, self._ledger.cause
            self._out.append(Served(self.name, route.instance, route.trace, at, cause=cause))
        request.tokens.append(token.token)
        cleared = self._suspects.clear(request)
        request.progress_at = request.waiting_since = now
        request.asked_at = None
        self._breakers.gave(route, request, now)
        route.charge(request.remaining - request.charge)
        request.charge = request.remaining
        finish = streams.finish_of(request, token)
        said = Emit(
            request.id,
            token.token,
            finish,
            route.instance if first else None,
            token.logprobs,
            token.cached,
            token.vector,
            cause=self._ledger.cause,
        )
        self._out.append(said)
        if first or finish:
            affinity.learn(self.table, request, route)
        if token.alone:
            route = self._attempts.settle(request)
        if request.check:
            self._attempts.close(request, State.DONE, finish)
            self._checks.done(route, now)
            return True
        if finish:
            self.turns.pace.end(now - request.submitted_at)
            if not token.finish:
                self._attempts.withdraw(route, request)
            self._attempts.close(request, State.DONE, finish)
        elif first:
            route.prefill(-request.prefill)
            request.prefill = 0
            request.refusals = 0
            request.shunned.clear()
            if request.move is None:
                self._ledger.step(request, State.STREAMING, "first token")
        return first or cleared or bool(finish)

    def not_done(self, request: Request, attempt: int, error: LambdaScaleError, now: float) -> None:
        """The node refused the attempt, did not answer, or gave it up."""
        reason = "refused" if isinstance(error, (NotReady, *REFUSALS)) else "failed"
        if isinstance(error, NoResponders) and request.begun:
            reason = "gone"
        moves = attempt != request.attempt
        route = self._attempts.route_of(request, attempt)
        if request.check and reason == "failed":
            self._attempts.fail(request, error)
            self._checks.failed(route, error, now)
        elif isinstance(error, BadInput) and not moves:
            self._attempts.fail(request, error)
        elif isinstance(error, CutOff) and request.begun and not moves:
            self._cut_off(request, route, error, now)
        elif isinstance(error, AdapterUnavailable):
            # No fault of the instance, which may go on without it.
            request.failures += 1
            self._setbacks.over(request, attempt, route, "refused", str(error), now)
        elif reason != "refused" and not moves:
            self._breakers.failed(route, request, str(error), now)
            request.failures += 1
            shun(route, request, str(error), now)
            self._suspects.broke(request, route, reason, error, now)
        else:
            if isinstance(error, REFUSALS):
                self._breakers.refused(route, request, now)
            elif not isinstance(error, NO_FAULT):
                self._breakers.failed(route, request, str(error), now)
            self._setbacks.over(request, attempt, route, reason, str(error), now)
            if moves and isinstance(error, SourceLost):
                self._ask_again(request, now)

    def _cut_off(self, request: Request, route: Route, error: CutOff, now: float) -> None:
        """Its instance has the attempt, and could not be asked whether it goes on. It begins anew.
        A node may have died of it meanwhile, and nobody could say so."""
        if request.suspect:
            self._suspects.broke(request, route, "refused", error, now, doubted=True)
            return
        request.leave(route.nodes, route.beyond(request, now))
        self._setbacks.over(request, request.attempt, route, "refused", str(error), now)

    def lost(self, request: Request, attempt: int, detail: str, now: float) -> None:
        """A token of the attempt is missing."""
        route = self._attempts.route_of(request, attempt)
        self._breakers.failed(route, request, detail, now)
        request.failures += attempt == request.attempt
        self._setbacks.over(request, attempt, route, "lost", detail, now)

    def judged(self, request: Request, attempt: int, dead: Collection[NodeId], now: float) -> None:
        """The nodes of an attempt that broke off were asked whether they live."""
        if self._suspects.judged(request, attempt, dead):
            self.queue.remove(request)
        self.found_dead(dead, now)

    def found_dead(self, dead: Collection[NodeId], now: float) -> None:
        """These nodes have no process any more, and the others that were asked about have one."""
        self._suspects.found_dead(dead, asked=True)
        for node in dead:
            gone = self.table.drop_node(node)
            self._suspects.break_off(gone, f"node {node} is dead", now, [node])
        self.dispatch(now)

    def accepted(self, request: Request, attempt: int, now: float) -> None:
        """The instance has said that it has the attempt."""
        if self._breakers.accepted(self._attempts.route_of(request, attempt), request):
            self.dispatch(now)

    def taken(self, request: Request, now: float) -> None:
        """The instance that the request moves to has accepted it: the attempt before ends."""
        self._attempts.take_over(self._attempts.route(request), request, "moved", now)

    def leave(self, request: Request, state: State, why: str, now: float) -> None:
        """The gateway itself ends the request."""
        if request.running:
            route = self._attempts.route(request)
            if request.has_token:
                affinity.learn(self.table, request, route)
            self._attempts.withdraw(route, request)
        else:
            self.queue.remove(request)
        self._attempts.close(request, state, why)
        self.dispatch(now)

    def tick(self, now: float) -> None:
        patience = self._rules.queue_timeout_s
        for request in [r for r in self.queue if now - r.waiting_since >= patience]:
            message = f"no instance of model {self.name!r} took the request for {patience:g} s"
            said = f" (the last one said: {request.refusal})" if request.refusals else ""
            error = CapacityExceeded(f"{message}{said}: try again later", self.turns.turn_s(now))
            self._drop(request, error)
        self._breakers.look(now)
        self._suspects.forget(now)
        for route in self.table.routes.values():
            for request in route.runs():
                patience = self._rules.stall_s
                if request.asked_at is None:
                    patience = min(patience, SILENCE_S)
                if now - (request.asked_at or request.progress_at) >= patience:
                    self._ask_again(request, now)
        self._moves.relieve(now)
        self.dispatch(now)
        if self.checked and not self.queue:
            self._checks.look(now)

    def _ask_again(self, request: Request, now: float) -> None:
        """Asks the leader of the request's attempt whether it goes on."""
        request.asked_at = now
        self._attempts.ask(self._attempts.route(request), request)

    def dispatch(self, now: float) -> list[Judged]:
        """Gives out the slots that are free now: first to those that wait for their first token.
        Returns what was decided for requests whose instances are moving."""
        if error := self._closed():
            for waiting in list(self.queue):
                self._drop(waiting, error)
            return []
        judged = self._moves.begin(now, with_token=False)
        self._moves.share(now)
        self._moves.hand_over(now)
        while request := self.queue.next():
            route, why = self._choose(request, now)
            if route is not None:
                self.queue.start(request)
                self.turns.pace.start(now - request.waiting_since, now)
                self._attempts.start(request, route, now, why)
            elif self._keeps_away(request, now):
                self.queue.pass_over(request)
            else:
                break
        self.queue.restore()
        return judged + self._moves.begin(now, with_token=True)

    def _keeps_away(self, request: Request, now: float) -> bool:
        """Whether instances are free, and none of them for this request: the next one may begin."""
        shuns_all = request.suspect or not self.table.has_free(now, request.shunned)
        return shuns_all and self.table.has_free(now)

    def _choose(self, request: Request, now: float) -> tuple[Route | None, str]:
        """The route for a request, and why; None: it waits."""
        table, rules = self.table, self._rules.routing
        if request.suspect:
            if request.in_doubt:
                return None, ""
            return routing.secluded(table.routes.values(), now, request.shunned), ""
        if rules.affinity and (kept := affinity.prefer(table, request, now)):
            return kept.route, kept.why
        return rules.choose(table, request, now, self._rules.draw), ""

    def _drop(self, request: Request, error: LambdaScaleError) -> None:
        """A request that waits ends."""
        self.queue.remove(request)
        self._attempts.fail(request, error)

    def _closed(self) -> LambdaScaleError | None:
        """The error for requests that would wait in vain; None if waiting makes sense."""
        if not self.listed:
            return NotFound(f"model {self.name!r} was removed")
        if self.table.fixed == 0 and not self.table.routes:
            return CapacityExceeded(
                f"model {self.name!r} is kept at 0 instances by its operator, until `lambdascale "
                f"scale {self.name} --instances auto`",
                KEPT_AT_0_S,
            )
        return None

    def breakers(self) -> Mapping[Health, int]:
        """How many instances are in each state of health."""
        return self._breakers.states()
