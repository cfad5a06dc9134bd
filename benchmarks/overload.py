"""Ten times the load that a real cluster can carry: who is admitted, who is refused, and how fast.

Run: .venv/bin/python -m benchmarks.overload [--seconds 60]. A model with an objective for the time
to its first token has all nodes, and so no replica can be added. Bars: nine in ten of the admitted
keep the objective (p90), the rest are refused within 50 ms (p99) with a Retry-After, the gateway's
memory stays flat, and 2 s after the load is back to half of the capacity nobody waits any more.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import aiohttp

from benchmarks.chaos.bench import MODEL
from benchmarks.machine import machine
from benchmarks.multicast.bars import Bar
from services.local.cluster import Cluster, ClusterSpec, bus_config
from services.local.demo_model import make_checkpoint
from services.local.publishing import import_model
from services.local.watch import Watch
from shared import subjects
from shared.bus.nats import NatsBus
from shared.ids import ModelName
from shared.messages.pool import Models, ModelSet
from shared.messages.scaling import ImportModel

NODES, SLOTS, TOKENS, STEP_S = 2, 8, 20, 0.05
CAPACITY = NODES * SLOTS / (TOKENS * STEP_S)
"""Requests a second, if every slot is always taken."""
TIMES = 10
TTFT_S = 1.0
REFUSED_S, AFTER_S = 0.05, 2.0
GROWTH_MIB = 20.0
NAME = ModelName("overload")
SETTINGS = {
    "LAMBDASCALE_NODE_THREADS": "1",
    "LAMBDASCALE_NODE_ARENA_BYTES": str(16 << 20),
    "LAMBDASCALE_NODE_KV_BYTES": str(64 << 20),
    "LAMBDASCALE_NODE_STEP_FLOOR_S": str(STEP_S),
    "LAMBDASCALE_NODE_SLOTS": str(SLOTS),
    "LAMBDASCALE_REGISTRY_DURABLE_COPIES": "1",
}


@dataclass(frozen=True, slots=True)
class Asked:
    at: float
    status: int
    first_s: float
    """Until the first token, or until the refusal."""
    retry_after: str | None


async def ask(session: aiohttp.ClientSession, url: str, rng: random.Random) -> Asked:
    prompt = [rng.randrange(3, MODEL.vocab_size) for _ in range(12)]
    body = {
        "model": NAME, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    at = time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        await response.content.readany()
        first_s = time.monotonic() - at
        await response.read()
        return Asked(at, response.status, first_s, response.headers.get("Retry-After"))


async def offer(url: str, per_s: float, seconds: float) -> list[Asked]:
    """An open loop: requests come at their times, whatever becomes of those before."""
    rng = random.Random(1)
    limits = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limits) as session:
        began, tasks, at = time.monotonic(), [], 0.0
        while at < seconds:
            await asyncio.sleep(began + at - time.monotonic())
            tasks.append(asyncio.create_task(ask(session, url, rng)))
            at += rng.expovariate(per_s)
        return await asyncio.gather(*tasks)


def resident_mib(cluster: Cluster) -> float:
    pid = next(p.pid for p in cluster.state.processes if p.name == "gateway")
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4 / 1024


async def measure(seconds: float) -> list[Bar]:
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        make_checkpoint(directory / "model", MODEL)
        cluster = Cluster(
            ClusterSpec(
                directory=directory / "cluster", nodes=NODES, gateway_port=0, settings=SETTINGS
            )
        )
        await cluster.start(print)
        try:
            async with NatsBus(bus_config(cluster.state), "bench") as bus:
                watch = Watch()
                await watch.follow(bus)
                path = str(directory / "model")
                request = ImportModel(path=path, name=NAME, min_instances=NODES)
                await import_model(bus, request, say=print)
                change = ModelSet(name=NAME, ttft_s=TTFT_S)
                await bus.request(subjects.REGISTRY_MODEL_SET, change, Models, timeout=5.0)
                while len(watch.replicas) < NODES:
                    await watch.change()
                url = cluster.state.gateway_url
                await offer(url, CAPACITY / 2, 10.0)  # the pace is known from now on
                before = resident_mib(cluster)
                found = await offer(url, TIMES * CAPACITY, seconds)
                grown = resident_mib(cluster) - before
                await asyncio.sleep(AFTER_S)
                after = await offer(url, CAPACITY / 2, 10.0)
        finally:
            await cluster.stop()
    return list(bars(found, after, grown, seconds))


def bars(found: list[Asked], after: list[Asked], grown: float, seconds: float) -> Iterator[Bar]:
    print(machine())
    taken = [asked for asked in found if asked.status == 200]
    refused = [asked for asked in found if asked.status in (429, 503)]
    others = len(found) - len(taken) - len(refused)
    print(
        f"{len(found)} requests in {seconds:g} s at {TIMES} x the capacity of {CAPACITY:g}/s: "
        f"{len(taken)} admitted ({len(taken) / seconds / CAPACITY:.2f} x the capacity), "
        f"{len(refused)} refused, {others} others"
    )
    yield Bar(f"other answers: {others} (bar 0)", others == 0)
    firsts = [asked.first_s for asked in taken]
    p50, p90, p99 = (quantiles(firsts, n=100)[q] for q in (49, 89, 98))
    what = (
        f"time to first token of the admitted, p50 / p90 / p99: {p50:.2f} / {p90:.2f} / {p99:.2f} s"
    )
    yield Bar(f"{what} (bar p90 {TTFT_S:g} s)", p90 <= TTFT_S)
    slow = quantiles([asked.first_s for asked in refused], n=100)
    what = f"time to a refusal, p50 / p99: {1e3 * slow[49]:.0f} / {1e3 * slow[98]:.0f} ms"
    yield Bar(f"{what} (bar p99 {1e3 * REFUSED_S:g} ms)", slow[98] <= REFUSED_S)
    without = sum(asked.retry_after is None for asked in refused)
    yield Bar(f"refusals without Retry-After: {without} (bar 0)", without == 0)
    yield Bar(f"gateway's memory: {grown:+.1f} MiB (bar {GROWTH_MIB:g})", grown <= GROWTH_MIB)
    ill = sum(asked.status != 200 for asked in after)
    worst = max(asked.first_s for asked in after)
    what = f"{AFTER_S:g} s later, at half the capacity: {ill} refused, slowest first token"
    yield Bar(f"{what} {worst:.2f} s (bar {TTFT_S:g} s)", ill == 0 and worst <= TTFT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    for bar in asyncio.run(measure(parser.parse_args().seconds)):
        print(bar)


if __name__ == "__main__":
    main()
