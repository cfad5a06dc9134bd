"""Pieces of models that peers read from this node's disk: for their arenas, or for their disks.

A model in the arena or the host cache is read there. Any other is read from the disk in pieces, as
peers ask for it, so that it takes no room in the arena (`transport.loans`).
"""

from services.node.core.profile import Profiler
from services.node.hosting.library import Library
from services.node.hosting.pieces import PIECE_BYTES
from shared.clock import wall_ns
from shared.errors import BadInput
from shared.ids import ModelId


class Lending:
    def __init__(self, library: Library, profiler: Profiler) -> None:
        self._library = library
        self._profiler = profiler

    async def piece(self, model: ModelId, block: int, offset: int, nbytes: int) -> memoryview:
        """The bytes [offset, offset + nbytes) of a block, with the right digests. NotFound: they
        are not on the disk. BadInput: they are no whole chunks, or too many. Errors of the disk."""
        began = wall_ns()
        manifest = self._library.stored(model, block)
        chunks = manifest.chunks_at(block, offset, nbytes)
        if nbytes > max(PIECE_BYTES, manifest.chunk_bytes):
            raise BadInput(f"{nbytes} bytes are asked for: at most {PIECE_BYTES} are read")
        piece = await self._library.piece(model, block, chunks)
        self._profiler.loaded(began / 1e9, wall_ns() / 1e9, nbytes)
        return piece
