"""One lifecycle for every service.

- No I/O in a constructor. `async with service:` opens it, runs its background tasks, and closes it
  in reverse.
- A background task that fails ends the service with that error, unless it works for one item (a
  model, a node, a request) only: then its failure is contained, and the service goes on.
- Draining has a deadline. A cancellation is never swallowed. A process that failed does not exit
  with 0.
"""

import asyncio
import gc
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import structlog

from shared import telemetry
from shared.bus.base import Bus, Subscription
from shared.containment import is_containable
from shared.election.active_bus import ActiveBus
from shared.election.election import Election

if TYPE_CHECKING:
    from shared.metrics import Metrics


class Service(ABC):
    role: ClassVar[str]
    drain_s: float = 5.0

    def __init__(self, name: str) -> None:
        self.name = name
        self.log = telemetry.logger(self.role, name=name)
        self.resources = AsyncExitStack()
        """What `open` acquires; closed in reverse, after the background tasks have ended."""
        self.ready = False
        """It is open and not about to end."""
        self.stands_by = False
        """It waits until it is the active process of its role."""
        self.term = 0
        """Its term as such; 0: it is not, or needs not be."""
        self._owner: asyncio.Task[Any] | None = None
        self.stop = asyncio.Event()
        """Set: the process is to end in good order, as after a signal."""
        self.failures = 0
        """Bugs that were contained: see the log."""
        self._background: dict[asyncio.Task[None], bool] = {}
        """The tasks that run, the oldest first, and whether a failure of each is contained."""
        self._failure: BaseException | None = None
        self._ending = False
        self._woken = False
        """The owner was cancelled to tell it of the failure."""

    @abstractmethod
    async def open(self) -> None:
        """Acquires resources, subscribes, spawns background tasks."""

    def metrics(self) -> "Metrics":
        """What it shows of itself. Called once, before it is open; what is to be read later may be
        asked for at any time from then on."""
        from shared.metrics import Metrics  # 50 ms, for processes that show something

        return Metrics()

    async def become_active(self, bus: Bus) -> ActiveBus:
        """Waits until this process is the active one of its role, which it is from then on; the
        service ends if another process takes the role over. Returns the bus to use."""
        election = Election(bus, self.role, self.log)
        self.stands_by = True
        try:
            await election.win()
        finally:
            self.stands_by = False
        self.term = election.term
        self.resources.push_async_callback(election.resign)
        self.spawn(election.keep(), name="lease")
        return ActiveBus(bus, election, self.role)

    async def drain(self) -> None:  # noqa: B027 - draining nothing is a valid default
        """Ends running work in good order; cut off after `drain_s`."""

    def own(self, subscription: Subscription) -> None:
        """The subscription ends with the service."""
        self.resources.push_async_callback(subscription.close)

    def spawn(
        self, work: Coroutine[Any, Any, None], *, name: str, contained: bool = False
    ) -> asyncio.Task[None]:
        """Runs `work` until it ends or the service closes.

        Its failure ends the service, which is of no use without it. `contained`: the work is for
        one item (a model, a node, a request), and the service goes on with the others; the failure
        is logged and counted.
        """
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name}/{name}")
        self._background[task] = contained
        task.add_done_callback(self._on_end)
        return task

    @contextmanager
    def contain(self, what: str, **item: object) -> Iterator[None]:
        """Around the work for one item, named by `item`: whatever it raises is logged and counted,
        and the service goes on with the others."""
        try:
            yield
        except BaseException as error:
            if not is_containable(error):
                raise
            self.failures += 1
            self.log.error(f"{what} failed", **item, exc_info=error)

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
        contained = self._background.pop(task)
        error = _failure(task)
        if error is None:
            return
        self.log.error("background task failed", task=task.get_name(), exc_info=error)
        if contained:
            self.failures += 1
        elif self._failure is None:
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


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    """What the task failed with, if it did: a task that somebody cancelled did not."""
    if not task.cancelled():
        return task.exception()
    if task.cancelling():
        return None
    return RuntimeError(f"{task.get_name()}: something that it awaited was cancelled")


async def _opened(service: Service, running: AsyncExitStack) -> bool:
    """Opens the service, and has `running` close it. False: told to stop before it was open."""
    stop = service.stop
    told = asyncio.ensure_future(stop.wait())
    owner = asyncio.current_task()
    assert owner is not None

    def end_opening(_: object) -> None:
        if stop.is_set():
            owner.cancel()

    told.add_done_callback(end_opening)
    try:
        await running.enter_async_context(service)
        return True
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        owner.uncancel()
        return False
    finally:
        told.remove_done_callback(end_opening)
        told.cancel()


def log_what_nobody_awaits(log: structlog.stdlib.BoundLogger) -> None:
    """Has the running loop log errors that reach nobody as this log's records, not as raw text."""

    def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, socket.gaierror):
            # uvloop looks a name up to the end though the attempt to connect was given up; the next
            # attempt says what is wrong.
            log.debug("a name was looked up in vain", error=str(error))
        else:
            log.error("an error that nobody awaits", what=context["message"], exc_info=error)

    asyncio.get_running_loop().set_exception_handler(report)


async def serve_until_signal(service: Service) -> None:
    """Opens the service, runs it until SIGINT or SIGTERM, its own `stop` or its failure, and closes
    it. A signal also ends a service that is still opening: a standby may be for days."""
    stop = service.stop
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        async with AsyncExitStack() as running:
            if not await _opened(service, running):
                return
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
