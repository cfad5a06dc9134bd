"""One lifecycle for every service.

Rules: no I/O in a constructor; `async with service:` opens it, runs its background tasks and
closes it in reverse; a background task that fails ends the service with that error; draining has
a deadline; CancelledError is never swallowed; a process that failed does not exit with 0.
"""

import asyncio
import gc
import signal
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, ClassVar, Self

from shared import telemetry
from shared.bus.base import Subscription


class Service(ABC):
    role: ClassVar[str]
    drain_s: ClassVar[float] = 5.0

    def __init__(self, name: str) -> None:
        self.name = name
        self.log = telemetry.logger(self.role, name=name)
        self.resources = AsyncExitStack()
        """What `open` acquires; closed in reverse, after the background tasks have ended."""
        self.ready = False
        """It is open and not about to end."""
        self._owner: asyncio.Task[Any] | None = None
        self._background: dict[asyncio.Task[None], None] = {}
        """In the order of their begin."""
        self._failure: BaseException | None = None
        self._ending = False
        self._woken = False
        """The owner was cancelled to tell it of the failure."""

    @abstractmethod
    async def open(self) -> None:
        """Acquires resources, subscribes, spawns background tasks."""

    async def drain(self) -> None:  # noqa: B027 - draining nothing is a valid default
        """Ends running work in good order; cut off after `drain_s`."""

    def own(self, subscription: Subscription) -> None:
        """The subscription ends with the service."""
        self.resources.push_async_callback(subscription.close)

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Runs `work` until it ends or the service closes; its failure ends the service."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name}/{name}")
        self._background[task] = None
        task.add_done_callback(self._on_end)
        return task

    async def __aenter__(self) -> Self:
        self._owner = asyncio.current_task()
        try:
            await self.open()
        except BaseException:
            await self._end()
            raise
        self.ready = True
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.ready = False
        try:
            if exc is None:
                await self._drain()
        finally:
            await self._end()

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self.drain_s) as deadline:
                await self.drain()
        except TimeoutError:
            if not deadline.expired():  # a timeout of the drain's own
                raise
            self.log.warning("drain cut off", after_s=self.drain_s)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._background.pop(task, None)
        if task.cancelled() or (error := task.exception()) is None:
            return
        self.log.error("background task failed", task=task.get_name(), exc_info=error)
        if self._failure is None:
            self._failure = error
            if self._owner is not None and not self._ending:
                self._woken = self._owner.cancel()

    async def _end(self) -> None:
        """Ends the tasks, then closes the resources, then raises what a task failed with."""
        self._ending = True
        if self._woken and self._owner is not None:
            self._owner.uncancel()  # the failure that is raised below takes its place
        try:
            await self._end_background()
        finally:
            await self.resources.aclose()
            await self._end_background()  # what a handler spawned before its subscription closed
        if self._failure is not None:
            raise self._failure

    async def _end_background(self) -> None:
        running = list(self._background)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def serve_until_signal(service: Service) -> None:
    """Opens the service, runs it until SIGINT or SIGTERM (or its failure), and closes it."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        async with service:
            # All that was imported and made so far stays: the collector, which stops every thread
            # of the process while it looks, need not look at it again.
            gc.collect()
            gc.freeze()
            service.log.info("ready")
            await stop.wait()
            service.log.info("stopping")
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
