"""Memory for packed weights, in huge pages of 2 MiB where the operating system has them.

A decode step reads all weights once. With pages of 4 KiB the processor has to find as many pages
anew as it reads, and its prefetching ends with each page: on a Zen 4, one core read 25 GB/s from
pages of 4 KiB, and 31 GB/s from huge pages.
"""

import mmap
from typing import Protocol

import torch

HUGE = 2 << 20
LEAST = 4 * HUGE
"""Smaller weights are not worth it: what does not fill a huge page is lost."""
ALIGN = 64
FLAGS = ("MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_NORESERVE")


class Pages(Protocol):
    """Memory for the matrices of one block."""

    @property
    def filled(self) -> bool:
        """Whether what is taken has its content already."""

    def take(self, outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
        """The next tensor [outputs, inputs]."""


class HugePages:
    """Memory for the matrices of one block, side by side, so that matrices smaller than a page lie
    in huge pages too. What is taken lives as long as a tensor of it."""

    filled = False

    def __init__(self, nbytes: int) -> None:
        """`nbytes`: about what will be taken. More comes from torch's own memory."""
        self._nbytes = nbytes + nbytes // 8 if nbytes >= LEAST else 0
        self._left: torch.Tensor | None = None

    def take(self, outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor [outputs, inputs]."""
        nbytes = outputs * inputs * dtype.itemsize
        if self._left is None:
            self._left = _mapped(self._nbytes)
        if len(self._left) < nbytes:
            return torch.empty(outputs, inputs, dtype=dtype)
        taken, self._left = self._left[:nbytes], self._left[-(-nbytes // ALIGN) * ALIGN :]
        return taken.view(dtype).view(outputs, inputs)


def _mapped(nbytes: int) -> torch.Tensor:
    """Bytes from the beginning of a huge page on. Only pages that are written take memory. Empty if
    the system has no huge pages to ask for (it may still have none to give)."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if not nbytes or advice is None:
        return torch.empty(0, dtype=torch.uint8)
    flags = sum(getattr(mmap, name, 0) for name in FLAGS)
    try:
        memory = mmap.mmap(-1, nbytes + HUGE, flags=flags)
        memory.madvise(advice)
    except OSError:  # a kernel without transparent huge pages
        return torch.empty(0, dtype=torch.uint8)
    found = torch.frombuffer(memory, dtype=torch.uint8)
    return found[-found.data_ptr() % HUGE :][:nbytes]
