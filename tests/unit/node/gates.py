"""Holding what runs in threads, at chosen points."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from services.node.model.store import Store
from shared.ids import ModelId

WAIT_S = 20


class Gate:
    """Holds a call in its thread, from the `after`th on."""

    def __init__(self, after: int = 0) -> None:
        self.left = after
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        if self.left:
            self.left -= 1
            return
        self.reached.set()
        if not self._open.wait(WAIT_S):
            raise TimeoutError("the test never opened the gate")

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, WAIT_S)

    def open(self) -> None:
        self._open.set()


@contextmanager
def reading(monkeypatch: pytest.MonkeyPatch, after: int = 0) -> Iterator[Gate]:
    """A gate before every read of a block from a disk."""
    gate = Gate(after)
    read = Store.fill

    def gated(
        self: Store, name: ModelId, index: int, into: memoryview, *, skip: frozenset[int]
    ) -> None:
        gate()
        read(self, name, index, into, skip=skip)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "fill", gated)
        try:
            yield gate
        finally:
            gate.open()
