"""Memory for weights: taken once, before any transfer, and handed out in spans.

Pages are touched when the arena is made, so that no transfer ever waits for the kernel to provide
them. Only a *lazy* arena gets its pages when they are first used. A span has one owner, who frees
it. Whoever reads or writes it meanwhile (transport, engine) holds it, and a span that is held
cannot be freed: cancelling an await does not stop what touches the memory.
"""

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator

from services.node.memory.available import host_memory
from services.node.memory.views import Memory
from shared.errors import BadInput, CapacityExceeded, Conflict, NotFound
from shared.layout import ALIGN, BlockSpec, Manifest
from shared.parts import Part, whole

PAGE = mmap.PAGESIZE
LARGE = 64 * PAGE
"""Blocks of at least this many bytes begin at a page; that wastes less than 2 %."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Peers on this machine map the file: they must not lose its pages while they read."""
_TOUCH = 64 << 20
"""Bytes faulted in at a time. Other threads run in between."""


class Span:
    """A range of an arena's bytes, which begins at a page. `memory` is writable."""

    def __init__(self, offset: int, memory: memoryview) -> None:
        self.offset = offset
        self.memory = memory
        self.users: list[str] = []

    @property
    def nbytes(self) -> int:
        return len(self.memory)

    @property
    def taken(self) -> int:
        """The bytes that it takes of the arena, in whole pages."""
        return _round_up(self.nbytes, PAGE)

    def hold(self, user: str) -> None:
        self.users.append(user)

    def release(self, user: str) -> None:
        if user not in self.users:
            raise Conflict(f"span at {self.offset}: {user} does not hold it")
        self.users.remove(user)


