"""One of the cluster's processes: a service on a bus of its own, which may stop, die and come back.

Each runs as a task under the cluster's task group. As in a service, a failure in any of them ends
the cluster with the same error.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from shared import telemetry
from shared.bus.base import Bus
from shared.bus.memory import MemoryBus
from shared.errors import BusError, Conflict, Superseded
from shared.service import Service
from simulation.bus import SimBroker
from simulation.loop import WallClock, own_clock

S = TypeVar("S", bound=Service)

LOOK_S = 0.001
"""Seconds between looks at whether a process is up."""
RESTART_S = 1.0
"""A process that finds no bus when it starts, or that loses its role, ends and is started again
after this time, as by systemd (`deploy/systemd`)."""


class Process(Generic[S]):
    """One life of a process. Whoever comes back under its name is another process."""

    def __init__(
        self, broker: SimBroker, name: str, make: Callable[[Bus], S], clock: WallClock
    ) -> None:
        self.name = name
        self.bus: MemoryBus | None = None
        self.service: S | None = None
        """Set while the process is up."""
        self._broker = broker
        self._make = make
        self._clock = clock
        self._up = asyncio.Event()
        """Set when it is up, or has ended."""
        self._opened = False
        self._begun: S | None = None
        """The service, from the time when it begins to open."""
        self._ending = asyncio.Event()
        self._dead = False
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> S:
        """The running service. Conflict if it is not up."""
        if self.service is None:
            raise Conflict(f"{self.name} is not up")
        return self.service

    @property
    def ending(self) -> bool:
        """Whether it was told to end."""
        return self._ending.is_set()

    @property
    def _stands_by(self) -> bool:
        return self._begun is not None and self._begun.stands_by

    async def begin(self, group: asyncio.TaskGroup) -> None:
        """Returns once it is up or stands by, or has been ended."""
        self._task = group.create_task(self._run(), name=self.name)
        while not (self._up.is_set() or self._stands_by):  # noqa: ASYNC110 - a service does not tell
            await asyncio.sleep(LOOK_S)

    async def stop(self) -> None:
        """Ends it as SIGTERM does: in good order, as far as possible. Returns when it is over."""
        self._ending.set()
        self._up.set()
        if self._task is not None:
            if self.service is None:  # it has not opened yet, and perhaps stands by
                self._task.cancel()
            await asyncio.wait([self._task])

    def kill(self) -> None:
        """Ends it as SIGKILL does: nothing that it still does reaches anybody."""
        self._broker.crash(self.name)
        self._dead = True
        self.service = None
        self._up.set()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        own_clock.set(self._clock)  # for this task, and all that begins in it
        while not self._ending.is_set():
            self._opened = False
            try:
                await self._live()
                return
            except (BusError, Superseded) as error:
                if self._dead:
                    return
                if self._opened and not isinstance(error, Superseded):
                    raise
                telemetry.logger("supervisor", name=self.name).warning(
                    "begun again", why=str(error)
                )
                await asyncio.sleep(RESTART_S)
            except Exception:
                if not self._dead:
                    raise
                return

    async def _live(self) -> None:
        async with MemoryBus(self._broker, self.name) as self.bus:
            self._begun = self._make(self.bus)
            await self._serve(self._begun)

    async def _serve(self, opening: S) -> None:
        async with opening as service:
            self.service, self._opened = service, True
            self._up.set()
            try:
                await self._ending.wait()
            finally:
                self.service = None
