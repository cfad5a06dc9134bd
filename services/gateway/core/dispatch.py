"""All requests of one gateway: events in, commands out.

Its methods are the events: requests are admitted, instance sets and tokens arrive, attempts are
refused or fail, nodes go, clients leave, time passes. Each returns commands for the shell, in
order.

A bug in the handling of one model harms no other model. If an error comes out of a model's state,
its requests end, and its state is made anew from its newest instances.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar, TypeVarTuple

from services.gateway.core import streams, validation
from services.gateway.core.breaker import State as Health
from services.gateway.core.commands import Broken, Command, End, TellOfGone
from services.gateway.core.ledger import Ledger, Rules
from services.gateway.core.model import Model
from services.gateway.core.others import Changed, Others
from services.gateway.core.pressure import Pressure, pressure
from services.gateway.core.requests import Request, State
from services.gateway.core.streams import Verdict
from shared.errors import BusTimeout, IllegalTransition, LambdaScaleError, NotFound, from_code
from shared.ids import GatewayId, ModelId, ModelName, NodeId, RequestId
from shared.messages.changes import whole_set
from shared.messages.instances import Coming, Instance, InstanceChange, InstanceSet
from shared.messages.load import GatewayLoad, ModelLoad
from shared.messages.serving import AttemptFailed, Scores, Token, Tokens
from shared.story import Transition

T = TypeVar("T")
Given = TypeVarTuple("Given")
BROKEN = "the gateway failed; its log says why"


class Dispatch:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._ledger = Ledger(Others())
        self._models: dict[ModelId, Model] = {}
        self._sets: dict[ModelId, InstanceSet] = {}
        """The newest instance set of each model."""
        self._kv_used: dict[NodeId, float] = {}
        """See `Tokens.kv_used`: what each node said last."""

    def story(self, subject: str) -> tuple[Transition, ...]:
        """The last steps of a request, or of the requests of a call, a model or an instance, with
        their causes."""
        return self._ledger.story.of(subject)

    def validate(self) -> None:
        """For tests. IllegalTransition names the parts of the state that contradict each other."""
        found = list(validation.faults(self._models.values(), self._ledger))
        if found:
            raise IllegalTransition("; ".join(found))

    def _begin(self, cause: str, now: float) -> None:
        """Begins to handle the event with the id `cause`."""
        self._ledger.cause, self._ledger.now = cause, now

    def take_id(self, gateway: GatewayId, now: float) -> list[Command]:
        """This gateway has this id from now on. Nothing that comes for an earlier one counts: what
        runs is submitted again."""
        earlier = self._ledger.gateway
        self._ledger.gateway = gateway
        self._ledger.others.is_own(gateway)
        if earlier:
            self._begin(gateway, now)
            for model in list(self._models.values()):
                self._guard(model, now, model.begin_again, f"{earlier} is now {gateway}", now)
        return self._flush()

    # --- what is there -------------------------------------------------------

    def add_model(self, name: ModelName, model_id: ModelId, checked: bool = False) -> None:
        """`checked`: whether its replicas can be checked (`checks`)."""
        model = self._model(name, model_id)
        model.listed, model.checked = True, checked

    def remove_model(self, model_id: ModelId, now: float) -> list[Command]:
        """Ends the requests that wait. Those that run go on as long as their instances do."""
        self._begin(model_id, now)
        if model := self._models.get(model_id):
            model.listed = False
            self._guard(model, now, model.dispatch, now)
        return self._flush()

    def on_instances(self, new: InstanceSet, now: float) -> list[Command]:
        self._begin(new.cause or f"instances {new.epoch}.{new.revision}", now)
        known = self._sets.get(new.model_id)
        if known is None or (new.epoch, new.revision) >= (known.epoch, known.revision):
            self._sets[new.model_id] = new
        model = self._model(new.name, new.model_id)
        self._guard(model, now, model.apply, new, now)
        return self._flush()

    def after(self, change: InstanceChange) -> InstanceSet | None:
        """The set after a change. None: an earlier change was missed."""
        return whole_set(self._sets.get(change.now.model_id), change)

    def on_node_gone(self, node: NodeId, now: float, graceful: bool = False) -> list[Command]:
        self._begin(node, now)
        self._kv_used.pop(node, None)
        for model in list(self._models.values()):
            self._guard(model, now, model.node_gone, node, now, graceful)
        return self._flush()

    # --- requests ------------------------------------------------------------

    def admit(self, requests: Sequence[Request], now: float) -> list[Command]:
        """Takes new requests of one model, all or none. NotFound if the model is not served,
        CapacityExceeded if too many would wait."""
        model = self._models.get(requests[0].model_id)
        if model is None or not model.listed:
            raise NotFound(f"model {requests[0].model_id} is not served here")
        model.turns.check_in_time(requests, now)
        self._begin(requests[0].call or requests[0].id, now)
        model.make_room(requests, now)
        for request in requests:
            self._ledger.requests[request.id] = request
            model.ask(request)
        self._guard(model, now, model.dispatch, now)
        return self._flush()

    def coming(self, model_id: ModelId, now: float) -> tuple[Coming | None, bool]:
        """What the model's scaling event brings, and whether an instance serves already."""
        model = self._models.get(model_id)
        return (model.turns.coming(now), model.table.slots > 0) if model else (None, False)

    def pressing(self, model_id: ModelId) -> bool:
        """Whether the model's load should be reported at once."""
        model = self._models.get(model_id)
        return model is not None and model.demand.pressing

    def finish(self, request_id: RequestId, now: float) -> list[Command]:
        """Ends a request whose text met a stop string. Its attempt is withdrawn."""
        return self._leave(request_id, State.DONE, "stop string", now)

    def cancel(self, request_id: RequestId, now: float) -> list[Command]:
        return self._leave(request_id, State.CANCELLED, "the client left", now)

    def _leave(self, request_id: RequestId, state: State, why: str, now: float) -> list[Command]:
        """The gateway itself ends a request. Unknown and ended requests are ignored."""
        self._begin(request_id, now)
        if request := self._ledger.requests.get(request_id):
            model = self._models[request.model_id]
            self._guard(model, now, model.leave, request, state, why, now)
        return self._flush()

    # --- what nodes say ------------------------------------------------------

    def on_tokens(self, message: Tokens, now: float) -> list[Command]:
        freed: dict[ModelId, None] = {}
        late: dict[tuple[RequestId, int], None] = {}
        requests = self._ledger.requests
        self._kv_used[message.node] = message.kv_used
        for model_id, positions in message.kv_free.items():
            known = self._models.get(model_id)
            if known and known.table.hear_kv(message.node, positions, now) and known.queue:
                freed[model_id] = None
        pieces: tuple[Scores | Token, ...] = (*message.scores, *message.tokens)
        for piece in pieces:
            self._begin(piece.request, now)
            request = requests.get(piece.request)
            verdict = streams.judge(request, piece) if request else Verdict.STALE
            if request is None or verdict is Verdict.STALE:
                late[piece.request, piece.attempt] = None
            elif verdict is Verdict.NEXT:
                model = self._models[request.model_id]
                if isinstance(piece, Scores):
                    self._guard(model, now, model.score, request, piece, now)
                elif self._guard(model, now, model.accept, request, piece, now):
                    freed[model.id] = None
            elif verdict is Verdict.GAP:
                model = self._models[request.model_id]
                freed[model.id] = None
                missing = f"token {piece.index} came where {request.due} was due"
                attempt = piece.attempt
                self._guard(model, now, model.lost, request, attempt, missing, now)
        for failure in message.failed:
            self._on_failed(failure, now, freed)
        # A node that still works on an attempt which is over did not get its withdrawal.
        for request_id, attempt in late:
            self._begin("late", now)
            self._ledger.withdraw(message.node, request_id, attempt)
        for model_id in freed:
            model = self._models[model_id]
            self._guard(model, now, model.dispatch, now)
        return self._flush()

    def _on_failed(self, failure: AttemptFailed, now: float, freed: dict[ModelId, None]) -> None:
        self._begin(failure.request, now)
        request = self._ledger.requests.get(failure.request)
        if request and request.speaks(failure.attempt):
            model = self._models[request.model_id]
            freed[model.id] = None
            error = from_code(failure.code, failure.message)
            self._guard(model, now, model.not_done, request, failure.attempt, error, now)

    def on_not_taken(
        self, request_id: RequestId, attempt: int, error: LambdaScaleError, now: float
    ) -> list[Command]:
        """A Send was answered with an error, or not at all (BusTimeout).

        It changes nothing if a token of the attempt came after it, which says more, or if the
        attempt is over: its instance may have gone while the answer was waited for. Nor does
        silence to a Send if a later one was answered.
        """
        self._begin(request_id, now)
        request = self._ledger.requests.get(request_id)
        if request is None or not request.speaks(attempt):
            return []
        moves = request.attempt != attempt
        if not moves and request.answered and isinstance(error, BusTimeout):
            return []
        if moves or not request.has_token or request.asked_at is not None:
            model = self._models[request.model_id]
            self._guard(model, now, model.not_done, request, attempt, error, now)
            self._guard(model, now, model.dispatch, now)
        return self._flush()

    def on_taken(self, request_id: RequestId, attempt: int, now: float) -> list[Command]:
        """A Send was answered with Ok."""
        self._begin(request_id, now)
        request = self._ledger.requests.get(request_id)
        if request is None:
            return []
        if request.speaks(attempt):
            model = self._models[request.model_id]
            self._guard(model, now, model.accepted, request, attempt, now)
        if request.attempt == attempt:
            request.answered_at = now
            model = self._models[request.model_id]
            if model.table.prefilling:
                self._guard(model, now, model.dispatch, now)
        elif request.move and request.move.attempt == attempt:
            model = self._models[request.model_id]
            self._guard(model, now, model.taken, request, now)
            self._guard(model, now, model.dispatch, now)
        return self._flush()

    def on_judged(
        self, request_id: RequestId, attempt: int, dead: Collection[NodeId], now: float
    ) -> list[Command]:
        """AskWhetherAlive was answered: `dead` are the nodes that have no process any more."""
        self._begin(request_id, now)
        if request := self._ledger.requests.get(request_id):
            model = self._models[request.model_id]
            self._guard(model, now, model.judged, request, attempt, dead, now)
        return self._flush()

    def on_found_dead(
        self, model_id: ModelId, dead: Collection[NodeId], now: float
    ) -> list[Command]:
        """AskWhoDied was answered: `dead` are the nodes that have no process any more."""
        self._begin("found dead", now)
        if model := self._models.get(model_id):
            self._guard(model, now, model.found_dead, dead, now)
        return self._flush()

    # --- time and load -------------------------------------------------------

    def on_load(self, load: GatewayLoad, now: float) -> list[Command]:
        """A gateway says what it has running. This gateway's own reports change nothing."""
        self._begin(load.gateway, now)
        self._hear_others(self._ledger.others.hear(load, now), now)
        for each in load.models:
            for model in list(self._models.values()) if each.explained else ():
                if model.name == each.model:
                    self._guard(model, now, model.hear_explained, each.explained, now)
        return self._flush()

    def _hear_others(self, changed: Changed, now: float) -> None:
        for model in list(self._models.values()) if changed else ():
            if instances := changed.get(model.name):
                self._guard(model, now, model.hear_others, instances, now)

    def on_tick(self, now: float) -> list[Command]:
        """Looks for requests that waited too long, and for instances that may be tried again. To be
        called every few 10 ms while there are requests."""
        self._begin("time", now)
        for gateway in self._ledger.others.silent(now):
            self._hear_others(self._ledger.others.forget(gateway), now)
            self._ledger.out.append(TellOfGone(gateway, cause=self._ledger.cause))
        for model in list(self._models.values()):
            self._guard(model, now, model.tick, now)
            if model.over:
                del self._models[model.id]
                self._sets.pop(model.id, None)
        return self._flush()

    def loads(self, zero_ns: int) -> tuple[ModelLoad, ...]:
        """`zero_ns`: what the wall clock showed at time 0."""
        return tuple(model.demand.load(zero_ns) for model in self._models.values() if model.listed)

    def instances(self) -> Iterator[tuple[ModelName, Instance, int]]:
        """Every instance, with its model and the requests that run there, of all gateways."""
        for model in self._models.values():
            for route in model.table.routes.values():
                running = len(route.requests) + route.others.requests
                yield model.name, route.instance, running

    def pressure(self) -> Pressure:
        routes = (route for model in self._models.values() for route in model.table.routes.values())
        leaders = (route.instance.leader for route in routes if route.requests)
        return pressure(self._ledger.requests.values(), leaders, self._kv_used)

    @property
    def served(self) -> int:
        """How many models an instance serves."""
        return sum(model.listed and model.table.serves for model in self._models.values())

    def breakers(self) -> Mapping[ModelName, Mapping[Health, int]]:
        """How many instances of each model are in each state of health."""
        return {model.name: model.breakers() for model in self._models.values() if model.listed}

    def _model(self, name: ModelName, model_id: ModelId) -> Model:
        model = self._models.get(model_id)
        if model is None:
            model = self._models[model_id] = Model(name, model_id, self._rules, self._ledger)
        return model

    def _guard(
        self, model: Model, now: float, step: Callable[[*Given], T], *given: *Given
    ) -> T | None:
        try:
            return step(*given)
        except Exception as error:  # the supervised boundary of each model's state
            self._make_anew(model, error, now)
            return None

    def _make_anew(self, broken: Model, error: Exception, now: float) -> None:
        out, cause = self._ledger.out, self._ledger.cause
        out.append(Broken(broken.name, error, cause=cause))
        for request in [r for r in self._ledger.requests.values() if r.model_id == broken.id]:
            del self._ledger.requests[request.id]
            route = broken.table.routes.get(request.instance) if request.instance else None
            if route is not None:
                self._ledger.withdraw(route.instance.leader, request.id, request.attempt)
            out.append(End(request.id, LambdaScaleError(BROKEN), cause=cause))
        model = self._replace(broken)
        if known := self._sets.pop(broken.id, None):
            try:
                model.apply(known, now)
            except Exception as again:  # the set itself is at fault: the model waits for the next
                out.append(Broken(broken.name, again, cause=cause))
                self._replace(broken)
            else:
                self._sets[broken.id] = known

    def _replace(self, broken: Model) -> Model:
        model = Model(broken.name, broken.id, self._rules, self._ledger)
        model.listed = broken.listed  # and not `checked`: perhaps it broke in a check
        self._models[broken.id] = model
        return model

    def _flush(self) -> list[Command]:
        out = self._ledger.out.copy()
        self._ledger.out.clear()
        return out
