"""Keeps a cluster's processes running: it starts again what ends, until it is cancelled."""

import asyncio
import signal
import time
from collections.abc import Callable

from services.local import processes
from services.local.cluster import Cluster
from services.local.restarts import Backoff
from services.local.rotation import put_aside
from shared.errors import BusError, StartFailed

LOOK_S = 10.0
"""Seconds between looks at the sizes of logs."""


class Supervisor:
    """Calls `say` with every end and every start."""

    def __init__(self, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._say = say

    async def run(self) -> None:
        """Runs until it is cancelled. The cluster must have been started."""
        async with asyncio.TaskGroup() as group:
            for name in self._cluster.names:
                group.create_task(self._keep(name), name=f"supervisor/{name}")
            group.create_task(self._keep_logs_small(), name="supervisor/logs")

    async def _keep(self, name: str) -> None:
        backoff = Backoff()
        while True:
            began = time.monotonic()
            why = exit_words(await self._cluster.ended(name))
            wait_s = backoff.wait_s(time.monotonic() - began)
            while failure := await self._start_again(name, why, wait_s):
                why, wait_s = failure, backoff.wait_s(0.0)

    async def _keep_logs_small(self) -> None:
        directory = self._cluster.spec.directory
        logs = [processes.log_of(directory, name) for name in (*self._cluster.names, "fork-server")]
        while True:
            await asyncio.sleep(LOOK_S)
            for log in logs:
                try:
                    await asyncio.to_thread(put_aside, log)
                except OSError as error:
                    self._say(f"{log} is large and cannot be put aside: {error.strerror}")

    async def _start_again(self, name: str, why: str, wait_s: float) -> str:
        """Starts a process again. Returns why it could not be started; empty if it was."""
        log = processes.log_of(self._cluster.spec.directory, name)
        self._cluster.note_end(name, why, wait_s)
        when = f"in {wait_s:.0f} s" if wait_s else "at once"
        self._say(f"{name} {why}; it is started again {when} (log: {log})")
        await asyncio.sleep(wait_s)
        try:
            await self._cluster.start_again(name)
        except (BusError, StartFailed) as error:
            return f"did not start: {error}"
        self._say(f"{name} is started")
        return ""


def exit_words(code: int) -> str:
    """The exit code of a Popen in words."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"
