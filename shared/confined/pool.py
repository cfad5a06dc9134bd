"""The processes in which foreign code runs, and who is served next."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections import Counter, OrderedDict, deque
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from shared.confined import jobs
from shared.confined.jobs import Check, Job, Outcome, Refused
from shared.errors import CapacityExceeded, LambdaScaleError

PROCESSES = 3
"""The most processes. Each is started when it is first needed."""
PER_KEY = 2
"""The most processes that work for one key, so that a process is left for others."""
_ROOT = Path(__file__).parents[2]
_PROGRAM = (sys.executable, "-m", "shared.confined.process")
_OVERFLOWS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
"""The signals that end a process whose stack or memory is used up."""


class _Waiting(NamedTuple):
    job: Job
    outcome: "asyncio.Future[Outcome]"


class ConfinedPool:
    """Keys take turns: what one key asks for waits for that key's jobs, not for those of others."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """What waits, by key. The key that was served last comes last."""
        self._busy: Counter[str] = Counter()
        """How many processes work for each key."""
        self._idle: list[_Process] = []
        self._working: set[asyncio.Task[Outcome]] = set()

    async def run(self, job: Job, *, key: str, most_waiting: int) -> Outcome:
        """What comes of the job, which is refused if it takes too much.

        CapacityExceeded: as many jobs of the key wait as may. LambdaScaleError: the process was
        killed from outside.
        """
        queue = self._queues.setdefault(key, deque())
        if len(queue) >= most_waiting:
            raise CapacityExceeded("too many requests wait to be read: try again later")
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        queue.append(_Waiting(job, outcome))
        self._go_on()
        return await outcome

    async def close(self) -> None:
        """Ends the processes. Who waits for an outcome is cancelled."""
        for queue in self._queues.values():
            for waiting in queue:
                waiting.outcome.cancel()
        self._queues.clear()
        for task in self._working:
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        for process in self._idle:
            await process.end()
        self._idle.clear()

    def _go_on(self) -> None:
        """Gives work to processes that have none."""
        while len(self._working) < PROCESSES and (key := self._next()) is not None:
            waiting = self._queues[key].popleft()
            if self._queues[key]:
                self._queues.move_to_end(key)
            else:
                del self._queues[key]
            if waiting.outcome.cancelled():
                continue
            self._busy[key] += 1
            task = asyncio.get_running_loop().create_task(self._asked(waiting.job))
            self._working.add(task)
            task.add_done_callback(partial(self._worked, key, waiting.outcome))

    def _next(self) -> str | None:
        return next((key for key in self._queues if self._busy[key] < PER_KEY), None)

    def _worked(
        self,
        key: str,
        outcome: "asyncio.Future[Outcome]",
        task: "asyncio.Task[Outcome]",
    ) -> None:
        self._working.discard(task)
        self._busy[key] -= 1
        if not self._busy[key]:
            del self._busy[key]
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            outcome.cancel()
        elif outcome.cancelled():
            pass
        elif error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())
        self._go_on()

    async def _asked(self, job: Job) -> Outcome:
        process = await self._taken()
        try:
            outcome = await process.ask(job)
        except (asyncio.IncompleteReadError, ConnectionError):
            return _death(job, -await process.end())
        except BaseException:  # its answer would be taken for that of the next job
            await process.end(kill=True)
            raise
        self._idle.append(process)
        return outcome

    async def _taken(self) -> "_Process":
        while self._idle:
            process = self._idle.pop()
            if process.lives:
                return process
            await process.end()
        return await _Process.start()


def run_once(job: Job) -> Outcome:
    """Does a job in a process of its own, and waits for it. For threads that may wait."""
    ended = subprocess.run(
        _PROGRAM, input=jobs.encode(job), capture_output=True, cwd=_ROOT, check=False
    )
    if ended.returncode == 0:
        return jobs.decode_outcome(ended.stdout[jobs.HEAD_BYTES :])
    return _death(job, -ended.returncode)


def _death(job: Job, died_of: int) -> Outcome:
    """What it means for a job that its process died. LambdaScaleError: nothing."""
    what = "" if isinstance(job, Check) else "the chat template "
    if died_of == signal.SIGPROF:
        return Refused(f"{what}takes too long" + (" to follow" if not what else ""))
    if died_of in _OVERFLOWS:
        if what:
            return Refused(f"{what}takes too much memory")
        return Refused("has chains of rules that are too long, or takes too much memory")
    raise LambdaScaleError(f"a process for foreign code ended with {-died_of}: try again")


def _spawn() -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """A process, and this end of its input and output."""
    ours, theirs = socket.socketpair()
    with theirs:
        end = theirs.fileno()
        return subprocess.Popen(_PROGRAM, stdin=end, stdout=end, cwd=_ROOT), ours


class _Process:
    """One process, which does one job at a time."""

    def __init__(
        self,
        child: "subprocess.Popen[bytes]",
        answers: asyncio.StreamReader,
        orders: asyncio.StreamWriter,
    ) -> None:
        self.child = child
        self._answers = answers
        self._orders = orders

    @classmethod
    async def start(cls) -> Self:
        """subprocess's vfork, in a thread, takes a millisecond. asyncio's and uvloop's own way is a
        fork on the loop, which copies the tables of all memory: 30 ms in a gateway."""
        starting = asyncio.ensure_future(asyncio.to_thread(_spawn))
        try:
            child, ours = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(lambda done: done.result()[1].close())  # which ends it
            raise
        try:
            return cls(child, *await asyncio.open_connection(sock=ours))
        except BaseException:
            ours.close()
            raise

    @property
    def lives(self) -> bool:
        return self.child.poll() is None

    async def ask(self, job: Job) -> Outcome:
        """asyncio.IncompleteReadError or ConnectionError: it died of the job."""
        self._orders.write(jobs.encode(job))
        head = await self._answers.readexactly(jobs.HEAD_BYTES)
        return jobs.decode_outcome(await self._answers.readexactly(jobs.body_bytes(head)))

    async def end(self, *, kill: bool = False) -> int:
        """Waits for its end, which comes with that of its input. Returns the exit code."""
        self._orders.close()
        if kill:
            self.child.kill()
        with contextlib.suppress(ConnectionError):  # it has ended by itself
            await self._orders.wait_closed()
        return await asyncio.to_thread(self.child.wait)
