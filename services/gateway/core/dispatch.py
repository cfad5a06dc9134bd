"""All requests of one gateway: events in, commands out.

Events are the calls: requests are admitted, instance sets and tokens arrive, attempts are refused
or fail, nodes go, clients leave, time passes. Each returns the commands for the shell, in order.
"""

from collections.abc import Sequence

from services.gateway.core import admission, streams
from services.gateway.core.commands import Command, Withdraw
from services.gateway.core.model import Ledger, Model, Rules
from services.gateway.core.requests import Request, State
from services.gateway.core.streams import Verdict
from shared.errors import LambdaScaleError, NotFound, from_code
from shared.ids import ModelId, ModelName, NodeId, RequestId
from shared.messages.instances import InstanceSet
from shared.messages.load import ModelLoad
from shared.messages.serving import AttemptFailed, Cancel, Scores, Token, Tokens


class Dispatch:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._ledger = Ledger()
        self._models: dict[ModelId, Model] = {}

    # --- what is there -------------------------------------------------------

    def add_model(self, name: ModelName, model_id: ModelId) -> None:
        self._model(name, model_id).listed = True

    def remove_model(self, model_id: ModelId, now: float) -> list[Command]:
        """What waits ends; what runs goes on as long as its instance is there."""
        if model := self._models.get(model_id):
            model.listed = False
            model.dispatch(now)
        return self._flush()

    def on_instances(self, new: InstanceSet, now: float) -> list[Command]:
        self._model(new.name, new.model_id).apply(new, now)
        return self._flush()

    def on_node_gone(self, node: NodeId, now: float) -> list[Command]:
        for model in self._models.values():
            model.node_gone(node, now)
        return self._flush()

    # --- requests ------------------------------------------------------------

    def admit(self, requests: Sequence[Request], now: float) -> list[Command]:
        """Takes new requests of one model, all or none: NotFound, CapacityExceeded."""
        model = self._models.get(requests[0].model_id)
        if model is None or not model.listed:
            raise NotFound(f"model {requests[0].model_id} is not served here")
        admission.check_queue(len(model.queue), len(requests), self._rules.max_queue)
        for request in requests:
            self._ledger.requests[request.id] = request
            model.queue.append(request)
        model.dispatch(now)
        return self._flush()

    def finish(self, request_id: RequestId, now: float) -> list[Command]:
        """The gateway has all it wants (a stop string): the attempt is withdrawn."""
        return self._leave(request_id, State.DONE, "stop string", now)

    def cancel(self, request_id: RequestId, now: float) -> list[Command]:
        return self._leave(request_id, State.CANCELLED, "the client left", now)

    def _leave(self, request_id: RequestId, state: State, why: str, now: float) -> list[Command]:
        """Unknown and ended requests are ignored."""
        if request := self._ledger.requests.get(request_id):
            self._models[request.model_id].leave(request, state, why, now)
        return self._flush()

    # --- what nodes say ------------------------------------------------------

    def on_tokens(self, message: Tokens, now: float) -> list[Command]:
        freed: dict[ModelId, Model] = {}
        late: dict[tuple[RequestId, int], None] = {}
        requests = self._ledger.requests
        pieces: tuple[Scores | Token, ...] = (*message.scores, *message.tokens)
        for piece in pieces:
            request = requests.get(piece.request)
            verdict = streams.judge(request, piece) if request else Verdict.STALE
            if request is None or verdict is Verdict.STALE:
                late[piece.request, piece.attempt] = None
            elif verdict is Verdict.NEXT:
                model = self._models[request.model_id]
                if isinstance(piece, Scores):
                    model.score(request, piece)
                elif model.accept(request, piece, now):
                    freed[model.id] = model
            elif verdict is Verdict.GAP:
                model = freed[request.model_id] = self._models[request.model_id]
                missing = f"token {piece.index} came where {request.due} was due"
                model.lost(request, "lost", missing, now)
        for failure in message.failed:
            self._on_failed(failure, now, freed)
        # A node that still works on an attempt which is over has not seen its withdrawal.
        for request_id, attempt in late:
            cancel = Cancel(request=request_id, attempt=attempt)
            self._ledger.out.append(Withdraw(message.node, cancel))
        for model in freed.values():
            model.dispatch(now)
        return self._flush()

    def _on_failed(self, failure: AttemptFailed, now: float, freed: dict[ModelId, Model]) -> None:
        request = self._ledger.requests.get(failure.request)
        if request and request.attempt == failure.attempt and request.running:
            model = freed[request.model_id] = self._models[request.model_id]
            model.not_done(request, from_code(failure.code, failure.message), now)

    def on_not_taken(
        self, request_id: RequestId, attempt: int, error: LambdaScaleError, now: float
    ) -> list[Command]:
        """A Send was answered with an error, or not at all (BusTimeout).

        It changes nothing if a token of the attempt came after it, which says more, or if the
        attempt is over: its instance may have gone while the answer was waited for.
        """
        request = self._ledger.requests.get(request_id)
        if request is None or request.attempt != attempt or not request.running:
            return []
        if request.state is State.SUBMITTED or request.asked_at is not None:
            model = self._models[request.model_id]
            model.not_done(request, error, now)
            model.dispatch(now)
        return self._flush()

    # --- time and load -------------------------------------------------------

    def on_tick(self, now: float) -> list[Command]:
        """Time-outs, and instances that may be tried again; to be called every few 10 ms."""
        for model in self._models.values():
            model.tick(now)
        return self._flush()

    def loads(self) -> tuple[ModelLoad, ...]:
        return tuple(model.load() for model in self._models.values() if model.listed)

    def _model(self, name: ModelName, model_id: ModelId) -> Model:
        model = self._models.get(model_id)
        if model is None:
            model = self._models[model_id] = Model(name, model_id, self._rules, self._ledger)
        return model

    def _flush(self) -> list[Command]:
        out = self._ledger.out.copy()
        self._ledger.out.clear()
        return out
