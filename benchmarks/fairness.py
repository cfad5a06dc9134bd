"""What one tenant at ten times its quota costs the others.

Run: .venv/bin/python -m benchmarks.fairness. A real cluster with two gateways and two replicas.
Tenants A to D ask at the rate of their quota. In every other phase tenant E asks too, at ten times
its quota, which is the same as theirs. The figure is the 99th percentile of the time to the first
token of A to D, with E and without.

With --no-limits E has no quota, and only the fair queue is between it and the others: that shows
what each of the two is worth.
"""

import argparse
import asyncio
import hashlib
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import uvloop

from benchmarks.watched import watched
from services.local.cluster import ClusterSpec
from services.local.demo_model import CheckpointSpec, make_checkpoint
from services.local.publishing import import_model
from shared import subjects
from shared.bus.base import Bus
from shared.ids import KeyId, ModelName, TenantId, id_source
from shared.messages.access import (
    AccessChange,
    AccessPage,
    AddKey,
    ChangeAccess,
    SetTenant,
)
from shared.messages.scaling import ImportModel

MODEL = ModelName("tiny")
SPEC = CheckpointSpec(
    layers=4, hidden=64, intermediate=96, heads=4, kv_heads=2, vocab_size=320, context_length=512
)
WITHIN, FLOODER = ("A", "B", "C", "D"), "E"
PER_S = 1.5
"""Requests a second of a tenant within its quota."""
TIMES = 10
PROMPT, TOKENS = 16, 24
NODES, SLOTS = 2, 8
STEP_S = 0.02
"""The least time of a step, so that the nodes and not this machine's processor are the limit."""
PHASE_S = 20.0
ROUNDS = 3
SETTLE_S = 3.0
BAR = 1.10
PER_MIN, AT_A_TIME = round(60 * PER_S), 4
"""The concurrency is about twice what a tenant has running at its rate."""


@dataclass
class Seen:
    """What the requests of a phase met."""

    first_s: list[float] = field(default_factory=list)
    """Of the tenants within their quota."""
    statuses: dict[str, Counter[int]] = field(default_factory=dict)


class Tenant:
    def __init__(self, name: str, key: str, rate: float, urls: tuple[str, ...]) -> None:
        self.name = name
        self.rate = rate
        self._key = key
        self._urls = urls
        self._draw = random.Random(name)

    async def ask(self, http: aiohttp.ClientSession, seen: Seen) -> None:
        url = self._draw.choice(self._urls)
        prompt = [self._draw.randrange(3, SPEC.vocab_size) for _ in range(PROMPT)]
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        headers = {"Authorization": f"Bearer {self._key}"}
        began = time.monotonic()
        async with http.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            seen.statuses.setdefault(self.name, Counter())[response.status] += 1
            if response.status != 200:
                return
            first = True
            async for line in response.content:
                if first and line.startswith(b"data: "):
                    first = False
                    if self.name != FLOODER:
                        seen.first_s.append(time.monotonic() - began)

    async def load(self, http: aiohttp.ClientSession, seen: Seen, seconds: float) -> None:
        """Poisson arrivals; whoever is refused does not come again."""
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            while (gap := self._draw.expovariate(self.rate)) < end - time.monotonic():
                await asyncio.sleep(gap)
                group.create_task(self.ask(http, seen))


async def change(bus: Bus, wish: AccessChange) -> None:
    message = ChangeAccess(change=wish)
    await bus.request(subjects.REGISTRY_ACCESS_CHANGE, message, AccessPage, timeout=10.0)


async def tenants(bus: Bus, urls: tuple[str, ...], *, limits: bool) -> list[Tenant]:
    made = []
    for name in (*WITHIN, FLOODER):
        tenant, key, secret = TenantId(name), KeyId(id_source()), secrets.token_urlsafe(32)
        limited = limits or name != FLOODER
        per_min, at_a_time = (PER_MIN, AT_A_TIME) if limited else (0, 0)
        quota = SetTenant(id=tenant, new=True, requests_per_min=per_min, concurrency=at_a_time)
        await change(bus, quota)
        digest = hashlib.sha256(secret.encode()).digest()
        await change(bus, AddKey(id=key, tenant=tenant, digest=digest))
        # A tenant that arrives at random at exactly its quota's rate would exceed it at times.
        rate = 0.8 * PER_S if name != FLOODER else TIMES * PER_S
        made.append(Tenant(name, f"ls-{key}-{secret}", rate, urls))
    return made


