"""A plugin of pytest that runs tests in several processes: `pytest --processes N`.

pytest collects once, and the processes are forks of the one that has collected: they begin at once,
with everything imported. (Processes that are started anew, as by pytest-xdist, collect all tests
again: in this suite that took longer than a tenth of a run.)

A process takes a file at a time (tests/support/dealing.py), runs its tests by pytest's own hooks,
and sends what they report to the first process, which gives it to its plugins as if it had run the
tests itself. If a process dies, the test that it ran has failed, and a new fork goes on with the
rest of the file.
"""

import multiprocessing
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, cast

import pytest

from tests.support import dealing, forks
from tests.support.dealing import Dealing

PATIENCE_S = 30.0
"""Seconds in which a process that is told to stop ends its test, and what the test has started."""
LOOK_S = 1.0
"""Seconds after which the first process looks again whether the others live."""


# What a process sends.


@dataclass(frozen=True)
class Wants:
    """The process has run its file, and wants the next one."""


@dataclass(frozen=True)
class Began:
    """`test`: its place in `session.items`."""

    test: int


@dataclass(frozen=True)
class Reported:
    """The result of a test's setup, call or teardown."""

    report: dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """The test that began last."""


@dataclass(frozen=True)
class Warned:
    """A warning. Its own class may be one that another process does not have."""

    category: str
    text: str
    file: str
    line: int
    when: Any
    test: str
    location: tuple[str, int, str] | None


Message = Wants | Began | Reported | Finished | Warned


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processes",
        type=int,
        default=0,
        metavar="N",
        help="run tests in N processes, a file's tests in the same one (0: in this process)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption("processes")
    nothing_to_run = session.config.option.collectonly or session.testsfailed
    if not count or nothing_to_run:
        return None
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined] # for all of them
    with _Processes(session, count) as processes:
        processes.run()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


@dataclass
class _Process:
    """A process as the first one sees it. Tests are their places in `session.items`."""

    number: int
    fork: ForkProcess
    connection: Connection
    left: list[int]
    """The tests of its file that it has not begun."""
    latest: int
    """The test that it began last, or is to begin with."""
    running: bool = False
    """Whether it runs `latest` now."""


class _Processes:
    def __init__(self, session: pytest.Session, count: int) -> None:
        self._session = session
        self._files = {
            file: [index for index, _ in tests]
            for file, tests in groupby(enumerate(session.items), lambda pair: _file(pair[1]))
        }
        self._dealing = Dealing(self._files)
        self._count = min(count, len(self._files))  # each has a file to begin with
        self._live: list[_Process] = []

    def __enter__(self) -> "_Processes":
        for number in range(self._count):
            self._fork(number, self._next_file(number))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._live:
            process.connection.close()  # tells it to stop
        for process in self._live:
            process.fork.join(PATIENCE_S)
            process.fork.kill()

    def run(self) -> None:
        """Returns when all tests have run, or the session is to stop."""
        while self._live and not (self._session.shouldfail or self._session.shouldstop):
            ready = wait([process.connection for process in self._live], LOOK_S)
            for process in list(self._live):
                if process.connection in ready:
                    self._hear(process)
                elif process.fork.exitcode is not None and not process.connection.poll():
                    # It has said all. Something that it has started holds its end open.
                    self._died(process)

    def _next_file(self, number: int) -> list[int]:
        """The tests of the next file for this process. None are left: it ends."""
        file = self._dealing.take(number)
        return self._files[file] if file else []

    def _fork(self, number: int, tests: Sequence[int]) -> None:
        """Starts a process that begins with these tests."""
        ours, theirs = multiprocessing.Pipe()
        not_its = [ours, *(process.connection for process in self._live)]
        fork = multiprocessing.get_context("fork").Process(
            target=_work, args=(self._session, number, tests, theirs, not_its)
        )
        with warnings.catch_warnings():
            # Python 3.12 warns of threads, which a fork does not have. Those of the libraries that
            # test files import are started anew when there is work for them.
            warnings.simplefilter("ignore", DeprecationWarning)
            fork.start()
        theirs.close()
        self._live.append(_Process(number, fork, ours, list(tests), tests[0]))

    def _hear(self, process: _Process) -> None:
        try:
            message = cast(Message, process.connection.recv())
        except (EOFError, OSError):
            process.fork.join()
            self._died(process)
            return
        config = self._session.config
        match message:
            case Wants():
                process.left = self._next_file(process.number)
                process.connection.send(list(process.left))
            case Began(test):
                process.left.remove(test)
                process.latest, process.running = test, True
            case Reported(data):
                report = config.hook.pytest_report_from_serializable(config=config, data=data)
                config.hook.pytest_runtest_logreport(report=report)
            case Finished():
                process.running = False
                self._say_finished(process.latest)
            case Warned():
                _warn(config.hook, message)

    def _died(self, process: _Process) -> None:
        """It has ended: because all tests are dealt, or it was killed, or broke."""
        self._live.remove(process)
        process.connection.close()
        status = process.fork.exitcode
        if status == 0 and not process.left and not process.running:
            return
        self._fail(process.latest, f"the process that ran it ended (status {status})")
        left = [test for test in process.left if test != process.latest]
        if tests := left or self._next_file(process.number):
            self._fork(process.number, tests)

    def _fail(self, test: int, why: str) -> None:
        item = self._session.items[test]
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)
        self._say_finished(test)

    def _say_finished(self, test: int) -> None:
        item = self._session.items[test]
        hook = self._session.config.hook
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _file(test: pytest.Item) -> str:
    return test.nodeid.partition("::")[0]


