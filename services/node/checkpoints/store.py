"""Packed models on a node's disk, named by the digest of their manifest.

    <root>/<model_id>/manifest.msgpack
                      block-000.bin ...
                      files/tokenizer.json ...

A model is written to a hidden directory and renamed into place, so a crash leaves a whole model
or none; the next import clears what it left. A model that comes from peers is a `Draft` until it is
whole. All but `read` and `piece` is synchronous: call it in a thread.
"""

import asyncio
import fcntl
import mmap
import re
import secrets
import shutil
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.node.checkpoints.adapter import open_adapter
from services.node.checkpoints.architecture import read_config
from services.node.checkpoints.checkpoint import Checkpoint, open_checkpoint
from services.node.checkpoints.decode_shape import decode_shape
from services.node.checkpoints.disk import (
    check_room,
    disk_errors,
    fsync_directory,
    write_file,
)
from services.node.checkpoints.draft import DRAFT, MANIFEST, Draft
from services.node.checkpoints.packer import Progress, block_file, empty_manifest, pack
from services.node.checkpoints.reading import (
    DEPTH,
    Files,
    Outcome,
    Reading,
    Unreadable,
    Wanted,
    read_run,
    read_together,
)
from services.node.memory.arena import PAGE
from services.node.memory.recycled import Recycled
from shared.errors import BadInput, CorruptCheckpoint, LambdaScaleError, ModelError, NotFound
from shared.ids import ModelId
from shared.layout import Manifest, decode_manifest, encode_manifest, model_id
from shared.messages.pool import DecodeShape

