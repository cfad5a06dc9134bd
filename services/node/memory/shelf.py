"""Memories that were made from a model's blocks, and outlive the process at its keeper: weights in
the order in which a processor reads them. To make them again takes far longer than to check them.
"""

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from shared.ids import ModelId


class Kept(NamedTuple):
    """A memfd from a process before, and what that process said about it."""

    descriptor: int
    nbytes: int
    about: str

    @property
    def made(self) -> str:
        """How its content was made."""
        return self.about.rpartition(" ")[0]

    @property
    def digest(self) -> str:
        return self.about.rpartition(" ")[2]


@dataclass(frozen=True, slots=True)
class Keeping:
    """How a process reaches its keeper. Both may be called on any thread."""

    hold: Callable[[str, int, int, str], None]
    drop: Callable[[str], None]


class Shelf:
    """`keeping`: None: there is no keeper, and memories end with the process. Its methods may be
    called on any thread."""

    def __init__(
        self, keeping: Keeping | None = None, left: Mapping[str, Kept] | None = None
    ) -> None:
        self._keeping = keeping
        self._left = dict(left or {})
        """What a process before has left, and nobody has taken yet."""
        self._held: set[str] = set()
        self._lock = threading.Lock()

    @property
    def keeps(self) -> bool:
        return self._keeping is not None

    def find(self, model: ModelId, block: int, made: str) -> Kept | None:
        """The block's memory from a process before, if it was `made` in the same way. The caller
        checks it, and closes the descriptor."""
        name = _name(model, block)
        with self._lock:
            kept = self._left.pop(name, None)
            if kept is not None:
                self._held.add(name)
        if kept is not None and kept.made != made:
            os.close(kept.descriptor)
            return None
        return kept

    def put(
        self, model: ModelId, block: int, made: str, descriptor: int, content: memoryview
    ) -> None:
        """Has the keeper hold a memory, in place of the block's memory before it."""
        if self._keeping is None:
            return
        name = _name(model, block)
        self._keeping.hold(name, descriptor, len(content), f"{made} {digest(content)}")
        with self._lock:
            self._held.add(name)

    def drop(self, model: ModelId) -> None:
        """The model's memories are of no use any more."""
        with self._lock:
            gone = [name for name in self._held if _belongs(name, model)]
            self._held.difference_update(gone)
        if self._keeping is not None:
            for name in gone:
                self._keeping.drop(name)

    def clear(self) -> None:
        """Gives up what nobody has taken."""
        with self._lock:
            left, self._left = self._left, {}
            unused = left.keys() - self._held
        for kept in left.values():
            os.close(kept.descriptor)
        if self._keeping is not None:
            for name in unused:
                self._keeping.drop(name)


def digest(content: memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def _name(model: ModelId, block: int) -> str:
    return f"packed {model} {block}"


def _belongs(name: str, model: ModelId) -> bool:
    return name.startswith(f"packed {model} ")
