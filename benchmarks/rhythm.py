"""What a model's history is worth to the planner, beside the same load without history.

Run: `.venv/bin/python -m benchmarks.rhythm`, four minutes. The real services run in virtual time on
modelled hardware, with Llama-2-13B, of which one replica stays.

*A daily rhythm*: on each of three days requests come at the same time of day, at random (Poisson,
another seed each day), 60 a second for 15 s, up to 2 s sooner or later (12 H800 nodes, a TTFT
objective of 300 ms). What the planner remembers of the first two days, in its durable store, is
there on the third. Only the minutes around the load are simulated. The third day is run twice: with
what is remembered, and without.

*Bursts that come again*: 30 requests a second for 2.5 s, at random times, 20 s apart in the mean,
or 60 s (8 A100 nodes of 100 Gbit/s). *A steady load*: 6 requests a second, in which there is
nothing to learn. Both are run with `planner.anticipate` and without; the history begins empty.
"""

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import msgspec

from benchmarks.no_options import describe
from services.planner.core.rhythm import History
from shared import subjects, telemetry
from shared.bus.memory import MemoryBus
from shared.config import TelemetryConfig
from simulation import loop, systems
from simulation.bus import SimBroker
from simulation.cluster import Cluster, ClusterSpec
from simulation.hardware import hardware
from simulation.measures import integral
from simulation.models import model
from simulation.results import SystemRun
from simulation.run import CHUNKS, LIMIT_S, result, run_cluster, watched
from simulation.traces import Row

MODEL, HARDWARE, NODES = "llama-2-13b", "h800-400g", 12
BEGIN_S, LASTS_S, RATE, SPREAD_S = 60.0, 15.0, 60.0, 2.0
SLOT_OVER_S = 420.0
"""A late request keeps the cluster running until the slots with load are kept."""
OBJECTIVE_S = 0.3
DAYS = range(3, 6)
"""Seeds of third days."""
SEEDS = range(1, 4)
RECURRING_S, TAIL_S = 300.0, 30.0
BURST_RATE, BURST_S = 30.0, 2.5
STEADY_RATE = 6.0
SLACK = 1.01
"""What history may cost in device seconds where there is nothing to learn."""
Histories = Mapping[str, History]


@dataclass(frozen=True)
class Day:
    run: SystemRun
    histories: Histories

    @property
    def ttft(self) -> list[float]:
        return sorted(r.ttft_s for r in self.run.requests if r.ttft_s is not None)[:-1]

    @property
    def gpu_s(self) -> float:
        return integral(self.run, lambda sample: sample.gpus, SLOT_OVER_S)


def cluster(ttft_s: float) -> ClusterSpec:
    return ClusterSpec(
        system=systems.named("lambdascale"),
        hardware=hardware(HARDWARE),
        models=(model(MODEL),),
        nodes=NODES,
        chunks=CHUNKS,
        slots=32,
        min_instances=1,
        objectives=((MODEL, ttft_s, 0.0),),
    )


def load(seed: int) -> list[Row]:
    draw = random.Random(seed)
    at = BEGIN_S + draw.uniform(-SPREAD_S, SPREAD_S)
    end, rows = at + LASTS_S, list[Row]()
    while at < end:
        rows.append(Row(at, 1024, 128, MODEL))
        at += draw.expovariate(RATE)
    return [*rows, Row(SLOT_OVER_S, 16, 2, MODEL)]


def simulate(spec: ClusterSpec, rows: Sequence[Row], seed: int, known: Histories) -> Day:
    """One day, with what the planner finds in its store, and what it leaves there."""

    async def day() -> Day:
        broker = SimBroker()
        async with MemoryBus(broker, "earlier") as bus:
            bucket = await bus.kv(subjects.KV_RHYTHMS)
            for key, history in known.items():
                await bucket.put(key, msgspec.msgpack.encode(history))
        async with Cluster(spec, broker) as there:
            watch = await watched(there, rows)
            stored = await (await there.bus.kv(subjects.KV_RHYTHMS)).entries()
        found = {e.key: msgspec.msgpack.decode(e.value, type=History) for e in stored}
        return Day(result(spec.system.name, watch), found)

    return loop.run(day(), seed=seed, limit_s=LIMIT_S)


def earlier(histories: Histories, days: int) -> Histories:
    """The same, but seen some days before."""
    return {
        key: History(h.since - days, {day - days: kept for day, kept in h.days.items()})
        for key, h in histories.items()
    }


def together(first: Histories, second: Histories) -> Histories:
    return {
        key: History(min(h.since, second[key].since), {**h.days, **second[key].days})
        for key, h in first.items()
        if key in second
    }


def at(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))]


