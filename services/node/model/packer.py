"""Packs a checkpoint into block files: the one pass over the weights, a chunk at a time."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from services.node.model.checkpoint import Checkpoint, TensorReader, open_tensors
from services.node.model.disk import new_file
from services.node.model.packing import chunk_bytes, digest, lay_out
from shared.layout import BlockSpec, Manifest

Progress = Callable[[int, int], None]
"""(bytes packed so far, bytes of all blocks)."""


def block_file(index: int) -> str:
    return f"block-{index:03d}.bin"


def empty_manifest(checkpoint: Checkpoint, blocks: int) -> Manifest:
    """The model's layout; the digests are still to come. BadInput for more blocks than units."""
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
    """Writes the block files of `layout` and returns the manifest with their digests.

    Memory: one chunk, whatever the model's size.
    """
    specs: list[BlockSpec] = []
    written = 0
    with open_tensors(checkpoint.stored.values()) as reader:
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
    """The block's bytes in chunks; a chunk is overwritten when the next one is asked for."""
    buffer = bytearray(layout.chunk_bytes)
    first = 0
    for start in range(0, spec.nbytes, layout.chunk_bytes):
        length = min(layout.chunk_bytes, spec.nbytes - start)
        chunk = memoryview(buffer)[:length]
        chunk[:] = bytes(length)
        while spec.tensors[first].offset + spec.tensors[first].nbytes <= start:
            first += 1
        for tensor in spec.tensors[first:]:
            if tensor.offset >= start + length:
                break
            begin = max(tensor.offset, start)
            stop = min(tensor.offset + tensor.nbytes, start + length)
            source = checkpoint.stored[tensor.name]
            reader.read(source, begin - tensor.offset, chunk[begin - start : stop - start])
        yield chunk
