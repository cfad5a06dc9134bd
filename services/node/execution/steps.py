"""What the engine thread does: the scheduler's commands, and sweeps over blocks, step by step.

Not thread-safe; `services.node.execution.worker` calls everything here on its one thread, and does
the waiting.

A bug ends no more than what it concerns. What the engine raises for a batch fails that batch; an
error in a peer's message ends the message and the sequences that it names; one in a step ends what
runs and waits, whose gateways resume it elsewhere. Each is logged and counted (`faults`). Only a
step that fails with nothing left to end raises, which ends the node.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from services.node.core.batching import Batcher
from services.node.core.load import WorkerLoad
from services.node.core.microbatches import (
    Command,
    Emit,
    Failure,
    Forward,
    Hidden,
    Part,
    Prepare,
    Release,
    Send,
)
from services.node.core.rows import SequenceKey, request_of
from services.node.core.sequences import sequence_key
from services.node.engine.base import (
    Engine,
    PartResult,
    RowsRefused,
    Rules,
    StagePart,
    Sweep,
    Weights,
)
from services.node.execution import activations
from services.node.transport.base import Buffer
from shared import telemetry
from shared.errors import (
    BadInput,
    CapacityExceeded,
    LambdaScaleError,
    NotFound,
    PeerLost,
    ProtocolViolation,
    TransportError,
)
from shared.ids import GatewayId, ModelId, NodeId
from shared.layout import Manifest
from shared.messages.serving import AttemptFailed, Cancel, Scores, Submit, Token, Tokens
from shared.story import Story
from shared.vision import is_classifier

SendTo = Callable[[str, bytes, Sequence[Buffer]], None]
"""(peer's address, header, payload)."""
EmitTo = Callable[[GatewayId, Tokens], None]
Ran = Callable[[ModelId, float, float, float], None]
"""A sweep is over: (model, share of its blocks that were run, mean of the tokens in them, s)."""

Aside = Callable[[Callable[[], Callable[[], None]]], None]
"""Has something called on another thread, and then what that returns on this one."""


STEP, GRAMMAR, BUG = "step", "grammar", "bug"
"""Causes of commands that no message caused."""


@dataclass(slots=True)
class _Outbox:
    tokens: list[Token] = field(default_factory=list)
    failed: list[AttemptFailed] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Making:
    """A grammar that is made on the other thread."""

    wanted: bool = True
    """Cleared on this thread when the sequence ends; the other one reads it."""


@dataclass(slots=True)
class _Run:
    """The sweep that is under way."""

    model_id: ModelId
    sweep: Sweep
    began: float
    parts: dict[int, Part] = field(default_factory=dict)
    """Those that wait for their first block or are aboard, by their number in the sweep."""
    left: dict[int, PartResult] = field(default_factory=dict)
    """Got off, and not handed on yet."""
    blocks: int = 0
    """That were run so far."""
    work: int = 0
    """Positions times blocks that were run, of the rows that got off where they should."""

    @property
    def due(self) -> float:
        return self.began + self.sweep.due_s


class Steps:
    def __init__(
        self,
        *,
        node: NodeId,
        engine: Engine,
        slots: int,
        step_tokens: int,
        speculation: int = 0,
        send: SendTo,
        emit: EmitTo,
        ran: Ran,
        aside: Aside = lambda work: work()(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`aside`: at once, if there is no other thread."""
        self._node = node
        self._engine = engine
        self._batcher = Batcher(
            node, slots=slots, step_tokens=step_tokens, speculation=speculation, kv=engine
        )
        self._send = send
        self._emit = emit
        self._ran = ran
        self._aside = aside
        self._clock = clock
        self.story = Story()
        self._models: dict[ModelId, Manifest] = {}
        self._out: dict[GatewayId, _Outbox] = {}
        self._run: _Run | None = None
        self._making: dict[SequenceKey, _Making] = {}
        self._violations = 0
        self._faults = 0
        self._log = telemetry.logger("engine", node=node)

    # --- calls, which raise typed errors only -------------------------------

    def open_model(self, model_id: ModelId, manifest: Manifest) -> None:
        with self._blamed():
            self._engine.open_model(model_id, manifest)
        self._models[model_id] = manifest

    def warm_up(self, model_id: ModelId) -> Iterator[None]:
        return self._engine.warm_up(model_id)

    def attach(self, model_id: ModelId, block: int, weights: Weights) -> None:
        """CapacityExceeded: no memory is left for what the engine makes of the block."""
        with self._blamed():
            self._engine.attach(model_id, block, weights)

    def close_model(self, model_id: ModelId) -> None:
        why = Failure(NotFound.code, f"node {self._node} gave model {model_id} up")
        self._do(self._batcher.model_closed(model_id, why), model_id)
        self._models.pop(model_id, None)
        with self._blamed():
            self._engine.close_model(model_id)

    def submit(self, submit: Submit) -> None:
        manifest = self._models.get(submit.model_id)
        if manifest is None:
            raise NotFound(
                f"node {self._node} does not have model {submit.model_id}: "
                f"submit to an instance of the newest revision"
            )
        check_prompt(submit, manifest)
        held = self._engine.held(submit.model_id)
        commands = self._batcher.submit(submit, n_blocks=manifest.n_blocks, held=held)
        self._tell(
            submit.cause or submit.request, "comes", sequence_key(submit.request, submit.attempt)
        )
        self._do(commands, submit.cause or submit.request)

    # --- events, which raise nothing ----------------------------------------

    def use_tokenizer(self, model_id: ModelId, tokenizer_json: bytes) -> None:
        """Ignored if the model was closed meanwhile."""
        with self._contained(f"the tokenizer of model {model_id}"):
            if model_id in self._models:
                self._engine.use_tokenizer(model_id, tokenizer_json)

    def cancel(self, cancel: Cancel) -> None:
        with self._contained(f"the cancellation of request {cancel.request}"):
            self._do(self._batcher.cancel(cancel), f"cancel of {cancel.request}")

    def received(self, sender: str, header: memoryview, payload: memoryview) -> None:
        """`sender`: where the peer says that it listens."""
        named: Collection[SequenceKey] = ()
        try:
            message, hidden = activations.decode(header, payload)
            named = message.keys
            if isinstance(message, Forward) and hidden is not None:
                self._check_width(message, hidden)
            self._do(
                self._batcher.received(message, hidden), f"{type(message).__name__} from {sender}"
            )
        except ProtocolViolation as error:
            self._violations += 1
            self._log.warning("bad stage message", sender=sender, error=str(error))
        except Exception as error:  # a message's boundary
            self._log.exception("a stage message failed", sender=sender)
            self._give_up(named, error)

    def peer_lost(self, address: str, error: TransportError) -> None:
        why = Failure(PeerLost.code, f"node {self._node} lost {address}: {error}")
        with self._contained(f"the loss of {address}"):
            self._do(self._batcher.peer_lost(address, why), f"loss of {address}")

    def close(self) -> None:
        """Ends everything: gateways resume their requests elsewhere, peers free what they keep."""
        why = Failure(NotFound.code, f"node {self._node} stopped")
        self._do(self._batcher.close(why), "stop")
        self.flush()

    # --- steps --------------------------------------------------------------

    def begin(self, now: float) -> float | None:
        """Has the engine run its next block, for all that waits for it. None: nothing can run.

        Returns the time, on the clock that `now` is of, until which what was run may not be over:
        the caller waits, and takes in what comes, then calls `finish`. What comes between two
        steps may join the sweep at a block ahead.
        """
        try:
            return self._begin(now)
        except Exception as error:  # a step's boundary
            self._end_all(error)
            return now

    def finish(self, now: float) -> None:
        """Hands on what got off after the step that `begin` began."""
        try:
            if self._run is not None:
                self._finish(self._run, now)
        except Exception as error:  # a step's boundary
            self._end_all(error)

    def _begin(self, now: float) -> float | None:
        run = self._run
        if run is None:
            parts = self._batcher.take()
            if not parts:
                return None
            model_id = parts[0].model_id
            run = self._run = _Run(model_id, self._engine.begin(model_id), now)
        else:
            parts = self._batcher.join(run.model_id, run.sweep.at, run.parts.values())
        for part in parts:
            self._join(run, part)
        if run.parts:
            self._advance(run)
        return run.due

    def _finish(self, run: _Run, now: float) -> None:
        left, run.left = run.left, {}
        for number, result in left.items():
            part = run.parts.pop(number)
            part = part.without(set(part.keys) - {row.sequence for row in result.rows})
            if part.rows:
                run.work += part.positions * (part.stop - part.start)
                for key, error in result.failed.items():
                    self._do(self._batcher.refused(part, [key], _failure(error)), STEP)
                commands = self._batcher.ran(part, result.sampled, result.hidden, result.logprobs)
                self._do(commands, STEP)
        if not run.parts:
            self._run = None
            self._tell_sweep(run, now)

    def flush(self) -> None:
        """Everything for one gateway goes out in one message."""
        if not self._out:
            return
        out, self._out = self._out, {}
        for gateway, box in out.items():
            message = Tokens(
                node=self._node,
                tokens=tuple(box.tokens),
                failed=tuple(box.failed),
                scores=tuple(box.scores),
            )
            self._emit(gateway, message)

    @property
    def load(self) -> WorkerLoad:
        return WorkerLoad(
            running=self._batcher.running,
            waiting=self._batcher.waiting,
            kv_used=self._engine.kv_used,
            kv_capacity=self._engine.kv_capacity,
            tokens_out=self._batcher.tokens_out,
            prompt_tokens=self._batcher.prompt_tokens,
            cached_tokens=self._batcher.cached_tokens,
            preemptions=self._batcher.preemptions,
            tokens_proposed=self._batcher.tokens_proposed,
            tokens_accepted=self._batcher.tokens_accepted,
            violations=self._violations,
            faults=self._faults,
        )

    def _join(self, run: _Run, part: Part) -> None:
        """Takes the part aboard, less rows of sequences that had to make room. What can't be run
        has failed."""
        while (part := self._batcher.live(part)).rows:
            try:
                with self._blamed():
                    run.parts[run.sweep.join(_stage_part(part))] = part
                return
            except CapacityExceeded as error:
                commands = self._batcher.no_room(part, _failure(error))
            except RowsRefused as error:
                commands = self._batcher.refused(part, error.sequences, _failure(error.why))
            except LambdaScaleError as error:
                commands = self._batcher.failed(part, _failure(error))
            self._do(commands, STEP)

    def _tell_sweep(self, run: _Run, now: float) -> None:
        manifest = self._models.get(run.model_id)
        if manifest is not None and run.work:
            share = run.blocks / manifest.n_blocks
            self._ran(run.model_id, share, run.work / run.blocks, now - run.began)

    def _advance(self, run: _Run) -> None:
        before = run.sweep.at
        try:
            with self._blamed():
                run.left = run.sweep.advance()
            dropped = {number for number, result in run.left.items() if not result.rows}
            starts = [part.start for number, part in run.parts.items() if number not in dropped]
            run.blocks += run.sweep.at - max(before, min(starts)) if starts else 0
        except LambdaScaleError as error:
            for part in run.parts.values():
                self._do(self._batcher.failed(part, _failure(error)), STEP)
            run.parts = {}

    # --- what goes wrong ----------------------------------------------------

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """The engine's boundary: what it can't do fails the call or the batch, not the node."""
        try:
            yield
        except LambdaScaleError:
            raise
        except (MemoryError, torch.OutOfMemoryError) as error:
            self._log.exception("engine out of memory")
            raise CapacityExceeded(f"node {self._node}'s engine has no memory: {error}") from error
        except Exception as error:
            self._log.exception("engine failed")
            raise LambdaScaleError(f"node {self._node}'s engine failed: {error}") from error

    @contextmanager
    def _contained(self, what: str) -> Iterator[None]:
        """The boundary of an event that nobody waits for."""
        try:
            yield
        except Exception:
            self._faults += 1
            self._log.exception(f"{what} failed")

    def _give_up(self, keys: Collection[SequenceKey], error: Exception) -> None:
        """A bug met these sequences, led or followed: they end."""
        self._faults += 1
        with self._contained("giving sequences up"):
            self._do(self._batcher.give_up(keys, self._bug(error)), BUG)

    def _end_all(self, error: Exception) -> None:
        """A step failed, and who is to blame is not known."""
        if not (self._batcher.running or self._batcher.waiting):
            raise error
        self._faults += 1
        self._log.exception("a step failed")
        self._run = None
        self._do(self._batcher.close(self._bug(error)), BUG)

    def _bug(self, error: Exception) -> Failure:
        return _failure(LambdaScaleError(f"node {self._node} failed: {error!r}"))

    # --- commands -----------------------------------------------------------

    def _do(self, commands: Iterable[Command], cause: str) -> None:
        """Each by itself: after one that fails, the others must not go undone. `cause`: the event
        that the commands follow from."""
        for command in commands:
            try:
                self._obey(command, cause)
            except Exception as error:  # a command's boundary
                name = type(command).__name__
                self._log.exception("a command failed", command=name, cause=cause)
                self._give_up(_sequences_of(command), error)

    def _obey(self, command: Command, cause: str) -> None:
        match command:
            case Release():
                self._tell(cause, "gives its KV back", *command.sequences)
                for key in command.sequences:
                    if making := self._making.pop(key, None):
                        making.wanted = False
                self._engine.free(command.sequences)
            case Prepare():
                self._tell(cause, "waits for its grammar", command.sequence)
                self._prepare(command)
            case Emit():
                self._emit_later(command, cause)
            case Send():
                self._send(
                    command.address, *activations.encode(command.message, _tensor(command.hidden))
                )

    def _tell(self, cause: str, text: str, *sequences: SequenceKey) -> None:
        requests = {request_of(key) for key in sequences}
        self.story.tell(self._clock(), cause, text, *sequences, *sorted(requests))

    def _emit_later(self, command: Emit, cause: str) -> None:
        box = self._out.setdefault(command.gateway, _Outbox())
        match command.what:
            case Token() as token:
                box.tokens.append(token)
                if token.finish:
                    self._tell(cause, token.finish, sequence_key(token.request, token.attempt))
            case Scores():
                box.scores.append(command.what)
            case AttemptFailed() as failed:
                box.failed.append(failed)
                key = sequence_key(failed.request, failed.attempt)
                self._tell(cause, f"fails: {failed.code}", key)

    # --- grammars -----------------------------------------------------------

    def _prepare(self, command: Prepare) -> None:
        making = self._making[command.sequence] = _Making()
        try:
            make = self._engine.make_rules(command.model_id, command.context)
        except LambdaScaleError as error:
            self._refuse(command, making, error)
        else:
            self._aside(partial(self._make, command, making, make))

    def _make(
        self, command: Prepare, making: _Making, make: Callable[[], Rules]
    ) -> Callable[[], None]:
        """On the other thread, on which other grammars may have been made first."""
        if not making.wanted:
            return lambda: None
        try:
            rules = make()
        except LambdaScaleError as error:
            return partial(self._refuse, command, making, error)
        except BaseException as error:  # a request's boundary; panics of Rust are no Exceptions
            self._log.exception("a grammar failed")
            why = LambdaScaleError(f"the request's rules can't be followed: {error!r}")
            return partial(self._refuse, command, making, why)
        return partial(self._made, command, making, rules)

    def _refuse(self, command: Prepare, making: _Making, error: LambdaScaleError) -> None:
        if making.wanted:
            with self._contained("a refused grammar"):
                self._do(self._batcher.prepared(command.sequence, _failure(error)), GRAMMAR)

    def _made(self, command: Prepare, making: _Making, rules: Rules) -> None:
        if not making.wanted:
            return
        try:
            self._engine.use_rules(command.model_id, command.sequence, rules)
            self._do(self._batcher.prepared(command.sequence), GRAMMAR)
        except Exception as error:  # a request's boundary
            self._log.exception("a grammar failed")
            self._give_up([command.sequence], error)

    # --- what fits this node's models ---------------------------------------

    def _check_width(self, message: Forward, hidden: torch.Tensor) -> None:
        manifest = self._models.get(message.path.model_id)
        width = hidden.shape[1]
        if manifest and manifest.config["hidden_size"] != width:
            raise ProtocolViolation(
                f"hidden states {width} wide for model {message.path.model_id}, "
                f"which has {manifest.config['hidden_size']}"
            )


def check_prompt(submit: Submit, manifest: Manifest) -> None:
    """BadInput for token ids that the model does not have: they would fail the whole batch. For an
    image where the model reads text: the tokens then mean nothing."""
    if is_classifier(manifest.config):
        return  # the engine refuses single images
    if submit.image:
        raise BadInput(f"request {submit.request} has an image, model {submit.model_id} reads text")
    vocab_size = manifest.config["vocab_size"]
    biased = [token for token, _ in submit.rules.logit_bias] if submit.rules else []
    if min(biased, default=0) < 0 or max((*submit.tokens, *biased), default=0) >= vocab_size:
        raise BadInput(
            f"request {submit.request} has token id {max((*submit.tokens, *biased))}, "
            f"model {submit.model_id} has ids from 0 to {vocab_size - 1}"
        )


def _sequences_of(command: Command) -> tuple[SequenceKey, ...]:
    """Those that can't go on if it fails. What a gateway is told can't fail."""
    match command:
        case Release():
            return command.sequences
        case Prepare():
            return (command.sequence,)
        case Send():
            return command.message.keys
        case Emit():
            return ()


def _failure(error: LambdaScaleError) -> Failure:
    return Failure(error.code, str(error))


def _tensor(hidden: Hidden | None) -> torch.Tensor | None:
    """What the scheduler passes on came from here, or from the engine."""
    assert hidden is None or isinstance(hidden, torch.Tensor)
    return hidden


def _stage_part(part: Part) -> StagePart:
    """With the hidden states of its rows, less those of rows that were taken out."""
    hidden = _tensor(part.hidden)
    if hidden is not None and part.positions < hidden.shape[0]:
        pairs = zip(part.rows, part.offsets, strict=True)
        hidden = torch.cat([hidden[start : start + row.count] for row, start in pairs])
    return StagePart(part.start, part.stop, part.rows, hidden)