def _warn(hook: Any, warned: Warned) -> None:
    category = type(warned.category, (Warning,), {})
    hook.pytest_warning_recorded.call_historic(
        kwargs={
            "warning_message": warnings.WarningMessage(
                category(warned.text), category, warned.file, warned.line
            ),
            "when": warned.when,
            "nodeid": warned.test,
            "location": warned.location,
        }
    )


def _work(
    session: pytest.Session,
    number: int,
    tests: Sequence[int],
    connection: Connection,
    not_its: Sequence[Connection],
) -> None:
    """What a forked process does. `not_its`: connections that belong to the first process."""
    for other in not_its:
        other.close()
    dealing.stand_back(number)
    with _on_its_own(session.config, number):
        worker = _Worker(session, connection)
        session.config.pluginmanager.register(worker)
        worker.run(tests)


@contextmanager
def _on_its_own(config: pytest.Config, number: int) -> Iterator[None]:
    """Parts what the process shares with the first one: the terminal, the file that captures
    output, the folder for temporary files."""
    capture = config.pluginmanager.getplugin("capturemanager")
    paths = config._tmp_path_factory  # type: ignore[attr-defined]
    with open(os.devnull, "w") as nowhere:
        config.get_terminal_writer()._file = nowhere
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
        paths._basetemp = paths.getbasetemp() / f"process-{number}"
        paths._basetemp.mkdir(mode=0o700, exist_ok=True)
        try:
            yield
        finally:
            capture.stop_global_capturing()


class _Worker:
    """In a forked process: the plugin that sends what pytest reports, and the loop over tests."""

    def __init__(self, session: pytest.Session, connection: Connection) -> None:
        self._session = session
        self._connection = connection

    def run(self, tests: Sequence[int]) -> None:
        """Returns when no tests are left, or the first process has gone or wants no more."""
        try:
            while tests and self._run_file(tests):
                self._send(Wants())
                tests = self._connection.recv()
        except (EOFError, ConnectionError, KeyboardInterrupt):
            pass  # the first process says what there is to say
        finally:
            self._session._setupstate.teardown_exact(None)  # fixtures of several files
            forks.stop()

    def _run_file(self, tests: Sequence[int]) -> bool:
        """False: the first process wants no more."""
        for test, following in zip(tests, [*tests[1:], None], strict=True):
            if self._connection.poll():  # it is closed: nothing is sent meanwhile
                return False
            self._run(test, following)
        return True

    def _run(self, test: int, following: int | None) -> None:
        item = self._session.items[test]
        # pytest keeps the fixtures that the following test shares. Which file follows this one is
        # not known yet: it shares what belongs to the session.
        shares: Any = self._session if following is None else self._session.items[following]
        self._send(Began(test))
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=shares)
        self._send(Finished())

    def _send(self, message: Message) -> None:
        self._connection.send(message)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self._session.config
        self._send(
            Reported(config.hook.pytest_report_to_serializable(config=config, report=report))
        )

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        category, text = warning_message.category.__name__, str(warning_message.message)
        file, line = warning_message.filename, warning_message.lineno
        self._send(Warned(category, text, file, line, when, nodeid, location))
