"""What traces, metrics and logs cost: the same load with all of them and with none.

Run: .venv/bin/python -m benchmarks.observing, two to three minutes, where nothing else runs. Two
real clusters are up on this machine, and take turns. Each has two nodes and a model that fits on
neither, so that every request runs over two stages. One cluster keeps traces (of gateway, leader
and later stage), logs at `info`, and is scraped by a reader of `/metrics` in the rhythm of
deploy/prometheus. The other keeps no traces and no logs, and nobody scrapes it.

tokens/s    what clients of another process get, of all streams
CPU         processor time of all services of the cluster for 1,000 tokens

It ends with status 1 if the bar is not met: the median of the pairs' ratios of tokens/s.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.gateway.__main__ import bar, cpu_s, streamed
from benchmarks.gateway.model import BENCH
from benchmarks.machine import machine
from services.local.cluster import Cluster, ClusterSpec, bus_config
from services.local.demo_model import CheckpointSpec, make_checkpoint
from services.local.nats_servers import Place, free_ports
from services.local.publishing import import_model
from services.local.watch import Watch
from shared.bus.nats import NatsBus
from shared.messages.scaling import ImportModel

SPEC = CheckpointSpec(
    layers=14, hidden=256, intermediate=768, heads=8, kv_heads=4, vocab_size=320, context_length=512
)
BLOCKS, ARENA_BYTES = 16, 26_000_000
"""The model has 44 MB: each of the two nodes holds a half."""
STREAMS, TOKENS = 32, 64
SCRAPE_S = 5.0
SHARE = 0.98
NODES = ("node-0", "node-1")
SILENT = {"LAMBDASCALE_TELEMETRY_TRACE_DIR": "", "LAMBDASCALE_TELEMETRY_LOG_LEVEL": "off"}


@dataclass
class Side:
    """One of the two clusters."""

    name: str
    cluster: Cluster
    tokens_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def _used_s(self) -> float:
        return sum(cpu_s(process.pid) for process in self.cluster.state.processes)

    async def load(self) -> None:
        """One turn: all streams at once, to their ends."""
        before = self._used_s()
        came = await streamed(self.cluster.state.gateway_url, STREAMS, TOKENS)
        if came.failed:
            raise SystemExit(f"{self.name}: {came.failed} streams failed: {came.first_failure}")
        self.tokens_s.append(came.events / came.seconds)
        self.cpu_s.append(1e3 * (self._used_s() - before) / came.events)

    def forget(self) -> None:
        self.tokens_s.clear()
        self.cpu_s.clear()


async def scrape(urls: list[str]) -> None:
    """As Prometheus does, whichever cluster has its turn: each turn has as many as fall into it."""
    async with aiohttp.ClientSession() as session:
        while True:
            for url in urls:
                async with session.get(url) as response:
                    response.raise_for_status()
                    await response.read()
            await asyncio.sleep(SCRAPE_S)


@asynccontextmanager
async def side(folder: Path, checkpoint: Path, *, observed: bool) -> AsyncIterator[Side]:
    planner, registry, *nodes = free_ports(4)
    settings = {
        "LAMBDASCALE_NODE_THREADS": "1",
        "LAMBDASCALE_NODE_SLOTS": str(STREAMS),
        "LAMBDASCALE_NODE_ARENA_BYTES": str(ARENA_BYTES),
        "LAMBDASCALE_REGISTRY_DURABLE_COPIES": "1",
    }
    own: dict[str, dict[str, str]] = {}
    if observed:
        settings |= {
            "LAMBDASCALE_PLANNER_METRICS_PORT": str(planner),
            "LAMBDASCALE_REGISTRY_METRICS_PORT": str(registry),
        }
        own = {
            name: {"LAMBDASCALE_NODE_METRICS_PORT": str(port)}
            for name, port in zip(NODES, nodes, strict=True)
        }
    else:
        own = dict.fromkeys(("gateway", "planner", "registry", *NODES), SILENT)
    spec = ClusterSpec(
        directory=folder / ("observed" if observed else "plain"),
        nodes=len(NODES),
        gateway_port=0,
        settings=settings,
        places={name: Place(settings=changed) for name, changed in own.items()},
    )
    cluster = Cluster(spec)
    await cluster.start()
    try:
        async with NatsBus(bus_config(cluster.state), "bench") as bus:
            watch = Watch()
            await watch.follow(bus)
            model = ImportModel(path=str(checkpoint), name=BENCH, blocks=BLOCKS, min_instances=1)
            await import_model(bus, model, say=lambda _: None)
            while not watch.replicas:
                await watch.change()
            assert len(watch.replicas[0].stages) == len(NODES)
        ports = (planner, registry, *nodes) if observed else ()
        urls = [f"http://127.0.0.1:{port}/metrics" for port in ports]
        if observed:
            urls.append(f"{cluster.state.gateway_url}/metrics")
        async with asyncio.TaskGroup() as group:
            scraping = group.create_task(scrape(urls))
            yield Side("all of them" if observed else "none", cluster)
            scraping.cancel()
    finally:
        await cluster.stop()


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [our / their for our, their in zip(ours, theirs, strict=True)]


async def run(rounds: int) -> bool:
    print(f"{machine()}; {STREAMS} streams of {TOKENS} tokens over two stages, {rounds} rounds")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        make_checkpoint(folder / "model", SPEC)
        async with (
            side(folder, folder / "model", observed=True) as observed,
            side(folder, folder / "model", observed=False) as plain,
        ):
            for each in (observed, plain):
                await each.load()
                each.forget()
            for number in range(rounds):
                pair = (observed, plain) if number % 2 else (plain, observed)
                for each in pair:
                    await each.load()
            spans = sum(
                file.read_text().count("\n")
                for file in (observed.cluster.spec.directory / "traces").glob("*.jsonl")
            )
            silent = list((plain.cluster.spec.directory / "traces").glob("*.jsonl"))
    assert spans
    assert not silent
    print(f"{'':14}{'tokens/s':>10}{'CPU, s':>10}   medians; {spans:,} spans")
    for each in (plain, observed):
        rate, cpu = statistics.median(each.tokens_s), statistics.median(each.cpu_s)
        print(f"{each.name:14}{rate:10,.0f}{cpu:10.3f}")
    rate_ratios = ratios(observed.tokens_s, plain.tokens_s)
    cpu_ratios = ratios(observed.cpu_s, plain.cpu_s)
    middle = statistics.median(rate_ratios)
    low, _, high = statistics.quantiles(rate_ratios, n=4)
    print(
        f"{'ratio':14}{middle:10.3f}{statistics.median(cpu_ratios):10.3f}   of pairs; half "
        f"of those of tokens/s lie between {low:.3f} and {high:.3f}"
    )
    return bar(f"at least {SHARE:g} of the tokens/s", middle >= SHARE)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.observing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=20, help="turns of each cluster")
    return 0 if asyncio.run(run(parser.parse_args().rounds)) else 1


if __name__ == "__main__":
    sys.exit(main())
