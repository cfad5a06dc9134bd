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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from shared.errors import StartFailed
from shared.parents import die_with_parent

PROGRAM = "shared.fork_server"
READY = b"ready"
LARGEST = 1 << 20
"""Bytes of an order."""
_PID_BYTES, _CODE_BYTES = 8, 4


class Order(msgspec.Struct, frozen=True):
    """Fork, and call `main(arguments)` of a module, which returns the exit code or None. With it
    goes the writing end of a pipe, through which the pid comes back, or a negative errno; and after
    a pid the exit code, when there is one."""

    name: str
    module: str
    arguments: tuple[str, ...]
    settings: dict[str, str]
    """More environment variables."""
    log: str
    network: str = ""
    """The file of its network namespace; empty: the server's."""


def encode_pid(pid: int) -> bytes:
    return pid.to_bytes(_PID_BYTES, "little", signed=True)


def encode_code(code: int) -> bytes:
    return code.to_bytes(_CODE_BYTES, "little", signed=True)


class Forked:
    """A process that a fork server has forked; as a Popen, as far as clusters need it."""

    def __init__(self, pid: int, status: int) -> None:
        """`status`: the reading end of its pipe."""
        self.pid = pid
        self._status = status
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal. None: it runs."""
        if self._code is None and _readable(self._status, 0.0):
            self._end()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has one. TimeoutError: it has none within `timeout` seconds."""
        if self._code is None:
            if not _readable(self._status, timeout):
                raise TimeoutError(f"process {self.pid} did not end within {timeout} s")
            self._end()
        assert self._code is not None
        return self._code

    async def ended(self) -> int:
        """As `wait`, beside other tasks."""
        if self.poll() is None:
            await _until_readable(self._status)
        return self.wait()

    def _end(self) -> None:
        told = os.read(self._status, _CODE_BYTES)
        os.close(self._status)
        if told:
            self._code = int.from_bytes(told, "little", signed=True)
        else:  # the fork server was killed, and the kernel kills this process with it
            _wait_until_gone(self.pid)
            self._code = -signal.SIGKILL


class ForkServer:
    """The server's process is started when it is first needed, and again if it has died."""

    def __init__(
        self, what: str, modules: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        """`what`: what the processes are called together. `modules`: those that it imports. `log`:
        of the server, in a directory that is there. `environment`: of the server and of all that it
        forks."""
        self._what = what
        self._modules = modules
        self._log = log
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None

    def start(self) -> None:
        """Has it begin to import, if it has not yet."""
        self._connected()

    async def ready(self) -> None:
        """Returns once it has imported everything. StartFailed: it could not."""
        orders = self._connected()
        await _until_readable(orders.fileno())
        try:
            told = orders.recv(len(READY), socket.MSG_PEEK)
        except ConnectionResetError:
            told = b""
        if told != READY:
            raise self._failure()

    def fork(self, order: Order) -> Forked:
        """Starts a process in a session of its own, with its output at the end of the order's log.
        It blocks until the server is `ready`. StartFailed: the server or the process cannot be
        started."""
        orders = self._connected()
        reading, writing = os.pipe()
        try:
            socket.send_fds(orders, [msgspec.msgpack.encode(order)], [writing])
        except OSError as error:  # it died a moment ago
            os.close(reading)
            raise self._failure() from error
        finally:
            os.close(writing)
        told = os.read(reading, _PID_BYTES)
        pid = int.from_bytes(told, "little", signed=True)
        if pid > 0:
            return Forked(pid, reading)
        os.close(reading)
        if pid < 0:
            raise StartFailed(f"{order.name} cannot be started: {os.strerror(-pid)}")
        raise self._failure()

    def stop(self) -> None:
        """Ends the server, and what it has forked."""
        process, orders = self._process, self._orders
        self._process = self._orders = None
        if orders is not None:
            orders.close()
        if process is not None:
            process.wait()

    def _connected(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self.stop()
        if self._orders is None:
            self._orders = self._spawn()
        return self._orders

    def _spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, *self._modules],
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self._environment,
                preexec_fn=die_with_parent(),  # noqa: PLW1509
            )
        return ours

    def _failure(self) -> StartFailed:
        self.stop()
        return StartFailed(
            f"the process that {self._what} are forked from has died; see {self._log}"
        )


def _readable(descriptor: int, timeout: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


def _wait_until_gone(pid: int) -> None:
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        try:
            _readable(process, None)
        finally:
            os.close(process)


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
