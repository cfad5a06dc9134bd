"""One stage in a process of its own: a node's engine thread, and its data plane over TCP."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import uvloop

from services.node.checkpoints.store import Store
from services.node.core import led
from services.node.core.sequences import Lane
from services.node.engine.engine import TorchEngine
from services.node.engine.sweep import TorchSweep
from services.node.execution.worker import Worker
from services.node.memory.arena import Arena
from services.node.moving.data_plane import DataPlane
from services.node.moving.events import Arrival, PullFailure
from services.node.transport.base import Buffer, NoListener
from shared import telemetry
from shared.config import TelemetryConfig
from shared.errors import LambdaScaleError, TransportError
from shared.ids import GatewayId, ModelId, NodeId
from shared.messages.serving import Cancel, Submit, Tokens

HOST = "127.0.0.1"
STEP_TOKENS = 512
"""The default of node.step_tokens."""
PATIENCE_S = 60.0
STOP_S = 10.0


class StageFailed(LambdaScaleError):
    code = "stage_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    node: str
    store: Path
    model: ModelId
    start: int
    stop: int
    """Its blocks are start <= block < stop."""
    step_s: float
    """Least seconds of a sweep through the whole model."""
    slots: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """One sweep. Times are seconds on the machine's monotonic clock, which all processes share."""

    began: float
    seconds: float
    """Seconds that the engine was busy."""


@dataclass(frozen=True, slots=True)
class Record:
    sweeps: list[Sweep]
    tokens: list[tuple[float, int]]
    """(when, how many tokens came), at the leader."""
    failures: list[str]


class Stage:
    """The process, from outside. Use as a context manager. StageFailed if it ends too early."""

    def __init__(self, spec: Spec) -> None:
        context = get_context("forkserver")  # All stages import torch once.
        context.set_forkserver_preload([__name__])
        self._spec = spec
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(spec, theirs), daemon=True)
        self._theirs = theirs

    def __enter__(self) -> Self:
        self._process.start()
        self._theirs.close()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pipe.close()
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def ready(self) -> str:
        """The stage's address, once its blocks are there."""
        return str(self._receive())

    def submit(self, submits: Sequence[Submit], depth: int) -> None:
        """Submits requests, with at most `depth` micro-batches of each path in flight; 0: no
        limit."""
        self._ask(("submit", submits, depth))

    def cancel(self, submits: Sequence[Submit]) -> None:
        cancels = [Cancel(request=submit.request, attempt=submit.attempt) for submit in submits]
        self._ask(("cancel", cancels))

    def record(self) -> Record:
        """The record of everything since the last call."""
        record = self._ask(("record",))
        assert isinstance(record, Record)
        return record

    def _ask(self, request: tuple[object, ...]) -> object:
        try:
            self._pipe.send(request)
        except OSError as error:
            raise self._ended() from error
        return self._receive()

    def _receive(self) -> object:
        try:
            if not self._pipe.poll(PATIENCE_S):
                raise StageFailed(f"stage {self._spec.node} gave no answer in {PATIENCE_S:.0f} s")
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if isinstance(answer, LambdaScaleError):
            raise answer
        return answer

    def _ended(self) -> StageFailed:
        return StageFailed(f"the process of stage {self._spec.node} has ended")


class LimitedLane(Lane):
    """A lane as a scheduler without 2-D pipelining has it."""

    limit: ClassVar[int] = 0
    """The most micro-batches in flight. 0: as many as there are stages."""

    @property
    def depth(self) -> int:
        return self.limit or super().depth


class TimedEngine(TorchEngine):
    began = 0.0
    """When the last sweep began."""

    def begin(self, model_id: ModelId) -> TorchSweep:
        self.began = time.monotonic()
        return super().begin(model_id)


def _main(spec: Spec, pipe: Connection) -> None:
    telemetry.configure("stage", TelemetryConfig(log_level="error"))
    setattr(led, "Lane", LimitedLane)  # noqa: B010 (a class is no variable to the type checker)
    uvloop.run(_Process(spec, pipe).run())


class _Ears(NoListener):
    """The worker hears its peers; nothing else is listened to."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def on_message(self, sender: str, header: memoryview, payload: memoryview) -> None:
        self._worker.on_message(sender, header, payload)

    def on_peer_lost(self, address: str, error: TransportError) -> None:
        self._worker.on_peer_lost(address, error)

    def on_arrived(self, arrival: Arrival) -> None:
        pass

    def on_kv_copied(self, nbytes: int, seconds: float) -> None:
        raise AssertionError("no KV moves here")

    def on_failed(self, failure: PullFailure) -> None:
        pass


class _Process:
    def __init__(self, spec: Spec, pipe: Connection) -> None:
        self._spec, self._pipe = spec, pipe
        self._record = Record([], [], [])

    async def run(self) -> None:
        spec = self._spec
        manifest = Store(spec.store).manifests()[spec.model]
        arena = Arena(sum(block.nbytes for block in manifest.blocks) + (1 << 20))
        worker = Worker(
            node=NodeId(spec.node),
            make_engine=self._make_engine,
            slots=spec.slots,
            step_tokens=STEP_TOKENS,
            send=self._send,
            emit=self._hear,
            ran=self._swept,
        )
        data = self._data = DataPlane(
            HOST,
            0,
            0,
            listener=_Ears(worker),
        )
        async with data:
            worker.start()
            try:
                await worker.open_model(spec.model, manifest)
                for block in range(spec.start, spec.stop):
                    buffer = arena.allocate(manifest.blocks[block].nbytes).memory
                    Store(spec.store).fill(spec.model, block, buffer)
                    assert not await worker.attach(spec.model, {block: buffer})
                self._pipe.send(data.address)
                await self._serve(worker)
            finally:
                await worker.stop()

    def _make_engine(self) -> TimedEngine:
        self._engine = TimedEngine(
            "cpu", self._spec.kv_tokens, threads=1, step_floor_s=self._spec.step_s
        )
        return self._engine

    async def _serve(self, worker: Worker) -> None:
        """Serves until the other end is closed."""
        while True:
            try:
                request = await asyncio.to_thread(self._pipe.recv)
            except EOFError:
                return
            try:
                self._pipe.send(await self._answer(worker, *request))
            except LambdaScaleError as error:
                self._pipe.send(error)

    async def _answer(self, worker: Worker, kind: str, *arguments: Any) -> Record | None:
        if kind == "submit":
            submits, LimitedLane.limit = arguments
            for submit in submits:
                await worker.submit(submit)
        elif kind == "cancel":
            for cancel in arguments[0]:
                worker.cancel(cancel)
        else:
            record, self._record = self._record, Record([], [], [])
            return record
        return None

    # --- on the engine thread ---

    def _send(self, address: str, header: bytes, payload: Sequence[Buffer]) -> None:
        self._data.send(address, header, payload)

    def _swept(self, model: ModelId, share: float, tokens: float, seconds: float) -> None:
        self._record.sweeps.append(Sweep(self._engine.began, seconds))

    def _hear(self, gateway: GatewayId, message: Tokens) -> None:
        record = self._record
        if message.tokens:
            record.tokens.append((time.monotonic(), len(message.tokens)))
        ended = [f"{t.request} ended, use shorter windows" for t in message.tokens if t.finish]
        record.failures.extend(ended + [failed.message for failed in message.failed])