_MODEL_ID = re.compile(r"[0-9a-f]{32}")
_FILES = "files"
_UNFINISHED = ".unfinished-"
LENT = 4
"""So many pieces' memory is kept for the next ones: new memory takes longer to find than to
fill."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Imported:
    model_id: ModelId
    manifest: Manifest
    files: dict[str, bytes]
    """Tokenizer and template files."""
    context_length: int
    nbytes: int
    shape: DecodeShape | None


class Store:
    """Imports run one at a time, across processes too. Reads run beside anything, in any thread."""

    def __init__(self, root: Path, bytes_per_s: int = 0) -> None:
        """`bytes_per_s` paces reads of blocks; 0: as fast as it goes."""
        self._root = root
        self._block_files = Files(bytes_per_s)
        self._verified: dict[ModelId, Manifest] = {}
        # Threads of its own: a disk that hangs must not take those that others wait for.
        self._lending = ThreadPoolExecutor(DEPTH, thread_name_prefix="lend")
        self._pieces = Recycled(LENT)

    def import_checkpoint(
        self, path: Path, *, blocks: int = 0, progress: Progress | None = None
    ) -> Imported:
        """Packs the checkpoint directory `path` into `blocks` blocks (0: a number that suits its
        size).

        Reads the weights a chunk at a time. Importing again repairs damaged blocks and takes over
        changed tokenizer files. Errors: those of `open_checkpoint`; BadInput for more blocks than
        units; CapacityExceeded if the disk is full; ModelError if it fails otherwise. Nothing is
        left behind after an error.
        """
        return self._import(open_checkpoint(path), blocks, progress)

    def import_adapter(self, path: Path, base: ModelId, manifest: Manifest) -> Imported:
        """Packs the LoRA adapter in the directory `path`, for a base with this manifest. Errors:
        those of `open_adapter`; CapacityExceeded and ModelError as above."""
        checkpoint = open_adapter(path, base, read_config(manifest.config))
        return self._import(checkpoint, blocks=1)

    def _import(
        self, checkpoint: Checkpoint, blocks: int, progress: Progress | None = None
    ) -> Imported:
        layout = empty_manifest(checkpoint, blocks)
        with disk_errors(self._root, layout.nbytes), self._staging() as staging:
            check_room(self._root, layout.nbytes)
            manifest = pack(checkpoint, layout, staging, progress)
            write_file(staging / MANIFEST, encode_manifest(manifest))
            name = model_id(manifest)
            self._publish(staging, self._root / name, checkpoint.files)
        return Imported(
            name,
            manifest,
            checkpoint.files,
            checkpoint.config.context_length,
            manifest.nbytes,
            decode_shape(manifest),
        )

    def manifests(self) -> dict[ModelId, Manifest]:
        """Every whole model. A damaged model is logged and left out; importing it again repairs it.

        A model is whole if its manifest is the one that the directory is named after, and if every
        block file has its length. The content of blocks is checked when they are read.
        """
        found: dict[ModelId, Manifest] = {}
        if not self._root.is_dir():
            return found
        for directory in sorted(self._root.iterdir()):
            if not _MODEL_ID.fullmatch(directory.name):
                continue
            name = ModelId(directory.name)
            try:
                manifest = self._manifest(name)
                self._check_lengths(name, manifest)
            except (CorruptCheckpoint, NotFound) as error:
                _log.warning("stored_model_damaged", model_id=name, reason=str(error))
            else:
                found[name] = manifest
        return found

    async def read(self, name: ModelId, wanted: Sequence[Wanted]) -> AsyncGenerator[Outcome, None]:
        """Reads blocks in this order, several requests at a time, and tells each outcome at once.

        Close it (`aclosing`): it writes to the buffers until then. It raises nothing. A block is
        `Unreadable` because of NotFound, CorruptCheckpoint (the manifest), BadInput (the buffer),
        DigestMismatch (names the chunk) or ModelError (the disk fails).
        """
        try:
            reading = await asyncio.to_thread(self._reading, name, wanted)
        except LambdaScaleError as error:
            for each in wanted:
                yield Unreadable(each.block, error)
            return
        async with aclosing(read_together(reading)) as outcomes:
            async for outcome in outcomes:
                yield outcome

    def fill(self, name: ModelId, index: int, into: memoryview) -> None:
        """Reads one block in this thread, and raises the errors that `read` tells."""
        outcomes: list[Outcome] = []
        self._reading(name, [Wanted(index, into)]).work(outcomes.append)
        for outcome in outcomes:
            if isinstance(outcome, Unreadable):
                raise outcome.error

    def _reading(self, name: ModelId, wanted: Sequence[Wanted]) -> Reading:
        manifest = self._manifest(name)
        for each in wanted:
            if not 0 <= each.block < manifest.n_blocks:
                raise NotFound(
                    f"model {name} has {manifest.n_blocks} blocks; there is no {each.block}"
                )
            nbytes = manifest.blocks[each.block].nbytes
            if each.into.nbytes != nbytes:
                raise BadInput(
                    f"block {each.block} is {nbytes} bytes long, the buffer {each.into.nbytes}"
                )
        return Reading(self._block_files, self._directory(name), manifest, wanted)

    async def piece(self, name: ModelId, block: int, chunks: range) -> memoryview:
        """Some consecutive chunks of a block, with the right digests. NotFound, CorruptCheckpoint
        (the manifest), DigestMismatch, ModelError (the disk fails)."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._lending, self._piece, name, block, chunks)

    def _piece(self, name: ModelId, block: int, chunks: range) -> memoryview:
        manifest = self._manifest(name)
        if not (0 <= block < manifest.n_blocks and chunks and 0 <= chunks[0] <= chunks[-1]):
            raise NotFound(f"model {name} has no chunks {chunks} of block {block}")
        if chunks[-1] >= manifest.n_chunks(block):
            raise NotFound(f"block {block} of model {name} has no chunk {chunks[-1]}")
        _, nbytes = manifest.run_range(block, chunks)
        into, spare = self._pieces.take(nbytes).memory, memoryview(mmap.mmap(-1, PAGE))
        read_run(self._block_files, self._directory(name), manifest, block, chunks, into, spare)
        return into

    # --- copies that come from peers ---

    def room(self) -> tuple[int, int]:
        """(bytes that are free, size in bytes) of the disk."""
        there = next(path for path in (self._root, *self._root.absolute().parents) if path.is_dir())
        usage = shutil.disk_usage(there)
        return usage.free, usage.total

    def draft(self, name: ModelId, manifest: Manifest) -> Draft:
        """The model's draft, possibly from before a restart. Its errors: see `Draft`."""
        return Draft(self._root, name, manifest)

    def drafts(self) -> list[Draft]:
        """Those that a restart left. Damaged ones are deleted."""
        found: list[Draft] = []
        for directory in sorted(self._root.glob(f"{DRAFT}*")):
            name = ModelId(directory.name.removeprefix(DRAFT))
            try:
                manifest = decode_manifest((directory / MANIFEST).read_bytes())
                if model_id(manifest) != name:
                    raise CorruptCheckpoint(f"{directory} is not a draft of {name}")
                found.append(self.draft(name, manifest))
            except (OSError, LambdaScaleError) as error:
                _log.warning("draft_deleted", model_id=name, reason=str(error))
                shutil.rmtree(directory, ignore_errors=True)
        return found

    def adopt(self, name: ModelId, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        """Makes a whole draft a model of the store, in place of the copy that is there."""
        draft = self.draft(name, manifest)
        with disk_errors(self._root, manifest.nbytes), self._locked():
            self._publish(draft.directory, self._root / name, files)
            self.discard(name)  # what is left of it where a copy was there

    def discard(self, name: ModelId) -> None:
        """Deletes the model's draft, if there is one."""
        shutil.rmtree(self._root / f"{DRAFT}{name}", ignore_errors=True)

    def files(self, name: ModelId) -> dict[str, bytes]:
        """Tokenizer and template files by name. NotFound if the model is not in the store."""
        directory = self._directory(name) / _FILES
        if not directory.is_dir():
            raise self._not_here(name)
        return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}

    def remove(self, name: ModelId) -> None:
        """Removes the model and frees its space. NotFound if it is not in the store; ModelError if
        the disk does not let it go."""
        directory = self._directory(name)
        self._verified.pop(name, None)
        grave = self._root / f"{_UNFINISHED}{secrets.token_hex(8)}"
        try:
            directory.rename(grave)
        except FileNotFoundError as error:
            raise self._not_here(name) from error
        except OSError as error:
            raise ModelError(f"{directory} cannot be removed: {error.strerror}") from error
        fsync_directory(self._root)
        shutil.rmtree(grave, ignore_errors=True)

    @contextmanager
    def _staging(self) -> Iterator[Path]:
        """A fresh directory for the one import that runs in this root. It is removed afterwards."""
        with self._locked():
            for stale in self._root.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(stale, ignore_errors=True)
            staging = self._root / f"{_UNFINISHED}{secrets.token_hex(8)}"
            staging.mkdir()
            try:
                yield staging
            finally:
                shutil.rmtree(staging, ignore_errors=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Whoever brings models into the store does so alone."""
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _publish(self, staging: Path, target: Path, files: Mapping[str, bytes]) -> None:
        """Adds the small files to a finished model, and moves it into place, or over the copy that
        is there.

        Blocks and manifest of the old copy have the same bytes (or are damaged), so replacing them
        one by one leaves a whole model at every point.
        """
        shutil.rmtree(staging / _FILES, ignore_errors=True)
        (staging / _FILES).mkdir()
        for name, data in files.items():
            write_file(staging / _FILES / name, data)
        fsync_directory(staging / _FILES)
        fsync_directory(staging)
        if target.is_dir():
            self._replace_files(staging, target)
        else:
            staging.rename(target)
        fsync_directory(self._root)

    def _replace_files(self, staging: Path, target: Path) -> None:
        (target / _FILES).mkdir(exist_ok=True)
        fresh = [path.relative_to(staging) for path in staging.rglob("*") if path.is_file()]
        for path in fresh:
            (staging / path).replace(target / path)
        for old in (target / _FILES).iterdir():
            if old.relative_to(target) not in fresh:
                old.unlink()
        fsync_directory(target / _FILES)
        fsync_directory(target)

    def _directory(self, name: ModelId) -> Path:
        if not _MODEL_ID.fullmatch(name):
            raise NotFound(f"{name!r} is no model id")
        return self._root / name

    def _not_here(self, name: ModelId) -> NotFound:
        return NotFound(f"model {name} is not stored in {self._root}")

    def _manifest(self, name: ModelId) -> Manifest:
        """The manifest, read and checked once. NotFound; CorruptCheckpoint if it is not the one
        named."""
        if name in self._verified:
            return self._verified[name]
        path = self._directory(name) / MANIFEST
        try:
            manifest = decode_manifest(path.read_bytes())
        except FileNotFoundError as error:
            raise self._not_here(name) from error
        except (CorruptCheckpoint, OSError) as error:
            raise CorruptCheckpoint(
                f"{path} is damaged: {error}; import the model again"
            ) from error
        if model_id(manifest) != name:
            raise CorruptCheckpoint(f"{path} is not the manifest of {name}; import the model again")
        self._verified[name] = manifest
        return manifest

    def _check_lengths(self, name: ModelId, manifest: Manifest) -> None:
        for spec in manifest.blocks:
            path = self._root / name / block_file(spec.index)
            length = path.stat().st_size if path.is_file() else 0
            if length != spec.nbytes:
                raise CorruptCheckpoint(f"{path}: {length} bytes instead of {spec.nbytes}")
