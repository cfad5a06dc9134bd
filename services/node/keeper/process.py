"""A keeper's process: sockets, process descriptors and a clock around `tenure` and `table`.

It maps no memory, so that it is small whatever it holds and has nothing that a bug could write to.
"""

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from msgspec import MsgspecError

from services.node.keeper.messages import (
    Alive,
    Claim,
    Drop,
    Forget,
    Granted,
    Hold,
    Refused,
    Space,
    Told,
    Waits,
    decode_asked,
    encode,
)
from services.node.keeper.sockets import Truncated, peer_of, receive, send
from services.node.keeper.table import Malformed, Table
from services.node.keeper.tenure import Client, Command, End, Grant, Kill, Tenure, Wait

CLIENTS = 16
GENERATIONS = 64
HOLDER = "holder"


@dataclass(slots=True, eq=False)
class _Process:
    """A process of the node with a connection, or without one but not known to be dead."""

    number: Client
    connection: socket.socket | None
    pid: int
    pidfd: int


class Keeper:
    def __init__(
        self, node: str, keep_s: float, listener: socket.socket, holder: int | None = None
    ) -> None:
        """`holder`: the descriptor of a process without which the memories are of no use."""
        self.table = Table()
        self._node = node
        self._listener = listener
        self._tenure = Tenure(keep_s, time.monotonic())
        self._generations: list[int] = []
        """Of all owners."""
        self._processes: dict[Client, _Process] = {}
        self._number = 0
        self._over = False
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        if holder is not None:
            self._selector.register(holder, selectors.EVENT_READ, HOLDER)

    def run(self) -> None:
        """Returns when the memories are to be freed."""
        while not self._over:
            now = time.monotonic()
            due = self._tenure.due(now)
            events = self._selector.select(None if due is None else max(0.0, due - now))
            for key, _ in events:
                self._on_event(key)
            self._do(self._tenure.tick(time.monotonic()))
        log("frees the memories and ends")

    # --- events ---

    def _on_event(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            self._accept()
        elif key.data == HOLDER:
            log("the cluster's process is gone")
            self._over = True
        elif key.fd == key.data.pidfd:
            self._on_died(key.data)
        elif key.data.connection is not None:
            self._on_readable(key.data)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        pid, user = peer_of(connection)
        if user != os.getuid() or len(self._processes) >= CLIENTS:
            log(f"process {pid} of user {user} was turned away")
            connection.close()
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # it is gone already, or in another namespace
            connection.close()
            return
        connection.setblocking(False)
        self._number += 1
        process = self._processes[self._number] = _Process(self._number, connection, pid, pidfd)
        self._selector.register(connection, selectors.EVENT_READ, process)
        self._selector.register(pidfd, selectors.EVENT_READ, process)

    def _on_readable(self, process: _Process) -> None:
        """Takes in one message."""
        assert process.connection is not None  # its reader
        descriptor = None
        try:
            data, descriptor = receive(process.connection)
            if not data:
                self._close(process)
            else:
                descriptor = self._on_message(process, data, descriptor)
        except BlockingIOError:
            return
        except (MsgspecError, UnicodeDecodeError, Truncated, Malformed) as error:
            log(f"process {process.pid} said what is no message: {error}")
            self._say(process, Refused(str(error)[:500]))
            self._close(process)
        except OSError as error:
            log(f"process {process.pid}: {error}")
            self._close(process)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _on_message(self, process: _Process, data: bytes, descriptor: int | None) -> int | None:
        """Returns the descriptor, if it is not held."""
        message, now = decode_asked(data), time.monotonic()
        self._tenure.heard(process.number, now)
        if isinstance(message, Claim):
            if message.node != self._node:
                raise Malformed(f"this is the keeper of node {self._node!r}")
            self._do(self._tenure.claimed(process.number, now))
            return descriptor
        if process.number != self._tenure.owner:
            raise Malformed("only the owner may say this")
        replaced = None
        match message:
            case Hold(memory, nbytes):
                if descriptor is None or os.fstat(descriptor).st_size != nbytes:
                    raise Malformed(f"no memory of {nbytes} bytes came for {memory!r}")
                replaced, descriptor = self.table.hold(message, descriptor), None
            case Drop():
                replaced = self.table.drop(message)
            case Space():
                self.table.note(message)
            case Forget():
                self.table.forget(message)
            case Alive(generation):
                if generation and generation not in self._generations:
                    self._generations = [*self._generations, generation][-GENERATIONS:]
        if replaced is not None:
            os.close(replaced)
        return descriptor

    def _on_died(self, process: _Process) -> None:
        while process.connection is not None and self._has_more(process.connection):
            self._on_readable(process)  # what it said before
        self._close(process)
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        del self._processes[process.number]
        self._do(self._tenure.died(process.number, time.monotonic()))

    def _has_more(self, connection: socket.socket) -> bool:
        try:
            return bool(connection.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _close(self, process: _Process) -> None:
        connection, process.connection = process.connection, None
        if connection is not None:
            self._selector.unregister(connection)
            connection.close()
            self._do(self._tenure.closed(process.number, time.monotonic()))

    # --- commands ---

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Grant(client):
                    self._grant(self._processes[client])
                case Wait(client, owner):
                    self._say(self._processes[client], Waits(self._processes[owner].pid))
                case Kill(client):
                    self._kill(self._processes[client])
                case End():
                    self._over = True

    def _kill(self, process: _Process) -> None:
        with suppress(ProcessLookupError):  # dead already: its descriptor will say so
            signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
            log(f"process {process.pid} has ended, or is killed: another one takes its place")

    def _grant(self, process: _Process) -> None:
        log(f"process {process.pid} owns {len(self.table.memories)} memories")
        for memory in self.table.memories.values():
            self._say(process, memory.held, memory.descriptor)
        for space in self.table.spaces:
            self._say(process, space)
        self._say(process, Granted(tuple(self._generations)))

    def _say(self, process: _Process, message: Told, descriptor: int | None = None) -> None:
        """A process that does not listen will be seen to be gone, or to hang."""
        if process.connection is None:
            return
        try:
            with_it = () if descriptor is None else (descriptor,)
            send(process.connection, encode(message), with_it)
        except OSError as error:
            log(f"process {process.pid} does not listen: {error}")


def log(text: str) -> None:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    print(f"{stamp}Z keeper[{os.getpid()}]: {text}", file=sys.stderr, flush=True)
