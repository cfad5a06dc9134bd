"""The parts of blocks in which copies are made and lent."""

from shared.layout import Manifest

PIECE_BYTES = 4 << 20
"""The most bytes of a piece, which is one chunk at least."""


def pieces(manifest: Manifest, block: int) -> list[range]:
    """The block's chunks in runs that are moved at a time."""
    most = max(1, PIECE_BYTES // manifest.chunk_bytes)
    end = manifest.n_chunks(block)
    return [range(start, min(start + most, end)) for start in range(0, end, most)]
