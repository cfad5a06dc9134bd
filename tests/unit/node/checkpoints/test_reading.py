"""Blocks read from a disk: directly or not, in parallel, with errors of single blocks."""

import asyncio
import ctypes
import errno
import mmap
import os
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog

from services.node.checkpoints import reading
from services.node.checkpoints.reading import (
    DEPTH,
    Outcome,
    Pace,
    Unreadable,
    Verified,
    Wanted,
)
from services.node.checkpoints.store import Imported, Store
from services.node.memory.arena import PAGE
from shared.errors import (
    BadInput,
    CorruptCheckpoint,
    DigestMismatch,
    LambdaScaleError,
    ModelError,
    NotFound,
)
from shared.ids import ModelId
from tests.unit.node import gates

GUARD = 0xAA
_LIBC = ctypes.CDLL(None, use_errno=True)


class Disk:
    """A store with one model, whose blocks have several chunks, and a place in memory for it."""

    def __init__(self, root: Path, checkpoint: Path) -> None:
        self.store = Store(root)
        self.imported: Imported = self.store.import_checkpoint(checkpoint)
        self.manifest = self.imported.manifest
        self.paths = [
            root / self.imported.model_id / f"block-{spec.index:03d}.bin"
            for spec in self.manifest.blocks
        ]
        self.content = [path.read_bytes() for path in self.paths]
        self.pages = [_pages(len(content)) for content in self.content]

    def wanted(self, *, shift: int = 0) -> list[Wanted]:
        """Every block, `shift` bytes beyond the beginning of a page."""
        return [
            Wanted(index, pages[shift : shift + len(content)])
            for index, (pages, content) in enumerate(zip(self.pages, self.content, strict=True))
        ]

    def read(self, wanted: Iterable[Wanted]) -> AsyncGenerator[Outcome, None]:
        return self.store.read(self.imported.model_id, list(wanted))

    async def read_all(self, *, shift: int = 0) -> dict[int, LambdaScaleError]:
        """The blocks that cannot be read; every chunk of all the others is told of, once."""
        told: dict[int, list[int]] = {spec.index: [] for spec in self.manifest.blocks}
        wrong: dict[int, LambdaScaleError] = {}
        async for outcome in self.read(self.wanted(shift=shift)):
            if isinstance(outcome, Unreadable):
                assert outcome.block not in wrong
                wrong[outcome.block] = outcome.error
            else:
                told[outcome.block] += outcome.chunks
        for block, chunks in told.items():
            every = range(self.manifest.n_chunks(block))
            assert sorted(chunks) == list(every) or block in wrong
            assert len(set(chunks)) == len(chunks)
        return wrong

    def is_right(self, block: int, *, shift: int = 0) -> bool:
        """Its bytes are there, and none was written beside them."""
        pages, content = self.pages[block], self.content[block]
        before, into = pages[:shift], pages[shift : shift + len(content)]
        after = pages[shift + len(content) :]
        return into == content and set(before) | set(after) <= {GUARD}

    @property
    def every(self) -> range:
        return range(self.manifest.n_blocks)


