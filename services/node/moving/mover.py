"""A node's part of a plan: pulls the blocks it lacks and forwards them while they arrive.

Runs on the transport's loop. Every block of a hosted model is one region, readable by peers up to
its verified chunks: a chunk is checked against the manifest before `advance` shows it to others,
so wrong bytes go no further than the node that received them. What was verified stays: another
revision, or another source, goes on from there.
"""

import asyncio
import enum
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from services.node.checkpoints.packing import Digest
from services.node.core.residency import PlanId
from services.node.memory.arena import ModelSpace
from services.node.transport.base import Listener, Transport
from shared import telemetry
from shared.clock import now, wall_ns
from shared.errors import (
    BadInput,
    Conflict,
    DigestMismatch,
    IllegalTransition,
    LambdaScaleError,
    NotFound,
    PeerLost,
    ProtocolViolation,
    RegionUnknown,
    TransportTimeout,
)
from shared.ids import ModelId, NodeId
from shared.layout import Manifest
from shared.messages.scaling import Pull

READ_BYTES = 4 << 20
"""Most that one read asks for: a run of whole chunks of one block, each of which is checked, and
shown to others, as it comes. A read costs the processor more than the chunks in it."""
BLOCKS_AHEAD = 4
"""Blocks that are read from one source at a time, so that it knows what comes next, and that one
which it still waits for leaves room for later ones."""
BLOCK_WINDOW = 16
"""Chunks in flight of each."""
FIRST_WINDOW = 2
"""The same while the source has sent nothing yet: it may have to wait for the bytes itself, or to
learn of the plan, and the fewer reads there are the sooner the first is answered. The second keeps
the link busy while the others are asked for."""
REGION_GRACE_S = 1.0
"""A source may learn of the plan after us: how long its regions may be unknown."""
REGION_RETRY_S = 0.01
OF_THE_SOURCE = (PeerLost, ProtocolViolation, TransportTimeout)
"""Errors that end every pull from a source, not just one block's."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A block is complete, verified and readable by others."""

    plan: PlanId
    """That it was pulled for."""
    model_id: ModelId
    block: int
    source: NodeId
    transport: str
    nbytes: int
    started_ns: int
    first_byte_ns: int
    finished_ns: int


@dataclass(frozen=True, slots=True)
class PullFailure:
    """A block cannot be had from its source; once a block and revision."""

    plan: PlanId
    """That it was pulled for."""
    model_id: ModelId
    block: int
    source: NodeId
    error: LambdaScaleError


class PlaneListener(Listener, Protocol):
    """Who hears what happens on a node's data plane, on its loop."""

    def on_arrived(self, arrival: Arrival) -> None: ...

    def on_failed(self, failure: PullFailure) -> None: ...


@dataclass(slots=True, eq=False)
class _Block:
    region: str
    buffer: memoryview
    verified: list[bool]
    """By chunk; in any order."""
    ready: int = 0
    """Leading verified chunks: what others may read."""
    writers: set[asyncio.Task[None]] = field(default_factory=set)
    """Reads that may still touch the buffer, cancelled ones too."""

    @property
    def complete(self) -> bool:
        return self.ready == len(self.verified)


class PullState(enum.Enum):
    """A pull ends once. What its reads still say after that is ignored."""

    PULLING = "pulling"
    ARRIVED = "arrived"
    FAILED = "failed"
    GIVEN_UP = "given up"
    """Another source was named, or the block came by other means, or the model goes."""


PULL_STEPS = {
    PullState.PULLING: frozenset({PullState.ARRIVED, PullState.FAILED, PullState.GIVEN_UP}),
    PullState.ARRIVED: frozenset[PullState](),
    PullState.FAILED: frozenset[PullState](),
    PullState.GIVEN_UP: frozenset[PullState](),
}


@dataclass(slots=True, eq=False)
class _Pulling:
    """One block from one source."""

    plan: PlanId
    step: int
    block: int
    source: NodeId
    address: str
    before: frozenset[asyncio.Task[None]]
    """Cancelled reads of an earlier source, which have the buffer until they have ended."""
    reads: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """By chunk; one may be of several."""
    started_ns: int = 0
    first_byte_ns: int = 0
    way: str = ""
    """What carries its bytes."""
    state: PullState = PullState.PULLING

    @property
    def ended(self) -> bool:
        return self.state is not PullState.PULLING

    def end(self, state: PullState) -> None:
        """IllegalTransition if it has ended already."""
        if state not in PULL_STEPS[self.state]:
            raise IllegalTransition(
                f"block {self.block} from {self.source}: {state.value} is not a step; "
                f"it is {self.state.value}"
            )
        self.state = state


