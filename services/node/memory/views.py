"""Memory that transports know as a whole, and where buffers lie in it."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Memory:
    """An arena: memory that peers may take bytes from, and that bytes may be read into."""

    view: memoryview
    """Writable, of bytes."""
    descriptor: int
    """The descriptor of the memfd that it maps, for other processes of this machine to map; -1 if
    closed."""


def address(buffer: memoryview) -> int:
    """The address of a writable buffer's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def find(memories: Sequence[Memory], buffer: memoryview) -> tuple[int, int] | None:
    """(index of the memory, offset in it) of a buffer; None if no memory holds all of it."""
    if buffer.readonly:
        return None
    for index, memory in enumerate(memories):
        offset = address(buffer) - address(memory.view)
        if 0 <= offset <= len(memory.view) - buffer.nbytes:
            return index, offset
    return None
