"""A test run must leave no process behind. If it does, it fails and names them, and they are ended.

Every process that a test starts inherits the run's mark, whatever becomes of its parents.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

MARK = "LS_TEST_RUN"
PATIENCE_S = 20.0
"""Seconds that a process which was told to end may take, on a busy machine."""
POLL_S = 0.1
TRACKER = "from multiprocessing.resource_tracker import main"
"""The command of a helper that Python gives to each process that starts others by `spawn`. It ends
with that process."""


class Leftovers:
    """A plugin of the process that a run begins with: it looks when the workers have ended."""

    def __init__(self) -> None:
        run = f"{os.getpid()}-{time.time_ns()}"
        os.environ[MARK] = run
        self._mark = f"{MARK}={run}".encode()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        yield
        deadline = time.monotonic() + PATIENCE_S
        while (found := self._find()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if not found:
            return
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        terminal = session.config.pluginmanager.getplugin("terminalreporter")
        if terminal is not None:
            terminal.section("left behind by tests", red=True)
            terminal.line("\n".join(found.values()))
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _find(self) -> dict[int, str]:
        """Live processes with the mark, but this one: pid -> description."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if self._mark in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if not (TRACKER in command and _is_child(entry)):
                        found[int(entry.name)] = f"process {entry.name}: {command}"
            except OSError:  # it ended, or is not ours to read
                continue
        return found


def _is_child(entry: Path) -> bool:
    """Whether this process is the parent of the process of that folder in /proc."""
    return f"\nPPid:\t{os.getpid()}\n" in (entry / "status").read_text()
