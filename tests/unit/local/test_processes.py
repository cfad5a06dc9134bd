"""A cluster's processes: found, told apart and ended, whatever state they were left in."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.local import processes
from services.local.processes import ClusterState, claim, end_all, read_state, record, write_state
from shared.errors import Conflict, LambdaScaleError, NotFound

SLEEPER = "import sys; print('up', flush=True); sys.stdin.read()"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPER}"
LAST_WORDS = """
import signal, sys
def end(number, frame):
    print(sys.argv[1], file=open(sys.argv[2], "a"))
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
signal.pause()
"""
NOBODY = 2**22 + 1
"""More than the kernel gives out."""
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that is marked as the cluster's, and waits until it is up."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str = SLEEPER, *arguments: str, marked: bool = True) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=processes.environment(tmp_path, {}) if marked else None,
        )
        started.append(process)
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def state_with(**roles: int) -> ClusterState:
    return ClusterState(
        nats_url="nats://x", processes=tuple(record(role, role, pid) for role, pid in roles.items())
    )


def test_the_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = ClusterState(
        nats_url="nats://x",
        gateway_urls=("http://y",),
        config="/etc/z.toml",
        processes=(record("nats", "nats", os.getpid()),),
    )
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    assert state.running


def test_a_process_is_told_from_a_later_one_with_its_pid() -> None:
    mine = record("me", "node", os.getpid())
    assert mine.state == "running"
    assert processes.ProcessRecord("me", "node", os.getpid(), "1").state == "dead"
    assert processes.ProcessRecord("me", "node", NOBODY, "1").state == "dead"


def test_a_process_that_is_about_to_be_started_again_is_not_dead() -> None:
    ended = processes.ProcessRecord("me", "node", NOBODY, "1", again_at=1.0)
    assert ended.state == "restarting"


@pytest.mark.parametrize("code", [0, 3])
async def test_the_end_of_a_child_is_awaited(code: int) -> None:
    child = subprocess.Popen(["sh", "-c", f"exit {code}"])  # noqa: ASYNC220 - as clusters do it
    assert await processes.ended(child) == code
    assert await processes.ended(child) == code


@pytest.mark.parametrize("text", ["", "garbage", '{"nats_url": 3}'])
def test_a_damaged_state_says_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / "cluster.json").write_text(text)
    with pytest.raises(LambdaScaleError, match=r"is damaged .*lambdascale down"):
        read_state(tmp_path)


def test_no_state_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="lambdascale up"):
        read_state(tmp_path / "nowhere")


def test_strays_are_found_by_their_mark_only(tmp_path: Path, start: Start) -> None:
    marked, other = start(), start(marked=False)
    assert processes.strays(tmp_path) == [marked.pid]
    assert processes.strays(tmp_path / "other") == []
    assert other.poll() is None


def test_down_ends_what_was_never_written_down(tmp_path: Path, start: Start) -> None:
    stray = start()
    assert end_all(tmp_path) == 1
    assert stray.wait() == -signal.SIGTERM
    assert end_all(tmp_path) == 0


def test_down_ends_all_though_the_state_is_damaged(tmp_path: Path, start: Start) -> None:
    stray = start()
    (tmp_path / "cluster.json").write_text("{")
    assert end_all(tmp_path) == 1
    assert stray.wait() == -signal.SIGTERM
    assert not (tmp_path / "cluster.json").exists()


def test_down_forgets_processes_that_died(tmp_path: Path, start: Start) -> None:
    dead = start()
    state = state_with(node=dead.pid)
    dead.kill()
    dead.wait()
    write_state(tmp_path, state)
    assert end_all(tmp_path) == 0
    with pytest.raises(NotFound):
        read_state(tmp_path)


def test_down_kills_what_does_not_end(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STOP_S", 0.3)
    stubborn = start(STUBBORN)
    write_state(tmp_path, state_with(node=stubborn.pid))
    assert end_all(tmp_path) == 1
    assert stubborn.wait() == -signal.SIGKILL


def test_gateways_end_first_and_the_bus_last(tmp_path: Path, start: Start) -> None:
    order = tmp_path / "order"
    roles = ("nats", "node", "registry", "gateway", "planner")
    pids = {role: start(LAST_WORDS, role, str(order)).pid for role in roles}
    write_state(tmp_path, state_with(**pids))
    assert end_all(tmp_path) == len(roles)
    assert order.read_text().split() == ["gateway", "planner", "node", "registry", "nats"]


def test_who_holds_the_directory_is_ended_first(tmp_path: Path, start: Start) -> None:
    order = tmp_path / "order"
    holder = start(LAST_WORDS, "up", str(order), marked=False)
    lock = claim(tmp_path, record("up", "holder", holder.pid))
    node, nats = (start(LAST_WORDS, role, str(order)) for role in ("node", "nats"))
    write_state(tmp_path, state_with(node=node.pid, nats=nats.pid))
    assert end_all(tmp_path) == 2
    assert order.read_text().split() == ["up", "node", "nats"]
    os.close(lock)


def test_the_holder_is_found_though_the_state_is_damaged(tmp_path: Path, start: Start) -> None:
    """It would start again what is ended behind its back."""
    holder = start(marked=False)
    lock = claim(tmp_path, record("up", "holder", holder.pid))
    (tmp_path / "cluster.json").write_text("{")
    end_all(tmp_path)
    assert holder.wait() == -signal.SIGTERM
    os.close(lock)


def test_a_holder_that_ends_its_own_cluster_spares_itself(tmp_path: Path) -> None:
    lock = claim(tmp_path, record("up", "holder", os.getpid()))
    assert end_all(tmp_path) == 0
    os.close(lock)


def test_a_holder_before_is_forgotten(tmp_path: Path) -> None:
    os.close(claim(tmp_path, record("up", "holder", os.getpid())))
    os.close(claim(tmp_path))
    assert processes.holder_of(tmp_path) is None


def test_a_directory_is_claimed_once(tmp_path: Path) -> None:
    lock = claim(tmp_path)
    with pytest.raises(Conflict, match="already"):
        claim(tmp_path)
    os.close(lock)
    os.close(claim(tmp_path))


def test_a_directory_with_a_live_process_is_not_free(tmp_path: Path, start: Start) -> None:
    stray = start()
    with pytest.raises(Conflict, match="lambdascale down"):
        claim(tmp_path)
    assert stray.poll() is None
    end_all(tmp_path)
    os.close(claim(tmp_path))


PARENT = """
import subprocess, sys
from shared.parents import die_with_parent
child = subprocess.Popen(
    [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"],
    stdin=subprocess.PIPE,
    preexec_fn=die_with_parent(),
)
sys.stdin.read()
"""


def test_children_die_with_their_parent_however_it_ends(start: Start) -> None:
    parent = start(PARENT)
    parent.kill()
    assert parent.stdout
    assert parent.stdout.read() == b""  # its end, for which the child must have let go of it
