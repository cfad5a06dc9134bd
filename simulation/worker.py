"""The node's engine in virtual time: the twin of `services.node.execution.worker`.

The scheduler and the steps are the node's own; only the waiting differs. A step sets one timer for
its end, and calls run at once, as they do in the thread while a step waits for its time.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from weakref import ReferenceType, ref

from services.node.core.handover import Worth
from services.node.core.kv import KvMover
from services.node.core.load import WorkerLoad
from services.node.core.watchdog import Pulse
from services.node.execution.steps import EmitTo, SendTo, Steps
from services.node.execution.sweeps import Ran
from services.node.execution.worker import PORTION, SETTLE_S, check_begun
from services.node.parts import MakeAdapter
from shared import telemetry
from shared.clock import now
from shared.errors import Conflict, LambdaScaleError, TransportError, UnsupportedModel
from shared.ids import ModelId, NodeId
from shared.layout import Manifest
from shared.messages.serving import Cancel, Submit
from shared.parts import Part
from shared.story import Transition
from simulation.engine import ModelledEngine
from simulation.hardware import Channel
from simulation.models import Model
from simulation.store import HostCache


class ModelledWorker:
    """`send` and `emit` must not call back before they return.

    If a model was closed and opened again in the same memory, its blocks were in host memory
    meanwhile, so attaching a block takes the time of `pcie`. A block that was just written there
    went to the accelerator as it arrived.
    """

    def __init__(
        self,
        *,
        node: NodeId,
        engine: ModelledEngine,
        pcie: Channel,
        host: HostCache,
        slots: int,
        step_tokens: int,
        send: SendTo,
        emit: EmitTo,
        ran: Ran,
        steps_type: type[Steps] = Steps,
        kv_mover: Callable[[], KvMover | None] = lambda: None,
        worth: Worth = lambda model_id, positions, nbytes: True,
        unit: int = 1,
    ) -> None:
        """`host` is told which models are in use. `unit`: the bytes that one byte of the network
        stands for."""
        self._node = node
        self._engine = engine
        self._pcie = pcie
        self._host = host
        self._kv_mover = kv_mover
        self._unit = unit
        self._make_steps = partial(
            steps_type,
            node=node,
            engine=engine,
            slots=slots,
            step_tokens=step_tokens,
            send=send,
            emit=emit,
            ran=ran,
            clock=now,
            worth=worth,
            post=lambda call: self._tell(lambda steps: call()),
        )
        self._log = telemetry.logger("worker", node=node)
        self._open: dict[ModelId, Manifest] = {}
        self._attached: dict[tuple[ModelId, int], ReferenceType[memoryview]] = {}
        """Where each block was last attached."""
        self._asleep: set[tuple[ModelId, int]] = set()
        self._next: asyncio.Handle | None = None
        """The end of the step that runs, or the begin of the next step."""
        self._ended = asyncio.Event()
        self._error: Exception | None = None

    @property
    def staging(self) -> str:
        return ""

    @property
    def portion(self) -> int:
        """As many modelled bytes as a worker's."""
        return PORTION // self._unit

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._steps = self._make_steps(kv_mover=self._kv_mover())

    async def ready(self) -> None:
        """Returns at once."""

    async def wait(self) -> None:
        """Waits until it is stopped or has failed, and raises what it failed with."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    async def stop(self) -> None:
        """Fails everything that is running. Its gateways resume it elsewhere."""
        if not self._ended.is_set():
            self._steps.close()
            self._end()

    async def open_model(
        self, model_id: ModelId, manifest: Manifest, part: Part | None = None, devices: int = 1
    ) -> None:
        self._do(lambda steps: steps.open_model(model_id, manifest, part, devices))
        self._open[model_id] = manifest
        self._host.on_open(model_id)

    def use_tokenizer(self, model_id: ModelId, tokenizer_json: bytes) -> None:
        """Does nothing: simulated tokens are no text."""

    def lift(self, model_id: ModelId, block: int, buffer: memoryview) -> None:
        """Does nothing: `attach` takes the time that it takes."""

    async def attach(
        self, model_id: ModelId, blocks: Mapping[int, memoryview]
    ) -> dict[int, BaseException]:
        failed: dict[int, BaseException] = {}
        for block, buffer in blocks.items():
            try:
                await self._attach(model_id, block, buffer)
            except Exception as error:  # the block's boundary
                failed[block] = error
        return failed

    async def _attach(self, model_id: ModelId, block: int, buffer: memoryview) -> None:
        key = model_id, block
        last = self._attached.get(key)
        if key in self._asleep and last is not None and last() is buffer:
            manifest = self._open[model_id]
            await self._pcie.carry(Model.of(manifest).block_bytes(manifest.blocks[block]))
        self._do(lambda steps: steps.attach(model_id, block, buffer))
        self._asleep.discard(key)
        self._attached[key] = ref(buffer)

    async def prepare(
        self, model_id: ModelId, manifest: Manifest, block: int, buffer: memoryview
    ) -> bool:
        return self._engine.prepare(model_id, manifest, block, buffer)

    async def close_model(self, model_id: ModelId, *, asleep: bool = False) -> None:
        held = self._engine.held(model_id)
        self._do(lambda steps: steps.close_model(model_id, asleep=asleep))
        self._forget(model_id)
        self._asleep |= {(model_id, block) for block in held}

    async def expect_adapter(self, manifest: Manifest) -> MakeAdapter:
        raise UnsupportedModel("modelled engines have no adapters")

    async def adapt(self, name: ModelId, make: MakeAdapter, buffer: memoryview) -> None:
        """There is none."""

    async def drop_adapter(self, name: ModelId) -> None:
        """There is none."""

    async def submit(self, submit: Submit) -> None:
        """The same as Worker.submit, with its errors."""
        settled, over = asyncio.Event(), False

        def tell(ended: bool) -> None:
            nonlocal over
            over = ended
            settled.set()

        self._do(lambda steps: steps.submit(submit, tell))
        try:
            async with asyncio.timeout(SETTLE_S):
                await settled.wait()
        except TimeoutError:
            self._tell(lambda steps: steps.late(submit))
        check_begun(submit, over=over)

    async def story(self, subject: str) -> tuple[Transition, ...]:
        return self._steps.story.of(subject)

    def cancel(self, cancel: Cancel) -> None:
        self._tell(lambda steps: steps.cancel(cancel))

    def on_message(self, sender: str, header: memoryview, payload: memoryview) -> None:
        self._tell(lambda steps: steps.received(sender, header, payload))

    def on_peer_lost(self, address: str, error: TransportError) -> None:
        self._tell(lambda steps: steps.peer_lost(address, error))

    def load(self) -> WorkerLoad:
        load = self._steps.load
        position_bytes = load.kv_position_bytes.items()
        return replace(
            load,
            kv_position_bytes={model: -(-n // self._unit) for model, n in position_bytes},
            kv_sent_bytes=load.kv_sent_bytes // self._unit,
            kv_received_bytes=load.kv_received_bytes // self._unit,
        )

    def pulse(self) -> Pulse:
        """A modelled engine never hangs."""
        return Pulse()

    def give_up(self, error: LambdaScaleError) -> None:
        self._fail(error)

    def _forget(self, model_id: ModelId) -> None:
        if self._open.pop(model_id, None) is not None:
            self._host.on_close(model_id, now())

    # --- calls --------------------------------------------------------------

    def _do(self, call: Callable[[Steps], None]) -> None:
        if self._ended.is_set():
            raise Conflict(f"the engine of node {self._node} has ended: {self._error}")
        call(self._steps)
        self._steps.flush()
        if self._next is None:
            self._next = self._loop.call_soon(self._begin)

    def _tell(self, call: Callable[[Steps], None]) -> None:
        if self._ended.is_set():
            return
        try:
            self._do(call)
        except Exception as error:  # as in the thread, it ends the node: `wait` raises it
            self._fail(error)

    # --- steps --------------------------------------------------------------

    def _begin(self) -> None:
        """Begins the next step once all calls of this moment are in."""
        try:
            until = self._steps.begin(now())
            self._steps.flush()
        except Exception as error:  # the engine's boundary: `wait` raises it
            self._fail(error)
            return
        self._next = None if until is None else self._loop.call_at(until, self._finish)

    def _finish(self) -> None:
        try:
            self._steps.finish(now())
            self._steps.flush()
        except Exception as error:  # the engine's boundary: `wait` raises it
            self._fail(error)
            return
        self._begin()

    def _fail(self, error: Exception) -> None:
        self._log.error("engine failed", error=repr(error))
        self._error = error
        self._end()

    def _end(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        for model_id in list(self._open):
            self._forget(model_id)
        self._ended.set()
