"""Work that a command leaves behind: a child process that outlives it once it is ready."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from shared.parents import die_with_parent, outlive_parent

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_READY = b"ready"


def detached(work: Callable[[Callable[[Path], None]], int]) -> int:
    """Runs `work` in a child process, in a session of its own.

    `work` is given a function to call, with the path of its log, when it is ready. Until then it
    speaks to the terminal, gets the signals that this process gets, and dies with this process.
    Returns, here, 0 when it is ready, or its exit code if it ends before; in the child, what `work`
    returns. Call it before anything starts a thread or an event loop.
    """
    reading, writing = os.pipe()
    die = die_with_parent()
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.close(writing)
        return _wait(child, reading)
    os.close(reading)
    os.setsid()
    die()

    def ready(log: Path) -> None:
        sys.stdout.flush()
        _redirect(log)
        outlive_parent()
        os.write(writing, _READY)
        os.close(writing)

    return work(ready)


def _wait(child: int, reading: int) -> int:
    def forward(number: int, _: FrameType | None) -> None:
        os.kill(child, number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        if os.read(reading, len(_READY)) == _READY:
            return 0
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    finally:
        os.close(reading)
        for number, handler in before.items():
            signal.signal(number, handler)


def _redirect(log: Path) -> None:
    """Standard input from nowhere, output and errors to the log."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number, descriptor in ((0, nowhere), (1, file), (2, file)):
        os.dup2(descriptor, number)
    os.close(nowhere)
    os.close(file)
