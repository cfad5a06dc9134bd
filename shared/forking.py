"""Processes that are forked from one which has imported all that they need.

To import torch takes a second of a processor and 200 MB. A fork server does so once: each process
that it forks is there in 20 ms and shares that memory. Its children die with it, and it dies with
the process that started it, whatever kills that.
"""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from pathlib import Path

import msgspec

from shared.errors import StartFailed

PROGRAM = "shared.fork_server"
READY = b"ready"
LARGEST = 1 << 20
"""Bytes of an order."""
THREADS = "OPENBLAS_NUM_THREADS"
"""NumPy's library starts its threads when it is imported."""
_PID_BYTES, _CODE_BYTES = 8, 4


class Order(msgspec.Struct, frozen=True):
    """Fork, and call `main(arguments)` of a module, which returns the exit code or None.

    With it goes a socket, through which the pid comes back with a descriptor of the process, or a
    negative errno; and after a pid the exit code, when there is one. Further descriptors are the
    new process's: their numbers are added to its arguments.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    """Its variables, beside those that the imported modules set. But what a library reads when it
    is loaded it has read among the server's."""
    log: str = ""
    """The file that its output goes to; empty: where the server's goes."""
    network: str = ""
    """The file of its network namespace; empty: the server's."""


def encode_pid(pid: int) -> bytes:
    return pid.to_bytes(_PID_BYTES, "little", signed=True)


def encode_code(code: int) -> bytes:
    return code.to_bytes(_CODE_BYTES, "little", signed=True)


class Forked:
    """A process that a fork server has forked; as a Popen, as far as it is needed. Any thread may
    use it."""

    def __init__(self, pid: int, process: int, status: int) -> None:
        """`process`: a descriptor that stands for the process, also when another one has its pid.
        `status`: of the socket that the exit code comes through."""
        self.pid = pid
        self._process = process
        self._status = status
        self._code: int | None = None
        self._ending = threading.Lock()
        for descriptor in (process, status):
            weakref.finalize(self, os.close, descriptor)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal. None: it runs."""
        return self._end() if _readable(self._process, 0.0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has one. TimeoutError: it has none within `timeout` seconds."""
        if not _readable(self._process, timeout):
            raise TimeoutError(f"process {self.pid} did not end within {timeout} s")
        return self._end()

    async def ended(self) -> int:
        """As `wait`, beside other tasks."""
        await _until_readable(self._process)
        return self._end()

    def kill(self) -> None:
        """Has the kernel kill it, unless it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def _end(self) -> int:
        with self._ending:
            if self._code is None:
                told = os.read(self._status, _CODE_BYTES)
                # Nothing: the fork server was killed, and the kernel killed this process with it.
                code = int.from_bytes(told, "little", signed=True)
                self._code = code if told else -signal.SIGKILL
            return self._code


class ForkServer:
    """The server's process is started when it is first needed, and again if it has died. Any thread
    may use it. A process that was forked from the one that started it has one of its own."""

    def __init__(
        self, what: str, modules: Sequence[str], log: Path | None, environment: Mapping[str, str]
    ) -> None:
        """`what`: what the processes are called together. `modules`: those that it imports. `log`:
        of the server, in a directory that is there; None: its output goes where this process's
        goes. `environment`: of the server."""
        self.environment = environment
        self._what = what
        self._modules = modules
        self._log = log
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._owner = 0
        """The process that started it."""

    def start(self) -> int:
        """Has it begin to import, if it has not yet. Returns its pid."""
        _, process = self._connected()
        return process.pid

    async def ready(self) -> None:
        """Returns once it has imported everything. StartFailed: it could not."""
        orders, process = self._connected()
        await _until_readable(orders.fileno())
        try:
            told = orders.recv(len(READY), socket.MSG_PEEK)
        except ConnectionResetError:
            told = b""
        if told != READY:
            raise self._failure(process)

    def fork(self, order: Order, descriptors: Sequence[int] = ()) -> Forked:
        """Starts a process in a session of its own, which gets copies of the descriptors. It blocks
        until the server is `ready`. StartFailed: the server or the process cannot be started."""
        orders, process = self._connected()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            try:
                with theirs:
                    data = msgspec.msgpack.encode(order)
                    socket.send_fds(orders, [data], [theirs.fileno(), *descriptors])
                told, given, _, _ = socket.recv_fds(ours, _PID_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except OSError as error:  # it died a moment ago
                raise self._failure(process) from error
            pid = int.from_bytes(told, "little", signed=True)
            if pid > 0:
                return Forked(pid, given[0], ours.detach())
        if pid < 0:
            raise StartFailed(f"{order.name} cannot be started: {os.strerror(-pid)}")
        raise self._failure(process)

    def stop(self) -> None:
        """Ends the server, and what it has forked."""
        with self._lock:
            self._stop()

    def _connected(self) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
        with self._lock:
            if self._process is not None and (
                self._owner != os.getpid() or self._process.poll() is not None
            ):
                self._stop()
            if self._orders is None or self._process is None:
                self._orders, self._process = self._spawn()
                self._owner = os.getpid()
            return self._orders, self._process

    def _stop(self) -> None:
        process, orders = self._process, self._orders
        self._process = self._orders = None
        if process is None or orders is None:
            return
        with orders:
            if self._owner != os.getpid():
                process.returncode = 0  # it is another process's child, and serves that one
                return
            with suppress(OSError):  # it has ended
                orders.shutdown(socket.SHUT_RDWR)  # also where a forked process has a copy
        process.wait()

    def _spawn(self) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
        started: Future[subprocess.Popen[bytes]] = Future()
        with theirs:
            holds = threading.Thread(
                target=self._hold, args=(theirs, started), name="fork-server", daemon=True
            )
            holds.start()
            try:
                return ours, started.result()
            except BaseException:
                ours.close()
                raise

    def _hold(self, orders: socket.socket, started: "Future[subprocess.Popen[bytes]]") -> None:
        """Starts the server, and returns when it has ended: the kernel kills it when the thread
        that started it ends, so this has to be a thread that lasts."""
        try:
            with open(self._log, "ab") if self._log else nullcontext() as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", PROGRAM, str(os.getpid()), *self._modules],
                    stdin=orders.fileno(),
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**self.environment, THREADS: "1"},
                )
            lives = os.pidfd_open(process.pid)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        _readable(lives, None)
        os.close(lives)

    def _failure(self, process: "subprocess.Popen[bytes]") -> StartFailed:
        with self._lock:
            if self._process is process:
                self._stop()
        see = f"; see {self._log}" if self._log else ""
        return StartFailed(f"the process that {self._what} are forked from has died{see}")


def _readable(descriptor: int, timeout: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


async def _until_readable(descriptor: int) -> None:
    """Several tasks may wait for the same one: the loop knows each by a descriptor of its own."""
    own = os.dup(descriptor)
    readable = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(own, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(own)
        os.close(own)