async def counts(http: aiohttp.ClientSession, tenant: Tenant, urls: tuple[str, ...]) -> None:
    """Waits until the tenant's key counts at every gateway."""
    headers = {"Authorization": f"Bearer {tenant._key}"}
    for url in urls:
        while True:
            async with http.get(f"{url}/v1/models", headers=headers) as response:
                if response.status == 200:
                    break
            await asyncio.sleep(0.1)


async def phase(
    http: aiohttp.ClientSession, asking: list[Tenant], seconds: float, into: Seen
) -> None:
    async with asyncio.TaskGroup() as group:
        for tenant in asking:
            group.create_task(tenant.load(http, into, seconds))


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measure(directory: Path, args: argparse.Namespace) -> int:
    make_checkpoint(directory / "tiny", SPEC)
    spec = ClusterSpec(
        directory=directory / "data",
        nodes=NODES,
        gateway_port=0,
        gateways=2,
        settings={
            "LAMBDASCALE_NODE_THREADS": "1",
            "LAMBDASCALE_NODE_ARENA_BYTES": str(64 << 20),
            "LAMBDASCALE_NODE_KV_BYTES": str(256 << 20),
            "LAMBDASCALE_NODE_SLOTS": str(SLOTS),
            "LAMBDASCALE_NODE_STEP_FLOOR_S": str(STEP_S),
            "LAMBDASCALE_REGISTRY_DURABLE_COPIES": "1",
        },
    )
    async with watched(spec) as (cluster, bus, watch):
        wish = ImportModel(
            path=str(directory / "tiny"), name=MODEL, min_instances=NODES, max_instances=NODES
        )
        await import_model(bus, wish, say=lambda _: None)
        while len(watch.replicas) < NODES:
            await watch.change()
        urls = cluster.state.gateway_urls
        asking = await tenants(bus, urls, limits=not args.no_limits)
        timeout = aiohttp.ClientTimeout(total=300)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            await counts(http, asking[-1], urls)
            return await compare(http, asking, args.seconds, args.rounds)


async def compare(
    http: aiohttp.ClientSession, asking: list[Tenant], seconds: float, rounds: int
) -> int:
    """Phases without E and with it take turns, so that the machine's own changes meet both."""
    await phase(http, asking[:-1], SETTLE_S, Seen())
    without, beside = Seen(), Seen()
    ratios = []
    for _ in range(rounds):
        one, other = Seen(), Seen()
        await phase(http, asking[:-1], seconds, one)
        await phase(http, asking, seconds, other)
        ratios.append(percentile(other.first_s, 0.99) / percentile(one.first_s, 0.99))
        for seen, total in ((one, without), (other, beside)):
            total.first_s += seen.first_s
            for name, statuses in seen.statuses.items():
                total.statuses.setdefault(name, Counter()).update(statuses)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("TTFT of A to D        requests   p50 ms   p90 ms   p99 ms")
    for text, seen in (("without E", without), ("with E at 10 x", beside)):
        values = [1000 * percentile(seen.first_s, share) for share in (0.5, 0.9, 0.99)]
        print(f"  {text:18} {len(seen.first_s):9}" + "".join(f"{value:9.1f}" for value in values))
    for name, statuses in sorted(beside.statuses.items()):
        told = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
        print(f"  {name}: {told}")
    ratio = percentile(beside.first_s, 0.99) / percentile(without.first_s, 0.99)
    each = ", ".join(f"{one:.2f}" for one in ratios)
    met = "met" if ratio <= BAR else "MISSED"
    print(
        f"p99 with E / without: {ratio:.3f} x (rounds: {each}; median "
        f"{statistics.median(ratios):.2f}); bar {BAR} x: {met}"
    )
    return 0 if ratio <= BAR else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fairness", description=__doc__)
    parser.add_argument("--seconds", type=float, default=PHASE_S, help="of each phase")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-limits", action="store_true", help="E has no quota")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        return uvloop.run(measure(Path(directory), args))


if __name__ == "__main__":
    sys.exit(main())
