"""What the gateway costs, beside the node's own answer and a bare HTTP server.

Run: .venv/bin/python -m benchmarks.gateway, where nothing else runs. It starts a real cluster of
one node with a tiny model on this machine, and measures

- latency: the same one-token request over HTTP and straight to the node over NATS, and over HTTP to
  a bare server of aiohttp that answers at once, one at a time, in turn. Beside them, what nothing
  can go below: a question over NATS that the node answers at once;
- streams: the tokens that a second of the gateway's processor time brings to 64 clients, beside the
  same events from the bare server in the same rhythm;
- many: the gateway's memory with 5,000 streams at once;
- with `--peer`, the first two for another gateway, litellm's proxy, before the bare server.

It ends with status 1 if a bar is not met.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec

from benchmarks.gateway.clients import Came
from benchmarks.gateway.latency import BODY, Direct, Http, by_aiohttp
from benchmarks.gateway.model import BENCH, SPEC
from benchmarks.gateway.peer import litellm
from benchmarks.machine import machine
from services.local.cluster import GATEWAY, Cluster, ClusterSpec, bus_config
from services.local.credentials import User
from services.local.demo_model import make_checkpoint
from services.local.publishing import import_model
from services.local.watch import Watch
from shared.bus.nats import NatsBus
from shared.messages.scaling import ImportModel
from shared.permissions import Role

WARM_UP = 50
ADDED_P50_MS, ADDED_P99_MS = 0.6, 3.0
STREAMS, TOKENS = 64, 256
OF_BARE = 0.5
"""The share of the bare server's tokens a second of processor time."""
MANY_TOKENS = 180
"""So many that the first stream has not ended when the last one begins."""
MANY_MIB = 1024.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def most_mib(pid: int) -> float:
    """The most resident memory that the process ever had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


class Times(NamedTuple):
    """In milliseconds."""

    p50: float
    p99: float

    def minus(self, other: "Times") -> "Times":
        return Times(self.p50 - other.p50, self.p99 - other.p99)

    def __str__(self) -> str:
        return f"{self.p50:8.2f}{self.p99:8.2f}"


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def bar(text: str, met: bool) -> bool:
    print(f"  bar: {text}: {'met' if met else 'NOT met'}")
    return met


class Bare:
    """The bare server."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process = process
        self.pid = process.pid
        self.url = f"http://127.0.0.1:{port}"

    @classmethod
    async def start(cls) -> "Bare":
        command = (sys.executable, "-m", "benchmarks.gateway.bare")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe)
        assert process.stdout
        return cls(process, int(await process.stdout.readline()))

    async def stop(self) -> None:
        self._process.kill()
        await self._process.wait()


async def streamed(url: str, streams: int, tokens: int) -> Came:
    """What came of so many streams at once, to clients of another process."""
    command = (sys.executable, "-m", "benchmarks.gateway.clients", url, str(streams), str(tokens))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    return msgspec.json.decode(said, type=Came)


async def latency(url: str, bare: Bare, direct: Direct, rounds: int) -> bool:
    ours, theirs = await Http.connect(url, BODY), await Http.connect(bare.url, BODY)
    async with aiohttp.ClientSession() as session:
        found = await in_turn(
            {
                "through the gateway": ours.ask,
                "straight to the node": direct.ask,
                "the bare server": theirs.ask,
                "through the gateway, aiohttp's client": partial(by_aiohttp, session, url),
                "the bare server, aiohttp's client": partial(by_aiohttp, session, bare.url),
                "a question over NATS": direct.ping,
            },
            rounds,
        )
    ours.close()
    theirs.close()
    gateway, straight, *_ = found
    added = gateway.minus(straight)
    print(f"  {'added by the gateway':<56}{added}")
    text = f"at most {ADDED_P50_MS:g} ms more at p50, {ADDED_P99_MS:g} ms at p99"
    return bar(text, added.p50 <= ADDED_P50_MS and added.p99 <= ADDED_P99_MS)


async def beside(bare: Bare, rounds: int, runs: int) -> None:
    """What another gateway adds to the bare server, and the tokens of a second of its processor
    time."""
    async with litellm(bare.url) as peer:
        through, straight = await Http.connect(peer.url, BODY), await Http.connect(bare.url, BODY)
        gateway, server = await in_turn(
            {"through litellm's proxy": through.ask, "the bare server": straight.ask}, rounds
        )
        print(f"  {'added by litellm':<56}{gateway.minus(server)}")
        rates = []
        for _ in range(runs):
            before = cpu_s(peer.pid)
            came = await streamed(peer.url, STREAMS, TOKENS)
            if came.failed:
                print(f"  litellm: {came.failed} streams failed: {came.first_failure}")
            rates.append(came.events / (cpu_s(peer.pid) - before))
        print(f"tokens for a second of processor time\n  litellm {statistics.median(rates):14,.0f}")


