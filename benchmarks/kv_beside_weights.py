"""How long KV takes that shares a paced port with weights, beside what it takes alone.

Run: `.venv/bin/python -m benchmarks.kv_beside_weights`, half a minute. A source in a process of its
own sends a quarter of a second of KV over TCP, again and again, first alone and then while weights
are read all the time: by another node, or by the one that reads the KV. Loading may slow KV by the
share that weights get in any case (`shared.port_shares`).
"""

import argparse
import asyncio
import multiprocessing
import time
from contextlib import AsyncExitStack, suppress
from multiprocessing.connection import Connection
from statistics import median

import uvloop

from services.node.memory.arena import Arena
from services.node.transport.base import NoListener
from services.node.transport.pacing import SERVING_FLOW
from services.node.transport.tcp import TcpTransport
from shared import telemetry
from shared.config import TelemetryConfig
from shared.port_shares import WEIGHTS_LEAST

MIB = 1 << 20
KV_S = 0.25
SETTLE_S = 0.3
WINDOW = 4
BAR = 1 / (1 - WEIGHTS_LEAST) * 1.05


def transport(rate: int) -> TcpTransport:
    return TcpTransport("127.0.0.1", 0, link_bytes_per_s=rate, ways=[], listener=NoListener())


def source(pipe: Connection, rate: int) -> None:
    telemetry.configure("benchmark", TelemetryConfig(log_level="off"))

    async def serve() -> None:
        arena = Arena(64 * MIB)
        async with transport(rate) as end:
            end.register("weights", arena.memory.view, ready=arena.nbytes, flow="model")
            end.register("kv", arena.memory.view, ready=arena.nbytes, flow=SERVING_FLOW)
            pipe.send(end.address)
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)

    uvloop.run(serve())


async def measure(address: str, rate: int, runs: int, *, together: bool) -> tuple[float, ...]:
    """Seconds of KV alone, and beside weights; and the share of the port that weights had."""
    weights, kv, nbytes = Arena(WINDOW * MIB), Arena(64 * MIB), int(rate * KV_S)
    moved = 0
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(transport(rate))
        other = one if together else await stack.enter_async_context(transport(rate))

        async def read() -> float:
            began = time.perf_counter()
            await other.read(address, "kv", 0, kv.memory.view[:nbytes], priority=0)
            return time.perf_counter() - began

        async def load(place: int) -> None:
            nonlocal moved
            into, step = weights.memory.view[place * MIB : (place + 1) * MIB], 0
            while True:
                step += 1
                await one.read(address, "weights", place * MIB, into, priority=step)
                moved += MIB

        alone = [await read() for _ in range(runs)]
        loads = [asyncio.create_task(load(place)) for place in range(WINDOW)]
        await asyncio.sleep(SETTLE_S)
        before, began = moved, time.perf_counter()
        beside = [await read() for _ in range(runs)]
        share = (moved - before) / (time.perf_counter() - began) / rate
        for each in loads:
            each.cancel()
            with suppress(asyncio.CancelledError):
                await each
    return median(alone), median(beside), share


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mbit", default="100,400", help="rates of the port, 10^6 bits/s")
    parser.add_argument("--runs", type=int, default=8)
    args = parser.parse_args()
    telemetry.configure("benchmark", TelemetryConfig(log_level="off"))
    worst = 0.0
    for mbit in map(int, args.mbit.split(",")):
        for together in (False, True):
            rate = mbit * 125_000
            pipe, child = multiprocessing.Pipe()
            spawn = multiprocessing.get_context("spawn")
            process = spawn.Process(target=source, args=(child, rate))
            process.start()
            alone, beside, share = uvloop.run(
                measure(pipe.recv(), rate, args.runs, together=together)
            )
            pipe.send(None)
            process.join()
            worst = max(worst, beside / alone)
            where = "the same node" if together else "another node"
            print(
                f"{mbit} Mbit/s, weights to {where}: KV alone {alone * 1e3:.0f} ms, beside weights "
                f"{beside * 1e3:.0f} ms, {beside / alone:.2f} times; weights had {share:.0%}",
                flush=True,
            )
    print(f"the worst: {worst:.2f}; bar: {BAR:.2f}")
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
