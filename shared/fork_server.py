"""`python -m shared.fork_server PARENT MODULES`: forks processes (`forking.py`).

It imports the modules, and then forks for each order that comes through its standard input, a
socket. It has a single thread and opens no device, so that nothing is missing in what it forks.
When PARENT, the process that started it, ends, or closes the other end of the socket, it ends at
once, and the kernel ends its children. A SIGTERM lets it wait until they have ended.
"""

import atexit
import ctypes
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from shared.forking import LARGEST, READY, Order, encode_code, encode_pid
from shared.lasting import lasting
from shared.parents import die_with, die_with_parent

_PR_SET_NAME = 15
_CLONE_NEWNET = 0x40000000
_MOST = 16
"""Descriptors that come with an order."""


@dataclass(frozen=True, slots=True)
class Child:
    pid: int
    process: int
    """A descriptor that can be read when the process has ended."""
    status: socket.socket
    """What its exit code goes to."""


class Server:
    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._children: set[Child] = set()
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        self._told_to_end, tells = socket.socketpair()
        self._tells = tells
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ)
        self._selector.register(self._told_to_end, selectors.EVENT_READ)

    def follow(self) -> Order | None:
        """Follows orders until it is to end (None). Returns in each process that it forks, too:
        there, with the order that this process is to follow."""
        before = signal.signal(signal.SIGTERM, lambda *_: self._tells.send(b"end"))
        try:
            return self._follow()
        finally:
            signal.signal(signal.SIGTERM, before)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            self._close()

    def _follow(self) -> Order | None:
        self._orders.send(READY)
        ends = False
        while not (ends and not self._children):
            for key, _ in self._selector.select():
                if isinstance(key.data, Child):
                    self._reap(key.data)
                elif key.fileobj is self._told_to_end:
                    self._selector.unregister(self._told_to_end)
                    ends = True
                elif (ordered := self._next()) is None:
                    return None
                else:
                    order, status, given = ordered
                    if self._forked(status):
                        arguments = *order.arguments, *map(str, given)
                        return msgspec.structs.replace(order, arguments=arguments)
                    for descriptor in given:
                        os.close(descriptor)
        return None

    def _next(self) -> tuple[Order, socket.socket, list[int]] | None:
        """An order, the socket that comes with it, and the descriptors of the new process. None:
        there are no more."""
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._orders, LARGEST, _MOST, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # the other end was closed, and has never read READY
            return None
        if not data:
            return None
        status, *given = descriptors
        return msgspec.msgpack.decode(data, type=Order), socket.socket(fileno=status), given

    def _forked(self, status: socket.socket) -> bool:
        """Forks. Whether this is the new process."""
        die = die_with_parent()
        # Until the new process has its own handler, a SIGTERM would tell the server to end.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            with status:
                status.send(encode_pid(-(error.errno or 1)))
            return False
        if pid == 0:
            die()
            status.close()
            return True
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        child = Child(pid, os.pidfd_open(pid), status)
        with suppress(BrokenPipeError):  # nobody wants to know
            socket.send_fds(status, [encode_pid(pid)], [child.process])
        self._children.add(child)
        self._selector.register(child.process, selectors.EVENT_READ, child)
        return False

    def _close(self) -> None:
        """Closes what is the server's, in a new process, too."""
        for child in self._children:
            os.close(child.process)
            child.status.close()
        for ours in (self._selector, self._orders, self._told_to_end, self._tells):
            ours.close()

    def _reap(self, child: Child) -> None:
        self._selector.unregister(child.process)
        self._children.remove(child)
        _, status = os.waitpid(child.pid, 0)
        with child.status, suppress(BrokenPipeError):  # nobody wants to know
            child.status.send(encode_code(os.waitstatus_to_exitcode(status)))
        os.close(child.process)


def become(order: Order, imported: Mapping[str, str]) -> None:
    """Makes of a forked process what a new one would be. `imported`: variables that were set by
    imports."""
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NAME, order.name.encode()[:15])  # for ps and top
    _redirect(os.open(os.devnull, os.O_RDONLY), 0)
    if order.log:
        _redirect(os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1, 2)
    if order.network:
        with open(order.network) as network:
            if libc.setns(network.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), order.network)
    os.environ.clear()
    os.environ.update({**imported, **order.environment})


def _redirect(source: int, *targets: int) -> None:
    for target in targets:
        os.dup2(source, target)
    os.close(source)


def run(modules: Sequence[str]) -> int:
    given = set(os.environ)
    with lasting():
        for module in modules:
            importlib.import_module(module)
    imported = {name: value for name, value in os.environ.items() if name not in given}
    with socket.socket(fileno=os.dup(0)) as orders:
        order = Server(orders).follow()
    if order is None:
        return 0
    become(order, imported)
    code: int | None = importlib.import_module(order.module).main(order.arguments)
    return code or 0


def end(code: int) -> NoReturn:
    """Ends as Python does, but leaves its memory to the kernel: to take all of torch apart costs
    0.2 s, and a copy of pages that are shared until then."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    parent, *modules = sys.argv[1:]
    die_with(int(parent))
    end(run(modules))
