"""How fast the TCP transport moves bytes between two processes, beside a plain socket copy of the
same bytes in the same run, and how exactly a paced link keeps its rate.

    python -m benchmarks.transport [--mib 512] [--rates 10,100]
"""

import argparse
import asyncio
import multiprocessing
import socket
import time
from multiprocessing.connection import Connection

import uvloop

from services.node.transport.tcp import TcpTransport

MIB = 1 << 20
READ = MIB
WINDOW = 8


def source(pipe: Connection, nbytes: int, rates: list[int]) -> None:
    data = memoryview(bytearray(b"\x5a") * nbytes)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        peer, _ = listener.accept()
        with peer:
            peer.sendall(data)
    for rate in rates:
        uvloop.run(serve(pipe, data, rate))


async def serve(pipe: Connection, data: memoryview, rate: int) -> None:
    async with transport(rate) as end:
        end.register("data", data, ready=len(data))
        pipe.send(end.address)
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)


def transport(rate: int) -> TcpTransport:
    return TcpTransport(
        "127.0.0.1",
        0,
        link_bytes_per_s=rate,
        on_message=lambda *_: None,
        on_peer_lost=lambda *_: None,
    )


def plain_copy(port: int, into: memoryview) -> float:
    """Seconds for all of `into` over one blocking socket."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        started, position = time.perf_counter(), 0
        while position < len(into):
            position += sock.recv_into(into[position:])
        return time.perf_counter() - started


async def pull(address: str, rate: int, into: memoryview) -> float:
    """Seconds for all of `into` in pipelined reads of one chunk each."""
    async with transport(rate) as end:
        await end.connect(address)
        window = asyncio.Semaphore(WINDOW)

        async def read(offset: int) -> None:
            async with window:
                part = into[offset : offset + READ]
                await end.read(address, "data", offset, part, priority=1)

        started = time.perf_counter()
        await asyncio.gather(*(read(offset) for offset in range(0, len(into), READ)))
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rates", default="10,100", help="paced rates, MB/s")
    arguments = parser.parse_args()
    rates = [0, *(int(float(rate) * 1e6) for rate in arguments.rates.split(","))]
    nbytes = arguments.mib * MIB
    into = memoryview(bytearray(nbytes))
    pipe, child_pipe = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=source, args=(child_pipe, nbytes, rates)
    )
    child.start()
    plain = nbytes / plain_copy(pipe.recv(), into) / 1e6
    print(f"plain socket copy   {plain:8.0f} MB/s")
    for rate in rates:
        # About two seconds of a paced link say enough.
        part = into[: min(nbytes, 2 * rate)] if rate else into
        moved = len(part) / uvloop.run(pull(pipe.recv(), rate, part)) / 1e6
        pipe.send("done")
        if rate:
            print(f"paced {rate / 1e6:6.0f} MB/s   {moved:8.2f} MB/s   {moved * 1e6 / rate:.4f}")
        else:
            print(f"transport           {moved:8.0f} MB/s   {moved / plain:.2f} of plain")
    child.join()


if __name__ == "__main__":
    main()
