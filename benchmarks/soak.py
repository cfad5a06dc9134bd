"""Whether anything grows: a real cluster under mixed traffic scales out and in every few seconds.

Run: .venv/bin/python -m benchmarks.soak [--minutes 30] [--figure PATH]. Every few seconds it takes
samples: of each process resident memory, open files and threads, and of each of NATS' buckets the
keys. A figure is the slope of the second half of the samples, an hour; the limit is none. Requests
of every kind that clients send come all the time: streams and whole answers, long and short,
cancelled, and wrong.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, linear_regression

import aiohttp
import nats

from benchmarks.chaos import harness
from benchmarks.chaos.bench import MODEL
from benchmarks.machine import machine
from services.local.cluster import Cluster
from services.local.demo_model import make_checkpoint

SAMPLE_S = 5.0
PERIOD_S = 8.0
"""Between two bursts, each of which makes the model scale out; then it scales in again."""
BURST = 20
PAGE_KIB = 4
GROWTH = {"MiB": 3.0, "files": 1.0, "threads": 1.0, "keys": 5.0}
"""What a process may grow in an hour and still count as flat: below what the samples resolve."""


@dataclass(slots=True)
class Series:
    """Samples of one quantity of one process."""

    unit: str
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        self.times.append(at)
        self.values.append(value)

    @property
    def per_hour(self) -> float:
        """The slope of the second half: the first half fills caches."""
        half = len(self.times) // 2
        return linear_regression(self.times[half:], self.values[half:]).slope * 3600

    @property
    def late(self) -> float:
        return fmean(self.values[len(self.values) // 2 :])


class Samples:
    def __init__(self) -> None:
        self.series: dict[tuple[str, str], Series] = {}
        self._began = time.monotonic()

    def add(self, name: str, unit: str, value: float) -> None:
        series = self.series.setdefault((name, unit), Series(unit))
        series.add(time.monotonic() - self._began, value)

    def take(self, cluster: Cluster) -> None:
        for process in cluster.state.processes:
            directory = Path(f"/proc/{process.pid}")
            resident = int((directory / "statm").read_text().split()[1]) * PAGE_KIB / 1024
            self.add(process.name, "MiB", resident)
            self.add(process.name, "files", len(list((directory / "fd").iterdir())))
            self.add(process.name, "threads", len(list((directory / "task").iterdir())))

    async def keys(self, urls: Sequence[str]) -> None:
        client = await nats.connect(list(urls))
        try:
            for stream in await client.jetstream().streams_info():
                self.add(stream.config.name or "", "keys", stream.state.messages)
        finally:
            await client.close()


async def traffic(session: aiohttp.ClientSession, urls: Sequence[str], rng: random.Random) -> None:
    """One request of a random kind. What comes back does not matter here, only that it does."""
    prompt = [rng.randrange(3, MODEL.vocab_size) for _ in range(rng.randrange(4, 200))]
    body: dict[str, object] = {
        "model": harness.MODEL,
        "prompt": prompt,
        "max_tokens": rng.choice((1, 8, 40)),
        "ignore_eos": True,
        "stream": rng.random() < 0.6,
        "temperature": rng.choice((0, 1)),
    }
    kind = rng.random()
    if kind < 0.1:
        body["model"] = "no-such-model"
    elif kind < 0.15:
        body["prompt"] = "x" * 5000  # longer than the context
    timeout = aiohttp.ClientTimeout(total=0.3 if kind > 0.9 else 60.0)  # a client that goes away
    try:
        async with session.post(
            f"{rng.choice(urls)}/v1/completions", json=body, timeout=timeout
        ) as response:
            await response.read()
    except (aiohttp.ClientError, TimeoutError):
        pass


async def soak(minutes: float) -> Samples:
    rng = random.Random(1)
    samples = Samples()
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        make_checkpoint(directory / "model", MODEL)
        async with (
            harness.running(directory / "cluster", directory / "model", None, print) as up,
            aiohttp.ClientSession() as session,
            asyncio.TaskGroup() as group,
        ):
            urls = up.cluster.state.gateway_urls
            began = time.monotonic()
            burst_at = began
            while time.monotonic() < began + 60 * minutes:
                if time.monotonic() >= burst_at:
                    burst_at += PERIOD_S
                    for _ in range(BURST):
                        group.create_task(traffic(session, urls, rng))
                group.create_task(traffic(session, urls, rng))
                await asyncio.sleep(0.5)
                if time.monotonic() - began > SAMPLE_S * len(
                    samples.series.get(("nats", "MiB"), Series("")).times
                ):
                    samples.take(up.cluster)
                    await samples.keys(up.cluster.state.nats_url.split(","))
                    up.watch.arrivals.clear()
    return samples


def report(samples: Samples) -> None:
    print(machine())
    for unit, most in GROWTH.items():
        print(f"{unit}: mean of the second half, growth an hour (flat: within {most:g})")
        for (name, its_unit), series in sorted(samples.series.items()):
            if its_unit == unit:
                flat = "flat" if series.per_hour <= most else "GROWS"
                print(f"  {name:24}{series.late:10.1f}{series.per_hour:+10.2f}  {flat}")


def draw(samples: Samples, path: Path) -> None:
    from matplotlib import pyplot

    _, axes = pyplot.subplots(len(GROWTH), 1, figsize=(9, 12), sharex=True)
    for axis, unit in zip(axes, GROWTH, strict=True):
        for (name, its_unit), series in sorted(samples.series.items()):
            if its_unit == unit:
                axis.plot([t / 60 for t in series.times], series.values, label=name, linewidth=0.8)
        axis.set_ylabel(unit)
        axis.legend(fontsize=5, ncols=2)
    axes[-1].set_xlabel("minutes")
    pyplot.savefig(path, bbox_inches="tight", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    samples = asyncio.run(soak(arguments.minutes))
    report(samples)
    if arguments.figure:
        draw(samples, arguments.figure)


if __name__ == "__main__":
    main()