@dataclass(slots=True, eq=False)
class _Model:
    id: ModelId
    manifest: Manifest
    space: ModelSpace
    blocks: list[_Block]
    pulls: dict[int, _Pulling] = field(default_factory=dict)
    queues: dict[NodeId, list[_Pulling]] = field(default_factory=dict)
    """The pulls from each source, in order of steps; ended ones perhaps among them."""
    heard: set[NodeId] = field(default_factory=set)
    """Sources that have sent something."""
    dropping: asyncio.Lock = field(default_factory=asyncio.Lock)

    def enqueue(self) -> None:
        """To be called after the pulls or their steps have changed."""
        self.queues = {}
        for pulling in sorted(self.pulls.values(), key=lambda pulling: pulling.step):
            self.queues.setdefault(pulling.source, []).append(pulling)

    def of(self, source: NodeId) -> list[_Pulling]:
        """The pulls from a source, earliest step first."""
        self.queues[source] = [p for p in self.queues.get(source, ()) if not p.ended]
        return self.queues[source]


class Mover:
    def __init__(
        self,
        transport: Transport,
        *,
        on_arrived: Callable[[Arrival], None],
        on_failed: Callable[[PullFailure], None],
        overwrites: Callable[[memoryview], None] = lambda buffer: None,
        read_bytes: int = READ_BYTES,
    ) -> None:
        """`overwrites` is told of each buffer before anything is written there. `read_bytes`: see
        READ_BYTES; a read is of one chunk at least."""
        self._transport = transport
        self._overwrites = overwrites
        self._read_bytes = read_bytes
        self._on_arrived = on_arrived
        self._on_failed = on_failed
        self._models: dict[ModelId, _Model] = {}
        self._log = telemetry.logger("mover")

    def host(
        self, model_id: ModelId, manifest: Manifest, space: ModelSpace, held: Iterable[int]
    ) -> None:
        """Makes the model's blocks readable by peers: `held` ones now, others as they come."""
        if model_id in self._models:
            raise Conflict(f"model {model_id} is hosted already")
        model = _Model(model_id, manifest, space, [])
        for spec in manifest.blocks:
            block = _Block(
                f"{model_id}/{spec.index}", space.block(spec.index), [False] * len(spec.digests)
            )
            model.blocks.append(block)
            self._transport.register(block.region, block.buffer, flow=model_id)
        self._models[model_id] = model
        space.span.hold(_user(model_id))
        for index in held:
            self.mark_held(model_id, index)

    def mark_held(self, model_id: ModelId, block: int, chunks: Iterable[int] | None = None) -> None:
        """The block's bytes, or these chunks', are there, verified, by other means than a pull."""
        model = self._hosted(model_id)
        self._end_pull(model, block)
        held = model.blocks[block]
        for chunk in range(len(held.verified)) if chunks is None else chunks:
            held.verified[chunk] = True
        self._advance(model, block)

    async def take_over(self, model_id: ModelId, block: int) -> frozenset[int]:
        """Ends the block's pull; once it returns, its buffer is the caller's to fill.

        But for the chunks that it returns: they are verified, and peers read them.
        """
        model = self._hosted(model_id)
        self._end_pull(model, block)
        taken = model.blocks[block]
        if taken.writers:
            await asyncio.wait(set(taken.writers))
        for chunk, done in enumerate(taken.verified):
            if not done:
                offset, nbytes = model.manifest.chunk_range(block, chunk)
                self._overwrites(taken.buffer[offset : offset + nbytes])
        return frozenset(chunk for chunk, done in enumerate(taken.verified) if done)

    def apply(
        self,
        model_id: ModelId,
        plan: PlanId,
        pulls: Sequence[Pull],
        addresses: Mapping[NodeId, str],
    ) -> None:
        """Pulls these blocks, in step order from each source; replaces what was applied before.

        A block in flight from the same source goes on. `plan`: says in whose name; whether it may
        still be applied is for the caller to know. NotFound: the model is not hosted; BadInput:
        nothing was changed.
        """
        model = self._hosted(model_id)
        _check(model, pulls, addresses)
        wanted = {pull.block: pull for pull in pulls if not model.blocks[pull.block].complete}
        for pulling in list(model.pulls.values()):
            pull = wanted.get(pulling.block)
            if pull and (pull.source, addresses[pull.source]) == (pulling.source, pulling.address):
                pulling.plan, pulling.step = plan, pull.step
                del wanted[pull.block]
            else:
                self._end(model, pulling, PullState.GIVEN_UP)
        for pull in wanted.values():
            model.pulls[pull.block] = _Pulling(
                plan,
                pull.step,
                pull.block,
                pull.source,
                addresses[pull.source],
                frozenset(model.blocks[pull.block].writers),
            )
        model.enqueue()
        for source in list(model.queues):
            self._fill(model, source)

    async def drop(self, model_id: ModelId) -> None:
        """Ends the model's pulls and its regions; once it returns nothing touches its space."""
        model = self._models.get(model_id)
        if model is None:
            return
        async with model.dropping:
            if self._models.get(model_id) is not model:
                return
            for pulling in list(model.pulls.values()):
                self._end(model, pulling, PullState.GIVEN_UP)
            await asyncio.gather(*(self._transport.unregister(b.region) for b in model.blocks))
            writers = [task for block in model.blocks for task in block.writers]
            if writers:
                await asyncio.wait(writers)
            del self._models[model_id]
            model.space.span.release(_user(model_id))

    async def close(self) -> None:
        for model_id in list(self._models):
            await self.drop(model_id)

    # --- pulling ---------------------------------------------------------------

    def _hosted(self, model_id: ModelId) -> _Model:
        model = self._models.get(model_id)
        if model is None or model.dropping.locked():
            raise NotFound(f"model {model_id} is not hosted here")
        return model

    def _fill(self, model: _Model, source: NodeId) -> None:
        """Keeps the window to a source full, earliest step first."""
        window = BLOCK_WINDOW if source in model.heard else FIRST_WINDOW
        room = window * BLOCKS_AHEAD
        for pulling in model.of(source):
            room -= len(pulling.reads)
            if room <= 0:
                return
            of_block = min(room, window - len(pulling.reads))
            chunks = list(islice(_missing(model, pulling), max(0, of_block)))
            room -= len(chunks)
            for run in _runs(chunks, max(1, self._read_bytes // model.manifest.chunk_bytes)):
                self._begin(model, pulling, run)

    def _begin(self, model: _Model, pulling: _Pulling, run: range) -> None:
        pulling.started_ns = pulling.started_ns or wall_ns()
        task = asyncio.get_running_loop().create_task(
            self._fetch(model, pulling, run), name=f"{model.id}/{pulling.block}/{run}"
        )
        pulling.reads.update(dict.fromkeys(run, task))
        model.blocks[pulling.block].writers.add(task)
        task.add_done_callback(lambda done: self._fetched(model, pulling, run, done))

    async def _fetch(self, model: _Model, pulling: _Pulling, run: range) -> None:
        """A run of chunks, verified; those that are wrong are read once more, each by itself."""
        if pulling.before:
            await asyncio.wait(pulling.before)
        for chunk in await self._read(model, pulling, run):
            if await self._read(model, pulling, range(chunk, chunk + 1)):
                raise DigestMismatch(
                    f"block {pulling.block}, chunk {chunk}: the bytes that {pulling.source} sends "
                    "are not the manifest's (read twice)"
                )

    async def _read(self, model: _Model, pulling: _Pulling, run: range) -> list[int]:
        """The chunks that came wrong. What has come is not read again if the source forgets the
        region half-way: others may be reading it from us."""
        block, manifest = model.blocks[pulling.block], model.manifest
        end = sum(manifest.chunk_range(pulling.block, run[-1]))
        loop, thread = asyncio.get_running_loop(), threading.get_ident()

        def show(chunk: int) -> None:
            if chunk == run[-1]:
                return  # with that the read is over, and maybe the block
            if threading.get_ident() == thread:
                self._show(model, pulling, chunk)
            else:
                loop.call_soon_threadsafe(self._show, model, pulling, chunk)

        wrong: list[int] = []
        deadline = now() + REGION_GRACE_S
        while True:
            offset = run.start * manifest.chunk_bytes
            into = block.buffer[offset:end]
            self._overwrites(into)
            check = _Check(manifest, pulling.block, run, show)
            try:
                result = await self._transport.read(
                    pulling.address,
                    block.region,
                    offset,
                    into,
                    priority=pulling.step,
                    received=check.update,
                )
            except RegionUnknown:
                if check.whole:
                    wrong += check.wrong
                    run = run[check.whole :]
                    deadline = now() + REGION_GRACE_S
                if now() >= deadline:
                    raise
                await asyncio.sleep(REGION_RETRY_S)
            else:
                pulling.first_byte_ns = pulling.first_byte_ns or result.first_byte_ns
                pulling.way = result.way
                return wrong + check.wrong

    def _show(self, model: _Model, pulling: _Pulling, chunk: int) -> None:
        """A chunk is right, and its read not over."""
        if not pulling.ended:
            model.blocks[pulling.block].verified[chunk] = True
            self._advance(model, pulling.block)

    def _fetched(
        self, model: _Model, pulling: _Pulling, run: range, task: asyncio.Task[None]
    ) -> None:
        model.blocks[pulling.block].writers.discard(task)
        for chunk in run:
            del pulling.reads[chunk]
        if task.cancelled():
            return
        error = task.exception()
        if pulling.ended:
            return
        if error is None:
            model.heard.add(pulling.source)
            self._verified(model, pulling, run)
            self._fill(model, pulling.source)
        elif isinstance(error, OF_THE_SOURCE):
            for each in model.of(pulling.source):
                self._fail(model, each, type(error)(str(error)))
        elif isinstance(error, LambdaScaleError):
            self._fail(model, pulling, error)
            self._fill(model, pulling.source)
        else:
            self._log.error("a pull ended with a bug", block=pulling.block, exc_info=error)
            self._fail(model, pulling, LambdaScaleError(f"bug: {error!r}"))

    def _verified(self, model: _Model, pulling: _Pulling, run: range) -> None:
        block = model.blocks[pulling.block]
        for chunk in run:
            block.verified[chunk] = True
        self._advance(model, pulling.block)
        if not block.complete:
            return
        self._end(model, pulling, PullState.ARRIVED)
        self._on_arrived(
            Arrival(
                pulling.plan,
                model.id,
                pulling.block,
                pulling.source,
                pulling.way,
                len(block.buffer),
                pulling.started_ns,
                pulling.first_byte_ns,
                wall_ns(),
            )
        )

    def _advance(self, model: _Model, index: int) -> None:
        """Shows others the verified chunks, as far as they lead without a gap."""
        block, ready = model.blocks[index], model.blocks[index].ready
        while ready < len(block.verified) and block.verified[ready]:
            ready += 1
        if ready > block.ready:
            block.ready = ready
            self._transport.advance(block.region, sum(model.manifest.chunk_range(index, ready - 1)))

    def _fail(self, model: _Model, pulling: _Pulling, error: LambdaScaleError) -> None:
        self._end(model, pulling, PullState.FAILED)
        self._on_failed(PullFailure(pulling.plan, model.id, pulling.block, pulling.source, error))

    def _end_pull(self, model: _Model, block: int) -> None:
        """Its place in the window goes to the source's other blocks."""
        pulling = model.pulls.get(block)
        if pulling is not None:
            self._end(model, pulling, PullState.GIVEN_UP)
            self._fill(model, pulling.source)

    def _end(self, model: _Model, pulling: _Pulling, state: PullState) -> None:
        pulling.end(state)
        del model.pulls[pulling.block]
        for task in set(pulling.reads.values()):
            task.cancel()


class _Check:
    """The digests of a run of chunks, whose bytes come in parts."""

    def __init__(
        self, manifest: Manifest, block: int, run: range, right: Callable[[int], None]
    ) -> None:
        """`right` is told each chunk that is, as soon as it is whole."""
        self.wrong: list[int] = []
        self.whole = 0
        """Chunks that have come, right or wrong."""
        self._digests = manifest.blocks[block].digests
        self._left = [(chunk, manifest.chunk_range(block, chunk)[1]) for chunk in reversed(run)]
        self._right = right
        self._digest = Digest()
        self._got = 0
        """Of the chunk that is coming."""

    def update(self, part: memoryview) -> None:
        while part:
            chunk, nbytes = self._left[-1]
            piece = part[: nbytes - self._got]
            self._digest.update(piece)
            self._got += len(piece)
            part = part[len(piece) :]
            if self._got == nbytes:
                self._end(chunk)

    def _end(self, chunk: int) -> None:
        found, self._digest = self._digest.digest(), Digest()
        self._got = 0
        self._left.pop()
        self.whole += 1
        if found == self._digests[chunk]:
            self._right(chunk)
        else:
            self.wrong.append(chunk)


def _runs(chunks: Sequence[int], most: int) -> Iterator[range]:
    """Runs of consecutive chunks, of at most `most` chunks each."""
    start = 0
    for index in range(1, len(chunks) + 1):
        if index == len(chunks) or chunks[index] != chunks[index - 1] + 1 or index - start == most:
            yield range(chunks[start], chunks[index - 1] + 1)
            start = index


def _missing(model: _Model, pulling: _Pulling) -> Iterator[int]:
    block = model.blocks[pulling.block]
    for chunk in range(block.ready, len(block.verified)):
        if not block.verified[chunk] and chunk not in pulling.reads:
            yield chunk


def _check(
    model: _Model,
    pulls: Sequence[Pull],
    addresses: Mapping[NodeId, str],
) -> None:
    blocks = [pull.block for pull in pulls]
    if len(set(blocks)) < len(blocks):
        raise BadInput("a plan pulls a block twice")
    for pull in pulls:
        if not 0 <= pull.block < len(model.blocks):
            raise BadInput(f"model {model.id} has no block {pull.block}")
        if pull.source not in addresses:
            raise BadInput(f"no address is known of {pull.source}, the source of {pull.block}")


def _user(model_id: ModelId) -> str:
    return f"transport of {model_id}"
