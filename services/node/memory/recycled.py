"""Memory for what comes and goes, such as adapters.

New memory takes longer to find than to fill: 9.6 MB take 6 ms of a core in pages of 4 KiB, and up
to 28 ms in huge pages, if the system has to move others for them first; to fill them takes 1.4 ms.
So what is given back is handed out again, and small pages become huge ones when nobody waits.
"""

import ctypes
import mmap
import weakref
from collections import deque
from contextlib import suppress
from functools import cache

import numpy as np

from services.node.memory.arena import PAGE
from services.node.memory.views import address

HUGE = 2 << 20
"""Linux has memory of this size and more begin where a huge page can."""
FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_COLLAPSE = 25
"""MADV_COLLAPSE (Linux 6.1)."""


class Lease:
    """Memory that is given back when nobody has a view of it any more."""

    def __init__(self, mapping: mmap.mmap, nbytes: int) -> None:
        self._mapping = mapping
        self.memory = memoryview((ctypes.c_ubyte * nbytes).from_buffer(mapping)).cast("B")
        """Begins at a page. What lies there is not defined."""

    def find(self, nbytes: int) -> None:
        """Has the system find the first bytes now, which are overwritten. Other threads run
        meanwhile."""
        np.frombuffer(self.memory, np.uint8)[:nbytes:PAGE] = 0

    def settle(self, nbytes: int) -> None:
        """The first bytes were filled, and will be read often: has the system make huge pages of
        them, if it can. Other threads run meanwhile, and may read them."""
        length = min(-(-nbytes // HUGE) * HUGE, len(self._mapping))
        start = ctypes.c_void_p(address(self.memory))
        _libc().madvise(start, ctypes.c_size_t(length), _COLLAPSE)


class Recycled:
    """Its methods may be called on any thread."""

    def __init__(self, kept: int = 2) -> None:
        """`kept`: how many pieces of memory may wait to be handed out again."""
        self._free: deque[mmap.mmap] = deque(maxlen=kept)
        """What was given back. The rest goes to the system."""

    def take(self, nbytes: int) -> Lease:
        """At least one byte. OSError: there is no memory."""
        whole = -(-nbytes // HUGE) * HUGE if nbytes >= HUGE else nbytes
        mapping = self._found(nbytes) or mmap.mmap(-1, whole, flags=FLAGS)
        lease = Lease(mapping, nbytes)
        # Whoever is asked for the memory's bytes holds on to this object.
        weakref.finalize(lease.memory.obj, self._free.append, mapping).atexit = False
        return lease

    def _found(self, nbytes: int) -> mmap.mmap | None:
        """Memory that has room for so much, and for twice as much at most."""
        for _ in range(len(self._free)):
            with suppress(IndexError):  # another thread was faster
                mapping = self._free.popleft()
                if nbytes <= len(mapping) <= 2 * nbytes:
                    return mapping
                self._free.append(mapping)
        return None


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
