"""A node's host cache: memory beside the arena, for models that are not in use here.

A copy comes from the arena when its model is given back there (`demotion`), or from peers and the
disk when the registry orders it (`copying`). While the arena has no space for the model, peers read
the copy like any other block in memory. `services.node.core.host_cache` has a copy's states.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from services.node.checkpoints.packing import digest
from services.node.checkpoints.reading import Outcome, Verified, Wanted
from services.node.core.host_cache import CacheBook, CacheState
from services.node.hosting.inheritance import CACHE, intact
from services.node.keeper.link import KeeperLink
from services.node.keeper.messages import Space
from services.node.memory.arena import Arena, ModelSpace, Span
from services.node.parts import AnyDataPlane, AnyDraft
from shared.clock import now, wall_ns
from shared.errors import CapacityExceeded, Conflict, DigestMismatch, NotFound
from shared.ids import ModelId
from shared.layout import Manifest
from shared.messages.pool import Holding, Tier
from shared.story import Story
from shared.threads import begun, ended, to_its_end

READ_BYTES = 16 << 20
"""Bytes that go to the arena at a time, rounded to whole chunks. Peers read each part once it is
there."""
READER = "reader of the host cache"
"""User of a span."""
DRAFT_KEPT_S = 60.0
"""A draft that no order goes on with gives its room back after this long."""


@dataclass(frozen=True, slots=True)
class _Place:
    manifest: Manifest
    span: Span
    space: ModelSpace


class _Copy:
    """Some chunks of a block on their way to the arena. It is called in a thread."""

    def __init__(self, place: _Place, wanted: Wanted, run: range) -> None:
        offset, nbytes = place.manifest.run_range(wanted.block, run)
        source = place.space.block(wanted.block)[offset : offset + nbytes]
        into = wanted.into[offset : offset + nbytes]
        self._source, self._into = np.frombuffer(source, np.uint8), np.frombuffer(into, np.uint8)
        self.brings = Verified(wanted.block, run, wall_ns())

    def __call__(self) -> None:
        self.brings = replace(self.brings, began_ns=wall_ns())
        np.copyto(self._into, self._source)  # releases the GIL meanwhile


class CacheDraft:
    """A model on its way into the host cache. `write` may be called in a thread."""

    def __init__(self, model_id: ModelId, manifest: Manifest, space: ModelSpace) -> None:
        self.model_id = model_id
        self.manifest = manifest
        self._space = space
        self._there = [0] * manifest.n_blocks
        """Verified bytes of each block."""

    @property
    def missing(self) -> list[int]:
        sizes = zip(self._there, self.manifest.blocks, strict=True)
        return [spec.index for there, spec in sizes if there < spec.nbytes]

    @property
    def done(self) -> int:
        return sum(self._there)

    def write(self, block: int, chunks: range, data: memoryview) -> None:
        """Takes some chunks of a block, in order and without gaps. DigestMismatch: they do not
        count."""
        spec = self.manifest.blocks[block]
        first, nbytes = self.manifest.run_range(block, chunks)
        into = self._space.block(block)[first : first + nbytes]
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))
        for chunk in chunks:
            offset, length = self.manifest.chunk_range(block, chunk)
            if digest(into[offset - first : offset - first + length]) != spec.digests[chunk]:
                raise DigestMismatch(
                    f"block {block} of model {self.model_id}: chunk {chunk} came damaged"
                )
        self._there[block] = first + nbytes


class HostCache:
    """All calls are made on the control loop."""

    book_type: ClassVar[type[CacheBook]] = CacheBook
    tier = Tier.CACHE
    draft_kept_s = DRAFT_KEPT_S

    def __init__(
        self,
        arena: Arena | None,
        data: AnyDataPlane,
        story: Story,
        keeper: KeeperLink,
        *,
        turn: Callable[[ModelId], asyncio.Lock],
        in_arena: Callable[[ModelId], bool],
        came: Callable[[ModelId], None],
    ) -> None:
        """`arena`: its memory; None: the node has no host cache. `keeper` is told which copies are
        whole. `turn`: what is held while a model
        gets or loses its space in the arena. `in_arena`: whether the model has space there. `came`
        is told when a copy from elsewhere is whole."""
        self._arena = arena
        self._data = data
        self._story = story
        self._keeper = keeper
        self._turn = turn
        self._in_arena = in_arena
        self._came = came
        self._book = self.book_type(arena.nbytes if arena else 0, story)
        self._places: dict[ModelId, _Place] = {}

    @property
    def nbytes(self) -> int:
        return self._book.nbytes

    @property
    def free(self) -> int:
        return self._book.free

    def holdings(self) -> list[Holding]:
        return [
            Holding(model, Tier.CACHE, tuple(range(self._places[model].manifest.n_blocks)))
            for model in self._book.whole
        ]

    def is_stored(self, model: ModelId) -> bool:
        """Whether it has the whole model."""
        return self._book.state(model) in (CacheState.WHOLE, CacheState.LENT)

    def expects(self, model: ModelId) -> bool:
        """Whether a copy is on its way."""
        return self._book.state(model) is CacheState.FILLING

    def space(self, model: ModelId) -> ModelSpace:
        """Where a copy lies that is stored. It is not given up while the model's turn is held."""
        return self._places[model].space

    def lends(self, model: ModelId) -> bool:
        return self._book.state(model) is CacheState.LENT

    # --- copies that come ---

    async def drafts(self) -> Sequence[AnyDraft]:
        """What an earlier process has left unfinished: nothing. Only whole copies are kept."""
        return ()

    async def draft(self, model: ModelId, manifest: Manifest) -> CacheDraft:
        """Takes room. CapacityExceeded: there is too little."""
        if self._arena is None:
            raise CapacityExceeded("this node has no host cache: see node.host_bytes")
        span = self._arena.allocate(ModelSpace.size(manifest))
        try:
            self._book.begin(model, span.taken)
        except BaseException:
            self._arena.free(span)
            raise
        self._places[model] = _Place(manifest, span, ModelSpace(manifest, span))
        return CacheDraft(model, manifest, self._places[model].space)

    async def adopt(self, draft: AnyDraft) -> None:
        """A draft from elsewhere is whole."""
        model = draft.model_id
        async with self._turn(model):
            self._complete(model)
            if not self._in_arena(model):
                await self.lend(model)
        self._came(model)

    def complete(self, draft: CacheDraft) -> None:
        """A draft from the arena is whole."""
        self._complete(draft.model_id)

    def _complete(self, model: ModelId) -> None:
        self._book.complete(model)
        place = self._places[model]
        blocks = tuple(range(place.manifest.n_blocks))
        self._keeper.note(Space(CACHE, model, place.span.offset, place.span.nbytes, blocks))

    async def discard(self, draft: AnyDraft) -> None:
        self._book.give_up(draft.model_id)
        self._free(draft.model_id)

    async def inherit(self, left: Space, manifest: Manifest) -> None:
        """Takes over a copy that a process before has left. What that process held in its arena was
        taken over before. NotFound: it is not as it was; Conflict, BadInput: nor is its place."""
        model = ModelId(left.model)
        if self._arena is None:
            raise NotFound("this node has no host cache any more")
        span = self._arena.take(left.offset, left.nbytes)
        try:
            space = ModelSpace(manifest, span)
            if len(await intact(manifest, space, left.blocks)) < manifest.n_blocks:
                raise NotFound("its copy in the host cache is not as it was")
            self._book.begin(model, span.taken)
        except BaseException:
            self._arena.free(span)
            raise
        self._places[model] = _Place(manifest, span, space)
        self._complete(model)
        if not self._in_arena(model):
            await self.lend(model)
        self._story.tell(now(), "", "its copy in the host cache outlived the process before", model)

    # --- copies that are there ---

    async def lend(self, model: ModelId) -> None:
        """Has peers read the copy. The arena must have no space for the model."""
        place = self._places[model]
        held = range(place.manifest.n_blocks)
        try:
            await self._data.host(model, place.manifest, place.space, held)
        except (
            BaseException
        ):  # cancelled half way, too: nobody may read what the book does not lend
            await self._data.drop(model)
            raise
        self._book.lend(model)

    async def withdraw(self, model: ModelId) -> None:
        """Once this returns, no peer reads the copy."""
        await self._data.drop(model)
        self._book.withdraw(model)

    async def drop(self, model: ModelId, why: str, *, cause: str) -> None:
        """Gives the copy's room back, if there is one. Conflict: it is being promoted."""
        if not self.is_stored(model):
            return
        place = self._places[model]
        if READER in place.span.users:
            raise Conflict(f"model {model} is on its way from the host cache to the arena")
        if self.lends(model):
            await self.withdraw(model)
        self._book.drop(model)
        self._free(model)
        self._story.tell(now(), cause, f"leaves the host cache: {why}", model)

    async def read(self, model: ModelId, wanted: Sequence[Wanted]) -> AsyncGenerator[Outcome, None]:
        """Copies blocks to the arena, like `Store.read`. The bytes were checked when they came. All
        runs are handed to the thread at once: it takes less time for a small block than the loop
        takes to come round and begin the next."""
        place = self._places[model]
        copies = [_Copy(place, each, run) for each in wanted for run in _runs(place.manifest, each)]
        place.span.hold(READER)
        threads = ThreadPoolExecutor(1, thread_name_prefix="host cache")
        try:
            for copy, work in [(copy, begun(copy, threads)) for copy in copies]:
                await ended(work)
                yield copy.brings
        finally:
            await to_its_end(partial(threads.shutdown, cancel_futures=True))
            place.span.release(READER)

    def _free(self, model: ModelId) -> None:
        place = self._places.pop(model)
        self._keeper.forget(CACHE, model)
        assert self._arena is not None  # a copy lies in it
        self._arena.free(place.span)

    def validate(self) -> None:
        """For tests. AssertionError: what is kept here cannot be."""
        self._book.validate()
        assert self._arena is None or self._arena.free_bytes == self._book.free


def _runs(manifest: Manifest, wanted: Wanted) -> list[range]:
    """The chunks to copy, in runs without a gap."""
    most = max(1, READ_BYTES // manifest.chunk_bytes)
    runs: list[range] = []
    for chunk in range(manifest.n_chunks(wanted.block)):
        if chunk in wanted.skip:
            continue
        if runs and runs[-1].stop == chunk and len(runs[-1]) < most:
            runs[-1] = range(runs[-1].start, chunk + 1)
        else:
            runs.append(range(chunk, chunk + 1))
    return runs