def recurring(seed: int, apart_s: float) -> list[Row]:
    draw, rows, begin = random.Random(seed), list[Row](), 5.0
    while begin < RECURRING_S:
        rows += arrivals(draw, begin, begin + BURST_S, BURST_RATE)
        begin += BURST_S + draw.expovariate(1 / apart_s)
    return rows


def steady(seed: int) -> list[Row]:
    return list(arrivals(random.Random(seed), 5.0, RECURRING_S, STEADY_RATE))


def arrivals(draw: random.Random, at: float, until: float, rate: float) -> Iterator[Row]:
    while at < until:
        yield Row(at, 1024, 64, MODEL)
        at += draw.expovariate(rate)


def compared(name: str, loads: Sequence[Sequence[Row]]) -> tuple[float, float]:
    """TTFT p90 and device seconds with history, as shares of those without; medians."""
    spec = replace(cluster(0.0), hardware=hardware("a100-100g"), nodes=8, slots=16, checked=False)
    ratios: list[tuple[float, float]] = []
    for seed, rows in zip(SEEDS, loads, strict=True):
        found: list[tuple[float, float]] = []
        for anticipate in (False, True):
            run = run_cluster(replace(spec, anticipate=anticipate), rows, seed)
            waits = sorted(r.ttft_s for r in run.requests if r.ttft_s is not None)
            until = RECURRING_S + TAIL_S
            copies = integral(run, lambda sample: sample.host_bytes, until) / model(MODEL).nbytes
            found.append((at(waits, 0.9), integral(run, lambda sample: sample.gpus, until)))
            known = "with history" if anticipate else "without"
            p50, p90, p99 = (at(waits, share) for share in (0.5, 0.9, 0.99))
            print(
                f"  {seed:>4}  {known:<12} {p50:8.3f}{p90:8.3f}{p99:8.3f}{found[-1][1]:8.0f}"
                f"   {copies / until:.1f} copies asleep in the mean, {len(waits)} requests"
            )
        (p90_without, gpu_without), (p90_with, gpu_with) = found
        ratios.append((p90_with / p90_without, gpu_with / gpu_without))
    p90, gpu_s = (median(column) for column in zip(*ratios, strict=True))
    print(f"  {name}, medians of the ratios: TTFT p90 {p90:.2f}, GPU seconds {gpu_s:.3f}")
    return p90, gpu_s


def learnt() -> bool:
    """Whether history is worth something where bursts come again, and costs nothing elsewhere."""
    met = True
    for apart_s in (20.0, 60.0):
        name = f"bursts {apart_s:g} s apart"
        p90, gpu_s = compared(name, [recurring(seed, apart_s) for seed in SEEDS])
        met &= p90 < 1 and gpu_s <= 1
    _, gpu_s = compared("a steady load", [steady(seed) for seed in SEEDS])
    met &= gpu_s <= SLACK
    print(
        "bar: TTFT p90 lower at no more GPU seconds where bursts come again, and no more than 1 % "
        f"of them where the load is steady: {'met' if met else 'NOT met'}"
    )
    return met


def main() -> int:
    describe("rhythm", __doc__)
    telemetry.configure("simulation", TelemetryConfig(log_level="off"))
    spec = cluster(OBJECTIVE_S)
    first, second = (simulate(spec, load(seed), seed, {}) for seed in (1, 2))
    known = together(earlier(first.histories, 2), earlier(second.histories, 1))
    print(f"  {'day':>4}{'':14}{'TTFT p50':>9}{'p90':>8}{'p99':>8}{'GPU s':>8}")
    ratios: list[tuple[float, float]] = []
    for seed in DAYS:
        days = {
            "not known": simulate(spec, load(seed), seed, {}),
            "rhythm known": simulate(spec, load(seed), seed, known),
        }
        for name, day in days.items():
            ttft = "".join(f"{at(day.ttft, share):8.3f}" for share in (0.5, 0.9, 0.99))
            print(f"  {seed:>4}  {name:<12} {ttft}{day.gpu_s:8.0f}")
        without, with_ = days.values()
        sooner = at(with_.ttft, 0.9) / at(without.ttft, 0.9)
        ratios.append((sooner, with_.gpu_s / without.gpu_s))
    p90, gpu_s = (median(column) for column in zip(*ratios, strict=True))
    print(f"  medians of the ratios: TTFT p90 {p90:.2f}, GPU seconds {gpu_s:.3f}")
    met = p90 < 1 and gpu_s <= 1.0
    verdict = "met" if met else "NOT met"
    print(f"bar: TTFT p90 lower at no more GPU seconds where the rhythm is known: {verdict}")
    return 0 if learnt() and met else 1


if __name__ == "__main__":
    sys.exit(main())
