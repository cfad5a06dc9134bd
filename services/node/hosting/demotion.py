"""A model that sleeps, on its way from the arena to the host cache."""

import asyncio
from collections.abc import Callable

from services.node.hosting.host_cache import CacheDraft
from services.node.hosting.pieces import pieces
from services.node.hosting.promotion import Spawn
from services.node.memory.arena import ModelSpace
from shared.clock import now
from shared.errors import LambdaScaleError
from shared.threads import to_its_end

COPIER = "copier to the host cache"
"""User of a span."""
BUSY_SHARE = 0.25
"""The share of the time that is copied while sequences run on this node: a copy takes memory
bandwidth from them."""


class Demotion:
    """Copies all blocks. The arena's bytes stay as they are, and peers go on reading them."""

    def __init__(
        self, draft: CacheDraft, space: ModelSpace, *, busy: Callable[[], bool], spawn: Spawn
    ) -> None:
        """Begins to copy. `busy`: whether sequences run on this node."""
        self.draft = draft
        self.whole = False
        self.why = "it is needed no more"
        """Why it is not whole, once it has ended."""
        self._space = space
        self._busy = busy
        self._urgent = False
        self._stopping = False
        self._task = spawn(self._run(), f"demote {draft.model_id}")

    def hurry(self) -> None:
        """Copies without pauses from now on: the arena's room is needed."""
        self._urgent = True

    async def ended(self) -> None:
        await asyncio.wait([self._task])

    async def stop(self) -> None:
        """Once this returns, it does not touch the space any more."""
        self._stopping = True
        await self.ended()

    async def _run(self) -> None:
        self._space.span.hold(COPIER)
        try:
            for block in self.draft.missing:
                for chunks in pieces(self.draft.manifest, block):
                    if self._stopping:
                        return
                    await self._copy(block, chunks)
            self.whole = True
        except LambdaScaleError as error:
            self.why = str(error)
        finally:
            self._space.span.release(COPIER)

    async def _copy(self, block: int, chunks: range) -> None:
        offset, nbytes = self.draft.manifest.run_range(block, chunks)
        piece = self._space.block(block)[offset : offset + nbytes]
        began = now()
        await to_its_end(lambda: self.draft.write(block, chunks, piece))
        if self._busy() and not self._urgent:
            await asyncio.sleep((now() - began) * (1 / BUSY_SHARE - 1))
