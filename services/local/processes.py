"""The processes of a cluster on this machine: starting, watching and ending them for certain.

A cluster lives in a data directory. `cluster.json` there names its processes; each of them also
carries the directory in its environment (LS_CLUSTER), so that `down` finds even one that was
started a moment before a crash and never written down. Whoever started the cluster holds a lock on
the directory for as long as the cluster runs; the processes die with it (the keepers of nodes see
its end: LS_HOLDER). The lock names it, if it ends its cluster in good order when it gets a SIGTERM.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from services.local.private import private_directory, write_private
from services.node.keeper.messages import HOLDER
from shared.errors import Conflict, LambdaScaleError, NotFound
from shared.parents import die_with_parent

STATE_FILE = "cluster.json"
LOCK_FILE = ".lock"
MARK = "LS_CLUSTER"
NATS = "nats"
"""Role of the nats-servers. It is also the name of the first, and of its directory; the second is
`nats-2`."""
HOLDER_STOP_S = 30.0
STOP_S = 10.0
POLL_S = 0.05
ORDER = ("gateway", "planner", "node", "registry", NATS)
"""The order in which roles are ended."""


class ProcessRecord(msgspec.Struct, frozen=True):
    name: str
    role: str
    pid: int
    started: str
    """Start time in ticks since boot, which tells the process from a later one with the same
    pid."""
    since: float = 0.0
    """When it was started (seconds since the epoch)."""
    restarts: int = 0
    """How many processes of this name ended before this one."""
    last_exit: str = ""
    """How the last of them ended, in words."""
    again_at: float = 0.0
    """When the supervisor starts the next process; 0 if this one has not ended."""

    @property
    def state(self) -> str:
        if _start_ticks(self.pid) == self.started:
            return "running"
        return "restarting" if self.again_at else "dead"


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    nats_url: str = ""
    """Empty until nats-server is up; several addresses have commas between them."""
    nats_copies: int = 0
    """Copies of durable state that the nats-servers keep; 0: as configured."""
    gateway_urls: tuple[str, ...] = ()
    """Empty until everything is up."""
    config: str = ""
    """The file that the cluster was started with."""
    credentials: str = ""
    """The directory with the credentials of its bus's users; empty: as configured."""
    processes: tuple[ProcessRecord, ...] = ()

    @property
    def gateway_url(self) -> str:
        """The first gateway's."""
        return self.gateway_urls[0] if self.gateway_urls else ""

    @property
    def running(self) -> bool:
        return any(process.state == "running" for process in self.processes)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on. Empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _start_ticks(pid: int) -> str:
    """Empty if the process is gone or a zombie."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] != "Z" else ""


def read_state(directory: Path) -> ClusterState:
    """The state that `cluster.json` has. NotFound if no cluster was started there."""
    try:
        return msgspec.json.decode((directory / STATE_FILE).read_bytes(), type=ClusterState)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(
            f"no cluster runs in {directory}: start one with `lambdascale up`, "
            "or name another with --data"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LambdaScaleError(
            f"{directory / STATE_FILE} is damaged ({error}); `lambdascale down` cleans up"
        ) from error


def write_state(directory: Path, state: ClusterState) -> None:
    text = msgspec.json.format(msgspec.json.encode(state), indent=2).decode()
    write_private(directory / STATE_FILE, text)


def claim(directory: Path, holder: ProcessRecord | None = None) -> int:
    """Takes the directory for a new cluster. Closing the returned descriptor gives it back.

    `holder`: the process to be told when the cluster has to end. Conflict if a cluster runs or
    starts there.
    """
    lock = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        check_free(directory)
        os.truncate(lock, 0)
        if holder is not None:
            os.write(lock, msgspec.json.encode(holder))
    except BlockingIOError as error:
        os.close(lock)
        raise _taken(directory) from error
    except BaseException:
        os.close(lock)
        raise
    return lock


def holder_of(directory: Path) -> ProcessRecord | None:
    """The `up` or demo that runs the cluster in this directory."""
    try:
        found = msgspec.json.decode((directory / LOCK_FILE).read_bytes(), type=ProcessRecord)
    except (OSError, msgspec.DecodeError):
        return None
    return found if found.state == "running" else None


def check_free(directory: Path) -> None:
    """Conflict if a cluster runs in this directory."""
    if strays(directory):
        raise _taken(directory)


def _taken(directory: Path) -> Conflict:
    return Conflict(
        f"a cluster runs in {directory} already: end it with `lambdascale down`, "
        "or name another directory with --data"
    )


def record(name: str, role: str, pid: int) -> ProcessRecord:
    return ProcessRecord(name, role, pid, _start_ticks(pid), since=time.time())


def marks(directory: Path) -> dict[str, str]:
    """Environment variables that say whose a process is: of the cluster that this process runs."""
    return {MARK: str(directory.resolve()), HOLDER: str(os.getpid())}


def environment(directory: Path, settings: Mapping[str, str]) -> dict[str, str]:
    """Of a process of the cluster that this process runs."""
    return {**os.environ, **settings, **marks(directory)}


async def ended(process: "subprocess.Popen[bytes]") -> int:
    """Waits for the end of a child. Returns its exit code."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:  # somebody waited for it already
        return process.wait()
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()


