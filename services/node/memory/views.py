"""Memory that transports know whole, and where buffers lie in it."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that peers may take bytes from, and that may be read into: an arena."""

    view: memoryview
    """Writable, of bytes."""
    descriptor: int
    """Of the file in memory that it maps (memfd), for others on this machine to map."""


def address(buffer: memoryview) -> int:
    """Where a writable buffer begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def find(memories: Sequence[Memory], buffer: memoryview) -> tuple[int, int] | None:
    """(which memory, offset in it) of a buffer; None if it lies in none of them, whole."""
    if buffer.readonly:
        return None
    for index, memory in enumerate(memories):
        offset = address(buffer) - address(memory.view)
        if 0 <= offset <= len(memory.view) - buffer.nbytes:
            return index, offset
    return None
