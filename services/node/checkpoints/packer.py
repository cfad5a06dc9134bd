"""Packs a checkpoint into block files: the one pass over the weights, a chunk at a time."""

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from services.node.checkpoints.checkpoint import Checkpoint, TensorReader, open_tensors
from services.node.checkpoints.disk import new_file
from services.node.checkpoints.packing import chunk_bytes, digest, lay_out
from services.node.checkpoints.safetensors_header import StoredTensor
from shared.layout import BlockSpec, Manifest

Progress = Callable[[int, int], None]
"""(bytes packed so far, bytes of all blocks)."""


def block_file(index: int) -> str:
    return f"block-{index:03d}.bin"


def empty_manifest(checkpoint: Checkpoint, blocks: int) -> Manifest:
    """The model's layout, still without digests. BadInput for more blocks than units."""
    specs = lay_out(checkpoint.units, blocks)
    return Manifest(
        architecture=checkpoint.raw_config["architectures"][0],
        config=checkpoint.raw_config,
        chunk_bytes=chunk_bytes(sum(spec.nbytes for spec in specs)),
        blocks=specs,
    )


def pack(
    checkpoint: Checkpoint, layout: Manifest, directory: Path, progress: Progress | None
) -> Manifest:
    """Writes the block files of `layout`, and returns the manifest with their digests.

    It holds one chunk in memory, whatever the model's size.
    """
    specs: list[BlockSpec] = []
    written = 0
    with open_tensors(chain.from_iterable(checkpoint.stored.values())) as reader:
        for spec in layout.blocks:
            digests: list[bytes] = []
            with new_file(directory / block_file(spec.index)) as file:
                for chunk in _chunks(layout, spec, checkpoint, reader):
                    digests.append(digest(chunk))
                    file.write(chunk)
                    written += len(chunk)
                    if progress:
                        progress(written, layout.nbytes)
            specs.append(msgspec.structs.replace(spec, digests=tuple(digests)))
    return msgspec.structs.replace(layout, blocks=tuple(specs))


def _chunks(
    layout: Manifest, spec: BlockSpec, checkpoint: Checkpoint, reader: TensorReader
) -> Iterator[memoryview]:
    """The block's bytes in chunks. A chunk is overwritten when the next one is taken."""
    buffer = bytearray(layout.chunk_bytes)
    pieces = _pieces(spec, checkpoint)
    first = 0
    for start in range(0, spec.nbytes, layout.chunk_bytes):
        stop = min(start + layout.chunk_bytes, spec.nbytes)
        chunk = memoryview(buffer)[: stop - start]
        chunk[:] = bytes(len(chunk))
        while pieces[first].stop <= start:
            first += 1
        for piece in pieces[first:]:
            if piece.start >= stop:
                break
            begin, end = max(piece.start, start), min(piece.stop, stop)
            reader.read(piece.source, begin - piece.start, chunk[begin - start : end - start])
        yield chunk


class _Piece(NamedTuple):
    start: int
    """Its offset in the block."""
    source: StoredTensor

    @property
    def stop(self) -> int:
        return self.start + self.source.nbytes


def _pieces(spec: BlockSpec, checkpoint: Checkpoint) -> list[_Piece]:
    """The pieces of the block, in order."""
    pieces: list[_Piece] = []
    for tensor in spec.tensors:
        offset = tensor.offset
        for source in checkpoint.stored[tensor.name]:
            pieces.append(_Piece(offset, source))
            offset += source.nbytes
    return pieces
