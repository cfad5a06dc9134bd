"""A device's link without a device: all that services.node.memory.device may count on."""

import threading
from collections.abc import Callable

import torch

from shared.errors import CapacityExceeded


class Copies:
    """Those on a SlowLink: bytes move when somebody waits for them, and not while it is shut."""

    def __init__(self) -> None:
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.begun = 0
        self.most_pending = 0
        """When a copy was begun. The link's thread begins copies while another waits for them."""
        self.done: list[int] = []
        """Bytes of each copy that has ended, in order."""
        self.waited = threading.Event()
        """Somebody waits for one."""
        self._open = threading.Event()
        self._open.set()

    def shut(self) -> None:
        self.waited.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait(self, count: int) -> None:
        """Until `count` copies have ended."""
        self.waited.set()
        if not self._open.wait(20):
            raise TimeoutError("the test never opened the link")
        while len(self.done) < count:
            source, target = self.pending.pop(0)
            target.copy_(source)
            self.done.append(len(source))


class SlowLink:
    """Implements services.node.memory.device.Link to memory of the host."""

    def __init__(self, *, may_lock: bool = True) -> None:
        self._may_lock = may_lock
        self.copies = Copies()
        self.locked: list[memoryview] = []
        self.buffers: list[torch.Tensor] = []

    def __call__(self, device: torch.device) -> "SlowLink":
        return self

    def lock(self, memory: memoryview) -> None:
        if not self._may_lock:
            raise CapacityExceeded("no more than 64 KiB may be locked")
        self.locked.append(memory)

    def unlock(self, memory: memoryview) -> None:
        assert not self.copies.pending
        self.locked.remove(memory)

    def buffer(self, nbytes: int) -> torch.Tensor:
        self.buffers.append(torch.zeros(nbytes, dtype=torch.uint8))
        return self.buffers[-1]

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> "Ended":
        copies = self.copies
        copies.pending.append((source, target))
        copies.most_pending = max(copies.most_pending, len(copies.pending))
        copies.begun = count = copies.begun + 1
        return Ended(lambda: copies.wait(count))


class Ended:
    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.synchronize = synchronize
