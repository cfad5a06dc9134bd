"""A model that comes to this disk in pieces.

    <root>/.copy-<model_id>/manifest.msgpack
                            block-000.bin    whole and durable
                            block-001.part   begun; after a restart it is begun anew

Nothing of it counts before `Store.adopt` renames it into place. All calls are synchronous: make
them in a thread, one at a time.
"""

import os
import shutil
from pathlib import Path

from services.node.checkpoints.disk import check_room, disk_errors, fsync_directory, write_file
from services.node.checkpoints.packer import block_file
from services.node.checkpoints.packing import digest
from shared.errors import DigestMismatch
from shared.ids import ModelId
from shared.layout import Manifest, encode_manifest

MANIFEST = "manifest.msgpack"
DRAFT = ".copy-"
"""How the names of drafts' directories begin."""


class Draft:
    def __init__(self, root: Path, model_id: ModelId, manifest: Manifest) -> None:
        """Goes on with the draft that is there, or begins one. CapacityExceeded if the disk lacks
        room for what is missing; ModelError if it fails otherwise."""
        self.directory = root / f"{DRAFT}{model_id}"
        self.model_id = model_id
        self.manifest = manifest
        with disk_errors(root, manifest.nbytes):
            if not (self.directory / MANIFEST).is_file():
                shutil.rmtree(self.directory, ignore_errors=True)
                root.mkdir(parents=True, exist_ok=True)
                check_room(root, manifest.nbytes)
                self.directory.mkdir()
                write_file(self.directory / MANIFEST, encode_manifest(manifest))
                fsync_directory(self.directory)
            for begun in self.directory.glob("*.part"):
                begun.unlink()
            check_room(root, manifest.nbytes - self.done)

    @property
    def missing(self) -> list[int]:
        """Blocks that are not whole."""
        return [block for block in range(self.manifest.n_blocks) if not self._has(block)]

    @property
    def done(self) -> int:
        """Bytes of whole blocks."""
        return self.manifest.nbytes - sum(self.manifest.blocks[b].nbytes for b in self.missing)

    def write(self, block: int, chunks: range, data: memoryview) -> None:
        """Writes the block's next chunks, in order and without gaps. With the last of them, the
        block is durable. DigestMismatch: nothing was written. CapacityExceeded, ModelError: the
        disk failed."""
        spec = self.manifest.blocks[block]
        first = self.manifest.chunk_range(block, chunks[0])[0]
        for chunk in chunks:
            offset, length = self.manifest.chunk_range(block, chunk)
            if digest(data[offset - first : offset - first + length]) != spec.digests[chunk]:
                raise DigestMismatch(
                    f"block {block} of model {self.model_id}: chunk {chunk} came damaged"
                )
        whole = self.directory / block_file(block)
        part = whole.with_suffix(".part")
        with disk_errors(self.directory.parent, self.manifest.nbytes):
            with part.open("ab" if first else "wb") as file:
                file.write(data)
                if first + len(data) == spec.nbytes:
                    file.flush()
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if first + len(data) == spec.nbytes:
                part.rename(whole)
                fsync_directory(self.directory)

    def _has(self, block: int) -> bool:
        try:
            nbytes = (self.directory / block_file(block)).stat().st_size
        except FileNotFoundError:  # not begun; or the draft becomes a model on another thread now
            return False
        return nbytes == self.manifest.blocks[block].nbytes
