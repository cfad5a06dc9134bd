"""Copies that this node makes of models, on its disk or in its host cache, piece by piece.

The registry orders a copy (`KeepCopy`). One task for each reads pieces of the sources in turn over
the data plane, behind everything else that is read there, and writes them to a draft. A piece that
this node's own disk has is read from there. Only one piece of a copy is on its way at a time, and
it keeps to the rate of its order. A whole draft is a model like any other in its tier. A draft
outlives failures, and on a disk restarts: the next order goes on with its whole blocks.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from structlog.stdlib import BoundLogger

from services.node.hosting.library import Library
from services.node.hosting.pieces import pieces
from services.node.hosting.promotion import Spawn
from services.node.moving.mover import permit_for, region_of
from services.node.parts import AnyDataPlane, AnyDraft
from shared.clock import now
from shared.errors import BadInput, LambdaScaleError, NotFound, as_typed
from shared.ids import ModelId, NodeId
from shared.layout import Manifest
from shared.messages.copies import KeepCopy
from shared.messages.pool import CopyProgress, Source, Tier
from shared.story import Story
from shared.threads import to_its_end

PIECE_S = 10.0
"""Seconds after which another source is asked. A source may have to read from a busy disk, or wait
for the piece itself."""
ROUNDS = 5
"""How often all sources of a piece are tried, before the copy fails."""
ROUND_S = 1.0
"""Seconds between two rounds."""


class Shelf(Protocol):
    """A tier that copies are made in."""

    @property
    def tier(self) -> Tier: ...
    @property
    def draft_kept_s(self) -> float:
        """A draft that no order goes on with is deleted after this long."""

    def is_stored(self, model: ModelId) -> bool: ...
    async def drafts(self) -> Sequence[AnyDraft]: ...
    async def draft(self, model: ModelId, manifest: Manifest) -> AnyDraft: ...
    async def adopt(self, draft: AnyDraft) -> None: ...
    async def discard(self, draft: AnyDraft) -> None: ...


@dataclass(slots=True, eq=False)
class _Copy:
    shelf: Shelf
    draft: AnyDraft
    order: KeepCopy | None = None
    """None: nobody has asked for it since this node started."""
    error: str = ""
    task: asyncio.Task[None] | None = None
    """The task that makes it, or else the one that deletes it in the end."""
    running: bool = False
    turn: int = 0
    """Which source is asked first, so that sources take turns."""
    began: float = 0.0
    moved: int = 0
    """Bytes that came since `began`."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Copying:
    def __init__(
        self,
        node: NodeId,
        library: Library,
        shelves: Sequence[Shelf],
        data: AnyDataPlane,
        story: Story,
        log: BoundLogger,
        *,
        changed: Callable[[], None],
        spawn: Spawn,
    ) -> None:
        """`changed` is called when a copy has begun, come further, failed or become whole."""
        self._node = node
        self._library = library
        self._shelves = {shelf.tier: shelf for shelf in shelves}
        self._data = data
        self._story = story
        self._log = log
        self._changed = changed
        self._spawn = spawn
        self._copies: dict[tuple[ModelId, Tier], _Copy] = {}
        self._beginning = asyncio.Lock()

    async def read_drafts(self) -> None:
        """Finds the drafts that a restart left on this node's disk."""
        for tier, shelf in self._shelves.items():
            for draft in await shelf.drafts():
                self._copies[draft.model_id, tier] = copy = _Copy(shelf, draft)
                self._leave(copy)

    def progress(self) -> tuple[CopyProgress, ...]:
        return tuple(
            CopyProgress(
                model_id=model,
                done=copy.draft.done,
                nbytes=copy.draft.manifest.nbytes,
                running=copy.running,
                error=copy.error,
                tier=tier,
            )
            for (model, tier), copy in sorted(self._copies.items(), key=lambda found: found[0][0])
        )

    async def keep(self, order: KeepCopy) -> None:
        """Begins a copy, or changes the order of the copy that is under way. Does nothing if the
        tier has the model. NotFound: it is not published. CapacityExceeded: the tier lacks room.
        BadInput: no rate, or a tier in which nothing is kept."""
        if order.bytes_per_s <= 0:
            raise BadInput(f"a copy at {order.bytes_per_s} bytes/s would never be made")
        shelf = self._shelves.get(order.tier)
        if shelf is None:
            raise BadInput(f"no copies are kept in tier {order.tier.value}")
        async with self._beginning:
            if shelf.is_stored(order.model_id):
                return
            copy = self._copies.get((order.model_id, order.tier))
            if copy is None:
                manifest = await self._library.manifest(order.model_id)
                draft = await shelf.draft(order.model_id, manifest)
                copy = self._copies[order.model_id, order.tier] = _Copy(shelf, draft)
            copy.order = order
            givers = [source.info.node for source in order.sources]
            at = f"at up to {order.bytes_per_s / 1e6:.1f} MB/s"
            self._tell(copy, f"comes from {', '.join(givers)} {at}", *givers)
            if not copy.running:
                self._begin(copy)
        self._changed()

    def _begin(self, copy: _Copy) -> None:
        if copy.task is not None:
            copy.task.cancel()
        copy.running, copy.error = True, ""
        copy.began, copy.moved = now(), 0
        copy.ended = asyncio.Event()
        copy.task = self._spawn(self._make(copy), f"copy of {copy.draft.model_id}")

    def _leave(self, copy: _Copy) -> None:
        """Deletes a draft in the end, unless an order comes for it."""
        copy.task = self._spawn(self._expire(copy), f"draft of {copy.draft.model_id}")

    async def forget(self, model: ModelId) -> None:
        """Ends and deletes the copies of a model that was removed. A copy that is whole by then is
        its tier's to delete."""
        for tier, shelf in self._shelves.items():
            copy = self._copies.pop((model, tier), None)
            if copy is None:
                continue
            if copy.task is not None:
                copy.task.cancel()
            if copy.running:
                await copy.ended.wait()
            if not shelf.is_stored(model):
                await shelf.discard(copy.draft)
            self._changed()

    # --- one copy ---

    async def _make(self, copy: _Copy) -> None:
        model, tier = copy.draft.model_id, copy.shelf.tier
        try:
            for block in copy.draft.missing:
                await self._bring(copy, block)
                self._changed()
            await copy.shelf.adopt(copy.draft)
            self._copies.pop((model, tier), None)
            self._tell(copy, "whole")
            self._log.info(
                "copy made", model=model, tier=tier.value, nbytes=copy.draft.manifest.nbytes
            )
        except Exception as error:  # one copy's boundary: nobody awaits it
            # A peer or the disk failed (LambdaScaleError, OSError), or there is a bug: the registry
            # is told why, and the other copies go on.
            copy.error = str(as_typed(error))
            self._tell(copy, f"fails: {copy.error}")
            self._log.warning("copy failed", model=model, tier=tier.value, error=copy.error)
            self._leave(copy)
        finally:
            copy.running = False
            copy.ended.set()
            self._changed()

    def _tell(self, copy: _Copy, text: str, *nodes: NodeId) -> None:
        """Adds to the node's story. `nodes`: others that it concerns."""
        assert copy.order is not None
        what = f"copy on {copy.shelf.tier.value}: {text}"
        self._story.tell(now(), copy.order.origin, what, copy.draft.model_id, *nodes)

    async def _bring(self, copy: _Copy, block: int) -> None:
        for chunks in pieces(copy.draft.manifest, block):
            piece = await self._borrow(copy, block, chunks)
            await to_its_end(lambda: copy.draft.write(block, chunks, piece))  # noqa: B023 - awaited
            copy.moved += len(piece)
            assert copy.order is not None
            due = copy.began + copy.moved / copy.order.bytes_per_s
            await asyncio.sleep(max(0.0, due - now()))

    async def _borrow(self, copy: _Copy, block: int, chunks: range) -> memoryview:
        """The piece, from the first source that gives it; sources take turns."""
        failure: LambdaScaleError | None = None
        for round_ in range(ROUNDS):
            if round_:
                await asyncio.sleep(ROUND_S)
            order = copy.order
            assert order is not None
            holders = [source for source in order.sources if block in source.blocks]
            for _ in holders:
                copy.turn += 1
                try:
                    return await self._read(copy, holders[copy.turn % len(holders)], block, chunks)
                except LambdaScaleError as error:
                    failure = error
        raise failure or NotFound(f"no source has block {block} of model {copy.draft.model_id}")

    async def _read(self, copy: _Copy, source: Source, block: int, chunks: range) -> memoryview:
        if source.info.node == self._node:
            return await self._library.piece(copy.draft.model_id, block, chunks)
        offset, nbytes = copy.draft.manifest.run_range(block, chunks)
        piece = memoryview(bytearray(nbytes))
        region = region_of(copy.draft.model_id, block)
        assert copy.order is not None
        permit = permit_for(copy.draft.model_id, copy.order.capability)
        await self._data.fetch(
            source.info.address, region, offset, piece, permit=permit, within=PIECE_S
        )
        return piece

    async def _expire(self, copy: _Copy) -> None:
        await asyncio.sleep(copy.shelf.draft_kept_s)
        key = copy.draft.model_id, copy.shelf.tier
        if self._copies.get(key) is copy:
            del self._copies[key]
            await copy.shelf.discard(copy.draft)
            self._changed()
