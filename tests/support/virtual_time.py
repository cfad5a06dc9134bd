"""An event loop whose clock jumps to the next timer: time passes only when all wait for it."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    def __init__(self, late_s: float) -> None:
        super().__init__()
        self.now = 0.0
        self._late_s = late_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits for ever: no timer is set")
        if timeout > 0:
            self.now += timeout + self._late_s
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, late_s: float = 0.0) -> None:
        """`late_s`: by how much timers fire late."""
        self._clock = _Jumping(late_s)
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(work: Coroutine[Any, Any, T], *, late_s: float = 0.0) -> T:
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(late_s)) as runner:
        return runner.run(work)
