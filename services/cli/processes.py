"""The processes of a cluster on this machine: starting, watching and ending them for certain.

A cluster lives in a data directory. `cluster.json` there names its processes; each of them also
carries the directory in its environment (LS_CLUSTER), so that `down` finds even one that was
started a moment before a crash and never written down.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from shared.errors import Conflict, LambdaScaleError, NotFound

STATE_FILE = "cluster.json"
MARK = "LS_CLUSTER"
STOP_S = 10.0
POLL_S = 0.05
ORDER = ("gateway", "planner", "node", "registry", "nats")
"""The order in which roles are ended."""


class StartFailed(LambdaScaleError):
    code = "start_failed"


class ProcessRecord(msgspec.Struct, frozen=True):
    name: str
    role: str
    pid: int
    started: str
    """Start time in ticks since boot: tells the process from a later one with its pid."""

    @property
    def state(self) -> str:
        return "running" if _start_ticks(self.pid) == self.started else "dead"


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    nats_url: str
    gateway_url: str = ""
    processes: tuple[ProcessRecord, ...] = ()


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _start_ticks(pid: int) -> str:
    """Empty for a process that is gone or a zombie."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] != "Z" else ""


def read_state(directory: Path) -> ClusterState:
    """NotFound if no cluster was started there."""
    try:
        return msgspec.json.decode((directory / STATE_FILE).read_bytes(), type=ClusterState)
    except FileNotFoundError as error:
        raise NotFound(
            f"no cluster runs in {directory}: start one with `lambdascale up`, "
            "or name another with --data"
        ) from error
    except msgspec.DecodeError as error:
        raise LambdaScaleError(
            f"{directory / STATE_FILE} is damaged ({error}); `lambdascale down` cleans up"
        ) from error


def write_state(directory: Path, state: ClusterState) -> None:
    temporary = directory / f".{STATE_FILE}"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2))
    temporary.rename(directory / STATE_FILE)


def check_free(directory: Path) -> None:
    """Conflict if a cluster runs in the directory."""
    running = strays(directory)
    if running:
        raise Conflict(
            f"a cluster runs in {directory} already ({len(running)} processes): "
            "end it with `lambdascale down`, or name another directory with --data"
        )


def record(name: str, role: str, pid: int) -> ProcessRecord:
    return ProcessRecord(name, role, pid, _start_ticks(pid))


def environment(directory: Path, settings: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **settings, MARK: str(directory.resolve())}


def spawn(
    directory: Path, name: str, role: str, arguments: Iterable[str], settings: Mapping[str, str]
) -> tuple[ProcessRecord, "subprocess.Popen[bytes]"]:
    """Starts `lambdascale ROLE ...` in a session of its own, its logs in logs/NAME.log."""
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", role, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment(directory, settings),
        )
    return record(name, role, process.pid), process


def last_lines(directory: Path, name: str, count: int = 5) -> str:
    try:
        lines = (directory / "logs" / f"{name}.log").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-count:])


def strays(directory: Path) -> list[int]:
    """Every live process that carries the directory's mark."""
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
    """Ends the cluster's processes: gateways first, nats-server last; then whatever is left.

    SIGTERM and, past STOP_S, SIGKILL. Returns how many there were. Safe to call at any time, also
    when the state file is damaged or gone.
    """
    try:
        processes = list(read_state(directory).processes)
    except LambdaScaleError:
        processes = []
    count = 0
    for role in ORDER:
        pids = [p.pid for p in processes if p.role == role and p.state == "running"]
        count += len(pids)
        _end(pids)
    rest = strays(directory)
    count += len(rest)
    _end(rest)
    (directory / STATE_FILE).unlink(missing_ok=True)
    return count


def _end(pids: list[int]) -> None:
    alive = {pid: ticks for pid in pids if (ticks := _start_ticks(pid))}
    for number, patience in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + patience
        while alive and time.monotonic() < deadline:
            alive = {pid: t for pid, t in alive.items() if _start_ticks(pid) == t}
            time.sleep(POLL_S)
        if not alive:
            return
    raise LambdaScaleError(f"processes {sorted(alive)} cannot be ended")
