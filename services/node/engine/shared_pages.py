"""Memory for packed weights that outlives the process: a memfd for each block, in huge pages.

Huge pages of shared memory are off by default (shmem_enabled: never), so they are asked for one by
one before they are written (MADV_COLLAPSE, Linux 6.1). Where they cannot be had, packed weights
stay in the process's own memory, and the next process packs again: to decode fast counts for more.
"""

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
import xxhash

from services.node.engine import kernels
from services.node.engine.huge_pages import ALIGN, HUGE, LEAST, HugePages, Pages
from services.node.engine.linear import Form
from services.node.engine.share import WHOLE, Share
from services.node.memory.shelf import Shelf, digest
from shared.errors import BadInput
from shared.ids import ModelId

_COLLAPSE, _FIXED = 25, 0x10
_FAILED = ctypes.c_void_p(-1).value
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
LAYOUT = ("linear", "weights", "encoder", "share", "shared_pages")
"""The modules that say where in a block's memory a matrix lies."""


class SharedPages:
    """As HugePages, in a memfd. BadInput: it has less than is taken, though it is filled."""

    def __init__(self, descriptor: int, nbytes: int, *, filled: bool) -> None:
        """Maps a memfd of whole huge pages. OSError: it cannot be mapped."""
        self.filled = filled
        self.whole = True
        """Whether all that was taken lies in it."""
        self._used = 0
        self._huge = nbytes if filled else 0
        """Up to here it has huge pages."""
        self._bytes = _mapped(descriptor, nbytes)

    def take(self, outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = outputs * inputs * dtype.itemsize
        end = self._used + nbytes
        if not self.grow(end):
            if self.filled:
                raise BadInput(f"{end} bytes are taken of {len(self._bytes)} that are packed")
            self.whole = False
            return torch.empty(outputs, inputs, dtype=dtype)
        taken = self._bytes[self._used : end]
        self._used = -(-end // ALIGN) * ALIGN
        return taken.view(dtype).view(outputs, inputs)

    @property
    def content(self) -> memoryview:
        """The huge pages that something was taken of."""
        return self._bytes.numpy().data[: self._huge]

    def grow(self, end: int) -> bool:
        """Has the bytes before `end` lie in huge pages. False: they cannot."""
        if end > len(self._bytes):
            return False
        while self._huge < end:
            self._bytes[self._huge] = 0  # an empty range cannot be collapsed
            start = ctypes.c_void_p(self._bytes.data_ptr() + self._huge)
            if _libc().madvise(start, ctypes.c_size_t(HUGE), _COLLAPSE):
                return False
            self._huge += HUGE
        return True


class Taken:
    """Pages that remember what was taken of them."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.filled = pages.filled
        self.tensors: list[torch.Tensor] = []

    def take(self, outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
        self.tensors.append(self.pages.take(outputs, inputs, dtype))
        return self.tensors[-1]


class TakenAgain:
    """What was taken before, once more in the same order."""

    filled = True

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = iter(tensors)

    def take(self, outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = next(self._tensors)
        assert (tensor.shape, tensor.dtype) == ((outputs, inputs), dtype)
        return tensor


class PackedBlocks:
    """The memories of packed blocks: from the shelf where they are there, and onto it.

    Memory for the packed weights of a full arena is set aside (budget.py). So those of a model that
    sleeps in the arena stay, and it wakes without packing anything. Those of a model that has left
    the arena stay, too, until others need the memory: its blocks often come back from the host
    cache, and are the same.
    """

    def __init__(
        self,
        shelf: Shelf,
        form: Form,
        compiled: kernels.Kernels | None,
        most: int = 0,
    ) -> None:
        """`compiled`: what packs weights here; None: nothing does. `most`: how many bytes of
        blocks keep their packed weights, while some of these blocks are not in the arena."""
        self._shelf = shelf
        self._made = "" if compiled is None else f"{form} {_layout()} {compiled.name}"
        self._most = most
        self._taken: dict[tuple[ModelId, int], tuple[Share, list[torch.Tensor]]] = {}
        self._sizes: dict[tuple[ModelId, int], int] = {}
        """Bytes of each of these blocks in the arena."""
        self._gone: dict[ModelId, None] = {}
        """Models that have left the arena, the first to leave first."""

    @contextmanager
    def of(self, model: ModelId, block: int, nbytes: int, share: Share = WHOLE) -> Iterator[Pages]:
        """Pages for the packed weights of a block of so many bytes. In the context they are
        taken and filled. `share`: the part of the block that is packed. What was packed of
        another part is dropped."""
        key = model, block
        self._gone.pop(model, None)
        before, tensors = self._taken.pop(key, (share, None))
        if before == share and tensors is not None:
            self._taken[key] = share, tensors
            yield TakenAgain(tensors)
            return
        self._sizes.pop(key, None)
        del tensors
        self._make_room(nbytes)
        with self._pages(model, block, nbytes, share) as pages:
            taken = Taken(pages)
            yield taken
        self._taken[key], self._sizes[key] = (share, taken.tensors), nbytes

    def has_room(self, model: ModelId, block: int, nbytes: int) -> bool:
        """Whether a block of so many bytes is packed already, or can be packed while nothing else
        gives way."""
        return (model, block) in self._taken or sum(self._sizes.values()) + nbytes <= self._most

    def expect(self, model: ModelId) -> None:
        """The model is not in the arena, and some of its blocks were packed ahead. It is the first
        to give way: models that were used before come back more often."""
        self._gone = {model: None} | self._gone

    def leave(self, model: ModelId) -> None:
        """The model's bytes leave the arena."""
        self._gone.pop(model, None)
        self._gone[model] = None
        self._make_room(0)

    def _make_room(self, nbytes: int) -> None:
        while self._gone and sum(self._sizes.values()) + nbytes > self._most:
            model = next(iter(self._gone))
            del self._gone[model]
            for key in [key for key in self._taken if key[0] == model]:
                del self._taken[key], self._sizes[key]
            self._shelf.drop(model)

    @contextmanager
    def _pages(self, model: ModelId, block: int, nbytes: int, share: Share) -> Iterator[Pages]:
        made = self._made if share == WHOLE else f"{self._made} {share.rank} of {share.of}"
        if not (self._shelf.keeps and self._made) or nbytes < LEAST:
            yield HugePages(nbytes)
        elif (kept := self._find(model, block, made)) is not None:
            yield kept
        else:
            descriptor = os.memfd_create(
                "lambdascale-packed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            )
            try:
                yield from self._new(model, block, nbytes, made, descriptor)
            finally:
                os.close(descriptor)

    def _new(
        self, model: ModelId, block: int, nbytes: int, made: str, descriptor: int
    ) -> Iterator[Pages]:
        most = -(-(nbytes + nbytes // 8) // HUGE) * HUGE
        os.ftruncate(descriptor, most)
        pages = SharedPages(descriptor, most, filled=False)
        if not pages.grow(1):
            yield HugePages(nbytes)
            return
        yield pages
        if pages.whole:
            content = pages.content
            os.ftruncate(descriptor, len(content))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._shelf.put(model, block, made, descriptor, content)

    def _find(self, model: ModelId, block: int, made: str) -> SharedPages | None:
        """The block's packed weights from the process before, if they are as they were made."""
        kept = self._shelf.find(model, block, made)
        if kept is None:
            return None
        try:
            sealed = fcntl.fcntl(kept.descriptor, fcntl.F_GET_SEALS) == _SEALS
            if not sealed or kept.nbytes % HUGE or os.fstat(kept.descriptor).st_size != kept.nbytes:
                return None
            pages = SharedPages(kept.descriptor, kept.nbytes, filled=True)
        except OSError:
            return None
        finally:
            os.close(kept.descriptor)
        return pages if digest(pages.content) == kept.digest else None


@cache
def _layout() -> str:
    """Stands for the modules LAYOUT."""
    sources = b"".join((Path(__file__).parent / f"{name}.py").read_bytes() for name in LAYOUT)
    return xxhash.xxh3_64_hexdigest(sources)


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    """The file's bytes, from an address on at which huge pages can begin."""
    libc, whole = _libc(), nbytes + HUGE
    aside = libc.mmap(None, whole, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if aside == _FAILED:
        raise OSError(ctypes.get_errno(), "no addresses for packed weights")
    start = -(-aside // HUGE) * HUGE
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mmap(start, nbytes, protection, mmap.MAP_SHARED | _FIXED, descriptor, 0) == _FAILED:
        error = ctypes.get_errno()
        libc.munmap(aside, whole)
        raise OSError(error, "packed weights cannot be mapped")
    memory = (ctypes.c_ubyte * nbytes).from_address(start)
    weakref.finalize(memory, libc.munmap, aside, whole).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
