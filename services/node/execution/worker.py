"""The engine thread of a node. It alone runs the scheduler and the engine. Only grammars are made
elsewhere, one after the other, on a thread beside it, which also settles adapters.

Everything reaches it through one queue of calls and leaves through `send` and `emit`. Between two
blocks it takes in all calls that have come, so that new rows join the sweep at a block ahead, or
the next sweep. With nothing to run it sleeps.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue

from services.node.core.handover import Worth
from services.node.core.kv import KvMover
from services.node.core.load import WorkerLoad
from services.node.core.watchdog import Pulse
from services.node.engine.base import Bell, Engine, MakeAdapter, Weights
from services.node.execution.steps import EmitTo, SendTo, Steps
from services.node.execution.sweeps import AT_ONCE_S, Ran
from services.node.memory.device import DeviceArena
from shared import telemetry
from shared.clock import wall_ns
from shared.errors import (
    CapacityExceeded,
    ConfigError,
    Conflict,
    LambdaScaleError,
    SourceLost,
    TransportError,
)
from shared.grammar import FOLLOW_STACK
from shared.ids import ModelId, NodeId
from shared.layout import Manifest
from shared.messages.serving import Cancel, Submit
from shared.parts import Part
from shared.story import Transition

__all__ = ["EmitTo", "SendTo", "Worker", "WorkerLoad"]

Call = Callable[[Steps], None]
SETTLE_S = 2.0
"""How long an attempt waits for KV of the attempt before, or for its path. Gateways wait longer for
an answer."""
PORTION = 128 << 20
"""The most bytes of blocks that a worker is meant to be given at a time. A larger block comes
alone."""


def check_begun(submit: Submit, *, over: bool) -> None:
    """CapacityExceeded if a request that may kill nodes has ended before all of its path had room
    for it: then it can have killed none of them. SourceLost if another request has ended before it
    had the KV of the attempt before."""
    ended = f"attempt {submit.attempt} of request {submit.request} ended before"
    if over and submit.alone_until:
        raise CapacityExceeded(f"{ended} all nodes of its path had room for it: submit elsewhere")
    if over:
        raise SourceLost(f"{ended} it had the KV of attempt {submit.takes_over}")


class Worker:
    """Owns the engine thread, on which `send`, `emit` and `ran` are called."""

    def __init__(
        self,
        *,
        node: NodeId,
        make_engine: Callable[[], Engine],
        device: DeviceArena | None = None,
        slots: int,
        step_tokens: int,
        speculation: int = 0,
        send: SendTo,
        emit: EmitTo,
        ran: Ran,
        kv_mover: Callable[[], KvMover | None] = lambda: None,
        worth: Worth = lambda model_id, positions, nbytes: True,
        broken: Callable[[], str] = str,
        staging: Callable[[], str] = str,
    ) -> None:
        """`device`: where the engine computes, if not in host memory. The caller opens it before
        the worker is started, and closes it after the worker has ended. `kv_mover` (asked for when
        the threads start) and `worth`: see `Steps`. `broken`: see `Pulse`. `staging`:
        how weights reach devices other than `device`, once the engine is made."""
        if slots < 1 or step_tokens < 1:
            raise ConfigError("node.slots and node.step_tokens must be at least 1")
        self._node = node
        self._make_engine = make_engine
        self._device = device
        self._slots = slots
        self._step_tokens = step_tokens
        self._speculation = speculation
        self._send = send
        self._emit = emit
        self._ran = ran
        self._kv_mover = kv_mover
        self._worth = worth
        self._broken = broken
        self._staging = staging
        self._log = telemetry.logger("worker", node=node)
        self._calls: list[Call] = []
        self._changed = threading.Condition()
        """Guards `_calls`, `_over` and `_error`."""
        self._bell = Bell()
        """Rung while there are calls."""
        self._over = False
        self._stopping = False
        """Set on the engine thread, unless that hangs."""
        self._load = WorkerLoad()
        self._traces: dict[ModelId, str] = {}
        """The span in which each open model was opened."""
        self._lifted: dict[tuple[ModelId, int], asyncio.Future[Weights]] = {}
        """Blocks on their way to the device, or there, which the engine does not have yet."""
        self._asked: set[asyncio.Future[None]] = set()
        self._ended = asyncio.Event()
        self._error: Exception | None = None
        self._busy_since: float | None = None
        """When the piece of work began that the engine's thread is at; None: it waits."""
        self._longest_s = 0.0
        self._failed_in_a_row = 0
        self._hangs = False
        self._thread: threading.Thread | None = None
        self._beside: threading.Thread | None = None
        self._work: SimpleQueue[Callable[[], Callable[[], None]] | None] = SimpleQueue()
        """What the thread beside the engine's is to do. None: it ends."""

    # --- on the control loop ------------------------------------------------

    def start(self) -> None:
        """Starts the threads. The engine is made on the engine thread."""
        loop = asyncio.get_running_loop()
        name = f"engine-{self._node}"
        self._thread = threading.Thread(target=self._main, args=(loop,), name=name, daemon=True)
        name = f"grammars-{self._node}"
        self._beside = threading.Thread(target=self._run_beside, name=name, daemon=True)
        default = threading.stack_size(FOLLOW_STACK)
        self._thread.start()
        self._beside.start()
        threading.stack_size(default)

    async def ready(self) -> None:
        """Waits until the engine is made. Conflict if it could not be made (`wait` raises why)."""
        await self._ask(lambda steps: None)

    async def wait(self) -> None:
        """Waits until the thread has ended, and raises what it failed with."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    async def stop(self) -> None:
        """Fails what is running (gateways resume it elsewhere) and ends the threads."""
        if self._thread is None or self._beside is None:
            return
        for lifted in self._lifted.values():
            lifted.cancel()
        self._lifted.clear()
        self._post(self._close)
        await self._ended.wait()
        if not self._hangs:
            self._thread.join()
        self._work.put(None)
        await asyncio.to_thread(self._beside.join)

    def give_up(self, error: LambdaScaleError) -> None:
        """The engine hangs, or is broken. Nobody waits for its thread any more, which ends with the
        process. `wait` raises the error."""
        self._hangs = self._stopping = True
        self._end(error)
        self._on_ended()

    async def open_model(
        self, model_id: ModelId, manifest: Manifest, part: Part | None = None, devices: int = 1
    ) -> None:
        """Opens a model. After this returns, what else can be prepared before blocks come is
        prepared between steps."""
        with telemetry.span("open_model", parent=telemetry.here()):
            await self._ask(lambda steps: steps.open_model(model_id, manifest, part, devices))
        trace = self._traces[model_id] = telemetry.here()
        self._post(lambda steps: self._warm_up(steps.warm_up(model_id), trace))

    def use_tokenizer(self, model_id: ModelId, tokenizer_json: bytes) -> None:
        """Requests with grammars can be served from now on."""
        self._post(lambda steps: steps.use_tokenizer(model_id, tokenizer_json))

    async def attach(
        self, model_id: ModelId, blocks: Mapping[int, memoryview]
    ) -> dict[int, BaseException]:
        """Once this returns, the engine can run the blocks. It returns the blocks that the engine
        cannot run, each with its error. Requests that run have steps in between (`_ask`). If the
        engine computes on a device, the bytes are copied there while it runs other blocks."""
        failed: dict[int, BaseException] = {}

        def attach(block: int, weights: Weights) -> Call:
            def call(steps: Steps) -> None:
                try:
                    steps.attach(model_id, block, weights)
                except BaseException as error:  # handed on to the caller; the thread goes on
                    failed[block] = error

            return call

        if self._device is None:
            await self._ask(*(attach(block, buffer) for block, buffer in blocks.items()))
            return failed
        parent = telemetry.here() or self._traces.get(model_id, "")
        for block, buffer in blocks.items():
            self._lift(self._device, model_id, block, buffer, parent)
        for block in blocks:
            try:
                weights = await self._lifted.pop((model_id, block))
            except Exception as error:  # the block's boundary
                failed[block] = error
            else:
                await self._ask(attach(block, weights))
        return failed

    def lift(self, model_id: ModelId, block: int, buffer: memoryview) -> None:
        """Begins to bring a block of an open model to the device, if there is one, ahead of
        `attach`, which waits for steps."""
        if self._device is not None and model_id in self._traces:
            self._lift(self._device, model_id, block, buffer, self._traces[model_id])

    def _lift(
        self, device: DeviceArena, model_id: ModelId, block: int, buffer: memoryview, parent: str
    ) -> None:
        if (model_id, block) not in self._lifted:
            work = self._on_device(device, block, buffer, parent)
            self._lifted[model_id, block] = asyncio.ensure_future(work)

    async def prepare(
        self, model_id: ModelId, manifest: Manifest, block: int, buffer: memoryview
    ) -> bool:
        """Makes ready what the engine makes of a block of a model that is not open. Once this
        returns, nobody needs the buffer. False: see `Engine.prepare`."""
        made: list[bool] = []
        await self._ask(lambda steps: made.append(steps.prepare(model_id, manifest, block, buffer)))
        return made[0]

    async def _on_device(
        self, device: DeviceArena, block: int, buffer: memoryview, parent: str
    ) -> Weights:
        """`parent`: the span that the upload belongs to."""
        if (landed := device.landed(buffer)) is not None:
            return landed
        attributes: dict[str, telemetry.Attribute] = {"block": block, "nbytes": len(buffer)}
        with telemetry.span("upload", parent=parent, attributes=attributes):
            return await device.upload(buffer)

    async def close_model(self, model_id: ModelId, *, asleep: bool = False) -> None:
        """Once this returns, the worker does not touch the model's buffers. `asleep`: see
        `Engine.close_model`."""
        self._traces.pop(model_id, None)
        for key in [key for key in self._lifted if key[0] == model_id]:
            self._lifted.pop(key).cancel()
        if self._device is not None:
            await self._device.settle()
        await self._ask(lambda steps: steps.close_model(model_id, asleep=asleep))

    async def expect_adapter(self, manifest: Manifest) -> MakeAdapter:
        """An adapter is on its way: finds memory for it. Returns what makes it, for `adapt`.
        Errors: see `Engine.make_adapter`."""
        found: list[Callable[[], MakeAdapter]] = []
        await self._ask(lambda steps: found.append(steps.make_adapter(manifest)))
        return await asyncio.to_thread(found[0])

    async def adapt(self, name: ModelId, make: MakeAdapter, buffer: memoryview) -> None:
        """Once this returns, requests can be run with the adapter, and nobody needs the buffer. It
        is made ready beside the engine's thread."""
        adapter = await asyncio.to_thread(make, buffer)
        await self._ask(lambda steps: steps.use_adapter(name, adapter))

    async def drop_adapter(self, name: ModelId) -> None:
        """Conflict: sequences run with it."""
        await self._ask(lambda steps: steps.drop_adapter(name))

    async def submit(self, submit: Submit) -> None:
        """Queues the attempt. Waits for the KV that it takes over, if it does, for SETTLE_S at
        most; and if the request may kill nodes, until all of its path have room for it.
        CapacityExceeded, NotFound, StaleEpoch, SourceLost or BadInput: it was not queued, or did
        not begin."""
        if why := self._broken():
            # It would fail as well, and be taken for what broke this node and another one.
            raise CapacityExceeded(f"node {self._node} ends, since {why}: submit elsewhere")
        settled, over = asyncio.Event(), False
        loop = asyncio.get_running_loop()

        def tell(ended: bool) -> None:
            nonlocal over
            over = ended
            loop.call_soon_threadsafe(settled.set)

        await self._ask(lambda steps: steps.submit(submit, tell))
        try:
            async with asyncio.timeout(SETTLE_S):
                await settled.wait()
        except TimeoutError:
            await self._ask(lambda steps: steps.late(submit))
        check_begun(submit, over=over)

    async def story(self, subject: str) -> tuple[Transition, ...]:
        """What the scheduler did lately with a sequence, or a request's, and why."""
        told: list[Transition] = []
        await self._ask(lambda steps: told.extend(steps.story.of(subject)))
        return tuple(told)

    def cancel(self, cancel: Cancel) -> None:
        self._post(lambda steps: steps.cancel(cancel))

    # --- on any thread ------------------------------------------------------

    def on_message(self, sender: str, header: memoryview, payload: memoryview) -> None:
        self._post(lambda steps: steps.received(sender, header, payload))

    def on_peer_lost(self, address: str, error: TransportError) -> None:
        """Ends the sequences on paths through the peer: its connection broke, a message could not
        be sent to it, or it died."""
        self._post(lambda steps: steps.peer_lost(address, error))

    @property
    def portion(self) -> int:
        """See PORTION."""
        return PORTION

    @property
    def staging(self) -> str:
        """How weights reach the engine's device, in words; empty: it computes where they land."""
        return self._device.staging if self._device else self._staging()

    def load(self) -> WorkerLoad:
        return self._load

    def pulse(self) -> Pulse:
        """What the engine's thread is at."""
        since = self._busy_since
        busy_s = None if since is None else time.monotonic() - since
        return Pulse(busy_s, self._longest_s, self._failed_in_a_row, self._broken())

    def regroup(self) -> None:
        """Processes have ended that ran models for the engine: see `Engine.regroup`."""
        self._post(lambda steps: self._do_pieces(steps.regroup()))

    # --- between the threads ------------------------------------------------

    def _post(self, call: Call) -> bool:
        """Queues a call. Returns False if the thread has ended, so that it will not be made."""
        with self._changed:
            if not self._over:
                self._calls.append(call)
                self._bell.ring()
                self._changed.notify()
            return not self._over

    def _post_back(self, call: Callable[[], None]) -> None:
        self._post(_call(call))

    async def _ask(self, *acts: Call) -> None:
        """Runs `acts` on the engine thread, in turn with the steps of what runs there: each turn
        takes AT_ONCE_S, or as long as one act. The first error ends that, and is raised here."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()
        left = deque(acts)

        def call(steps: Steps) -> None:
            until = time.monotonic() + AT_ONCE_S
            try:
                while left:
                    left.popleft()(steps)
                    if time.monotonic() >= until:
                        break
            except BaseException as error:  # handed on to the caller; the thread goes on
                loop.call_soon_threadsafe(_settle, answer, error)
            else:
                if left:
                    self._post(call)
                else:
                    loop.call_soon_threadsafe(_settle, answer, None)

        self._asked.add(answer)
        try:
            if not self._post(call):
                raise self._gone()
            await answer
        finally:
            self._asked.discard(answer)

    def _gone(self) -> Conflict:
        return Conflict(f"the engine thread of node {self._node} has ended: {self._error}")

    def _on_ended(self) -> None:
        self._ended.set()
        for answer in self._asked:
            _settle(answer, self._gone())

    # --- the thread beside the engine's -------------------------------------

    def _run_beside(self) -> None:
        while (work := self._work.get()) is not None:
            self._post(_call(work()))

    # --- the engine thread --------------------------------------------------

    def _main(self, loop: asyncio.AbstractEventLoop) -> None:
        failure: Exception | None = None
        try:
            engine = self._make_engine()
            self._serve(engine)
        except Exception as error:  # the thread's boundary: `wait` raises it on the control loop
            self._log.exception("engine thread failed")
            failure = error
        if not self._hangs:
            self._end(failure)
            loop.call_soon_threadsafe(self._on_ended)

    def _end(self, failure: Exception | None) -> None:
        """No call is made from now on."""
        with self._changed:
            self._over, self._error = True, failure
            self._calls.clear()

    def _beat(self, *, busy: bool) -> None:
        """A piece of work has ended, and the next begins, or none does."""
        now = time.monotonic()
        if self._busy_since is not None:
            self._longest_s = max(self._longest_s, now - self._busy_since)
        self._busy_since = now if busy else None

    def _serve(self, engine: Engine) -> None:
        steps = Steps(
            node=self._node,
            engine=engine,
            slots=self._slots,
            step_tokens=self._step_tokens,
            speculation=self._speculation,
            send=self._send,
            emit=self._emit,
            ran=self._ran,
            aside=self._work.put,
            kv_mover=self._kv_mover(),
            worth=self._worth,
            post=self._post_back,
            bell=self._bell,
        )
        idle = False
        self._load = steps.load
        while not self._stopping:
            self._take_in(steps, timeout=None if idle else 0)
            self._beat(busy=True)
            until = None if self._stopping else steps.begin(time.monotonic())
            idle = until is None
            if until is not None:
                self._hold(steps, until)
                self._beat(busy=True)
                steps.finish(time.monotonic())
            self._tell(steps)

    def _take_in(self, steps: Steps, timeout: float | None) -> None:
        """Runs the calls that have come. If there are none, waits for one."""
        with self._changed:
            if not self._calls and timeout != 0:
                self._beat(busy=False)
                self._changed.wait(timeout)
            calls, self._calls = self._calls, []
            self._bell.quiet()
        for call in calls:
            if not self._stopping:
                self._beat(busy=True)
                call(steps)
        if calls:
            self._tell(steps)

    def _tell(self, steps: Steps) -> None:
        """Whoever hears of a token finds it in the load."""
        self._load, self._failed_in_a_row = steps.load, steps.failed_in_a_row
        steps.flush()

    def _hold(self, steps: Steps, until: float) -> None:
        """Takes in what comes until a time, and returns then."""
        while not self._stopping and (left := until - time.monotonic()) > 0:
            self._take_in(steps, timeout=left)

    def _warm_up(self, pieces: Iterator[None], trace: str) -> None:
        """Does one piece of a model's warm-up. Between two pieces, what runs has a step."""
        started = wall_ns()
        try:
            next(pieces)
        except StopIteration:
            return
        except Exception:  # the first steps will be slower, or say themselves what is wrong
            self._log.exception("warm-up failed")
            return
        telemetry.record("warm_up", start_ns=started, end_ns=wall_ns(), parent=trace)
        self._post(lambda _: self._warm_up(pieces, trace))

    def _do_pieces(self, pieces: Iterator[None]) -> None:
        """Between two pieces, what runs has a step. An error ends the node."""
        for _ in pieces:
            self._post(lambda _: self._do_pieces(pieces))
            break

    def _close(self, steps: Steps) -> None:
        self._stopping = True
        steps.close()


def _call(then: Callable[[], None]) -> Call:
    return lambda _: then()


def _settle(answer: asyncio.Future[None], error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(None)
    else:
        answer.set_exception(error)
