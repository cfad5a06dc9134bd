"""The shell of answers with idempotency keys (`core/keyed.py`): the store, the instances and the
clients of each.

An answer's clients read its deltas from the beginning, each at its own pace, whichever gateway
generates them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, ClassVar, Self

import msgspec
import structlog

from services.gateway.api_error import ApiError, of_error
from services.gateway.choices import Choice
from services.gateway.core.commands import Emit, End, Piece
from services.gateway.core.key_limits import KeyLimits
from services.gateway.core.keyed import MAX_BYTES, KeyedAnswer, State
from services.gateway.core.keyed_record import (
    Ask,
    Effect,
    Fail,
    Generate,
    Kept,
    Look,
    Record,
    Stop,
    Tell,
    Work,
    Write,
)
from services.gateway.failures import Contain
from services.gateway.generation import Delta, Generation
from services.gateway.idempotency import Key
from shared import subjects
from shared.bus.base import Bus, KeyValue
from shared.clock import now, wall_ns
from shared.config import GatewayConfig
from shared.errors import (
    BadMessage,
    BusError,
    BusTimeout,
    KeyExists,
    LambdaScaleError,
    NoResponders,
)
from shared.ids import GatewayId
from shared.messages import Ok, Ping
from shared.stored import read_stored
from shared.story import Story, Transition

LOOK_S = 0.05
"""Seconds between looks at what is due."""
ASK_TIMEOUT_S = 0.5
STORE_TIMEOUT_S = 1.0
"""Then the store is asked again: one that elects a leader has forgotten the question."""
STATUS_S = 3.0
"""The longest time that a client waits for its answer's status until the store has answered. Then a
stream begins, so that it can say that it lives."""
Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


class KeyedAnswers:
    core_type: ClassVar[type[KeyedAnswer]] = KeyedAnswer
    """Simulations use answers that are validated after every event."""

    def __init__(
        self,
        bus: Bus,
        config: GatewayConfig,
        spawn: Spawn,
        contain: Contain,
        log: structlog.stdlib.BoundLogger,
        own: Callable[[], GatewayId],
    ) -> None:
        """`own`: this gateway's id, now."""
        self._bus = bus
        self._keep_s = config.keep_answers_s
        self._limits = KeyLimits(config.max_keys, config.keep_answers_s)
        self._spawn = spawn
        self._contain = contain
        self._log = log
        self._own = own
        self._story = Story(1000)
        self._running: dict[str, RunningAnswer] = {}
        self._bucket: KeyValue

    async def open(self) -> None:
        self._bucket = await self._bus.kv(subjects.KV_ANSWERS)

    def story(self, subject: str) -> tuple[Transition, ...]:
        """The last steps of answers that an API call asked for."""
        return self._story.of(subject)

    def reader(self, key: Key, generation: Generation) -> "Reader":
        """Reads the key's answer; `generation` is for an answer that is not known here. ApiError
        429 if the client has too many keys, 422 if this key came with another request."""
        running = self._running.get(key.name)
        if running is None or not running.goes_on:
            running = self._begin(key, generation)
        elif running.record.digest != key.digest:
            raise of_error(running.core.reused)
        return Reader(running)

    def _begin(self, key: Key, generation: Generation) -> "RunningAnswer":
        try:
            self._limits.take(key.client, key.name, now())
        except LambdaScaleError as error:
            raise of_error(error) from error
        record = Record(
            digest=key.digest,
            model_id=generation.record.model_id,
            created=wall_ns() // 1_000_000_000,
            owner=self._own(),
        )
        room = 0 if generation.scored else MAX_BYTES
        call = generation.choices[0].request.call
        core = self.core_type(key.name, record, self._story, now(), call=call, max_bytes=room)
        running = RunningAnswer(core, generation, self._bus, self._bucket, self._keep_s)
        self._running[key.name] = running
        self._spawn(self._run(key.name, running), f"keyed answer {key.name[:8]}")
        return running

    async def _run(self, name: str, running: "RunningAnswer") -> None:
        try:
            with self._contain("an answer with an idempotency key"):
                await running.run()
        finally:
            running.close()
            if self._running.get(name) is running:
                del self._running[name]


