"""Reads blocks from a disk at its full speed.

The bytes go straight to their place, past the page cache. Several requests are under way at all
times, also across the ends of blocks. Each thread checks what it has read while the requests of
other threads run.
"""

import asyncio
import errno
import mmap
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.node.checkpoints.packer import block_file
from services.node.checkpoints.packing import digest
from services.node.memory.arena import PAGE
from services.node.memory.views import address
from shared.clock import wall_ns
from shared.errors import DigestMismatch, LambdaScaleError, ModelError, NotFound
from shared.layout import Manifest
from shared.threads import to_its_end

REQUEST = 4 << 20
"""Bytes asked of the disk at a time, rounded to whole chunks."""
DEPTH = 8
"""Number of requests under way. With fewer, the disk would be idle while a thread checks
(`benchmarks/disk.py`)."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block to read. `into` has its length. The read is direct if `into` begins at a page."""

    block: int
    into: memoryview
    skip: frozenset[int] = frozenset()
    """Chunks that are there already, and are not touched."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Chunks of a block that are in place, with the right digests."""

    block: int
    chunks: Sequence[int]
    began_ns: int
    """When the disk was asked for them, wall clock."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A block that cannot be had from this disk, told once for each block. Its verified chunks are
    good."""

    block: int
    error: LambdaScaleError


Outcome = Verified | Unreadable


class Pace:
    """When reads are over on a disk of this rate, which serves one after the other."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def due(self, now: float, nbytes: int) -> float:
        """When a read that is asked for now is over."""
        self._free_at = max(now, self._free_at) + nbytes / self._bytes_per_s
        return self._free_at


class Files:
    """Reads ranges of the files of one file system: directly, unless the file system refuses
    that."""

    def __init__(self, bytes_per_s: int = 0) -> None:
        """`bytes_per_s` paces the reads of all threads together; 0: as fast as it goes."""
        self._direct = True
        self._pace = Pace(bytes_per_s) if bytes_per_s else None
        self._pacing = threading.Lock()

    def read(self, path: Path, offset: int, into: memoryview, spare: memoryview) -> None:
        """Fills `into` as far as the file goes. `spare`: a page that may be used meanwhile."""
        if self._pace is None:
            self._read(path, offset, into, spare)
            return
        with self._pacing:
            due = self._pace.due(time.monotonic(), len(into))
        self._read(path, offset, into, spare)
        time.sleep(max(0.0, due - time.monotonic()))

    def _read(self, path: Path, offset: int, into: memoryview, spare: memoryview) -> None:
        if self._direct and offset % PAGE == 0 and address(into) % PAGE == 0:
            try:
                _read_direct(path, offset, into, spare)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = False
                _log.debug("no direct reads here; the page cache is used", path=str(path))
        _read_buffered(path, offset, into)


class Reading:
    """The reading of some blocks of one model, in order, by all threads that call `work`."""

    def __init__(
        self, files: Files, directory: Path, manifest: Manifest, wanted: Sequence[Wanted]
    ) -> None:
        """`directory`: where the model's block files are."""
        self._files = files
        self._directory = directory
        self._manifest = manifest
        self._requests = ((each, run) for each in wanted for run in _runs(manifest, each))
        self._taking = threading.Lock()
        self._stopped = False
        self._unreadable: set[int] = set()

    def work(self, tell: Callable[[Outcome], None]) -> None:
        """Reads until nothing is left to begin, and calls `tell` with each outcome."""
        spare = memoryview(mmap.mmap(-1, PAGE))
        while request := self._take():
            wanted, chunks = request
            began = wall_ns()
            try:
                self._read(wanted, chunks, spare)
            except LambdaScaleError as error:
                if self._give_up(wanted.block):
                    tell(Unreadable(wanted.block, error))
            else:
                tell(Verified(wanted.block, chunks, began))

    def stop(self) -> None:
        """Begins no more requests. Those under way end."""
        with self._taking:
            self._stopped = True

    def _take(self) -> tuple[Wanted, range] | None:
        with self._taking:
            if self._stopped:
                return None
            left = (each for each in self._requests if each[0].block not in self._unreadable)
            return next(left, None)

    def _give_up(self, block: int) -> bool:
        """Whether this is the first time that the block is given up."""
        with self._taking:
            first = block not in self._unreadable
            self._unreadable.add(block)
        return first

    def _read(self, wanted: Wanted, chunks: range, spare: memoryview) -> None:
        first, nbytes = self._manifest.run_range(wanted.block, chunks)
        into = wanted.into[first : first + nbytes]
        read_run(self._files, self._directory, self._manifest, wanted.block, chunks, into, spare)


