"""Engine threads wired back to back in one process, and what a gateway would see of them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from services.node.engine.base import Engine, StagePart
from services.node.execution.worker import Worker, WorkerLoad
from services.node.transport.base import Buffer
from shared.ids import GatewayId, NodeId
from shared.layout import Manifest
from shared.messages.serving import (
    AttemptFailed,
    Scores,
    Submit,
    Token,
    Tokens,
)
from tests.support.hash_engine import HashEngine, hash_manifest
from tests.support.submits import BLOCKS, MODEL

HASH_MODEL = hash_manifest(BLOCKS)
BOUND_S = 120.0
"""A bound only: on a busy machine a thread may get the processor late."""


@dataclass
class Attempt:
    """What a gateway saw of one attempt."""

    tokens: list[Token] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    failed: AttemptFailed | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ids(self) -> list[int]:
        return [token.token for token in self.tokens]

    @property
    def over(self) -> bool:
        return self.failed is not None or bool(self.tokens and self.tokens[-1].finish)

    @property
    def code(self) -> str | None:
        return self.failed.code if self.failed else None

    async def until(self, reached: Callable[["Attempt"], bool]) -> "Attempt":
        async with asyncio.timeout(BOUND_S):
            while not reached(self):
                self.changed.clear()
                await self.changed.wait()
        return self

    async def end(self) -> "Attempt":
        return await self.until(lambda a: a.over)


class Gate:
    """Holds an engine before it runs a block of the row that draws token `index` of a request."""

    def __init__(self, request: str, index: int, block: int | None) -> None:
        """`block`: the first of the row's stage if None."""
        self._request = request
        self._index = index
        self._block = block
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, block: int, part: StagePart) -> None:
        if block != (part.start if self._block is None else self._block):
            return
        for row in part.rows:
            of_request = row.sequence.startswith(f"{self._request}#")
            if of_request and row.draw is not None and row.draw.index == self._index:
                self.reached.set()
                if not self._open.wait(BOUND_S):
                    raise TimeoutError("the test never opened the gate")

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, BOUND_S)

    def open(self) -> None:
        self._open.set()


class Cluster:
    """Workers whose messages go straight into each other's queue."""

    def __init__(
        self,
        manifest: Manifest,
        buffers: Sequence[bytearray | memoryview],
        make_engine: Callable[[int], Engine],
    ) -> None:
        self._manifest = manifest
        self._buffers = buffers
        self._make_engine = make_engine
        self.workers: dict[str, Worker] = {}
        self.engines: dict[str, HashEngine] = {}
        self.attempts: dict[tuple[str, int], Attempt] = {}
        self.cut: set[str] = set()
        self.messages: list[tuple[GatewayId, Tokens]] = []
        self.loads: list[WorkerLoad] = []
        """The load of the node that said them, as each of `messages` went out."""
        self._loop = asyncio.get_running_loop()

    def attempt(self, name: str, number: int = 1) -> Attempt:
        return self.attempts.setdefault((name, number), Attempt())

    async def add(
        self,
        name: str,
        *,
        kv_capacity: int,
        slots: int,
        step_tokens: int,
        speculation: int,
        holds: Collection[int],
    ) -> Worker:
        def make_engine() -> Engine:
            engine = self._make_engine(kv_capacity)
            if isinstance(engine, HashEngine):
                self.engines[name] = engine
            return engine

        worker = self.workers[name] = Worker(
            node=NodeId(name),
            make_engine=make_engine,
            slots=slots,
            step_tokens=step_tokens,
            speculation=speculation,
            send=lambda address, header, payload: self._send(name, address, header, payload),
            emit=self._emit,
            ran=lambda *_: None,
        )
        worker.start()
        await worker.open_model(MODEL, self._manifest)
        for block in holds:
            assert not await worker.attach(MODEL, {block: memoryview(self._buffers[block])})
        return worker

    def gate(self, node: str, request: str, index: int, block: int | None = None) -> Gate:
        gate = self.engines[node].before_run = Gate(request, index, block)
        return gate

    async def submit(self, message: Submit) -> Attempt:
        await self.workers[message.stages[0].node].submit(message)
        return self.attempt(message.request, message.attempt)

    async def submit_together(self, *messages: Submit) -> list[Attempt]:
        """All come before their leader's engine begins with any of them."""
        (leader,) = {message.stages[0].node for message in messages}
        queued = threading.Event()
        self.workers[leader]._post(lambda _: _wait(queued))
        together = asyncio.gather(*map(self.submit, messages))
        await asyncio.sleep(0)
        queued.set()
        return await together

    def _send(self, sender: str, address: str, header: bytes, payload: Sequence[Buffer]) -> None:
        target = address.removeprefix("mem://")
        if not {sender, target} & self.cut:
            body = memoryview(b"".join(payload))
            self.workers[target].on_message(f"mem://{sender}", memoryview(header), body)

    def _emit(self, gateway: GatewayId, tokens: Tokens) -> None:
        load = self.workers[tokens.node].load()
        self._loop.call_soon_threadsafe(self._on_tokens, gateway, tokens, load)

    def _on_tokens(self, gateway: GatewayId, message: Tokens, load: WorkerLoad) -> None:
        self.messages.append((gateway, message))
        self.loads.append(load)
        for scores in message.scores:
            self.attempt(scores.request, scores.attempt).scores.append(scores)
        for token in message.tokens:
            attempt = self.attempt(token.request, token.attempt)
            attempt.tokens.append(token)
            attempt.changed.set()
        for failed in message.failed:
            attempt = self.attempt(failed.request, failed.attempt)
            attempt.failed = failed
            attempt.changed.set()

    async def all_free(self, *names: str) -> None:
        for name in names or self.engines:
            assert await asyncio.to_thread(self.engines[name].wait_until_free), name


def _wait(event: threading.Event) -> None:
    assert event.wait(BOUND_S)


@asynccontextmanager
async def cluster(
    *names: str,
    slots: int = 8,
    step_tokens: int = 4,
    speculation: int = 0,
    kv_capacity: Mapping[str, int] = MappingProxyType({}),
    holds: Mapping[str, Collection[int]] = MappingProxyType({}),
    manifest: Manifest = HASH_MODEL,
    buffers: Sequence[bytearray | memoryview] = (bytearray(),) * BLOCKS,
    make_engine: Callable[[int], Engine] = HashEngine,
) -> AsyncIterator[Cluster]:
    """`holds`: the blocks of nodes that do not hold all."""
    async with AsyncExitStack() as stack:
        made = Cluster(manifest, buffers, make_engine)
        for name in names:
            worker = await made.add(
                name,
                kv_capacity=kv_capacity.get(name, 10_000),
                slots=slots,
                step_tokens=step_tokens,
                speculation=speculation,
                holds=holds.get(name, range(len(buffers))),
            )
            stack.push_async_callback(worker.stop)
        yield made