class RunningAnswer:
    """One answer that clients of this gateway read, or read a moment ago."""

    def __init__(
        self,
        core: KeyedAnswer,
        generation: Generation,
        bus: Bus,
        bucket: KeyValue,
        keep_s: float,
    ) -> None:
        self.core = core
        self.generation = generation
        self.deltas: list[Delta] = []
        self.error: ApiError | None = None
        self._bus = bus
        self._bucket = bucket
        self._keep_s = max(1, round(keep_s))
        self._generating = False
        self._readers = 0
        self._changed = asyncio.Event()

    @property
    def record(self) -> Record:
        return self.core.record

    @property
    def goes_on(self) -> bool:
        """Whether more clients may read it."""
        return self.error is None and self.core.state not in (State.FAILED, State.LEFT)

    @property
    def looked(self) -> bool:
        """Whether the store has said what is known of it."""
        return self.core.state is not State.LOOKING

    def read_by(self, more: int) -> None:
        self._readers += more
        self.core.readers(self._readers, now())

    async def change(self) -> None:
        await self._changed.wait()

    async def run(self) -> None:
        while not self.core.done:
            if given_up := self.core.tick(now()):
                self._do(given_up)
            if work := self.core.due(now()):
                self._do(await self._carry_out(work))
            else:
                await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        """Ends what is not over, because the gateway stops or failed."""
        self._stop()
        if self.generation.open and self.error is None:
            message = "the gateway stops: send the request again with its Idempotency-Key"
            self._end(ApiError(503, message, retry_after=1))

    # --- the store -----------------------------------------------------------

    async def _carry_out(self, work: Work) -> list[Effect]:
        core = self.core
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                match work:
                    case Look():
                        record, revision = await self._look()
                        return core.looked(record, revision, now())
                    case Write():
                        return core.written(await self._write(work), now())
                    case Ask(gateway):
                        return core.asked(await self._is_there(gateway), now())
        except KeyExists:
            return core.refused(now())
        except TimeoutError:
            return core.unanswered(BusTimeout(f"no answer within {STORE_TIMEOUT_S} s"), now())
        except BusError as error:
            return core.unanswered(error, now())

    async def _look(self) -> tuple[Record | None, int]:
        entry = await self._bucket.get(self.core.name)
        if entry is None:
            return None, 0
        try:
            record = read_stored(entry.value, Record)
        except BadMessage as error:
            raise BusError(f"what is kept of the answer cannot be read: {error}") from error
        choices = len(self.generation.choices)
        if any(not 0 <= kept.choice < choices or kept.token < 0 for kept in record.kept):
            raise BusError("what is kept of the answer has tokens that cannot be")
        return record, entry.revision

    async def _write(self, work: Write) -> int:
        key, value = self.core.name, msgspec.msgpack.encode(work.record)
        if not work.revision:
            return await self._bucket.create(key, value, ttl=self._keep_s)
        return await self._bucket.update(key, value, work.revision, ttl=self._keep_s)

    async def _is_there(self, gateway: GatewayId) -> bool:
        """Whether the gateway is connected to the bus, for all that is known."""
        subject = subjects.gateway_story(gateway)
        try:
            await self._bus.request(subject, Ping(), Ok, timeout=ASK_TIMEOUT_S)
        except NoResponders:
            return False
        except BusError:
            pass
        return True

    # --- tokens --------------------------------------------------------------

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Tell(kept):
                    for one in kept:
                        self._push(one)
                case Generate():
                    self._generate()
                case Stop():
                    self._stop()
                case Fail(error):
                    self._end(self.generation.fail(error))
        self._tell()

    def _push(self, kept: Kept) -> None:
        """Takes a token that another gateway wrote down."""
        choice = self.generation.choices[kept.choice]
        if choice.finish is None:
            delta = self.generation.push(
                choice, kept.token, kept.finish, kept.logprobs, kept.cached
            )
            self.deltas.append(delta)

    def _generate(self) -> None:
        if not self.generation.open:
            self.core.ended(now())
            return
        for choice in self.generation.choices:
            if choice.finish is None:
                choice.ask_for_the_rest()
        self._generating = True
        try:
            self.generation.begin(self._take)
        except LambdaScaleError as error:
            self._do(self.core.failed(error, now()))

    def _take(self, choice: Choice, piece: Piece) -> None:
        """Takes what an instance gave."""
        if not self._generating:
            return
        if isinstance(piece, End):
            self._do(self.core.failed(piece.error, now()))
            return
        if delta := self.generation.take(choice, piece):
            self.deltas.append(delta)
            assert isinstance(piece, Emit)
            kept = Kept(choice.index, piece.token, piece.finish, piece.cached, piece.logprobs)
            self.core.generated(kept)
        if not self.generation.open:
            self.core.ended(now())
            self._stop()
        self._tell()

    def _stop(self) -> None:
        if self._generating:
            self._generating = False
            self.generation.end()

    def _end(self, error: ApiError) -> None:
        self.error = self.error or error
        self._tell()

    def _tell(self) -> None:
        """Wakes whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()


class Reader:
    """A client's way through an answer, from its beginning."""

    def __init__(self, running: RunningAnswer) -> None:
        self._running = running
        self.generation = running.generation

    @property
    def answer_id(self) -> str:
        return f"key-{self._running.core.name[:20]}"

    @property
    def created(self) -> int:
        return self._running.record.created

    async def __aenter__(self) -> Self:
        """Waits until the store has said what is known of the answer, or for STATUS_S. ApiError."""
        self._running.read_by(1)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(STATUS_S):
                    while not (self._running.looked or self._running.error):
                        await self._running.change()
            if self._running.error and not self._running.deltas:
                raise self._running.error
        except BaseException:
            self._running.read_by(-1)
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._running.read_by(-1)

    async def deltas(self, patience_s: float | None) -> AsyncIterator[list[Delta]]:
        """As `Generation.deltas`."""
        running, seen = self._running, 0
        while True:
            new: list[Delta] = []
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    while not (new := running.deltas[seen:]):
                        if not self.generation.open:
                            return
                        if running.error:
                            raise running.error
                        await running.change()
            seen += len(new)
            yield new
