"""Processor time by role, in one process and in virtual time.

A task inherits the context in which it is made, and so the role of the service that made it. The
loop adds the time of each step to the role of the step's context.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from contextvars import ContextVar, copy_context
from time import thread_time_ns
from typing import Any

from shared.bus.delivery import Delivery
from shared.bus.memory import MemoryBus, MemorySubscription, Reply
from shared.messages import Message
from simulation.bus import SimBroker
from simulation.loop import VirtualLoop

_ROLE: ContextVar[str] = ContextVar("role", default="")


class MeteredLoop(VirtualLoop):
    """Relies on the internals of its base's base, as its base does."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu_ns: Counter[str] = Counter()
        self._role = ""
        self._since = thread_time_ns()

    def _run_once(self) -> None:
        ready = self._ready
        if not ready and not self._stopping:
            self._jump()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            role = handle._context.get(_ROLE, "")  # type: ignore[attr-defined]
            if role != self._role:
                self._turn_to(role)
            handle._run()

    def _turn_to(self, role: str) -> None:
        now = thread_time_ns()
        self.cpu_ns[self._role] += now - self._since
        self._role, self._since = role, now

    def cpu_s(self, role: str) -> float:
        """Processor seconds of a role so far."""
        self._turn_to(self._role)
        return self.cpu_ns[role] / 1e9


def begin(role: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Starts a task whose time, and whose tasks' time, counts for the role."""
    context = copy_context()
    context.run(_ROLE.set, role)
    return asyncio.get_running_loop().create_task(work, name=role, context=context)


class CountedBus(MemoryBus):
    """Decodes what it receives itself, as a process of its own would."""

    def _decode(self, subject: str, data: bytes) -> Message:
        return Delivery._decode(self, subject, data)


class CountingBroker(SimBroker):
    """Counts what each bus receives: messages, and bytes by subject."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: Counter[str] = Counter()
        """By the name of the bus."""
        self.nbytes: Counter[tuple[str, str]] = Counter()
        """By the name of the bus, and subject."""

    def hand(self, subscription: MemorySubscription, data: bytes, reply: Reply | None) -> None:
        if subscription.bus is not None:
            name = subscription.bus.name
            self.messages[name] += 1
            self.nbytes[name, subscription.subject] += len(data)
        super().hand(subscription, data, reply)

    def answer(self, bus: MemoryBus, reply: Reply, data: bytes) -> None:
        self.messages[reply.bus.name] += 1
        self.nbytes[reply.bus.name, ""] += len(data)
        super().answer(bus, reply, data)
