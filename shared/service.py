"""One lifecycle for every service.

Rules: no I/O in a constructor; `async with service:` opens it, runs its background tasks and
closes it in reverse; a background task that fails ends the service with that error; draining has
a deadline; CancelledError is never swallowed; a process that failed does not exit with 0.
"""

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, ClassVar, Self

from shared import telemetry


class Service(ABC):
    role: ClassVar[str]
    drain_s: ClassVar[float] = 5.0

    def __init__(self, name: str) -> None:
        self.name = name
        self.log = telemetry.logger(self.role, name=name)
        self.resources = AsyncExitStack()
        """What `open` acquires; closed in reverse."""
        self._group = asyncio.TaskGroup()
        self._background: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def open(self) -> None:
        """Acquires resources, subscribes, spawns background tasks."""

    async def drain(self) -> None:  # noqa: B027 - draining nothing is a valid default
        """Ends running work in good order; cut off after `drain_s`."""

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Runs `work` until it ends or the service closes; its failure ends the service."""
        task = self._group.create_task(work, name=f"{self.name}/{name}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        try:
            await self.resources.__aenter__()
            await self.open()
        except BaseException as error:
            await self._shut(error)
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is None:
            try:
                async with asyncio.timeout(self.drain_s):
                    await self.drain()
            except TimeoutError:
                self.log.warning("drain cut off", after_s=self.drain_s)
        await self._shut(exc)

    async def _shut(self, exc: BaseException | None) -> None:
        for task in list(self._background):
            task.cancel()
        try:
            await self.resources.aclose()
        finally:
            await self._group.__aexit__(type(exc) if exc else None, exc, None)


async def serve_until_signal(service: Service) -> None:
    """Runs an opened-and-closed service until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with service:
        service.log.info("ready")
        await stop.wait()
        service.log.info("stopping")
