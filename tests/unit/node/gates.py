"""Holding what runs in threads, at chosen points."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from services.node.checkpoints.reading import Reading, Wanted

WAIT_S = 100.0


class Gate:
    """Holds calls in their threads."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        if not self._open.wait(WAIT_S):
            raise TimeoutError("the test never opened the gate")

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, WAIT_S)

    def open(self) -> None:
        self._open.set()


@contextmanager
def reading(monkeypatch: pytest.MonkeyPatch, after: int = 0) -> Iterator[Gate]:
    """A gate before every read from a disk, but for those of the first `after` blocks."""
    gate = Gate()
    read = Reading._read

    def gated(self: Reading, wanted: Wanted, chunks: range, spare: memoryview) -> None:
        if wanted.block >= after:
            gate()
        read(self, wanted, chunks, spare)

    with monkeypatch.context() as patch:
        patch.setattr(Reading, "_read", gated)
        try:
            yield gate
        finally:
            gate.open()
