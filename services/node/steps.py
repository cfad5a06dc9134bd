"""What the engine thread does: the scheduler's commands, one engine run after the other.

Not thread-safe; `services.node.worker` calls everything here on its one thread.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from services.node import activations
from services.node.core.batching import Batcher
from services.node.core.microbatches import Command, Emit, Failure, Forward, Part, Release, Work
from services.node.engine.base import Engine, StageBatch, StageResult
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
from shared.messages.serving import AttemptFailed, Cancel, Submit, Token, Tokens

SendTo = Callable[[str, bytes, Sequence[Buffer]], None]
"""(peer's address, header, payload)."""
EmitTo = Callable[[GatewayId, Tokens], None]
Hold = Callable[[float], None]
"""Returns at that time (`time.monotonic`), taking in what comes until then."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    running: int = 0
    """Sequences that this node leads or is a stage of."""
    waiting: int = 0
    kv_used: int = 0
    kv_capacity: int = 0
    tokens_out: int = 0
    """Tokens drawn here since the start."""
    violations: int = 0
    """Messages of peers that were malformed or out of place."""


@dataclass(slots=True)
class _Outbox:
    tokens: list[Token] = field(default_factory=list)
    failed: list[AttemptFailed] = field(default_factory=list)


class Steps:
    def __init__(
        self,
        *,
        node: NodeId,
        engine: Engine,
        slots: int,
        step_tokens: int,
        step_floor_s: float,
        send: SendTo,
        emit: EmitTo,
    ) -> None:
        self._node = node
        self._engine = engine
        self._batcher = Batcher(
            node, slots=slots, step_tokens=step_tokens, kv_capacity=engine.kv_capacity
        )
        self._step_floor_s = step_floor_s
        self._send = send
        self._emit = emit
        self._models: dict[ModelId, Manifest] = {}
        self._out: dict[GatewayId, _Outbox] = {}
        self._violations = 0
        self._log = telemetry.logger("engine", node=node)

    # --- calls --------------------------------------------------------------

    def open_model(self, model_id: ModelId, manifest: Manifest) -> None:
        self._engine.open_model(model_id, manifest)
        self._models[model_id] = manifest

    def attach(self, model_id: ModelId, block: int, buffer: memoryview) -> None:
        self._engine.attach(model_id, block, buffer)

    def close_model(self, model_id: ModelId) -> None:
        why = Failure(NotFound.code, f"node {self._node} gave model {model_id} up")
        self._do(self._batcher.model_closed(model_id, why))
        self._models.pop(model_id, None)
        self._engine.close_model(model_id)

    def submit(self, submit: Submit) -> None:
        manifest = self._models.get(submit.model_id)
        if manifest is None:
            raise NotFound(
                f"node {self._node} does not have model {submit.model_id}: "
                f"submit to an instance of the newest revision"
            )
        check_tokens(submit, manifest)
        held = self._engine.held(submit.model_id)
        self._do(self._batcher.submit(submit, n_blocks=manifest.n_blocks, held=held))

    def cancel(self, cancel: Cancel) -> None:
        self._do(self._batcher.cancel(cancel))

    def received(self, sender: str, header: memoryview, payload: memoryview) -> None:
        try:
            message, hidden = activations.decode(header, payload)
            if isinstance(message, Forward) and hidden is not None:
                self._check_width(message, hidden)
            self._do(self._batcher.received(message, hidden))
        except ProtocolViolation as error:
            self._violations += 1
            self._log.warning("bad stage message", sender=sender, error=str(error))

    def peer_lost(self, address: str, error: TransportError) -> None:
        why = Failure(PeerLost.code, f"node {self._node} lost {address}: {error}")
        self._do(self._batcher.peer_lost(address, why))

    def close(self) -> None:
        """Ends everything: gateways resume their requests elsewhere, peers free what they keep."""
        self._do(self._batcher.close(Failure(PeerLost.code, f"node {self._node} stopped")))
        self.flush()

    # --- steps --------------------------------------------------------------

    def step(self, hold: Hold) -> bool:
        """Runs the engine once; False if there is nothing to run."""
        work = self._batcher.take()
        if work is None:
            return False
        until = time.monotonic() + self._floor(work)
        ran = self._run(work)
        if ran is not None:
            work, result = ran
            hold(until)
            self._do(self._batcher.ran(work, result.sampled, _split(work, result.hidden)))
        return True

    def flush(self) -> None:
        """Everything for one gateway goes out in one message."""
        out, self._out = self._out, {}
        for gateway, box in out.items():
            message = Tokens(node=self._node, tokens=tuple(box.tokens), failed=tuple(box.failed))
            self._emit(gateway, message)

    @property
    def load(self) -> WorkerLoad:
        return WorkerLoad(
            running=self._batcher.running,
            waiting=self._batcher.waiting,
            kv_used=self._engine.kv_used,
            kv_capacity=self._engine.kv_capacity,
            tokens_out=self._batcher.tokens_out,
            violations=self._violations,
        )

    def _run(self, work: Work) -> tuple[Work, StageResult] | None:
        """What could be run and its result. What could not has failed."""
        while work.parts:
            try:
                return work, self._engine.run(_batch(work))
            except CapacityExceeded as error:
                work, commands = self._batcher.no_room(work, _failure(error))
                self._do(commands)
            except LambdaScaleError as error:
                self._do(self._batcher.failed(work, _failure(error)))
                return None
            except Exception as error:  # the engine's boundary: a bad batch must not end the node
                self._log.exception("engine failed", blocks=str(work.blocks), rows=len(work.rows))
                why = Failure(LambdaScaleError.code, f"node {self._node}'s engine failed: {error}")
                self._do(self._batcher.failed(work, why))
                return None
        return None

    def _do(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Release):
                self._engine.free(command.sequences)
            elif isinstance(command, Emit):
                box = self._out.setdefault(command.gateway, _Outbox())
                if isinstance(command.what, Token):
                    box.tokens.append(command.what)
                else:
                    box.failed.append(command.what)
            else:
                self._send(command.address, *activations.encode(command.message, command.hidden))

    def _floor(self, work: Work) -> float:
        """Least time of this work: its share of a step through the whole model."""
        manifest = self._models.get(work.blocks.model_id)
        if manifest is None:
            return 0.0
        return self._step_floor_s * (work.blocks.stop - work.blocks.start) / manifest.n_blocks

    def _check_width(self, message: Forward, hidden: torch.Tensor) -> None:
        manifest = self._models.get(message.path.model_id)
        width = hidden.shape[1]
        if manifest and manifest.config["hidden_size"] != width:
            raise ProtocolViolation(
                f"hidden states {width} wide for model {message.path.model_id}, "
                f"which has {manifest.config['hidden_size']}"
            )


def check_tokens(submit: Submit, manifest: Manifest) -> None:
    """BadInput for token ids that the model does not have: they would fail the whole batch."""
    vocab_size = manifest.config["vocab_size"]
    if submit.tokens and max(submit.tokens) >= vocab_size:
        raise BadInput(
            f"request {submit.request} has token id {max(submit.tokens)}, "
            f"model {submit.model_id} has {vocab_size}"
        )


def _failure(error: LambdaScaleError) -> Failure:
    return Failure(error.code, str(error))


def _batch(work: Work) -> StageBatch:
    inputs = [_input(part) for part in work.parts if part.hidden is not None]
    hidden = torch.cat(inputs) if len(inputs) > 1 else inputs[0] if inputs else None
    blocks = work.blocks
    return StageBatch(blocks.model_id, blocks.start, blocks.stop, work.rows, hidden)


def _input(part: Part) -> torch.Tensor:
    """The rows' hidden states, less those of rows that were taken out."""
    hidden: torch.Tensor = part.hidden
    if part.positions == hidden.shape[0]:
        return hidden
    pairs = zip(part.rows, part.offsets, strict=True)
    return torch.cat([hidden[start : start + row.count] for row, start in pairs])


def _split(work: Work, hidden: torch.Tensor | None) -> list[torch.Tensor | None]:
    if hidden is None:
        return [None] * len(work.parts)
    return list(torch.split(hidden, [part.positions for part in work.parts]))
