"""How fast the transport moves bytes between two processes of this machine: over TCP and through
shared memory, with and without the digests that a node checks, beside a plain socket copy of the
same bytes in the same run. Also how exactly a paced link keeps its rate.

    python -m benchmarks.transport [--mib 512] [--runs 5] [--rates 10,100]

Each way takes its turn in every run; medians are printed. Bars: TCP at least 0.8 of the plain copy,
digests under 5 %.
"""

import argparse
import asyncio
import multiprocessing
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import median

import uvloop

from services.node.checkpoints.packing import Digest
from services.node.memory.arena import Arena
from services.node.transport.base import NoListener
from services.node.transport.shm import ShmDirect
from services.node.transport.tcp import TcpTransport

MIB = 1 << 20
READ = 4 * MIB
WINDOW = 4
DIGEST = " + digests"
PLAIN = "plain socket copy"
UNPACED = ("tcp", "tcp" + DIGEST, "shm", "shm" + DIGEST)


def source(pipe: Connection, nbytes: int) -> None:
    """Serves one copy after the other, as told."""
    arena = Arena(nbytes)
    data = arena.memory.view
    data[:] = bytes(range(256)) * (nbytes // 256)
    while (told := pipe.recv()) is not None:
        way, rate = told
        if way == PLAIN:
            send_plainly(pipe, data)
        else:
            uvloop.run(serve(pipe, arena, way, rate))


def send_plainly(pipe: Connection, data: memoryview) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        peer, _ = listener.accept()
        with peer:
            peer.sendall(data)


async def serve(pipe: Connection, arena: Arena, way: str, rate: int) -> None:
    async with transport(arena, way, rate) as end:
        end.register("data", arena.memory.view, ready=arena.nbytes)
        pipe.send(end.address)
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)


def transport(arena: Arena, way: str, rate: int) -> TcpTransport:
    shm = ShmDirect([arena.memory], machine="here", bytes_per_s=rate)
    return TcpTransport(
        "127.0.0.1",
        0,
        link_bytes_per_s=rate,
        ways=[shm] if way.startswith("shm") else [],
        listener=NoListener(),
    )


def plain_copy(port: int, into: memoryview) -> float:
    """Seconds for all of `into` over one blocking socket."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        started, position = time.perf_counter(), 0
        while position < len(into):
            position += sock.recv_into(into[position:])
        return time.perf_counter() - started


async def pull(address: str, arena: Arena, way: str, rate: int, nbytes: int) -> float:
    """Seconds for `nbytes` in pipelined reads of one chunk each."""
    async with transport(arena, way, rate) as end:
        await end.connect(address)
        window = asyncio.Semaphore(WINDOW)

        async def read(offset: int) -> None:
            async with window:
                into = arena.memory.view[offset : min(offset + READ, nbytes)]
                digest = Digest() if way.endswith(DIGEST) else None
                received = digest.update if digest else None
                result = await end.read(
                    address, "data", offset, into, priority=1, received=received
                )
                if not way.startswith(result.way):
                    raise RuntimeError(f"{way} was asked for, {result.way} used")
                if digest:
                    digest.digest()

        started = time.perf_counter()
        await asyncio.gather(*(read(offset) for offset in range(0, nbytes, READ)))
        return time.perf_counter() - started


def measure(pipe: Connection, arena: Arena, way: str, rate: int, nbytes: int) -> float:
    """Bytes a second."""
    pipe.send((way, rate))
    if way == PLAIN:
        return nbytes / plain_copy(pipe.recv(), arena.memory.view[:nbytes])
    moved = nbytes / uvloop.run(pull(pipe.recv(), arena, way, rate, nbytes))
    pipe.send("done")
    return moved


def report(rates: dict[str, Sequence[float]]) -> None:
    plain = median(rates[PLAIN])
    for way, values in rates.items():
        middle = median(values)
        line = f"{way:20s} {middle / 1e6:6.0f} MB/s   {middle / plain:5.2f} of plain"
        line += f"   ({min(values) / 1e6:.0f}-{max(values) / 1e6:.0f})"
        if way == "tcp":
            line += f"   bar 0.80: {'met' if middle >= 0.8 * plain else 'not met'}"
        if way.endswith(DIGEST):
            cost = 1 - middle / median(rates[way.removesuffix(DIGEST)])
            line += f"   digests cost {cost:.1%}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rates", default="10,100", help="paced rates, MB/s")
    arguments = parser.parse_args()
    nbytes = arguments.mib * MIB
    arena = Arena(nbytes)
    pipe, child_pipe = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=source, args=(child_pipe, nbytes))
    child.start()
    ways = (PLAIN, *UNPACED)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(arguments.runs):
        for way in ways:
            found[way].append(measure(pipe, arena, way, 0, nbytes))
    report(dict(found))
    for rate in (int(float(rate) * 1e6) for rate in arguments.rates.split(",")):
        # About two seconds of a paced link are enough.
        part = min(nbytes, 2 * rate)
        for way in ("tcp", "tcp" + DIGEST):
            moved = measure(pipe, arena, way, rate, part)
            print(f"{way:14s} paced {rate / 1e6:4.0f} MB/s   {moved / rate:.4f} of it")
    pipe.send(None)
    child.join()


if __name__ == "__main__":
    main()
