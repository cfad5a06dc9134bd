"""Fork servers that import nothing: what becomes of them and of what they fork."""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import StartFailed
from shared.forking import Forked, ForkServer, Order

MODULE = "tests.support.forked"
LIMIT_S = 60.0
VARIABLE = "LAMBDASCALE_OF_A_TEST"
TRIES = 50


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    made = ForkServer("tests", (), None, os.environ)
    yield made
    made.stop()


def fork(server: ForkServer, *arguments: str, descriptors: tuple[int, ...] = ()) -> Forked:
    order = Order("a-test", MODULE, arguments, dict(os.environ))
    return server.fork(order, descriptors)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_how_a_process_ended_is_told(server: ForkServer) -> None:
    assert fork(server, "end").wait(LIMIT_S) == 0
    assert fork(server, "end", "3").wait(LIMIT_S) == 3
    assert fork(server, "fail").wait(LIMIT_S) == 1
    waits = fork(server, "wait")
    assert waits.poll() is None
    assert parent_of(waits.pid) == server.start()
    waits.kill()
    assert waits.wait(LIMIT_S) == waits.poll() == -signal.SIGKILL
    waits.kill()  # nobody else, if another process has its pid


def test_a_process_that_is_told_to_end_as_it_begins_ends(server: ForkServer) -> None:
    """And its server goes on."""
    pid = server.start()
    for _ in range(TRIES):
        waits = fork(server, "wait")
        os.kill(waits.pid, signal.SIGTERM)
        assert waits.wait(LIMIT_S) == -signal.SIGTERM
    assert server.start() == pid


def test_any_number_of_threads_wait_for_the_end(server: ForkServer) -> None:
    waits = fork(server, "wait")
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda: codes.append(waits.wait(LIMIT_S))) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    os.kill(waits.pid, signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert codes == [-signal.SIGTERM] * 16


def test_variables_are_those_of_the_time_of_the_order(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> bytes:
        reading, writing = os.pipe()
        forked = fork(server, "tell", VARIABLE, descriptors=(writing,))
        os.close(writing)
        with open(reading, "rb") as pipe:
            assert forked.wait(LIMIT_S) == 0
            return pipe.read()

    server.stop()
    monkeypatch.setenv(VARIABLE, "first")
    assert told() == b"first"
    monkeypatch.setenv(VARIABLE, "second")
    assert told() == b"second"
    monkeypatch.delenv(VARIABLE)
    assert told() == b"unset"


def test_variables_that_an_imported_module_sets_stay(tmp_path: Path) -> None:
    (tmp_path / "sets.py").write_text(f"import os; os.environ['{VARIABLE}'] = '5'")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    server = ForkServer("tests", ("sets",), None, environment)
    (tmp_path / "reads.py").write_text(
        f"import os\ndef main(arguments): return int(os.environ['{VARIABLE}'])"
    )
    order = Order("a-test", "reads", (), environment)
    assert server.fork(order).wait(LIMIT_S) == 5
    order = Order("a-test", "reads", (), {**environment, VARIABLE: "6"})
    assert server.fork(order).wait(LIMIT_S) == 6
    server.stop()


def test_output_goes_where_that_of_this_process_goes(capfd: pytest.CaptureFixture[str]) -> None:
    server = ForkServer("tests", (), None, os.environ)
    assert fork(server, "say", "something").wait(LIMIT_S) == 0
    server.stop()
    assert capfd.readouterr().err == "something\n"


def test_a_server_outlives_the_thread_that_needed_it_first() -> None:
    server, begun = ForkServer("tests", (), None, os.environ), list[tuple[int, Forked]]()
    first = threading.Thread(target=lambda: begun.append((server.start(), fork(server, "wait"))))
    first.start()
    first.join()
    ((pid, waits),) = begun
    with pytest.raises(TimeoutError):
        waits.wait(0.1)
    assert server.start() == parent_of(waits.pid) == pid
    server.stop()
    assert waits.wait(LIMIT_S) == -signal.SIGKILL


def test_a_server_that_was_killed_is_replaced(server: ForkServer) -> None:
    dies, killed = fork(server, "wait"), server.start()
    os.kill(killed, signal.SIGKILL)
    assert dies.wait(LIMIT_S) == -signal.SIGKILL
    assert fork(server, "end", "4").wait(LIMIT_S) == 4
    assert server.start() != killed


def test_a_forked_process_has_a_server_of_its_own(server: ForkServer) -> None:
    before = server.start()
    reading, writing = os.pipe()
    if os.fork() == 0:
        own = fork(server, "wait")
        os.write(writing, f"{server.start()} {parent_of(own.pid)}".encode())
        server.stop()
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        theirs, parent = map(int, pipe.read().split())
    os.wait()
    assert theirs == parent != before
    assert parent_of(fork(server, "wait").pid) == server.start() == before


PARENT = """
import os, sys
from shared.forking import ForkServer, Order
server = ForkServer("tests", sys.argv[1:], None, os.environ)
pids = [server.start()]
if sys.argv[1:] != ["lasts"]:
    order = Order("a-test", "tests.support.forked", ("wait",), dict(os.environ))
    pids.append(server.fork(order).pid)
print(*pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("modules", [[], ["lasts"]], ids=["has forked", "imports"])
def test_a_server_and_what_it_forked_die_with_the_process_that_started_it(
    tmp_path: Path, modules: list[str]
) -> None:
    (tmp_path / "lasts.py").write_text("import threading; threading.Event().wait()")
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as parent:
        assert parent.stdout is not None
        first, *forked = [int(pid) for pid in parent.stdout.readline().split()]
        assert [parent_of(pid) for pid in forked] == [first] * len(forked)
        parent.kill()
        ended, _, _ = select.select([parent.stdout], [], [], LIMIT_S)
        assert ended
        assert parent.stdout.read() == b""  # its end: all have let go of it


def test_a_server_that_cannot_begin_is_told() -> None:
    broken = ForkServer("tests", ("tests.there_is_no_such_module",), None, os.environ)
    with pytest.raises(StartFailed, match=r"that tests are forked from has died$"):
        fork(broken, "end")
    broken.stop()


def test_a_process_begins_with_one_thread(server: ForkServer) -> None:
    assert fork(server, "threads").wait(LIMIT_S) == 1
