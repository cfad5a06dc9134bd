"""The peer: the same bytes at the same rate over one plain socket, between two processes that do
nothing else. What they cost a server beside them is what moving bytes costs on this machine.

Run by itself (`python -m benchmarks.serving_source.plain`), this module is one of the two
processes.
"""

import argparse
import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.testbed import Namespace
from shared.errors import LambdaScaleError

PIECE = 128 << 10
"""Bytes between two looks at the clock: a few ms of a link of about 100 Mbit/s."""
TIMEOUT_S = 30.0
"""Seconds for a connection, and for a piece."""


class PlainCopyFailed(LambdaScaleError):
    code = "plain_copy_failed"


@asynccontextmanager
async def plain_copy(
    source: Namespace, target: Namespace, address: str, nbytes: int, rate: int
) -> AsyncIterator[Coroutine[Any, Any, None]]:
    """A copy that begins now. Await what it gives for its end.

    `address` is the target's. `rate` is in bytes/s; 0: as fast as it goes.
    """
    receiver = _start(target, "receive", address, 0, nbytes, 0)
    try:
        port = int(await _line(receiver))
        sender = _start(source, "send", address, port, nbytes, rate)
        try:
            await _line(sender)
            ended = _ended(sender, receiver)
            try:
                yield ended
            finally:
                ended.close()
        finally:
            _stop(sender)
    finally:
        _stop(receiver)


def _start(namespace: Namespace, *arguments: str | int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.serving_source.plain", *map(str, arguments)]
    return namespace.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


async def _line(process: "subprocess.Popen[str]") -> str:
    """The next line of its output. PlainCopyFailed if it ends without a line."""
    assert process.stdout is not None
    line = await asyncio.to_thread(process.stdout.readline)
    if not line:
        _, errors = await asyncio.to_thread(process.communicate)
        raise PlainCopyFailed(f"a plain copy's process ended: {errors[-2000:]}")
    return line


async def _ended(*processes: "subprocess.Popen[str]") -> None:
    for process in processes:
        await _line(process)


def _stop(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


# --- the two processes ----------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("send", "receive"))
    parser.add_argument("address")
    parser.add_argument("port", type=int, help="to send to")
    parser.add_argument("bytes", type=int)
    parser.add_argument("rate", type=int, help="bytes/s to send at (0: as fast as it goes)")
    arguments = parser.parse_args()
    if arguments.role == "send":
        send((arguments.address, arguments.port), arguments.bytes, arguments.rate)
    else:
        receive(arguments.address, arguments.bytes)


def send(address: tuple[str, int], nbytes: int, rate: int) -> None:
    data = memoryview(bytes(range(256)) * -(-nbytes // 256))[:nbytes]
    with socket.create_connection(address, TIMEOUT_S) as sock:
        print("begun", flush=True)
        started = time.monotonic()
        for offset in range(0, nbytes, PIECE):
            if rate:
                time.sleep(max(0.0, started + offset / rate - time.monotonic()))
            sock.sendall(data[offset : offset + PIECE])
    print("ended", flush=True)


def receive(address: str, nbytes: int) -> None:
    """Exits with an error unless `nbytes` bytes come."""
    into = memoryview(bytearray(nbytes))
    with socket.create_server((address, 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        print(listener.getsockname()[1], flush=True)
        peer, _ = listener.accept()
    with peer:
        peer.settimeout(TIMEOUT_S)
        position = 0
        while position < nbytes:
            received = peer.recv_into(into[position:])
            if not received:
                sys.exit(f"{position} of {nbytes} bytes came")
            position += received
    print("ended", flush=True)


if __name__ == "__main__":
    main()