def read_run(
    files: Files,
    directory: Path,
    manifest: Manifest,
    block: int,
    chunks: range,
    into: memoryview,
    spare: memoryview,
) -> None:
    """Reads a run of chunks from a model's `directory`, and checks them. `spare`: a page that may
    be used meanwhile. NotFound, ModelError; DigestMismatch names the chunk."""
    path = directory / block_file(block)
    first, _ = manifest.run_range(block, chunks)
    with _disk_errors(path):
        files.read(path, first, into, spare)
    for chunk in chunks:
        offset, length = manifest.chunk_range(block, chunk)
        start = offset - first
        if digest(into[start : start + length]) != manifest.blocks[block].digests[chunk]:
            raise DigestMismatch(
                f"block {block} of model {directory.name}: chunk {chunk} in {path} is damaged; "
                "import the model again"
            )


async def read_together(reading: Reading) -> AsyncGenerator[Outcome, None]:
    """The outcomes of DEPTH reading threads, as they come. Once it is closed, nothing is written
    any more."""
    loop = asyncio.get_running_loop()
    outcomes: asyncio.Queue[Outcome | None] = asyncio.Queue()

    def tell(outcome: Outcome) -> None:
        loop.call_soon_threadsafe(outcomes.put_nowait, outcome)

    threads = ThreadPoolExecutor(DEPTH, thread_name_prefix="disk")
    try:
        works = [loop.run_in_executor(threads, reading.work, tell) for _ in range(DEPTH)]
        ended = asyncio.gather(*works)
        ended.add_done_callback(lambda _: outcomes.put_nowait(None))
        while outcome := await outcomes.get():
            yield outcome
        await ended
    finally:
        reading.stop()
        await to_its_end(threads.shutdown)


def _runs(manifest: Manifest, wanted: Wanted) -> Iterator[range]:
    """Runs of missing chunks, of about REQUEST bytes each."""
    most = max(1, REQUEST // manifest.chunk_bytes)
    end = manifest.n_chunks(wanted.block)
    begin = 0
    for chunk in (*sorted(wanted.skip), end):
        for start in range(begin, chunk, most):
            yield range(start, min(start + most, chunk))
        begin = chunk + 1


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{path} is missing; import the model again") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


@contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_direct(path: Path, offset: int, into: memoryview, spare: memoryview) -> None:
    """Reads whole pages only. The last page, of which `into` takes a part, goes through `spare`."""
    whole = len(into) // PAGE * PAGE
    last = spare if whole < len(into) else spare[:0]
    done = 0
    with _opened(path, os.O_DIRECT) as descriptor:
        while done < len(into):
            buffers = [part for part in (into[done:whole], last) if len(part)]
            got = os.preadv(descriptor, buffers, offset + done)
            if got == 0:
                return
            done += got
    into[whole:] = spare[: len(into) - whole]


def _read_buffered(path: Path, offset: int, into: memoryview) -> None:
    """Reads through the page cache, and leaves nothing there."""
    done = 0
    with _opened(path) as descriptor:
        while done < len(into):
            got = os.preadv(descriptor, [into[done:]], offset + done)
            if got == 0:
                break
            done += got
        os.posix_fadvise(descriptor, offset, done, os.POSIX_FADV_DONTNEED)
