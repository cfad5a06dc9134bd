"""A node's part of a plan: pulls the blocks it lacks and forwards them while they arrive.

Runs on the transport's loop. Every block of a hosted model is one region, readable by peers up to
its verified chunks. A chunk is checked against the manifest before others may read it, so wrong
bytes go no further than the node that received them. What is read from whom is decided in
`services.node.core.pulling`; here are the reads.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from services.node.core.pulling import (
    Arrived,
    Command,
    Failed,
    Pulling,
    Pulls,
    Read,
    Show,
    Stop,
)
from services.node.core.residency import PlanId
from services.node.memory.arena import ModelSpace
from services.node.moving.events import Arrival, PullFailure
from services.node.moving.run_digests import RunDigests
from services.node.transport.base import Permit, Transport
from shared import telemetry
from shared.clock import now, wall_ns
from shared.errors import (
    BadInput,
    Conflict,
    DigestMismatch,
    LambdaScaleError,
    NotFound,
    RegionUnknown,
)
from shared.ids import ModelId, NodeId
from shared.layout import Manifest
from shared.messages.scaling import Pull

READ_BYTES = 4 << 20
"""The most that one read asks for: a run of whole chunks of one block, each of which is checked,
and shown to others, as it comes. A read costs the processor more than the chunks in it."""
REGION_GRACE_S = 1.0
"""How long a source's regions may be unknown: it may learn of the plan after us."""
REGION_RETRY_S = 0.01


@dataclass(slots=True, eq=False)
class _Block:
    region: str
    buffer: memoryview
    writers: set[asyncio.Task[None]] = field(default_factory=set)
    """Reads that may still touch the buffer, cancelled ones too."""


