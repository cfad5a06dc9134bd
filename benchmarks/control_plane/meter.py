"""Processor time by role and by what it was spent on, in one process and in virtual time.

A task inherits the context in which it is made, and so the role of the service that made it. The
loop adds the time of each step to the role of the step's context, and to the step's task. What the
loop itself takes to find the next step counts for nobody: most of its timers are the simulated
nodes'. Nor does what Python's collector of cycles takes, because it looks through what all of them
have made, in the time of whoever happens to make the next object.
"""

import asyncio
import gc
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
NOBODY = ("", "")
TIMERS = "timers"


class MeteredLoop(VirtualLoop):
    """Relies on the internals of its base's base, as its base does."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu_ns: Counter[tuple[str, str]] = Counter()
        """By role, and by the name of a task."""
        self._whose = NOBODY
        self._since = thread_time_ns()
        self._collects_since = 0
        gc.callbacks.append(self._on_collection)

    def close(self) -> None:
        gc.callbacks.remove(self._on_collection)
        super().close()

    def _run_once(self) -> None:
        ready = self._ready
        if not ready and not self._stopping:
            self._turn_to(NOBODY)
            self._jump()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            role = handle._context.get(_ROLE, "")  # type: ignore[attr-defined]
            whose = (role, _name(handle)) if role else NOBODY
            if whose != self._whose:
                self._turn_to(whose)
            handle._run()

    def _turn_to(self, whose: tuple[str, str]) -> None:
        now = thread_time_ns()
        self.cpu_ns[self._whose] += now - self._since
        self._whose, self._since = whose, now

    def _on_collection(self, phase: str, _: dict[str, int]) -> None:
        now = thread_time_ns()
        if phase == "start":
            self._collects_since = now
        else:
            self._since += now - self._collects_since

    def cpu_s(self, role: str) -> dict[str, float]:
        """Processor seconds of a role so far, by task."""
        self._turn_to(self._whose)
        return {what: ns / 1e9 for (whose, what), ns in self.cpu_ns.items() if whose == role}


def _name(handle: asyncio.Handle) -> str:
    """The name of the task that the handle is a step of."""
    owner = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    return owner.get_name() if isinstance(owner, asyncio.Task) else TIMERS


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
