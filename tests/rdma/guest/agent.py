"""Runs modules in a guest as the host orders: `python -m tests.rdma.guest.agent MODULE...`.

It imports these modules first, which takes an emulated processor a minute (torch alone half of it),
and then forks for each order: so all jobs of a machine have these imports without doing them.
Orders come as lines of JSON through standard input, and reports go the same way out. It ends when
its input does.
"""

import contextlib
import gc
import importlib
import os
import runpy
import selectors
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

CHUNK = 1 << 16


class Run(msgspec.Struct, frozen=True, tag="run"):
    """Order: run a module as `python -m` would, with more environment variables."""

    job: int
    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]


class End(msgspec.Struct, frozen=True, tag="end"):
    """Order: kill a job and all that it has started."""

    job: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Report: everything is imported, orders may come."""


class Said(msgspec.Struct, frozen=True, tag="said"):
    """Report: a line that a job has printed."""

    job: int
    line: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Report: a job's process has ended, and what it has started was killed. `code`: as of
    subprocess.Popen, negative for a signal."""

    job: int
    code: int


Order = Run | End
Report = Ready | Said | Ended


class Lines:
    """What comes through a descriptor, line by line."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        os.set_blocking(descriptor, False)
        self._rest = b""

    def read(self) -> list[bytes] | None:
        """The lines that one read completes. None: there is nothing to read, or no more."""
        with contextlib.suppress(BlockingIOError):
            if data := os.read(self.descriptor, CHUNK):
                *lines, self._rest = (self._rest + data).split(b"\n")
                return lines
        last, self._rest = self._rest, b""
        return [last] if last else None


@dataclass(frozen=True, slots=True)
class Job:
    number: int
    pid: int
    """The id of the job's process, and of its session."""
    process: int
    """A descriptor that can be read when the process has ended."""
    output: Lines


class Agent:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._jobs: dict[int, Job] = {}

    def serve(self) -> Run | None:
        """Follows orders until their end (None). Returns in each process that it forks, too: there,
        with the order that this process is to follow."""
        orders = Lines(sys.stdin.fileno())
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        report(Ready())
        while True:
            for key, _ in self._selector.select():
                if isinstance(key.data, Job):
                    self._watch(key.fd, key.data)
                    continue
                lines = orders.read()
                if lines is None:
                    return None
                for line in lines:
                    order: Order = msgspec.json.decode(line, type=Order)
                    if isinstance(order, End):
                        self._end(order.job)
                    elif self._start(order):
                        return order

    def _start(self, order: Run) -> bool:
        """Whether this is the new process."""
        output, input_ = os.pipe()
        pid = os.fork()
        if pid == 0:
            become(order, input_)
            return True
        os.close(input_)
        job = self._jobs[order.job] = Job(order.job, pid, os.pidfd_open(pid), Lines(output))
        self._selector.register(output, selectors.EVENT_READ, job)
        self._selector.register(job.process, selectors.EVENT_READ, job)
        return False

    def _end(self, number: int) -> None:
        if job := self._jobs.get(number):
            os.killpg(job.pid, signal.SIGKILL)

    def _watch(self, descriptor: int, job: Job) -> None:
        if job.number not in self._jobs:
            return  # this was told of together with its end
        more = self._pass_on(job)
        if descriptor == job.process:
            self._end(job.number)
            while more:  # A keeper, which outlives its node, may hold the pipe open.
                more = self._pass_on(job)
            self._close(job)
        elif not more:
            self._selector.unregister(descriptor)

    def _pass_on(self, job: Job) -> bool:
        """Reports what the job has printed by now. Whether there was something."""
        lines = job.output.read()
        for line in lines or ():
            report(Said(job.number, line.decode(errors="replace")))
        return lines is not None

    def _close(self, job: Job) -> None:
        for descriptor in (job.process, job.output.descriptor):
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
            os.close(descriptor)
        _, status = os.waitpid(job.pid, 0)
        del self._jobs[job.number]
        report(Ended(job.number, os.waitstatus_to_exitcode(status)))


def report(message: Report) -> None:
    """In one write, so that no other line comes between."""
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def become(order: Run, output: int) -> None:
    """Makes of a forked process what a new one would be."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    os.environ.update(order.environment)


def main(modules: Sequence[str]) -> None:
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # else collections in the forked processes would copy all that is shared
    gc.enable()
    order = Agent().serve()
    if order is not None:
        sys.argv[1:] = order.arguments
        sys.modules.pop(order.module, None)  # it runs anew; what it has imported stays
        runpy.run_module(order.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