class Arena:
    def __init__(
        self,
        nbytes: int,
        setting: str = "node.arena_bytes",
        kept: int | None = None,
        *,
        lazy: bool = False,
    ) -> None:
        """Allocates and faults in `nbytes`, rounded up to whole pages. CapacityExceeded if the
        machine does not have them. `setting`: what says how many, for the error. `lazy`: for an
        arena that is rarely used, and hardly ever whole.

        `kept`: the descriptor of an arena of this size that outlived its process, to be gone on
        with: its bytes are as they were. BadInput: it is no such arena. The caller closes it."""
        if nbytes <= 0:
            raise BadInput(f"an arena of {nbytes} bytes")
        self.nbytes = _round_up(nbytes, PAGE)
        self._memory, self.file = self._new(setting, lazy) if kept is None else self._again(kept)
        """`file` is the descriptor of the memfd, for the keeper."""
        self._close_file = weakref.finalize(self, os.close, self.file)
        readable = os.open(f"/proc/self/fd/{self.file}", os.O_RDONLY | os.O_CLOEXEC)
        self._close_readable = weakref.finalize(self, os.close, readable)
        self.memory = Memory(self._memory, readable)
        """The whole arena, for transports to register once."""
        self._holes: list[tuple[int, int]] = [(0, self.nbytes)]
        """Free ranges (start, stop), ascending; no two of them touch."""
        self._spans: dict[int, Span] = {}

    def _new(self, setting: str, lazy: bool) -> tuple[memoryview, int]:
        if not lazy and self.nbytes > (left := host_memory().left):
            raise _no_memory(self.nbytes, f"{left} bytes are left of this machine's", setting)
        file = os.memfd_create("lambdascale-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, self.nbytes)
            memory = memoryview(mmap.mmap(file, self.nbytes))
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(file)
            raise _no_memory(self.nbytes, error.strerror, setting) from error
        for start in range(0, 0 if lazy else self.nbytes, _TOUCH):
            pages = memory[start : start + _TOUCH : PAGE]
            pages[:] = bytes(len(pages))
        return memory, file

    def _again(self, kept: int) -> tuple[memoryview, int]:
        if os.fstat(kept).st_size != self.nbytes:
            raise BadInput(
                f"what was kept has {os.fstat(kept).st_size} bytes, the arena {self.nbytes}"
            )
        try:
            if fcntl.fcntl(kept, fcntl.F_GET_SEALS) != _SEALS:
                raise BadInput("what was kept is sealed in another way than an arena")
            return memoryview(mmap.mmap(kept, self.nbytes)), os.dup(kept)
        except OSError as error:
            raise BadInput(f"what was kept cannot be mapped: {error.strerror}") from error

    def close(self) -> None:
        """Stops handing out memory. The memory is freed with the last view of it."""
        self._holes = []
        self._memory = memoryview(b"")
        self.memory = Memory(self._memory, -1)
        self._close_readable()
        self._close_file()

    @property
    def free_bytes(self) -> int:
        return sum(stop - start for start, stop in self._holes)

    def allocate(self, nbytes: int) -> Span:
        """A span from the first hole that fits. CapacityExceeded says how much is free."""
        if nbytes <= 0:
            raise BadInput(f"a span of {nbytes} bytes")
        size = _round_up(nbytes, PAGE)
        for start, stop in self._holes:
            if stop - start >= size:
                return self._take(start, nbytes)
        largest = max((stop - start for start, stop in self._holes), default=0)
        raise CapacityExceeded(
            f"{nbytes} bytes are wanted, {self.free_bytes} of the arena's {self.nbytes} are free, "
            f"{largest} in one piece"
        )

    def take(self, offset: int, nbytes: int) -> Span:
        """The span at this place, as an earlier process had it. Conflict: a part of it is not free,
        or it is no place for a span."""
        fits = any(
            start <= offset and offset + _round_up(nbytes, PAGE) <= stop
            for start, stop in self._holes
        )
        if offset % PAGE or nbytes <= 0 or not fits:
            raise Conflict(f"{nbytes} bytes at {offset} of the arena are not free")
        return self._take(offset, nbytes)

    def _take(self, offset: int, nbytes: int) -> Span:
        end = offset + _round_up(nbytes, PAGE)
        index, (start, stop) = next(
            (index, hole) for index, hole in enumerate(self._holes) if hole[1] >= end
        )
        rest = [(start, offset)] * (start < offset) + [(end, stop)] * (end < stop)
        self._holes[index : index + 1] = rest
        span = self._spans[offset] = Span(offset, self._memory[offset : offset + nbytes])
        return span

    def free(self, span: Span) -> None:
        """Conflict if the span is still held, or is not this arena's (for example because it was
        freed already)."""
        if self._spans.get(span.offset) is not span:
            raise Conflict(f"span at {span.offset} is not allocated: freed twice?")
        if span.users:
            raise Conflict(f"span at {span.offset} is still held by {', '.join(span.users)}")
        del self._spans[span.offset]
        start, stop = span.offset, span.offset + span.taken
        before = [hole for hole in self._holes if hole[1] < start]
        after = [hole for hole in self._holes if hole[0] > stop]
        touching = self._holes[len(before) : len(self._holes) - len(after)]
        start = min([start, *(hole[0] for hole in touching)])
        stop = max([stop, *(hole[1] for hole in touching)])
        self._holes = [*before, (start, stop), *after]


class ModelSpace:
    """The blocks of one model in a span, or of a part of it, each contiguous. Blocks are aligned to
    ALIGN, so that little is lost between them; large ones to a page, so that a disk can write right
    into them."""

    def __init__(self, manifest: Manifest, span: Span, part: Part | None = None) -> None:
        """`part`: the blocks that have room in it; None: all."""
        self.part = whole(manifest.n_blocks) if part is None else part
        if span.nbytes < (needed := self.size(manifest, self.part)):
            raise BadInput(f"a span of {span.nbytes} bytes for {needed} bytes of a model")
        self.manifest = manifest
        self.span = span
        self._blocks: dict[int, memoryview] = {}
        blocks = manifest.blocks[self.part.start : self.part.stop]
        for offset, block in zip(_offsets(blocks), blocks, strict=False):
            self._blocks[block.index] = span.memory[offset : offset + block.nbytes]

    @staticmethod
    def size(manifest: Manifest, part: Part | None = None) -> int:
        """Bytes to allocate for a model, or a part of it."""
        *_, end = _offsets(manifest.blocks[part.start : part.stop] if part else manifest.blocks)
        return end

    def block(self, index: int) -> memoryview:
        """NotFound: the block has no room here."""
        if index not in self._blocks:
            raise NotFound(f"there is room for {self.part} here, not for block {index}")
        return self._blocks[index]


def _no_memory(nbytes: int, why: str | None, setting: str) -> CapacityExceeded:
    return CapacityExceeded(f"no memory for an arena of {nbytes} bytes: {why}; lower {setting}")


def _offsets(blocks: Iterable[BlockSpec]) -> Iterator[int]:
    """The offset of each block, and then the end of the last one."""
    end = 0
    for block in blocks:
        start = _round_up(end, PAGE if block.nbytes >= LARGE else ALIGN)
        yield start
        end = start + block.nbytes
    yield _round_up(end, ALIGN)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
