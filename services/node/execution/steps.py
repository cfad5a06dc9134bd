"""What the engine thread does: it takes calls and messages in, has sweeps run block by block, and
carries out the scheduler's commands.

Not thread-safe: `services.node.execution.worker` calls everything here on its one thread, and does
the waiting.

A bug ends no more than what it concerns. What the engine raises for a batch fails that batch. An
error in a peer's message ends the message and the sequences that it names. An error in a step ends
everything that runs and waits, and gateways resume it elsewhere. Each error is logged and counted
(`faults`). Only a step that fails with nothing left to end raises, which ends the node.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch

from services.node.core.batching import BUG, Batcher
from services.node.core.handover import Worth
from services.node.core.kv import KvMover
from services.node.core.load import WorkerLoad
from services.node.core.microbatches import (
    Admit,
    Admitted,
    Bring,
    Command,
    Emit,
    Failed,
    Failure,
    Forward,
    KvAsk,
    KvHere,
    Lend,
    Prepare,
    Release,
    Return,
    Sampled,
    Send,
    Settled,
    StageMessage,
    Stop,
    Weighed,
    Yield,
)
from services.node.core.rows import SequenceKey, request_of
from services.node.core.sequences import sequence_key
from services.node.engine.base import (
    Adapter,
    Bell,
    Engine,
    MakeAdapter,
    Weights,
)
from services.node.execution import activations
from services.node.execution.checks import check_prompt, check_width
from services.node.execution.grammars import Aside, Grammars
from services.node.execution.kv_moves import KvMoves, Post
from services.node.execution.outbox import Outbox
from services.node.execution.stage_spans import StageSpans
from services.node.execution.sweeps import Ran, Sweeps, failure_of, rows_of, tensor_of
from services.node.transport.base import Buffer
from shared import telemetry
from shared.clock import wall_ns
from shared.errors import (
    CapacityExceeded,
    EngineFailed,
    LambdaScaleError,
    NotFound,
    PeerLost,
    ProtocolViolation,
    TransportError,
)
from shared.ids import GatewayId, ModelId, NodeId
from shared.layout import Manifest
from shared.messages.serving import AttemptFailed, Cancel, Submit, Token, Tokens
from shared.parts import Part
from shared.story import Story

SendTo = Callable[[str, bytes, Sequence[Buffer]], None]
"""(peer's address, header, payload)."""
EmitTo = Callable[[GatewayId, Tokens], None]


class Steps:
    batcher_type: ClassVar[type[Batcher]] = Batcher

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
        kv_mover: KvMover | None = None,
        worth: Worth = lambda model_id, positions, nbytes: True,
        post: Post = lambda call: call(),
        bell: Bell | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`aside`: at once, if there is no other thread. `kv_mover`: copies KV between nodes; None:
        KV is always computed. `worth`: when it is copied. `post` has something done on this thread:
        at once, if there is no other. `bell`: is rung while calls wait; None: none ever do, if
        there is no other thread."""
        self._node = node
        self._engine = engine
        self._batcher = self.batcher_type(
            node,
            slots=slots,
            step_tokens=step_tokens,
            speculation=speculation,
            kv=engine,
            worth=lambda *what: kv_mover is not None and worth(*what),
            held=engine.held,
        )
        self._ran = ran
        self._aside = aside
        self._send = send
        self._emit = emit
        self._clock = clock
        self.story = Story()
        self._models: dict[ModelId, Manifest] = {}
        self._out = Outbox(node)
        self._violations = 0
        self._faults = 0
        self.failed_in_a_row = 0
        """How often the engine failed since it last ran a sweep (`watchdog`)."""
        self._broken_blocks: set[ModelId] = set()
        """Models with a block that failed since they were opened."""
        self._log = telemetry.logger("engine", node=node)
        self._grammars = Grammars(engine, aside, self, self._log)
        self._kv_moves = KvMoves(engine, kv_mover, self, lambda act: post(partial(self._back, act)))
        self._unsettled: dict[SequenceKey, Callable[[bool], None]] = {}
        self._spans = StageSpans(node, clock)
        self._sweeps = Sweeps(
            engine,
            self._batcher,
            self._models,
            blamed=self._blamed,
            do=self._do,
            ran=self._on_ran,
            bell=bell or Bell(),
        )

    # --- calls, which raise typed errors only -------------------------------

    def open_model(
        self, model_id: ModelId, manifest: Manifest, part: Part | None = None, devices: int = 1
    ) -> None:
        self._broken_blocks.discard(model_id)
        with self._blamed():
            self._engine.open_model(model_id, manifest, part, devices)
        self._models[model_id] = manifest
        self._batcher.open(model_id, together=devices > 1)
        self._tell_division(model_id, "open_model")

    def regroup(self) -> Iterator[None]:
        """See `Engine.regroup`."""
        pieces = self._engine.regroup()
        for _ in pieces:
            for model_id in self._models:
                self._tell_division(model_id, "regroup")
            yield
            break
        yield from pieces

    def _tell_division(self, model_id: ModelId, cause: str) -> None:
        if division := self._engine.division(model_id):
            self.story.tell(self._clock(), cause, division, model_id)
            self._log.info("who runs a model", model=model_id, division=division)

    def warm_up(self, model_id: ModelId) -> Iterator[None]:
        return self._engine.warm_up(model_id)

    def attach(self, model_id: ModelId, block: int, weights: Weights) -> None:
        """CapacityExceeded: no memory is left for what the engine makes of the block."""
        with self._blamed(model_id):
            self._engine.attach(model_id, block, weights)

    def prepare(self, model_id: ModelId, manifest: Manifest, block: int, weights: Weights) -> bool:
        with self._blamed(model_id):
            return self._engine.prepare(model_id, manifest, block, weights)

    def make_adapter(self, manifest: Manifest) -> Callable[[], MakeAdapter]:
        with self._blamed():
            return self._engine.make_adapter(manifest)

    def use_adapter(self, name: ModelId, adapter: Adapter) -> None:
        self._engine.use_adapter(name, adapter)

        def settle() -> Callable[[], None]:
            self._engine.settle_adapter(adapter)
            return lambda: None

        self._aside(settle)

    def drop_adapter(self, name: ModelId) -> None:
        """Conflict: sequences run with it."""
        self._engine.drop_adapter(name)

    def close_model(self, model_id: ModelId, *, asleep: bool = False) -> None:
        why = Failure(NotFound.code, f"node {self._node} gave model {model_id} up")
        self._do(self._batcher.model_closed(model_id, why))
        self._models.pop(model_id, None)
        self._broken_blocks.discard(model_id)
        self._sweeps.closed(model_id)
        with self._blamed():
            self._engine.close_model(model_id, asleep=asleep)

    def submit(self, submit: Submit, settled: Callable[[bool], None] = lambda _: None) -> None:
        """`settled` is called once, as soon as it is settled whether KV of the attempt before is
        used, and, if the request may kill nodes, whether all of its path have room. It is told
        whether the attempt is over already."""
        manifest = self._models.get(submit.model_id)
        if manifest is None:
            raise NotFound(
                f"node {self._node} does not have model {submit.model_id}: "
                f"submit to an instance of the newest revision"
            )
        check_prompt(submit, manifest)
        held = self._engine.held(submit.model_id)
        commands = self._batcher.submit(submit, n_blocks=manifest.n_blocks, held=held)
        key = sequence_key(submit.request, submit.attempt)
        self._tell(submit.cause or submit.request, "comes", key)
        if self._batcher.unsettled(key):
            self._unsettled[key] = settled
        else:
            settled(False)
        self._do(commands)

    # --- events, which raise nothing ----------------------------------------

    def use_tokenizer(self, model_id: ModelId, tokenizer_json: bytes) -> None:
        """Ignored if the model was closed meanwhile."""
        with self._contained(f"the tokenizer of model {model_id}"):
            if model_id in self._models:
                self._engine.use_tokenizer(model_id, tokenizer_json)

    def cancel(self, cancel: Cancel) -> None:
        with self._contained(f"the cancellation of request {cancel.request}"):
            self._do(self._batcher.cancel(cancel))

    def received(self, sender: str, header: memoryview, payload: memoryview) -> None:
        """`sender`: where the peer says that it listens."""
        named: Collection[SequenceKey] = ()
        try:
            message, hidden, cause = activations.decode(header, payload)
            named = message.keys
            if isinstance(message, Forward) and hidden is not None:
                check_width(message, hidden, self._models)
            self._trace_received(message)
            self._do(self._batcher.received(message, hidden, cause))
        except ProtocolViolation as error:
            self._violations += 1
            self._log.warning("bad stage message", sender=sender, error=str(error))
        except Exception as error:  # a message's boundary
            self._log.exception("a stage message failed", sender=sender)
            self._give_up(named, error)

    def late(self, submit: Submit) -> None:
        """The attempt waits for other nodes no longer (see `submit`)."""
        key = sequence_key(submit.request, submit.attempt)
        with self._contained(f"the end of the wait of {key}"):
            self._do(self._batcher.late(key))

    def peer_lost(self, address: str, error: TransportError) -> None:
        why = Failure(PeerLost.code, f"node {self._node} lost {address}: {error}")
        with self._contained(f"the loss of {address}"):
            self._do(self._batcher.peer_lost(address, why))

    def close(self) -> None:
        """Ends everything: gateways resume their requests elsewhere, peers free what they keep."""
        why = Failure(NotFound.code, f"node {self._node} stopped")
        self._do(self._batcher.close(why))
        self.flush()

    # --- steps --------------------------------------------------------------

    def begin(self, now: float) -> float | None:
        """Has the engine run its next block, for all that waits for it. None: nothing can run.

        Returns the time, on the clock that `now` is of, until which what was run may not be over:
        the caller waits, and takes in what comes, then calls `finish`. What comes between two
        steps may join the sweep at a block ahead.
        """
        try:
            return self._sweeps.begin(now)
        except Exception as error:  # a step's boundary
            self._end_all(error)
            return now

    def finish(self, now: float) -> None:
        """Hands on what got off after the step that `begin` began."""
        try:
            self._sweeps.finish(now)
        except Exception as error:  # a step's boundary
            self._end_all(error)

    def _on_ran(self, model: ModelId, share: float, tokens: float, seconds: float) -> None:
        self.failed_in_a_row = 0
        self._ran(model, share, tokens, seconds)

    def flush(self) -> None:
        """Hands out what gateways are told: see `Outbox`."""
        if self._out:
            kv_used = self._engine.kv_used / max(1, self._engine.kv_capacity)
            kv_free = self._batcher.kv_left(self._models)
            for gateway, tokens in self._out.empty(kv_used, kv_free):
                self._emit(gateway, tokens)

    @property
    def load(self) -> WorkerLoad:
        return WorkerLoad(
            running=self._batcher.running,
            waiting=self._batcher.waiting,
            kv_used=self._engine.kv_used,
            kv_capacity=self._engine.kv_capacity,
            kv_shares={model_id: self._engine.kv_share(model_id) for model_id in self._models},
            kv_position_bytes={
                model_id: self._engine.position_bytes(model_id) for model_id in self._models
            },
            tokens_out=self._batcher.tokens_out,
            prompt_tokens=self._batcher.prompt_tokens,
            cached_tokens=self._batcher.cached_tokens,
            received_tokens=self._batcher.received_tokens,
            kv_sent_bytes=self._kv_moves.sent_bytes,
            kv_received_bytes=self._kv_moves.received_bytes,
            host_tier=replace(self._engine.host_tier, tokens=self._batcher.restored_tokens),
            preemptions=self._batcher.preemptions,
            costs=self._engine.costs,
            tokens_proposed=self._batcher.tokens_proposed,
            tokens_accepted=self._batcher.tokens_accepted,
            violations=self._violations,
            faults=self._faults,
        )

    # --- what goes wrong ----------------------------------------------------

    @contextmanager
    def _blamed(self, blocks_of: ModelId | None = None) -> Iterator[None]:
        """The engine's boundary: what it can't do fails the call or the batch, not the node. What
        it can't do with a model's blocks may be the model's fault, and counts once."""
        try:
            yield
        except LambdaScaleError:
            raise
        except (MemoryError, torch.OutOfMemoryError) as error:
            self._log.exception("engine out of memory")
            raise CapacityExceeded(f"node {self._node}'s engine has no memory: {error}") from error
        except Exception as error:
            self._faults += 1
            self.failed_in_a_row += blocks_of not in self._broken_blocks
            if blocks_of is not None:
                self._broken_blocks.add(blocks_of)
            self._log.exception("engine failed")
            raise EngineFailed(f"node {self._node}'s engine failed: {error}") from error

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
            self._do(self._batcher.give_up(keys, self._bug(error)))

    def _end_all(self, error: Exception) -> None:
        """A step failed, and who is to blame is not known."""
        if not (self._batcher.running or self._batcher.waiting):
            raise error
        self._faults += 1
        self._log.exception("a step failed")
        self._sweeps.give_up()
        self._do(self._batcher.close(self._bug(error), BUG))

    def _bug(self, error: Exception) -> Failure:
        return failure_of(EngineFailed(f"node {self._node} failed: {error!r}"))

    # --- commands -----------------------------------------------------------

    def _do(self, commands: Iterable[Command]) -> None:
        """Each by itself: after one that fails, the others must not go undone."""
        commands = tuple(commands)
        self._spans.failing(commands)
        for command in commands:
            try:
                self._obey(command)
            except Exception as error:  # a command's boundary
                name = type(command).__name__
                self._log.exception("a command failed", command=name, cause=command.cause)
                self._give_up(_sequences_of(command), error)

    def _obey(self, command: Command) -> None:
        cause = command.cause
        match command:
            case Release():
                self._tell(cause, "gives its KV back", *command.sequences)
                self._spans.over(command.sequences)
                self._grammars.forget(command.sequences)
                self._engine.free(command.sequences)
            case Prepare():
                self._tell(cause, "waits for its grammar", command.sequence)
                self._grammars.make(command)
            case Lend(ask=ask):
                self._tell(cause, f"lends its KV to {ask.to}", ask.sequence)
                self._kv_moves.lend(command)
            case Bring():
                self._kv_moves.bring(command)
            case Stop(sequence=key):
                self._kv_moves.stop(key)
            case Return(region=region):
                self._kv_moves.end(region)
            case Settled(sequence=key):
                self._tell(cause, "waits for nothing of other nodes any more", key)
                if settled := self._unsettled.pop(key, None):
                    settled(command.over)
            case Weighed():
                self._tell_weighed(command)
            case Emit():
                self._tell_end(command)
                self._out.put(command)
            case Send():
                self._tell_sent(command)
                message, hidden = command.message, tensor_of(command.hidden)
                if isinstance(message, KvAsk):
                    message = self._kv_moves.asked(command.address, message)
                if isinstance(message, Forward | Sampled):
                    self._spans.went(message.keys)
                if isinstance(message, Forward) and command.offsets:
                    hidden = rows_of(hidden, message.rows, command.offsets)
                self._send(command.address, *activations.encode(message, hidden, cause))

    def _tell(self, cause: str, text: str, *sequences: SequenceKey) -> None:
        requests = {request_of(key) for key in sequences}
        self.story.tell(self._clock(), cause, text, *sequences, *sorted(requests))

    def _tell_sent(self, command: Send) -> None:
        """Tells how sequences come to the stages of a path, and how they fail there."""
        match command.message:
            case Admit(sequence=key):
                self._tell(command.cause, f"asks {command.address} for room", key)
            case Admitted(sequence=key):
                self._tell(command.cause, "has room kept for it", key)
            case Forward(path=path, rows=rows) as forward:
                if begun := [row.sequence for row in rows if not row.position]:
                    block = path.stages[forward.stage].start
                    self._tell(
                        command.cause, f"goes on at {command.address}, block {block}", *begun
                    )
            case Failed(sequences=keys, code=code):
                self._tell(command.cause, f"fails: {code}", *keys)
            case KvAsk(sequence=source, taker=key, first=first, end=end):
                text = f"asks {command.address} for the KV of {source}, positions {first} to {end}"
                self._tell(command.cause, text, key)
            case Yield(taker=key):
                self._tell(command.cause, f"has its KV, and takes over from {command.address}", key)

    def _tell_weighed(self, command: Weighed) -> None:
        found = command.restoration
        way = "is copied from host memory" if found.worth else "is computed again"
        costs = f"{found.copy_s:.2g} s to copy, {found.compute_s:.2g} s to compute"
        self._tell(
            command.cause, f"KV of {found.positions} tokens {way}: {costs}", command.sequence
        )
        if command.trace:
            now = wall_ns()
            telemetry.record(
                "kv_restore",
                start_ns=now,
                end_ns=now,
                parent=command.trace,
                attributes={
                    "tokens": found.positions,
                    "copy_s": found.copy_s,
                    "compute_s": found.compute_s,
                    "copied": found.worth,
                },
            )

    def _trace_received(self, message: StageMessage) -> None:
        match message:
            case Admit():
                self._spans.asked(message)
            case Forward():
                self._spans.came(message)

    def _tell_end(self, command: Emit) -> None:
        """Only ends are told: one line for each token would leave no room for anything else."""
        match command.what:
            case Token(finish=finish) as token if finish:
                self._tell(command.cause, finish, sequence_key(token.request, token.attempt))
            case AttemptFailed() as failed:
                key = sequence_key(failed.request, failed.attempt)
                self._tell(command.cause, f"fails: {failed.code}", key)

    # --- KV that moves: see `services.node.execution.kv_moves.Listener` --------

    def _back(self, act: Callable[[], None]) -> None:
        with self._contained("KV that moved"):
            act()

    def lent(self, lend: Lend, here: KvHere) -> None:
        self._do(self._batcher.lent(lend, here))

    def brought(self, bring: Bring, *, right: bool) -> None:
        self._do(self._batcher.brought(bring, right=right))

    # --- grammars: see `services.node.execution.grammars.Listener` ------------

    def prepared(self, sequence: SequenceKey) -> None:
        self._do(self._batcher.prepared(sequence))

    def refused(self, sequence: SequenceKey, error: LambdaScaleError) -> None:
        with self._contained("a refused grammar"):
            self._do(self._batcher.prepared(sequence, failure_of(error)))

    def broke(self, sequence: SequenceKey, error: Exception) -> None:
        self._give_up([sequence], error)


def _sequences_of(command: Command) -> tuple[SequenceKey, ...]:
    """Those that can't go on if it fails. What a gateway is told can't fail."""
    match command:
        case Release():
            return command.sequences
        case Prepare() | Bring() | Stop():
            return (command.sequence,)
        case Lend() | Return() | Settled() | Weighed():
            return ()
        case Send():
            return command.message.keys
        case Emit():
            return ()