@dataclass(slots=True, eq=False)
class _Reads:
    """The reads of one pull."""

    before: frozenset[asyncio.Task[None]]
    """Cancelled reads of an earlier source, which have the buffer until they have ended."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    started_ns: int = field(default_factory=wall_ns)
    first_byte_ns: int = 0
    way: str = ""
    """What carries the bytes."""


@dataclass(slots=True, eq=False)
class _Model:
    id: ModelId
    manifest: Manifest
    space: ModelSpace
    blocks: dict[int, _Block]
    """Those that have room here."""
    pulls: Pulls
    reads: dict[Pulling, _Reads] = field(default_factory=dict)
    """The reads of pulls that have not ended."""
    permit: Permit | None = None
    """Lets this node read the blocks that it pulls."""
    dropping: asyncio.Lock = field(default_factory=asyncio.Lock)


class Mover:
    pulls_type: ClassVar[type[Pulls]] = Pulls

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
        """Makes the model's blocks readable by peers: `held` ones now, others as they come. Until
        a plan has some of the others pulled (`apply`), the caller may fill their buffers."""
        if model_id in self._models:
            raise Conflict(f"model {model_id} is hosted already")
        most = max(1, self._read_bytes // manifest.chunk_bytes)
        pulls = self.pulls_type([len(spec.digests) for spec in manifest.blocks], most)
        model = _Model(model_id, manifest, space, {}, pulls)
        for index in space.part.blocks:
            block = _Block(region_of(model_id, index), space.block(index))
            model.blocks[index] = block
            self._transport.register(block.region, block.buffer, flow=model_id)
        self._models[model_id] = model
        space.span.hold(_user(model_id))
        there = frozenset(held)
        for index in there:
            self.mark_held(model_id, index)
        for index in model.blocks.keys() - there:
            self._overwrites(model.blocks[index].buffer)

    def mark_held(self, model_id: ModelId, block: int, chunks: Iterable[int] | None = None) -> None:
        """The block's bytes, or the bytes of these chunks, are there and verified, by other means
        than a pull."""
        model = self._hosted(model_id)
        self._do(model, model.pulls.hold(block, chunks))

    async def take_over_all(
        self, model_id: ModelId, blocks: Iterable[int]
    ) -> dict[int, frozenset[int]]:
        """`take_over` for some blocks."""
        return {block: await self.take_over(model_id, block) for block in blocks}

    async def take_over(self, model_id: ModelId, block: int) -> frozenset[int]:
        """Ends the block's pull. Once this returns, the caller may fill the block's buffer, except
        for the chunks that are returned: they are verified, and peers read them."""
        model = self._hosted(model_id)
        self._do(model, model.pulls.give_up(block))
        taken, verified = model.blocks[block], model.pulls.blocks[block].verified
        if taken.writers:
            await asyncio.wait(set(taken.writers))
        for chunk, done in enumerate(verified):
            if not done:
                offset, nbytes = model.manifest.chunk_range(block, chunk)
                self._overwrites(taken.buffer[offset : offset + nbytes])
        return frozenset(chunk for chunk, done in enumerate(verified) if done)

    def apply(
        self,
        model_id: ModelId,
        plan: PlanId,
        pulls: Sequence[Pull],
        addresses: Mapping[NodeId, str],
        capability: bytes = b"",
    ) -> None:
        """Pulls these blocks, in step order from each source, instead of what was applied before.

        A block in flight from the same source goes on. `plan` says in whose name this is done; the
        caller knows whether it may still be applied. `capability`: for peers that ask for one
        (`shared/capabilities.py`). NotFound: the model is not hosted. BadInput:
        nothing was changed.
        """
        model = self._hosted(model_id)
        if outside := [pull.block for pull in pulls if pull.block not in model.blocks]:
            raise BadInput(f"no block {outside[0]} of model {model_id} has room here")
        commands = model.pulls.apply(plan, pulls, addresses)
        model.permit = permit_for(model_id, capability)
        self._do(model, commands)

    async def drop(self, model_id: ModelId) -> None:
        """Ends the model's pulls and its regions; once it returns nothing touches its space."""
        model = self._models.get(model_id)
        if model is None:
            return
        async with model.dropping:
            if self._models.get(model_id) is not model:
                return
            self._do(model, model.pulls.close())
            blocks = model.blocks.values()
            await asyncio.gather(*(self._transport.unregister(b.region) for b in blocks))
            writers = [task for block in blocks for task in block.writers]
            if writers:
                await asyncio.wait(writers)
            del self._models[model_id]
            model.space.span.release(_user(model_id))

    async def close(self) -> None:
        for model_id in list(self._models):
            await self.drop(model_id)

    def _hosted(self, model_id: ModelId) -> _Model:
        model = self._models.get(model_id)
        if model is None or model.dropping.locked():
            raise NotFound(f"model {model_id} is not hosted here")
        return model

    # --- commands ----------------------------------------------------------------

    def _do(self, model: _Model, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Read(pulling, run):
                    self._begin(model, pulling, run)
                case Stop(pulling):
                    if reads := model.reads.pop(pulling, None):
                        for task in reads.tasks:
                            task.cancel()
                case Show() if model.dropping.locked():
                    pass  # its regions may be gone
                case Show(index, ready):
                    end = sum(model.manifest.chunk_range(index, ready - 1))
                    self._transport.advance(model.blocks[index].region, end)
                case Arrived(pulling):
                    self._on_arrived(_arrival(model, pulling))
                case Failed(pulling, error):
                    self._on_failed(
                        PullFailure(pulling.plan, model.id, pulling.block, pulling.source, error)
                    )

    def _begin(self, model: _Model, pulling: Pulling, run: range) -> None:
        block = model.blocks[pulling.block]
        reads = model.reads.get(pulling)
        if reads is None:
            reads = model.reads[pulling] = _Reads(frozenset(block.writers))
        task = asyncio.get_running_loop().create_task(
            self._fetch(model, pulling, reads, run), name=f"{model.id}/{pulling.block}/{run}"
        )
        reads.tasks.add(task)
        block.writers.add(task)
        task.add_done_callback(lambda done: self._fetched(model, pulling, reads, run, done))

    def _fetched(
        self,
        model: _Model,
        pulling: Pulling,
        reads: _Reads,
        run: range,
        task: asyncio.Task[None],
    ) -> None:
        model.blocks[pulling.block].writers.discard(task)
        reads.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            model.pulls.stopped(pulling, run)
        elif error is None:
            self._do(model, model.pulls.read(pulling, run))
        else:
            if not isinstance(error, LambdaScaleError):
                self._log.error("a pull ended with a bug", block=pulling.block, exc_info=error)
                error = LambdaScaleError(f"bug: {error!r}")
            self._do(model, model.pulls.failed(pulling, run, error))

    # --- reading -----------------------------------------------------------------

    async def _fetch(self, model: _Model, pulling: Pulling, reads: _Reads, run: range) -> None:
        """Reads a run of chunks. Chunks that are wrong are read once more, each by itself."""
        if reads.before:
            await asyncio.wait(reads.before)
            # What these have brought may be shown already.
            verified = model.pulls.blocks[pulling.block].verified
            run = range(next((c for c in run if not verified[c]), run.stop), run.stop)
            if not run:
                return
        for chunk in await self._read(model, pulling, reads, run):
            if await self._read(model, pulling, reads, range(chunk, chunk + 1)):
                raise DigestMismatch(
                    f"block {pulling.block}, chunk {chunk}: the bytes that {pulling.source} sends "
                    "are not the manifest's (read twice)"
                )

    async def _read(self, model: _Model, pulling: Pulling, reads: _Reads, run: range) -> list[int]:
        """Returns the chunks that came wrong. Chunks that have come are not read again if the
        source forgets the region half-way, since others may be reading them from us."""
        block, manifest = model.blocks[pulling.block], model.manifest
        end = sum(manifest.chunk_range(pulling.block, run[-1]))
        loop, thread = asyncio.get_running_loop(), threading.get_ident()

        def show(chunks: range) -> None:
            if chunks[-1] == run[-1]:
                return  # with these the read is over, and maybe the block
            if threading.get_ident() == thread:
                self._show(model, pulling, chunks)
            else:
                loop.call_soon_threadsafe(self._show, model, pulling, chunks)

        wrong: list[int] = []
        deadline = now() + REGION_GRACE_S
        while True:
            offset = run.start * manifest.chunk_bytes
            into = block.buffer[offset:end]
            self._overwrites(into)
            digests = RunDigests(manifest, pulling.block, run, show, block.region)
            try:
                result = await self._transport.read(
                    pulling.address,
                    block.region,
                    offset,
                    into,
                    priority=pulling.step,
                    received=digests,
                    permit=model.permit,
                )
            except asyncio.CancelledError:
                # The last may have come just now.
                whole = run[: digests.whole]
                self._show(model, pulling, [c for c in whole if c not in digests.wrong])
                raise
            except RegionUnknown:
                if digests.whole:
                    wrong += digests.wrong
                    run = run[digests.whole :]
                    deadline = now() + REGION_GRACE_S
                if now() >= deadline:
                    raise
                await asyncio.sleep(REGION_RETRY_S)
            else:
                reads.first_byte_ns = reads.first_byte_ns or result.first_byte_ns
                reads.way = result.way
                return wrong + digests.wrong

    def _show(self, model: _Model, pulling: Pulling, chunks: Sequence[int]) -> None:
        """These chunks are right, and their read is not over."""
        self._do(model, model.pulls.verified(pulling, chunks))


def _arrival(model: _Model, pulling: Pulling) -> Arrival:
    reads = model.reads.pop(pulling, None) or _Reads(frozenset())
    return Arrival(
        pulling.plan,
        model.id,
        pulling.block,
        pulling.source,
        reads.way,
        len(model.blocks[pulling.block].buffer),
        reads.started_ns,
        reads.first_byte_ns,
        wall_ns(),
    )


def region_of(model_id: ModelId, block: int) -> str:
    """The name of the region that a block of a hosted model is."""
    return f"{model_id}/{block}"


def block_of(region: str) -> tuple[ModelId, int]:
    """The block that a region's name means. BadInput if it is no name of a block."""
    model, _, block = region.rpartition("/")
    if not block.isdecimal():
        raise BadInput(f"region {region!r} is no block of a model")
    return ModelId(model), int(block)


def permit_for(model_id: ModelId, capability: bytes) -> Permit | None:
    """`capability`: empty: the order had none."""
    return Permit(model_id, capability) if capability else None


def _user(model_id: ModelId) -> str:
    return f"transport of {model_id}"