def _pages(nbytes: int) -> memoryview:
    room = (nbytes // PAGE + 3) * PAGE
    pages = memoryview(mmap.mmap(-1, room))
    pages[:] = bytes([GUARD]) * room
    return pages


def forget(path: Path) -> None:
    """Takes it out of the page cache. Pages that a processor is still busy with stay at first."""
    while True:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not is_cached(path):
            return


def is_cached(path: Path) -> bool:
    """Whether any page of it is in the page cache. Asking (mincore) reads nothing into it."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        resident = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        failed = _LIBC.mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), resident
        )
        del first  # the map cannot be closed before
        assert not failed, os.strerror(ctypes.get_errno())
        return any(page & 1 for page in resident)


def directly(path: Path) -> bool:
    """Whether its file system has direct reads."""
    page = mmap.mmap(-1, PAGE)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            return os.preadv(descriptor, [page], 0) > 0
        finally:
            os.close(descriptor)
    except OSError:
        return False


@pytest.fixture
def disk(tmp_path: Path, wide: Path) -> Disk:
    return Disk(tmp_path / "store", wide)


@pytest.fixture
def small_requests(monkeypatch: pytest.MonkeyPatch, disk: Disk) -> None:
    """One chunk each, so that blocks are read in several."""
    monkeypatch.setattr(reading, "REQUEST", disk.manifest.chunk_bytes)


@pytest.mark.parametrize("shift", [0, 1, 512])
async def test_blocks_go_to_their_place_and_nothing_beside_it(disk: Disk, shift: int) -> None:
    assert any(len(content) % PAGE for content in disk.content)
    assert await disk.read_all(shift=shift) == {}
    assert all(disk.is_right(block, shift=shift) for block in disk.every)


@pytest.mark.parametrize("shift", [0, 1])
async def test_the_page_cache_stays_as_it_was(disk: Disk, shift: int) -> None:
    """Directly (a block that begins at a page), or read and then taken out again."""
    for path in disk.paths:
        forget(path)
    assert await disk.read_all(shift=shift) == {}
    assert not any(is_cached(path) for path in disk.paths)


@pytest.mark.parametrize("refused", ["open", "preadv"])
async def test_where_direct_reads_are_refused_others_are_made_from_then_on(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    tried: list[int] = []
    direct: set[int] = set()
    really_open, really_read = os.open, os.preadv

    def open_(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            tried.append(flags)
            if refused == "open":
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        descriptor = really_open(path, flags & ~os.O_DIRECT, *rest)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def preadv(descriptor: int, *rest: object) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_read(descriptor, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("os.open", open_)
    monkeypatch.setattr("os.preadv", preadv)
    with structlog.testing.capture_logs() as logs:
        assert await disk.read_all() == {}
    assert all(disk.is_right(block) for block in disk.every)
    assert {(log["event"], log["log_level"]) for log in logs} == {
        ("no direct reads here; the page cache is used", "debug")
    }
    assert 0 < len(tried) <= DEPTH
    tried.clear()
    assert await disk.read_all() == {}
    assert tried == []


async def test_direct_reads_are_made_where_they_can_be(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a block's last bytes, which fill no page; and after others were made."""
    reads: list[int] = []
    read = reading._read_buffered

    def buffered(path: Path, offset: int, into: memoryview) -> None:
        reads.append(offset)
        read(path, offset, into)

    monkeypatch.setattr(reading, "_read_buffered", buffered)
    await disk.read_all(shift=1)
    assert len(reads) == disk.manifest.n_blocks
    reads.clear()
    os.truncate(disk.paths[1], 300_000)
    await disk.read_all()
    await disk.read_all()
    if not directly(disk.paths[0]):
        pytest.skip("this file system refuses direct reads")
    assert reads == []


@pytest.mark.usefixtures("small_requests")
async def test_the_next_block_is_begun_before_the_last_one_ends(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gates.Gate()
    really = reading.Reading._read

    def gated(self: reading.Reading, wanted: Wanted, chunks: range, spare: memoryview) -> None:
        if wanted.block == 1 and 0 in chunks:
            gate()
        really(self, wanted, chunks, spare)

    monkeypatch.setattr(reading.Reading, "_read", gated)
    seen: set[tuple[int, int]] = set()
    async for outcome in disk.read(disk.wanted()):
        assert isinstance(outcome, Verified)
        seen |= {(outcome.block, chunk) for chunk in outcome.chunks}
        if {block for block, _ in seen} == set(disk.every) and (1, 1) in seen:
            gate.open()
    assert all(disk.is_right(block) for block in disk.every)


@pytest.mark.usefixtures("small_requests")
async def test_closing_waits_for_what_is_under_way_and_begins_nothing(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gates.Gate()
    begun: list[Path] = []
    read = reading.Files.read

    def gated(
        self: reading.Files, path: Path, offset: int, into: memoryview, spare: memoryview
    ) -> None:
        begun.append(path)
        if len(begun) > 1:
            gate()
        read(self, path, offset, into, spare)

    monkeypatch.setattr(reading.Files, "read", gated)
    outcomes = disk.read(disk.wanted())
    async with asyncio.timeout(20):
        await anext(outcomes)
        await gate.wait()
        closing = asyncio.ensure_future(outcomes.aclose())
        await asyncio.wait([closing], timeout=0.1)
        assert not closing.done()  # threads write into the buffers
        gate.open()
        await closing
    assert len(begun) <= DEPTH + 1 < sum(map(disk.manifest.n_chunks, disk.every))
    for pages in disk.pages:
        pages[:] = bytes(len(pages))
    assert not any(map(any, disk.pages))


@pytest.mark.parametrize("position", [0, 300_000, -1])
@pytest.mark.usefixtures("small_requests")
async def test_a_damaged_chunk_is_of_its_block_only(disk: Disk, position: int) -> None:
    content = bytearray(disk.content[1])
    content[position] ^= 1
    disk.paths[1].write_bytes(content)
    wrong = await disk.read_all()
    assert set(wrong) == {1}
    assert isinstance(wrong[1], DigestMismatch)
    chunk = position % len(content) // disk.manifest.chunk_bytes
    assert f"chunk {chunk} in {disk.paths[1]} is damaged" in str(wrong[1])
    assert all(disk.is_right(block) for block in disk.every if block != 1)


def _symlink_to_unmapped_memory(path: Path) -> None:
    """The kernel's own EIO; opening it for direct reads is refused."""
    path.symlink_to("/proc/self/mem")


@pytest.mark.parametrize(
    ("replace", "error", "said"),
    [
        (lambda path: None, NotFound, "is missing; import the model again"),
        (Path.mkdir, ModelError, "Is a directory"),
        (_symlink_to_unmapped_memory, ModelError, "Input/output error"),
        (lambda path: path.symlink_to(path), ModelError, "symbolic links"),
    ],
    ids=["missing", "directory", "EIO", "loop"],
)
@pytest.mark.usefixtures("small_requests")
async def test_a_block_that_the_disk_does_not_give(
    disk: Disk, replace: object, error: type[LambdaScaleError], said: str
) -> None:
    disk.paths[2].unlink()
    assert callable(replace)
    replace(disk.paths[2])
    wrong = await disk.read_all()
    assert set(wrong) == {2}
    assert type(wrong[2]) is error
    assert said in str(wrong[2])
    assert all(disk.is_right(block) for block in disk.every if block != 2)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("length", [0, 100, 300_000, 512 << 10, -1])
async def test_a_block_that_ends_too_early(disk: Disk, length: int, shift: int) -> None:
    there = length % len(disk.content[1])
    os.truncate(disk.paths[1], there)
    wrong = await disk.read_all(shift=shift)
    assert set(wrong) == {1}
    assert f"chunk {there // disk.manifest.chunk_bytes} in" in str(wrong[1])


@pytest.mark.usefixtures("small_requests")
async def test_chunks_that_are_there_already_are_left_alone(disk: Disk) -> None:
    with disk.paths[1].open("r+b") as file:
        file.write(b"damaged")
    every, last = range(disk.manifest.n_chunks(1)), disk.manifest.n_chunks(1) - 1
    wanted = Wanted(1, disk.wanted()[1].into, frozenset({0, last}))
    told: list[int] = []
    async for outcome in disk.read([wanted]):
        assert isinstance(outcome, Verified)
        told += outcome.chunks
    assert sorted(told) == [chunk for chunk in every if chunk not in (0, last)]
    for chunk in (0, last):
        offset, length = disk.manifest.chunk_range(1, chunk)
        assert set(wanted.into[offset : offset + length]) == {GUARD}


@pytest.mark.parametrize("request_chunks", [1, 2, 3, 100])
@pytest.mark.parametrize("skip", [(), (0,), (1, 2), (0, 2, 4), (0, 1, 2, 3, 4)])
def test_requests_are_runs_of_chunks_that_are_not_there(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, request_chunks: int, skip: tuple[int, ...]
) -> None:
    monkeypatch.setattr(reading, "REQUEST", request_chunks * disk.manifest.chunk_bytes)
    runs = list(reading._runs(disk.manifest, Wanted(1, memoryview(b""), frozenset(skip))))
    left = [chunk for chunk in range(disk.manifest.n_chunks(1)) if chunk not in skip]
    assert [chunk for run in runs for chunk in run] == left
    assert all(0 < len(run) <= request_chunks for run in runs)


async def test_what_is_not_there_is_said_of_every_block(disk: Disk, tmp_path: Path) -> None:
    wanted = disk.wanted()[:2]
    missing = [outcome async for outcome in disk.store.read(ModelId("0" * 32), wanted)]
    assert [(o.block, type(o.error)) for o in missing if isinstance(o, Unreadable)] == [
        (0, NotFound),
        (1, NotFound),
    ]
    for each, error in (
        (Wanted(4, wanted[0].into), NotFound),
        (Wanted(-1, wanted[0].into), NotFound),
        (Wanted(0, wanted[0].into[1:]), BadInput),
    ):
        (outcome,) = [outcome async for outcome in disk.read([each])]
        assert isinstance(outcome, Unreadable)
        assert type(outcome.error) is error
    (disk.paths[0].parent / "manifest.msgpack").write_bytes(b"\xc1")
    later = Store(tmp_path / "store")
    (outcome,) = [o async for o in later.read(disk.imported.model_id, wanted[:1])]
    assert isinstance(outcome, Unreadable)
    assert isinstance(outcome.error, CorruptCheckpoint)


async def test_a_bug_in_a_thread_is_raised(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> bytes:
        raise RuntimeError("a bug")

    monkeypatch.setattr(reading, "digest", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        await disk.read_all()


def test_a_paced_disk_serves_one_read_after_the_other() -> None:
    pace = Pace(100)
    assert [pace.due(5.0, 50), pace.due(5.1, 100), pace.due(9.0, 200)] == [5.5, 6.5, 11.0]


async def test_reads_of_all_threads_keep_to_the_pace(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that stands still, the last read waits for the time of all bytes."""
    disk, slept = Disk(tmp_path, checkpoint), list[float]()
    disk.store = Store(tmp_path, bytes_per_s=1000)
    stopped = SimpleNamespace(monotonic=lambda: 0.0, sleep=slept.append)
    monkeypatch.setattr(reading, "time", stopped)
    assert not await disk.read_all()
    await disk.store.piece(disk.imported.model_id, 0, range(1))
    _, piece = disk.manifest.run_range(0, range(1))
    assert max(slept) == pytest.approx((disk.manifest.nbytes + piece) / 1000)
