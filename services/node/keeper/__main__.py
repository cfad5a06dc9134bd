"""`python -m services.node.keeper DIRECTORY NODE KEEP_S`: the keeper of a node's weights.

It returns once a keeper listens in the directory; the keeper itself goes on in the background.
With --foreground it stays, and tells systemd when it listens.
"""

import argparse
import fcntl
import os
import signal
import socket
import sys
from pathlib import Path

from services.node.keeper.messages import HOLDER
from services.node.keeper.process import Keeper, log
from services.node.keeper.sockets import LOCK, new_socket, short_path

LOG = "keeper.log"


def main() -> int:
    parser = argparse.ArgumentParser(prog="services.node.keeper", description=__doc__)
    parser.add_argument("directory", type=Path, help="the node's data directory")
    parser.add_argument("node", help="the node's id")
    parser.add_argument("keep_s", type=float, help="seconds without a process of the node, at most")
    parser.add_argument("--foreground", action="store_true")
    args = parser.parse_args()
    directory: Path = args.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0  # another keeper is there
    listener = _listen(directory)
    holder = _holder()
    if not args.foreground:
        _detach(directory)
    keeper = Keeper(args.node, args.keep_s, listener, holder)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    _tell_systemd()
    try:
        keeper.run()
    finally:
        log("ends")
        with short_path(directory) as path:
            os.unlink(path)
    return 0


def _listen(directory: Path) -> socket.socket:
    listener = new_socket()
    with short_path(directory) as path:
        Path(path).unlink(missing_ok=True)  # of a keeper that was killed: this one has the lock
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
    listener.listen(16)
    return listener


def _holder() -> int | None:
    pid = os.environ.get(HOLDER, "")
    return os.pidfd_open(int(pid)) if pid.isdecimal() else None


def _detach(directory: Path) -> None:
    """Goes on in a session of its own, without the terminal; the process that was started ends."""
    output = os.open(directory / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    if os.fork():
        os._exit(0)
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in ((0, nowhere), (1, output), (2, output)):
        os.dup2(descriptor, number)
    os.close(nowhere)
    os.close(output)
    os.chdir("/")


def _tell_systemd() -> None:
    """sd_notify(3), READY=1."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(b"READY=1", address.replace("@", "\0", 1))


if __name__ == "__main__":
    sys.exit(main())