async def in_turn(asks: Mapping[str, Callable[[], Awaitable[float]]], rounds: int) -> list[Times]:
    """How long each takes, one at a time, in turn. Prints it."""
    taken = [[await ask() for ask in asks.values()] for _ in range(WARM_UP + rounds)]
    found = []
    print(f"time to first token, {rounds} requests one at a time, ms{'p50':>17}{'p99':>8}")
    for name, column in zip(asks, zip(*taken[WARM_UP:], strict=True), strict=True):
        found.append(Times(1e3 * statistics.median(column), 1e3 * percentile(column, 0.99)))
        print(f"  {name:<56}{found[-1]}")
    return found


async def streams(url: str, gateway: int, bare: Bare, rounds: int) -> bool:
    rates: dict[str, list[float]] = {"gateway": [], "bare": []}
    print(f"{STREAMS} streams of {TOKENS} tokens: tokens for a second of processor time")
    for _ in range(rounds):
        tick_s = 0.0
        for name, at, pid in (("gateway", url, gateway), ("bare", bare.url, bare.pid)):
            before = cpu_s(pid)
            came = await streamed(f"{at}?tick_s={tick_s}", STREAMS, TOKENS)
            if came.failed:
                print(f"  {name}: {came.failed} streams failed: {came.first_failure}")
                return False
            rates[name].append(came.events / (cpu_s(pid) - before))
            tick_s = came.seconds / TOKENS
    ours, theirs = (statistics.median(found) for found in rates.values())
    print(f"  the gateway {ours:10,.0f}\n  the bare server {theirs:6,.0f}")
    return bar(f"{OF_BARE:g} x the bare server's ({ours / theirs:.2f} x)", ours >= OF_BARE * theirs)


async def many(url: str, gateway: int, count: int) -> bool:
    before = most_mib(gateway)
    came = await streamed(url, count, MANY_TOKENS)
    after = most_mib(gateway)
    print(
        f"{count} streams of {MANY_TOKENS} tokens at once: {came.ended} came to their end, at most "
        f"{came.most_open} open, {came.seconds:.1f} s, {came.events / came.seconds:,.0f} tokens/s\n"
        f"  the gateway's memory {before:.0f} MiB before, {after:.0f} MiB at most"
    )
    if came.failed:
        print(f"  {came.failed} failed: {came.first_failure}")
    right = came.ended == count == came.most_open and came.events >= count * MANY_TOKENS
    return bar(f"all right, in less than {MANY_MIB:g} MiB", right and after < MANY_MIB)


async def run(args: argparse.Namespace) -> bool:
    print(machine())
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "model"
        make_checkpoint(checkpoint, SPEC)
        settings = {
            "LAMBDASCALE_NODE_THREADS": "1",
            "LAMBDASCALE_NODE_SLOTS": str(max(STREAMS, args.many)),
            "LAMBDASCALE_GATEWAY_MAX_QUEUE": str(2 * args.many + STREAMS),
            "LAMBDASCALE_GATEWAY_MAX_CONNECTIONS": str(2 * args.many + STREAMS),
        }
        spec = ClusterSpec(
            directory=Path(directory) / "cluster", nodes=1, gateway_port=0, settings=settings
        )
        cluster = Cluster(spec)
        await cluster.start()
        bare = await Bare.start()
        try:
            return await measure(cluster, bare, checkpoint, args)
        finally:
            await bare.stop()
            await cluster.stop()


async def measure(cluster: Cluster, bare: Bare, checkpoint: Path, args: argparse.Namespace) -> bool:
    url = cluster.state.gateway_url
    gateway = next(one.pid for one in cluster.state.processes if one.role == GATEWAY)
    as_gateway = bus_config(cluster.state, user=User(Role.GATEWAY))
    async with (
        NatsBus(bus_config(cluster.state), "bench") as bus,
        NatsBus(as_gateway, "bench-gateway") as gateway_bus,
    ):
        watch = Watch()
        await watch.follow(bus)
        model = ImportModel(path=str(checkpoint), name=BENCH, min_instances=1)
        record = await import_model(bus, model, say=lambda _: None)
        while not watch.replicas:
            await watch.change()
        direct = Direct(gateway_bus, record, watch)
        await direct.start()
        met = await latency(url, bare, direct, args.rounds)
        met &= await streams(url, gateway, bare, args.runs)
        if args.many:
            met &= await many(url, gateway, args.many)
        if args.peer:
            await beside(bare, args.rounds, args.runs)
        return met


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gateway",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=1000, help="requests of the latency part")
    parser.add_argument("--runs", type=int, default=5, help="runs of the streams part")
    parser.add_argument("--many", type=int, default=5000, help="streams at once; 0: not measured")
    parser.add_argument("--peer", action="store_true", help="litellm's proxy beside it")
    return 0 if asyncio.run(run(parser.parse_args())) else 1


if __name__ == "__main__":
    sys.exit(main())
