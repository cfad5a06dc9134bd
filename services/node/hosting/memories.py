"""The memories of a node that starts: those that its keeper has kept, or new ones."""

import asyncio
import os

from structlog.stdlib import BoundLogger

from services.node.keeper.link import Estate, KeeperLink
from services.node.memory.arena import Arena
from services.node.memory.shelf import Keeping, Kept, Shelf
from shared.clock import now
from shared.errors import BadInput


class Memories:
    def __init__(self, estate: Estate, keeper: KeeperLink, log: BoundLogger) -> None:
        """`estate`: what was kept. What is taken here is taken out of it."""
        self._estate = estate
        self._keeper = keeper
        self._log = log

    async def take(self, name: str, nbytes: int, setting: str) -> Arena:
        """The memory of that name as it was kept, if its size is still right, or else new. The
        caller closes it. `setting`: where its size comes from, for errors."""
        estate = self._estate
        started, kept = now(), estate.memories.pop(name, None)
        arena = None
        if kept is not None:
            try:
                arena = Arena(nbytes, setting, kept.descriptor)
            except BadInput as error:
                self._log.warning("a memory is not taken over", memory=name, why=str(error))
                estate.spaces = [space for space in estate.spaces if space.memory != name]
                self._keeper.drop(name)
            finally:
                os.close(kept.descriptor)
        if arena is None:
            arena = await asyncio.to_thread(Arena, nbytes, setting)
            self._keeper.hold(name, arena.file, arena.nbytes)
        took = round(now() - started, 3)
        self._log.info(f"{name} taken", nbytes=arena.nbytes, seconds=took, kept=kept is not None)
        return arena

    def shelf(self) -> Shelf:
        """What else was kept, and room for more of the kind."""
        if not self._keeper.there:
            return Shelf()
        left = {name: Kept(*each) for name, each in self._estate.memories.items()}
        self._estate.memories.clear()
        return Shelf(Keeping(self._keeper.hold, self._keeper.drop), left)