def log_of(directory: Path, name: str) -> Path:
    if name == NATS or name.startswith(f"{NATS}-"):
        return directory / name / "nats-server.log"
    return directory / "logs" / f"{name}.log"


def spawn(
    directory: Path,
    name: str,
    words: Iterable[str],
    settings: Mapping[str, str],
    *,
    within: tuple[str, ...],
) -> "subprocess.Popen[bytes]":
    """Starts `lambdascale WORDS` in a session of its own, with its log in logs/NAME.log.

    It dies with this process, whatever kills this process. `within`: the command that runs it
    where it belongs. What runs here is forked instead (`forking`).
    """
    path = log_of(directory, name)
    private_directory(path.parent)
    with path.open("ab") as log:
        return subprocess.Popen(
            [*within, sys.executable, "-m", "services.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment(directory, settings),
            preexec_fn=die_with_parent(),  # noqa: PLW1509
        )


def strays(directory: Path) -> list[int]:
    """Every live process whose environment names the directory."""
    mark = f"{MARK}={directory.resolve()}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0") and _start_ticks(
                int(entry.name)
            ):
                found.append(int(entry.name))
    return found


def end_all(directory: Path) -> int:
    """Ends the cluster's processes: gateways first, nats-server last, then whatever is left.

    Sends SIGTERM and, after STOP_S, SIGKILL. Returns how many there were. Safe to call at any time,
    also when the state file is damaged or gone, or while an `up` is at work: that is ended first.
    """
    try:
        state = read_state(directory)
    except LambdaScaleError:
        state = ClusterState()
    running = [process for process in state.processes if process.state == "running"]
    there = {process.pid for process in running}.union(strays(directory))
    holder = holder_of(directory)
    if holder and holder.pid != os.getpid():
        end([holder.pid], HOLDER_STOP_S)
    if any(process.role == NATS for process in running):
        for role in ORDER:
            end([process.pid for process in running if process.role == role])
    end(strays(directory))  # all at once: without the bus nothing is left to settle
    with contextlib.suppress(NotADirectoryError):
        (directory / STATE_FILE).unlink(missing_ok=True)
    return len(there)


def end(pids: Collection[int], patience_s: float | None = None) -> None:
    """Sends SIGTERM and, after `patience_s`, SIGKILL; returns once all have ended."""
    alive = {pid: ticks for pid in pids if (ticks := _start_ticks(pid))}
    for number, patience in ((signal.SIGTERM, patience_s or STOP_S), (signal.SIGKILL, STOP_S)):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + patience
        while alive and time.monotonic() < deadline:
            time.sleep(POLL_S)
            alive = {pid: t for pid, t in alive.items() if _start_ticks(pid) == t}
        if not alive:
            return
    raise LambdaScaleError(f"processes {sorted(alive)} cannot be ended")
